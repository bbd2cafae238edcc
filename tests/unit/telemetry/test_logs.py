import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from orthros_service.settings import LogSettings
from orthros_service.telemetry import configure_logging, current_request_id, log_context
from orthros_service.telemetry.logs import JsonFormatter, TextFormatter


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(
    format_name: str, root: logging.Logger, *records: tuple[str, dict[str, str]]
) -> list[str]:
    stream = io.StringIO()
    configure_logging(LogSettings(format=format_name), stream=stream)
    for message, extra in records:
        logging.getLogger("orthros_service.test").info(message, extra=extra)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("format_name", ["text", "json"])
def test_every_line_carries_the_request_id_and_phase(
    format_name: str, root_logger: logging.Logger
) -> None:
    with log_context(request_id="req_1"), log_context(phase="decode"):
        (inside,) = _lines(format_name, root_logger, ("hello", {}))
    (outside,) = _lines(format_name, root_logger, ("hello", {}))
    assert "req_1" in inside
    assert "decode" in inside
    assert "req_1" not in outside
    if format_name == "json":
        assert json.loads(inside) | {"time": ""} == {
            "time": "",
            "level": "INFO",
            "logger": "orthros_service.test",
            "message": "hello",
            "request_id": "req_1",
            "phase": "decode",
        }
        assert json.loads(outside)["request_id"] is None


@pytest.mark.parametrize("format_name", ["text", "json"])
@pytest.mark.parametrize("breaker", ["\n", "\r\n", "\x85", "\u2028", "\x1b[31m", "\ud800"])
def test_a_value_with_line_breaks_stays_on_one_line(
    format_name: str, breaker: str, root_logger: logging.Logger
) -> None:
    forged = f"title{breaker}2020-01-01 ERROR forged"
    lines = _lines(format_name, root_logger, (forged, {"title": forged}))
    assert len(lines) == 1
    assert breaker not in lines[0]
    lines[0].encode()


def test_a_traceback_is_kept_and_its_message_cannot_forge_a_line(
    root_logger: logging.Logger,
) -> None:
    stream = io.StringIO()
    configure_logging(LogSettings(), stream=stream)
    try:
        raise ValueError("bad\n2020 ERROR forged")
    except ValueError:
        logging.getLogger("orthros_service.test").exception("failed")
    lines = stream.getvalue().splitlines()
    assert "ValueError: bad" in stream.getvalue()
    assert all(line.startswith("    ") for line in lines[1:])


@pytest.mark.parametrize("format_name", ["text", "json"])
def test_a_traceback_is_text_also_where_only_its_text_is_left(
    format_name: str, root_logger: logging.Logger
) -> None:
    stream = io.StringIO()
    configure_logging(LogSettings(format=format_name), stream=stream)
    logger = logging.getLogger("orthros_service.test")
    try:
        raise ValueError("bad")
    except ValueError as error:
        logger.error("alive", exc_info=error)
    crossed = {"msg": "crossed", "levelno": logging.ERROR, "exc_text": "ValueError: text"}
    logger.handle(logging.makeLogRecord(crossed))
    logger.warning("stack", stack_info=True)
    written = stream.getvalue()
    assert "ValueError: bad" in written
    assert "ValueError: text" in written
    assert "Stack (most recent call last)" in written
    assert "<class" not in written
    if format_name == "json":
        lines = [json.loads(line) for line in written.splitlines()]
        exceptions = [line.get("exception", "") for line in lines]
        assert exceptions[0].startswith("Traceback (most recent call last):\n")
        assert exceptions[1] == "ValueError: text"


def test_configuring_twice_writes_each_record_once(root_logger: logging.Logger) -> None:
    first = io.StringIO()
    configure_logging(LogSettings(), stream=first)
    assert len(_lines("text", root_logger, ("once", {}))) == 1
    assert first.getvalue() == ""


def test_the_level_hides_less_severe_records(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging(LogSettings(level="WARNING"), stream=stream)
    logging.getLogger("orthros_service.test").info("hidden")
    logging.getLogger("orthros_service.test").warning("shown")
    assert "hidden" not in stream.getvalue()
    assert "shown" in stream.getvalue()


async def test_concurrent_tasks_keep_their_own_request_ids() -> None:
    async def work(name: str) -> str | None:
        with log_context(request_id=name):
            await asyncio.sleep(0.001)
            return current_request_id()

    names = [f"req_{index}" for index in range(20)]
    assert await asyncio.gather(*map(work, names)) == names
    assert current_request_id() is None


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_traceback_is_text_also_where_another_has_replaced_print(formatter, monkeypatch):
    monkeypatch.setattr("builtins.print", lambda *parts, file, end="": file.write(str(parts)))
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    text = formatter.format(record)
    assert "ValueError: broken" in text
    assert "('" not in text
