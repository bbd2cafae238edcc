"""What the client sends, and what it refuses to send."""

import httpx
import pytest

from orthros_client import OrthrosClient, Turn, errors


def _page(wire, ids, next_after):
    documents = [wire.document(id=document_id) for document_id in ids]
    body = {"object": "list", "data": documents, "has_more": next_after is not None}
    return httpx.Response(200, json={**body, "next_after": next_after})


def test_a_text_bytes_and_a_file_are_the_same_upload(wire, script, make_client, tmp_path):
    text = "Zeile eins\r\nÜber \U0001f600"
    path = tmp_path / "über.txt"
    path.write_bytes(text.encode())
    for source, title in ((text, None), (text.encode(), None), (path, "über.txt")):
        service = script(httpx.Response(201, json=wire.document("queued")))
        make_client(service).upload(source, metadata={"a": "b"}, prefill_mode="linear")
        assert service.body["text"] == text
        assert service.body.get("title") == title
        assert (service.body["metadata"], service.body["prefill_mode"]) == ({"a": "b"}, "linear")


def test_a_given_title_wins_over_the_files_name(wire, script, make_client, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Some text")
    service = script(httpx.Response(201, json=wire.document("queued")))
    make_client(service).upload(path, title="Mine")
    assert service.body["title"] == "Mine"


def test_a_file_name_that_is_no_text_is_made_one(wire, script, make_client, tmp_path):
    path = tmp_path / "a\udcff.txt"
    path.write_text("Some text")
    service = script(httpx.Response(201, json=wire.document("queued")))
    make_client(service).upload(path)
    assert service.body["title"] == "a?.txt"


def test_bytes_that_are_not_utf8_are_refused_with_their_place(script, make_client):
    with pytest.raises(errors.MalformedRequestError, match="byte 3"):
        make_client(script()).upload(b"abc\xff")


def test_lone_surrogates_are_refused_before_they_are_sent(script, make_client):
    client = make_client(script())
    for call in (
        lambda: client.upload("a\ud800"),
        lambda: client.count_tokens("a\ud800"),
        lambda: client.ask("a\ud800", document_ids=["doc_1"]),
    ):
        with pytest.raises(errors.InvalidTextError):
            call()


def test_a_missing_file_is_an_os_error(script, make_client, tmp_path):
    with pytest.raises(FileNotFoundError):
        make_client(script()).upload(tmp_path / "missing.txt")


def test_progress_of_an_upload_is_told_up_to_its_end(wire, script, make_client):
    service = script(httpx.Response(201, json=wire.document("queued")))
    told = []
    make_client(service).upload("x" * 200_000, on_sent=lambda *sent: told.append(sent))
    request = service.requests[0]
    total = len(request.content)
    assert len(told) == 4
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert request.headers["Content-Length"] == str(total)
    assert "Transfer-Encoding" not in request.headers


def test_only_what_was_asked_for_is_sent(wire, script, make_client):
    service = script(*(httpx.Response(200, json=wire.answer()) for _ in range(2)))
    client = make_client(service)
    client.ask("Who?", document_ids=("doc_1",), top_k=None)
    assert service.body == {"question": "Who?", "document_ids": ["doc_1"], "stream": False}
    client.summarize(text="Long.", style="bullets", max_tokens=5, stop=("x",), temperature=1)
    assert service.body == {
        "text": "Long.",
        "style": "bullets",
        "max_tokens": 5,
        "stop": ["x"],
        "temperature": 1.0,
        "stream": False,
    }


def test_a_single_id_is_one_document_and_not_its_letters(wire, script, make_client):
    service = script(httpx.Response(200, json=wire.answer()))
    make_client(service).ask("Who?", document_ids="doc_1")
    assert service.body["document_ids"] == ["doc_1"]


def test_history_is_sent_as_turns(wire, script, make_client):
    service = script(httpx.Response(200, json=wire.answer()))
    history = (Turn(role="user", content="Who?"), Turn(role="assistant", content="Ishmael."))
    make_client(service).ask("And then?", document_ids=["doc_1"], history=history)
    assert [turn["role"] for turn in service.body["history"]] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of document_ids and text"),
        ({"document_ids": ["doc_1"], "text": "x"}, "exactly one of document_ids and text"),
        ({"text": "x", "max_tokens": 0}, "max_tokens"),
        ({"text": "x", "temperature": float("nan")}, "temperature"),
        ({"text": "x", "max_token": 5}, "max_token"),
        ({"text": "x", "max_tokens": "5"}, "max_tokens"),
    ],
)
def test_wrong_arguments_are_named_and_never_sent(script, make_client, options, message):
    with pytest.raises(errors.InvalidValueError, match=message) as caught:
        make_client(script()).ask("Who?", **options)
    assert caught.value.status is None


def test_wrong_arguments_are_not_repeated_in_the_message(script, make_client):
    with pytest.raises(errors.InvalidValueError) as caught:
        make_client(script()).ask("Who?", text="A private text", document_ids=["private_id"])
    assert "private" not in str(caught.value).lower()


def test_pages_are_fetched_as_the_iterator_gets_there(wire, script, make_client):
    service = script(_page(wire, ["d1", "d2"], "d2"), _page(wire, ["d3"], None))
    documents = make_client(service).documents.list()
    assert service.requests == []
    assert next(documents).id == "d1"
    assert len(service.requests) == 1
    assert [document.id for document in documents] == ["d2", "d3"]
    assert service.requests[1].url.params["after"] == "d2"


