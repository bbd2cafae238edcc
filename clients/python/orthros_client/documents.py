"""The documents that the service keeps, for both clients."""

from collections.abc import AsyncIterator, Iterator

from orthros_client import _requests as requests
from orthros_client._transport import AsyncTransport, Transport
from orthros_client.types import Document, DocumentDeleted


class Documents:
    """The documents that the service keeps; reached as `client.documents`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, document_id: str) -> Document:
        """One document and how far its ingestion has come.

        Raises:
            NotFoundError: There is no such document.
        """
        return self._transport.send(requests.document_request(document_id))

    def list(self, *, limit: int | None = None) -> Iterator[Document]:
        """Documents, newest first; further pages are fetched as the iterator gets there.

        Args:
            limit: Most documents to return; None returns all.
        """
        pages = requests.Pages(limit=limit)
        while (request := pages.next_request()) is not None:
            yield from pages.take(self._transport.send(request))

    def delete(self, document_id: str) -> DocumentDeleted:
        """Delete a document and its state.

        Raises:
            NotFoundError: There is no such document.
        """
        return self._transport.send(requests.delete_request(document_id))


class AsyncDocuments:
    """The documents that the service keeps; reached as `client.documents`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def get(self, document_id: str) -> Document:
        """One document and how far its ingestion has come; see `Documents.get`."""
        return await self._transport.send(requests.document_request(document_id))

    async def list(self, *, limit: int | None = None) -> AsyncIterator[Document]:
        """Documents, newest first, for `async for`; see `Documents.list`."""
        pages = requests.Pages(limit=limit)
        while (request := pages.next_request()) is not None:
            for document in pages.take(await self._transport.send(request)):
                yield document

    async def delete(self, document_id: str) -> DocumentDeleted:
        """Delete a document and its state; see `Documents.delete`."""
        return await self._transport.send(requests.delete_request(document_id))
