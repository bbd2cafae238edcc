"""A small service on a real socket that says what a test sets, and the commands in front of it."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from orthros_client.cli import app


class LocalService:
    """What the service will say; `requests` keeps what it was asked."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire
        self.documents = [wire.document()]
        self.progress = [wire.document()]
        self.deltas = ["Ish", "mael."]
        self.answer = wire.answer()
        self.is_broken = False
        self.refusals: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        self.requests: list[tuple[str, str, Any]] = []
        self.url = ""
        # A test that sets it holds a stream after its deltas, and every other answer.
        self.hold: threading.Event | None = None

    def refuse(
        self, code: str, status: int, *, retry_after: str | None = None, **more: Any
    ) -> None:
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        self.refusals.append((status, self.wire.problem(code, status, **more), headers))

    def body(self, path: str) -> Any:
        """The body of the last request to a path."""
        return [body for _, asked, body in self.requests if asked == path][-1]

    def events(self, path: str) -> list[bytes]:
        if path.endswith("/events"):
            return [self.wire.event("progress", document) for document in self.progress]
        return [self.wire.event("delta", {"text": text}) for text in self.deltas]

    def reply(self, method: str, path: str) -> Any:
        match method, path.partition("?")[0]:
            case "POST", "/v1/documents":
                return self.wire.document("queued")
            case "GET", "/v1/documents":
                return {"object": "list", "data": self.documents, "has_more": False}
            case "GET", _:
                return self.documents[0]
            case "DELETE", _:
                return {"id": "doc_1", "object": "document.deleted", "deleted": True}
            case "POST", "/v1/tokens:count":
                count = {"num_tokens": 1234, "document_tokens": 1260, "num_chars": 5678}
                return {**count, "prefill_mode": "full"}
            case _:
                return self.answer


def _handler(service: LocalService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _handle(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(content) if content else None
            service.requests.append((self.command, self.path, body))
            if service.refusals:
                status, problem, headers = service.refusals.pop(0)
                self._json(status, problem, "application/problem+json", headers)
            elif self.path.endswith("/events") or (body or {}).get("stream"):
                self._stream()
            else:
                self._wait()
                self._json(200, service.reply(self.command, self.path), "application/json", {})

        do_GET = do_POST = do_DELETE = _handle

        def _wait(self) -> None:
            if service.hold is not None:
                service.hold.wait(30)

        def _json(self, status: int, body: Any, kind: str, headers: dict[str, str]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Type": kind}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in service.events(self.path):
                self.wfile.write(event)
                self.wfile.flush()
            if self.path.endswith("/events"):
                return
            self._wait()
            if not service.is_broken:
                self.wfile.write(service.wire.event("completed", service.answer))

    return Handler


@pytest.fixture
def service(wire: Any) -> Iterator[LocalService]:
    service = LocalService(wire)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(service))
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield service
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(service: LocalService) -> Callable[..., Result]:
    """Run a command against the service."""

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        environment = {"ORTHROS_CLIENT_URL": service.url}
        return CliRunner().invoke(app, list(arguments), input=stdin, env=environment)

    return run


@pytest.fixture
def text_file(tmp_path: Any) -> str:
    path = tmp_path / "moby.txt"
    path.write_text("Call me Ishmael.", encoding="utf-8")
    return str(path)
