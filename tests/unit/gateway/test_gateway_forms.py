"""Documents that arrive as the one file of a form."""

import pytest

TEXT = "It is a truth universally acknowledged."


async def test_a_form_upload_takes_one_file_and_its_name_as_title(service):
    response = await service.client.post(
        "/v1/documents",
        files={"file": ("pride.txt", TEXT.encode(), "text/plain")},
        data={"prefill_mode": "full"},
    )
    assert response.status_code == 202, response.text
    assert response.json()["title"] == "pride.txt"
    assert service.backend.ingested[0].text == TEXT
    assert service.backend.ingested[0].mode == "full"


@pytest.mark.parametrize(
    ("files", "data", "status", "field"),
    [
        ([("other", ("a.txt", b"x"))], {}, 422, "other"),
        ([("title", (None, "no file"))], {}, 422, "file"),
        ([("file", (None, "no filename"))], {}, 422, "file"),
        ([("file", ("a.txt", b"x"))], {"prefill_mode": "fast"}, 422, "prefill_mode"),
        ([("title", ("b.txt", b"x"))], {}, 422, "file"),
        ([("file", ("a.txt", b"x")), ("file", ("b.txt", b"x"))], {}, 400, None),
        ([("file", ("a.txt", b"y" * 100_001))], {}, 413, None),
        ([("file", ("a.txt", b"y" * 200_000))], {}, 413, None),
        ([("file", ("a.txt", b"caf\xe9"))], {}, 400, None),
        ([("file", ("a.txt", b""))], {}, 422, None),
    ],
)
async def test_a_form_of_another_shape_is_refused(service, files, data, status, field):
    response = await service.client.post("/v1/documents", files=files, data=data)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    if field:
        assert response.json()["errors"][0]["field"] == field
    assert service.backend.ingested == []


@pytest.mark.parametrize(
    ("parts", "status", "code", "says"),
    [
        ([("title", "", b"A"), ("title", "", b"B")], 422, "invalid_value", "title"),
        ([("prefill_mode", "", b"full")] * 2, 422, "invalid_value", "prefill_mode"),
        ([("file", "", b"no file")], 422, "invalid_value", "file"),
        ([("title", "", b"caf\xe9")], 400, "malformed_request", "UTF-8"),
        ([("title", "", b"\xff\xfea\x00")], 400, "malformed_request", "UTF-8"),
    ],
)
async def test_a_form_field_is_given_once_and_in_utf8(service, parts, status, code, says):
    parts = [*parts, ("file", "; filename=a.txt", TEXT.encode())]
    response = await service.client.post("/v1/documents", **_form(parts))
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    assert says in response.text
    assert service.backend.ingested == []


@pytest.mark.parametrize(
    "head",
    [
        b"; filename=caf\xe9.txt",
        b"; filename=a.txt\r\nContent-Type: text/plain; charset=latin-1",
    ],
)
async def test_a_file_whose_name_or_text_is_not_utf8_is_refused(service, head):
    response = await service.client.post("/v1/documents", **_form([("file", head, b"abc")]))
    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")
    assert "UTF-8" in response.text


def _form(parts):
    """A form whose parts are (name, rest of the head, data), as bytes that are sent as they are."""
    body = b""
    for name, head, data in parts:
        rest = head.encode() if isinstance(head, str) else head
        disposition = b"Content-Disposition: form-data; name=" + name.encode() + rest
        body += b"--b\r\n" + disposition + b"\r\n\r\n" + data + b"\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    return {"content": body + b"--b--\r\n", "headers": headers}


async def test_a_form_that_is_cut_off_is_refused_and_never_stored_in_part(service):
    body = (
        b"--b\r\nContent-Disposition: form-data; name=file; filename=a.txt\r\n\r\n"
        b"The beginning of a text"
    )
    response = await service.client.post(
        "/v1/documents",
        content=body,
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )
    assert 400 <= response.status_code < 500
    assert service.backend.ingested == []
