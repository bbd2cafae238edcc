"""Documents at rest: their text, its checks, and the catalogue of what is stored."""

from orthros_service.documents.catalog import DocumentCatalog
from orthros_service.documents.rows import DocumentRow
from orthros_service.documents.store import TextStore
from orthros_service.documents.text import check_text, content_key, decode_upload, normalize_text

__all__ = [
    "DocumentCatalog",
    "DocumentRow",
    "TextStore",
    "check_text",
    "content_key",
    "decode_upload",
    "normalize_text",
]
