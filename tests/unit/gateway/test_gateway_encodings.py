"""Bodies that are compressed or in another charset: refused in words, never guessed at."""

import gzip
import json

import pytest

JSON = {"Content-Type": "application/json"}
PATHS = {
    "/v1/answers": {"text": "Some text.", "question": "q"},
    "/v1/tokens:count": {"text": "Some text."},
    "/v1/documents": {"text": "Some text."},
    "/v1/chat/completions": {
        "model": "tiny-model",
        "messages": [{"role": "user", "content": "hi"}],
    },
}


def code_of(response):
    body = response.json()
    return body["error"]["code"] if "error" in body else body["code"]


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", "windows-1252", "x"])
async def test_plain_text_in_another_charset_is_refused(service, charset):
    response = await service.client.post(
        "/v1/documents", content=b"text", headers={"Content-Type": f"text/plain; charset={charset}"}
    )
    assert (response.status_code, code_of(response)) == (400, "malformed_request")


@pytest.mark.parametrize("path", PATHS)
async def test_json_in_another_charset_is_refused_though_its_bytes_would_pass(service, path):
    headers = {"Content-Type": "application/json; charset=iso-8859-1"}
    response = await service.client.post(path, content=json.dumps(PATHS[path]), headers=headers)
    assert (response.status_code, code_of(response)) == (400, "malformed_request")
    assert "UTF-8" in response.text


@pytest.mark.parametrize("path", [*PATHS, "text/plain", "multipart/form-data"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, deflate", "x", "GZIP"])
async def test_a_compressed_body_is_a_415_that_names_what_is_read(service, path, encoding):
    headers = {"Content-Encoding": encoding}
    if path in PATHS:
        body = gzip.compress(json.dumps(PATHS[path]).encode())
        response = await service.client.post(path, content=body, headers=JSON | headers)
    elif path == "text/plain":
        # A compressed text may well be valid UTF-8.
        headers["Content-Type"] = path
        response = await service.client.post("/v1/documents", content=b"abc", headers=headers)
    else:
        files = {"file": ("a.txt", b"abc")}
        response = await service.client.post("/v1/documents", files=files, headers=headers)
    assert (response.status_code, code_of(response)) == (415, "unsupported_document")
    assert "identity" in response.text
    assert service.backend.ingested == []
    assert service.backend.requests == []


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
async def test_a_body_that_says_it_is_not_compressed_is_read(service, encoding):
    headers = {"Content-Encoding": encoding}
    response = await service.client.post("/v1/answers", json=PATHS["/v1/answers"], headers=headers)
    assert response.status_code == 200
