"""The commands about documents: ingest, count, documents list, get and delete."""

from itertools import islice
from typing import Annotated

import typer

from orthros_client._requests import decode_utf8
from orthros_client.cli.options import (
    DEFAULT_URL,
    DocumentIdArgument,
    FileArgument,
    JsonOption,
    QuietOption,
    TimeoutOption,
    UrlOption,
)
from orthros_client.cli.session import open_session, read_input
from orthros_client.cli.terminal import one_line
from orthros_client.types import Document, DocumentList, PrefillModeChoice

TitleOption = Annotated[
    str | None, typer.Option("--title", help="A name for people; by default that of the file.")
]
ModeOption = Annotated[
    PrefillModeChoice,
    typer.Option("--mode", help="How to read it; auto lets the length decide."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until the document can be asked.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Most documents to show.")]


def ingest(
    file: FileArgument,
    title: TitleOption = None,
    mode: ModeOption = "auto",
    wait: WaitOption = True,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Upload a file and wait until it can be asked."""
    with open_session(url=url, is_json=json, is_quiet=quiet, timeout_s=timeout) as session:
        document = session.upload(file, title=title, mode=mode)
        if wait:
            document = session.wait(document.id)
            session.terminal.note(f"Ready: {_size(document)}.")
        if json:
            session.terminal.object(document)
        else:
            session.terminal.line(document.id)


def count(
    file: FileArgument,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Count a file's tokens."""
    with open_session(url=url, is_json=json, is_quiet=quiet, timeout_s=timeout) as session:
        counted = session.client.count_tokens(decode_utf8(read_input(file, session.terminal)))
        if json:
            session.terminal.object(counted)
        else:
            session.terminal.line(
                f"{counted.num_tokens:,} tokens, {counted.num_chars:,} characters; as a document "
                f"{counted.document_tokens:,} tokens, read in {counted.prefill_mode} mode"
            )


def list_documents(
    limit: LimitOption = 50,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """List documents, newest first."""
    with open_session(url=url, is_json=json, is_quiet=quiet, timeout_s=timeout) as session:
        found = list(islice(session.client.documents.list(limit=limit + 1), limit + 1))
        documents, has_more = found[:limit], len(found) > limit
        if json:
            session.terminal.object(DocumentList(data=documents, has_more=has_more))
            return
        for document in documents:
            title = one_line(document.title or "", max_chars=60)
            session.terminal.line(
                f"{document.id}  {document.status:<9}  {_tokens(document):>15}  "
                f"{document.created_at}  {title}".rstrip()
            )
        if not documents:
            session.terminal.note("There are no documents; the command `ingest` adds one.")
        if has_more:
            session.terminal.note(f"There are more than {limit}; show them with --limit.")


def get_document(
    document_id: DocumentIdArgument,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Show one document."""
    with open_session(url=url, is_json=json, is_quiet=quiet, timeout_s=timeout) as session:
        document = session.client.documents.get(document_id)
        if json:
            session.terminal.object(document)
            return
        rows = {
            "id": document.id,
            "status": document.status,
            "title": one_line(document.title or ""),
            "size": _size(document),
            "read": f"{document.prefill.tokens_done:,} tokens",
            "created": document.created_at,
            **{f"metadata {key}": one_line(value) for key, value in document.metadata.items()},
        }
        if document.error is not None:
            rows["error"] = f"{document.error.code}: {one_line(document.error.message)}"
        for name, value in rows.items():
            session.terminal.line(f"{one_line(name)}: {value}")


def delete_document(
    document_id: DocumentIdArgument,
    url: UrlOption = DEFAULT_URL,
    json: JsonOption = False,
    timeout: TimeoutOption = None,
    quiet: QuietOption = False,
) -> None:
    """Delete a document."""
    with open_session(url=url, is_json=json, is_quiet=quiet, timeout_s=timeout) as session:
        deleted = session.client.documents.delete(document_id)
        if json:
            session.terminal.object(deleted)
        else:
            session.terminal.note(f"Deleted {deleted.id}.")


def _tokens(document: Document) -> str:
    return "? tokens" if document.num_tokens is None else f"{document.num_tokens:,} tokens"


def _size(document: Document) -> str:
    parts = [_tokens(document), f"{document.num_chars:,} characters"]
    if document.prefill.mode is not None:
        parts.append(f"{document.prefill.mode} mode")
    if document.prefill.tokens_per_s is not None:
        parts.append(f"{document.prefill.tokens_per_s:,.0f} tokens/s")
    return ", ".join(parts)
