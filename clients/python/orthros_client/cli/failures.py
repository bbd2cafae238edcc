"""From errors to exit codes and to what the user reads."""

from collections.abc import Mapping

from orthros_client import errors
from orthros_client.cli.terminal import Terminal, printable
from orthros_client.errors import OrthrosError

EXIT_SERVICE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

_UNREACHABLE = (
    errors.ConnectionFailedError,
    errors.ResponseTimeoutError,
    errors.UnexpectedResponseError,
)
_REFUSED_LOCALLY = (errors.InvalidValueError, errors.MalformedRequestError)

_REMEDIES: Mapping[type[OrthrosError], str] = {
    errors.ConnectionFailedError: (
        "Start the service with `orthros serve`, or name its address with --url."
    ),
    errors.UnexpectedResponseError: "Name the service's address with --url.",
    errors.ResponseTimeoutError: (
        "Wait longer with --timeout, or look into the service's logs whether it is overloaded."
    ),
    errors.DeadlineExceededError: "Wait longer with --timeout.",
    errors.NotFoundError: "The command `documents list` shows the documents that exist.",
    errors.DocumentNotReadyError: "The command `documents get ID` shows how far it has come.",
    errors.ContextTooLongError: "Ask a shorter question, or lower --max-tokens.",
    errors.DocumentTooLargeError: "Split the file; the command `count` tells its tokens.",
    errors.EmptyDocumentError: "Give a file that holds text.",
    errors.MalformedRequestError: "Convert the file, for example: iconv -f LATIN1 -t UTF-8 FILE",
    errors.OverloadedError: "Run the command again later.",
    errors.UnavailableError: "Run the command again.",
    errors.StreamBrokenError: "Run the command again; what stands above is not a whole answer.",
}


def exit_code(error: OrthrosError) -> int:
    """The exit code of an error."""
    if isinstance(error, _UNREACHABLE):
        return EXIT_UNREACHABLE
    if isinstance(error, _REFUSED_LOCALLY) and error.status is None:
        return EXIT_USAGE
    return EXIT_SERVICE


def report(error: OrthrosError, terminal: Terminal) -> int:
    """Tell what was wrong, its code, the request and what to do; return the exit code."""
    code = exit_code(error)
    terminal.error(f"Error: {printable(error.message)}")
    facts = [f"code: {error.code}"]
    if error.status is not None:
        facts.append(f"HTTP status: {error.status}")
    if error.phase is not None:
        facts.append(f"phase: {error.phase}")
    if error.request_id is not None:
        facts.append(f"request: {error.request_id}")
    terminal.error(f"  {', '.join(facts)}")
    remedy = _remedy(error)
    if remedy is not None:
        terminal.error(f"  {remedy}")
    if terminal.is_json:
        terminal.object(_as_json(error, code))
    return code


def _remedy(error: OrthrosError) -> str | None:
    if error.retry_after_s is not None:
        return f"Run the command again in {error.retry_after_s:.0f} s."
    for cls in type(error).__mro__:
        if issubclass(cls, OrthrosError) and cls in _REMEDIES:
            return _REMEDIES[cls]
    if error.request_id is not None:
        return "The request's name finds the cause in the service's logs."
    return None


def _as_json(error: OrthrosError, code: int) -> dict[str, object]:
    return {
        "object": "error",
        "code": error.code,
        "message": error.message,
        "status": error.status,
        "phase": error.phase,
        "request_id": error.request_id,
        "retryable": error.is_retryable,
        "retry_after_s": error.retry_after_s,
        "exit_code": code,
    }
