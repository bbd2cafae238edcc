"""Malformed bodies, wrong values and wrong types, on every path that takes JSON."""

import json

import pytest

from orthros_service.gateway import lingering

JSON = {"Content-Type": "application/json"}
NATIVE = {
    "/v1/answers": {"text": "Some text.", "question": "q"},
    "/v1/summaries": {"text": "Some text."},
    "/v1/tokens:count": {"text": "Some text."},
    "/v1/documents": {"text": "Some text."},
}
CHAT = {
    "/v1/chat/completions": {
        "model": "tiny-model",
        "messages": [{"role": "user", "content": "hi"}],
    }
}
PATHS = NATIVE | CHAT


def code_of(response):
    body = response.json()
    if "error" in body:
        assert response.headers["content-type"] == "application/json"
        assert set(body["error"]) >= {"message", "type", "param", "code", "request_id"}
        return body["error"]["code"]
    assert response.headers["content-type"] == "application/problem+json"
    assert {"type", "title", "status", "detail", "code", "retryable", "request_id"} <= set(body)
    assert body["status"] == response.status_code
    return body["code"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"text":"a","text":"b"}', 400, "malformed_request"),
        (b'{"text":{"deep":[{"a":1,"a":2}]}}', 400, "malformed_request"),
        (b'{"text":"caf\xe9"}', 400, "malformed_request"),
        ('{"text":"a"}'.encode("utf-16"), 400, "malformed_request"),
        (b"\x89PNG\r\n\x1a\n", 400, "malformed_request"),
        (b'{"text":NaN}', 400, "malformed_request"),
        (b'{"temperature":1e999}', 400, "malformed_request"),
        (b'{"max_tokens":' + b"1" + b"0" * 5000 + b"}", 400, "malformed_request"),
        (b'{"text":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400, "malformed_request"),
        (b"", 400, "malformed_request"),
        (b"{", 400, "malformed_request"),
        (b'{"text":"emoji \\ud83d","question":"q"}', 422, "invalid_text"),
        (b'{"max_tokens":"\\ud83d"}', 422, "invalid_text"),
        (b'{"text":"nul \\u0000"}', 422, "invalid_text"),
        (b"[]", 422, "invalid_value"),
        (b"null", 422, "invalid_value"),
        (b'"text"', 422, "invalid_value"),
        (b"5", 422, "invalid_value"),
        (b"{}", 422, "invalid_value"),
    ],
)
async def test_a_body_that_is_not_what_the_path_takes_is_refused(service, path, body, status, code):
    response = await service.client.post(path, content=body, headers=JSON)
    if path in CHAT and status == 422:
        status = 400
    assert (response.status_code, code_of(response)) == (status, code)
    assert service.backend.requests == []
    assert service.backend.ingested == []


@pytest.mark.parametrize("path", PATHS)
async def test_a_byte_order_mark_a_charset_and_a_json_suffix_are_accepted(service, path):
    raw = b"\xef\xbb\xbf" + json.dumps(PATHS[path]).encode()
    for content_type in (
        "application/json",
        "application/json; charset=utf-8",
        "APPLICATION/JSON",
        "application/problem+json",
    ):
        response = await service.client.post(
            path, content=raw, headers={"Content-Type": content_type}
        )
        assert response.status_code in (200, 202), response.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "application/x-www-form-urlencoded",
        "application/octet-stream",
        "multipart/form-data; boundary=b",
        "text/html",
        "image/png",
        "json",
        ";",
        "\xff",
        "text/plain; charset*=utf-9''x; =",
    ],
)
async def test_another_content_type_is_a_415_that_lists_what_is_read(service, path, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type.encode("latin-1")}
    raw = json.dumps(PATHS[path]).encode()
    response = await service.client.post(path, content=raw, headers=headers)
    if path == "/v1/documents" and (content_type or "").startswith(("text/plain", "multipart")):
        assert response.status_code in (202, 400)
        return
    assert (response.status_code, code_of(response)) == (415, "unsupported_document")
    assert "application/json" in response.text
    if path == "/v1/documents":
        assert "text/plain" in response.text
        assert "multipart/form-data" in response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, True, "5", 1.5, None, 32_769, 10**19)),
        *(("temperature", value) for value in (-1, 2.1, "0", True)),
        *(("top_p", value) for value in (0, 1.1, -0.1)),
        *(("top_k", value) for value in (0, -1)),
        *(("seed", value) for value in (-1, 2**63, 0.5)),
        *(("stop", value) for value in ([""], ["x"] * 100, "x", [1])),
        *(("deadline_s", value) for value in (0, -5, 1e9)),
        *(("stream", value) for value in ("true", 1)),
        *(("question", value) for value in ("", "  \n", None, 5, ["q"])),
        ("unknown", 1),
        ("instructions", " "),
        ("prefill_mode", "fast"),
        ("history", [{"role": "assistant", "content": "a"}]),
        ("history", [{"role": "user", "content": "a"}]),
        ("history", [{"role": "system", "content": "a"}]),
    ],
)
async def test_a_wrong_value_is_a_422_that_names_the_field_and_never_repeats_the_value(
    service, field, value
):
    body = {"text": "Some text.", "question": "q"} | {field: value}
    response = await service.client.post("/v1/answers", json=body)
    assert (response.status_code, code_of(response)) == (422, "invalid_value")
    problem = response.json()
    named = {error["field"].split(".")[0] for error in problem["errors"]}
    assert named in ({field}, {"body"})
    assert field in response.text
    assert service.backend.requests == []


