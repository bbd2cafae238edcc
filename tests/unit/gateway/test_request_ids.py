"""One valid request id per response, also behind a server that adds and echoes ids itself."""

import httpx
import pytest

from orthros_service.gateway.request_ids import serve_middlewares


def behind_serve(app):
    """Ray Serve's own layer, which echoes any id, and our middlewares around it."""

    async def echoing(scope, receive, send):
        (given,) = (value for name, value in scope["headers"] if name == b"x-request-id")

        async def send_with_id(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", given)]
            await send(message)

        await app(scope, receive, send_with_id)

    wrapped = echoing
    for middleware in serve_middlewares():
        wrapped = middleware.cls(wrapped, *middleware.args, **middleware.kwargs)
    return wrapped


@pytest.mark.parametrize("is_behind_serve", [False, True])
@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ([b"my-request_1.2"], True),
        ([b"first", b"second"], True),
        ([], False),
        ([b"caf\xe9"], False),
        ([b"a" * 65], False),
        ([b"bell\x07"], False),
    ],
)
async def test_a_response_has_one_request_id_and_a_valid_one(
    service, caplog, is_behind_serve, given, is_kept
):
    caplog.set_level("INFO")
    app = behind_serve(service.app) if is_behind_serve else service.app
    headers = [(b"x-request-id", value) for value in given]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://gateway"
    ) as client:
        response = await client.get("/v1/unknown", headers=headers)
    (request_id,) = response.headers.get_list("x-request-id")
    assert request_id.isascii()
    assert request_id.isprintable()
    assert (request_id.encode() in given[:1]) == is_kept
    assert response.json()["request_id"] == request_id
    is_told = any("was replaced" in record.getMessage() for record in caplog.records)
    assert is_told == (bool(given) and not is_kept)
