"""Client and gateway mean the same by the wire types: both clients and the commands, end to end."""

import asyncio
import json
import time

import pytest
from typer.testing import CliRunner

from orthros_client import AsyncOrthrosClient, OrthrosClient, Turn, errors
from orthros_client.cli import app

TEXT = "Call me Ishmael. Some years ago."
ANSWER = "Call me Ish\x1bmael\u2028."


@pytest.fixture
def client(gateway):
    with OrthrosClient(gateway.url, max_retries=0) as client:
        yield client


def test_a_document_is_uploaded_followed_asked_and_deleted(client):
    document = client.upload(TEXT, title="Moby", metadata={"a": "b"})
    seen = []
    ready = client.wait_until_ready(document.id, on_progress=seen.append, timeout_s=30)
    assert (ready.status, ready.title, ready.metadata) == ("ready", "Moby", {"a": "b"})
    done = [state.prefill.tokens_done for state in seen]
    assert len(done) >= 2
    assert done == sorted(done)
    assert seen[-1].status == "ready"

    answer = client.ask("Who?", document_ids=[document.id], max_tokens=7)
    assert (answer.text, answer.usage.max_tokens, answer.converted) == (ANSWER, 7, False)
    (citation,) = answer.citations
    assert citation.quote == TEXT[citation.start_char : citation.end_char] == "Ishmael"
    assert citation.document_id == document.id
    assert client.ask("Who?", document_ids=[document.id], citations=False).citations == []

    assert client.documents.get(document.id) == ready
    assert document.id in [listed.id for listed in client.documents.list()]
    assert client.documents.delete(document.id).deleted
    with pytest.raises(errors.NotFoundError) as caught:
        client.documents.get(document.id)
    assert caught.value.request_id


def test_a_streamed_answer_is_the_sum_of_its_deltas(client):
    history = [Turn(role="user", content="Hm?"), Turn(role="assistant", content="Yes.")]
    times = []
    with client.ask_stream("Who?", text=TEXT, history=history) as stream:
        for _ in stream:
            times.append(time.monotonic())  # noqa: PERF401
    assert stream.text == stream.answer.text == ANSWER
    # The pieces came one after the other, not all at the end.
    assert times[-1] - times[0] > 0.03


def test_a_summary_takes_its_style(client, gateway):
    with client.summarize_stream(text=TEXT, style="bullets", focus="whales") as stream:
        list(stream)
    assert stream.answer.object == "summary"
    assert "whales" in gateway.workers.questions[-1]


def test_an_engine_that_breaks_in_a_stream_raises_its_error(client):
    with client.ask_stream("break", text=TEXT) as stream:
        with pytest.raises(errors.EngineError) as caught:
            list(stream)
        assert (caught.value.phase, stream.text) == ("decode", "Call ")


def test_leaving_a_stream_stops_the_work(client, gateway):
    before = len(gateway.workers.cancelled)
    with client.ask_stream("for ever", text=TEXT) as stream:
        next(stream)
    deadline = time.monotonic() + 10
    while len(gateway.workers.cancelled) == before:
        assert time.monotonic() < deadline, "the work was not cancelled"
        time.sleep(0.02)


def test_a_deadline_of_the_service_is_its_error(client):
    with pytest.raises(errors.DeadlineExceededError) as caught:
        client.ask("for ever", text=TEXT, deadline_s=0.3)
    assert caught.value.status == 504


def test_a_failed_ingestion_raises_its_code(client):
    document = client.upload("This will FAIL.")
    with pytest.raises(errors.EngineError, match="It says FAIL"):
        client.wait_until_ready(document.id, timeout_s=30)
    with pytest.raises(errors.DocumentNotReadyError):
        client.ask("Who?", document_ids=[document.id])


def test_refusals_arrive_as_their_classes(client):
    for call, expected in (
        (lambda: client.upload(" \n"), errors.EmptyDocumentError),
        (lambda: client.upload("a\0b"), errors.InvalidTextError),
        (lambda: client.ask("Who?", document_ids=["doc_x"]), errors.NotFoundError),
        (lambda: client.documents.get("a/b"), errors.NotFoundError),
        (lambda: client.wait_until_ready("doc_x"), errors.NotFoundError),
    ):
        with pytest.raises(expected) as caught:
            call()
        assert type(caught.value) is expected
        assert caught.value.problem is not None
        assert caught.value.status == caught.value.problem.status


def test_counting_models_and_health(client):
    counted = client.count_tokens(TEXT)
    assert 0 < counted.num_tokens < counted.document_tokens
    assert counted.num_chars == len(TEXT)
    (model,) = client.models()
    assert (model.id, model.converted) == ("rote", False)
    assert client.healthz()
    assert client.readyz()


def test_paging_finds_every_document_once(client):
    ids = [client.upload(f"Text number {number}.").id for number in range(5)]
    listed = [document.id for document in client.documents.list(limit=5)]
    assert listed == list(reversed(ids))


async def test_the_async_client_asks_many_questions_at_once(gateway):
    async with AsyncOrthrosClient(gateway.url) as client:
        document = await client.upload(TEXT)
        assert (await client.wait_until_ready(document.id, timeout_s=30)).status == "ready"
        asks = [client.ask(f"{number}?", document_ids=[document.id]) for number in range(5)]
        assert {answer.text for answer in await asyncio.gather(*asks)} == {ANSWER}
        async with client.ask_stream("Who?", document_ids=[document.id]) as stream:
            assert "".join([delta.text async for delta in stream]) == ANSWER
        assert stream.answer.citations[0].quote == "Ishmael"
        assert document.id in [listed.id async for listed in client.documents.list()]
        assert (await client.documents.delete(document.id)).deleted
        assert await client.readyz()


def test_the_commands_work_against_the_gateway(gateway, tmp_path):
    path = tmp_path / "moby.txt"
    path.write_text(TEXT)
    runner = CliRunner(env={"ORTHROS_CLIENT_URL": gateway.url})
    ingested = runner.invoke(app, ["ingest", str(path)])
    assert ingested.exit_code == 0
    document_id = ingested.stdout.strip()
    assert "4 of 4 tokens, 8 tokens/s" in ingested.stderr

    asked = runner.invoke(app, ["ask", "Who?", "--document", document_id])
    assert asked.exit_code == 0
    assert asked.stdout.startswith("Call me Ish\\x1bmael\\u2028.\n")
    assert f'[1] {document_id} 8-15: "Ishmael"' in asked.stdout
    assert "rote (converted: false)" in asked.stdout

    summary = runner.invoke(app, ["summarize", "--file", str(path), "--json"])
    assert json.loads(summary.stdout)["object"] == "summary"
    assert runner.invoke(app, ["count", str(path)]).exit_code == 0
    assert document_id in runner.invoke(app, ["documents", "list"]).stdout
    assert "status: ready" in runner.invoke(app, ["documents", "get", document_id]).stdout
    assert runner.invoke(app, ["documents", "delete", document_id]).exit_code == 0
    assert runner.invoke(app, ["documents", "get", document_id]).exit_code == 1
    path.write_text("  \n")
    refused = runner.invoke(app, ["ingest", str(path)])
    assert refused.exit_code == 1
    assert "code: empty_document" in refused.stderr