def test_a_limit_asks_for_no_more_than_is_wanted(wire, script, make_client):
    service = script(_page(wire, ["d1", "d2"], "d2"), _page(wire, ["d3", "d4"], "d4"))
    assert [d.id for d in make_client(service).documents.list(limit=3)] == ["d1", "d2", "d3"]
    assert [request.url.params["limit"] for request in service.requests] == ["3", "1"]
    with pytest.raises(errors.InvalidValueError, match="limit"):
        next(make_client(script()).documents.list(limit=0))


def test_an_id_is_one_part_of_the_path_whatever_it_holds(wire, script, make_client):
    service = script(wire.refusal("not_found", 404), wire.refusal("not_found", 404))
    for document_id, raw in (("a/../b?c#d", b"a%2F..%2Fb%3Fc%23d"), ("é", b"%C3%A9")):
        with pytest.raises(errors.NotFoundError):
            make_client(service).documents.get(document_id)
        assert service.requests[-1].url.raw_path == b"/v1/documents/" + raw


@pytest.mark.parametrize("document_id", ["", ".", "..", "\ud800"])
def test_an_id_that_would_be_another_path_is_refused(script, make_client, document_id):
    with pytest.raises(errors.InvalidValueError):
        make_client(script()).documents.delete(document_id)


def test_answers_allow_fields_of_newer_services(wire, script, make_client):
    service = script(httpx.Response(200, json=wire.answer(new_field=1)))
    assert make_client(service).ask("Who?", text="x").text == "Ishmael."


def test_a_success_that_is_no_answer_is_reported_without_its_content(script, make_client):
    service = script(httpx.Response(200, text="<html>secret</html>"))
    with pytest.raises(errors.UnexpectedResponseError, match="Answer") as caught:
        make_client(service).ask("Who?", text="x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "base_url", ["", "foo", "ftp://host", "http://", "http://host?q=1", "http://host:port"]
)
def test_a_base_url_that_is_none_is_refused(base_url):
    with pytest.raises(errors.InvalidValueError, match="base_url"):
        OrthrosClient(base_url)


@pytest.mark.parametrize("name", ["connect_timeout_s", "read_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_timeouts_must_be_times(name, value):
    with pytest.raises(errors.InvalidValueError, match=name):
        OrthrosClient(**{name: value})


def test_a_base_url_may_have_a_path(wire):
    seen = []

    def service(request):
        seen.append(request)
        return httpx.Response(200, json=wire.document())

    transport = httpx.MockTransport(service)
    with OrthrosClient("http://host/orthros/", transport=transport, headers={"X-A": "b"}) as client:
        client.documents.get("doc_1")
    assert seen[0].url == "http://host/orthros/v1/documents/doc_1"
    assert seen[0].headers["X-A"] == "b"
    assert seen[0].headers["User-Agent"].startswith("orthros-client")


def test_credentials_of_the_url_stay_out_of_messages():
    def service(request):
        raise httpx.ConnectError("refused")

    with (
        OrthrosClient(
            "http://user:secret@host", transport=httpx.MockTransport(service), max_retries=0
        ) as client,
        pytest.raises(errors.ConnectionFailedError) as caught,
    ):
        client.models()
    assert "secret" not in str(caught.value)


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.test:3128")
    for url, is_proxied in (
        ("http://127.0.0.1:8000", False),
        ("http://localhost:8000", False),
        ("http://[::1]:8000", False),
        ("http://service.test", True),
    ):
        with OrthrosClient(url) as client:
            assert bool(client._transport._client._mounts) is is_proxied


def test_a_long_deadline_extends_the_wait_for_an_answer(wire, script, make_client):
    service = script(*(httpx.Response(200, json=wire.answer()) for _ in range(2)))
    client = make_client(service)
    client.ask("Who?", text="x", deadline_s=5000.0)
    client.ask("Who?", text="x", deadline_s=5.0)
    reads = [request.extensions["timeout"]["read"] for request in service.requests]
    assert reads == [5010.0, 660.0]
    assert {request.extensions["timeout"]["connect"] for request in service.requests} == {5.0}


async def test_the_async_client_sends_the_same(wire, script, make_async_client):
    service = script(
        httpx.Response(201, json=wire.document("queued")),
        _page(wire, ["d1", "d2"], "d2"),
        _page(wire, ["d3"], None),
        httpx.Response(200, json=wire.document()),
        httpx.Response(200, json={"id": "doc_1", "object": "document.deleted", "deleted": True}),
        httpx.Response(200, json={"object": "list", "data": []}),
        httpx.Response(200, json=wire.answer(object="summary")),
    )
    told = []
    async with make_async_client(service) as client:
        await client.upload("x" * 100_000, on_sent=lambda *sent: told.append(sent))
        assert told[-1] == (len(service.requests[0].content),) * 2
        assert [document.id async for document in client.documents.list()] == ["d1", "d2", "d3"]
        assert (await client.documents.get("doc_1")).status == "ready"
        assert (await client.documents.delete("doc_1")).deleted
        assert await client.models() == []
        assert (await client.summarize(text="Long.")).object == "summary"