async def test_an_empty_stop_list_is_fine(service):
    body = {"text": "Some text.", "question": "q", "stop": []}
    assert (await service.client.post("/v1/answers", json=body)).status_code == 200


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"text": "a", "document_ids": ["doc_1"]},
        {"document_ids": []},
        {"document_ids": ["doc_1", "doc_1"]},
        {"document_ids": [f"doc_{number}" for number in range(33)]},
        {"document_ids": [1]},
    ],
)
async def test_the_source_must_be_one_text_or_up_to_32_different_documents(service, source):
    response = await service.client.post("/v1/answers", json={**source, "question": "q"})
    assert (response.status_code, code_of(response)) == (422, "invalid_value")


@pytest.mark.parametrize("text", ["", " \n\u2003", "\u200b"])
async def test_an_inline_text_that_shows_nothing_is_an_empty_document(service, text):
    response = await service.client.post("/v1/answers", json={"text": text, "question": "q"})
    assert (response.status_code, code_of(response)) == (422, "empty_document")


async def test_an_inline_text_over_the_document_limit_is_a_413(service):
    response = await service.client.post(
        "/v1/answers", json={"text": "x" * 100_001, "question": "q"}
    )
    assert (response.status_code, code_of(response)) == (413, "document_too_large")
    assert (response.json()["limit"], response.json()["actual"]) == (100_000, 100_001)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_body_over_the_limit_is_a_413_with_and_without_a_length(service, path, is_chunked):
    raw = json.dumps({"text": "x" * 300_000}).encode()

    async def chunks():
        for start in range(0, len(raw), 10_000):
            yield raw[start : start + 10_000]

    response = await service.client.post(
        path, content=chunks() if is_chunked else raw, headers=JSON
    )
    assert (response.status_code, code_of(response)) == (413, "document_too_large")
    assert response.headers["connection"] == "close"


async def test_an_endless_body_is_refused_at_the_limit_and_taken_in_only_for_a_while(
    service, monkeypatch
):
    monkeypatch.setattr(lingering, "LINGER_BYTES", 300_000)
    num_sent = 0

    async def endless():
        nonlocal num_sent
        while True:
            num_sent += 10_000
            yield b"x" * 10_000

    response = await service.client.post(
        "/v1/documents", content=endless(), headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 413
    assert num_sent <= 420_000


async def test_unknown_paths_and_methods_have_the_shape_of_their_path(service):
    for path in ("/", "/v1", "/v1/answers/", "/v1/documents/a/b", "/v1/jobs", "/V1/answers"):
        response = await service.client.get(path)
        assert (response.status_code, code_of(response)) == (404, "not_found")
    response = await service.client.get("/v1/answers")
    assert (response.status_code, code_of(response)) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    response = await service.client.put("/v1/documents/doc_1")
    assert (response.status_code, code_of(response)) == (405, "method_not_allowed")
    response = await service.client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    response = await service.client.get("/v1/chat/unknown")
    assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("my-request_1.2", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("", False),
        ("two words", False),
        ("<script>", False),
        ("caf\xe9", False),
    ],
)
async def test_a_short_and_safe_request_id_is_kept_and_others_are_replaced(service, given, is_kept):
    response = await service.client.get(
        "/v1/unknown", headers={"X-Request-ID": given.encode("latin-1")}
    )
    request_id = response.headers["x-request-id"]
    assert (request_id == given) == is_kept
    assert response.json()["request_id"] == request_id


async def test_an_unexpected_exception_is_a_500_without_its_text_and_is_logged(service, caplog):
    def fail(document_id):
        raise RuntimeError("the password is 1234")

    service.catalog.get = fail
    response = await service.client.get("/v1/documents/doc_1", headers={"X-Request-ID": "r1"})
    assert (response.status_code, code_of(response)) == (500, "internal")
    assert "1234" not in response.text
    assert response.json()["request_id"] == "r1"
    assert any("1234" in str(record.exc_info) for record in caplog.records)
    counted = service.metric(
        "orthros_requests_total", endpoint="document", outcome="server_error", code="internal"
    )
    assert counted == 1


async def test_nothing_of_documents_questions_or_answers_is_logged(service, caplog):
    caplog.set_level("INFO")
    service.backend.script = ["ANSWERSECRET"]
    await service.client.post(
        "/v1/answers", json={"text": "TEXTSECRET", "question": "QUESTIONSECRET"}
    )
    await service.client.post("/v1/answers", json={"text": "TEXTSECRET", "QUESTIONSECRET": 1})
    logged = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert "request finished" in logged
    assert "SECRET" not in logged


async def test_unknown_fields_by_the_thousand_give_a_short_error(service):
    body = {"text": "t", "question": "q"} | {f"k{number}": 1 for number in range(5_000)}
    response = await service.client.post("/v1/answers", json=body)
    assert response.status_code == 422
    assert len(response.text) < 5_000
