"""JSON as the service accepts it: one meaning per body and bounded work, or a clear 400.

Stricter than `json.loads`: UTF-8 only (a byte order mark is allowed), no repeated key at any depth,
no NaN or Infinity, no number that overflows, bounded nesting and a bounded count of values.
"""

import json
import math
import re
from collections import Counter

from orthros_service.documents import check_text
from orthros_service.errors import MalformedRequestError

MAX_DEPTH = 64
# Brackets, braces and commas outside strings. It bounds memory: a list costs 20 times its 3 bytes.
MAX_STRUCTURE = 20_000
MAX_INTEGER_DIGITS = 20

# A string never fails to match, closed or not, so the scan is linear in the body.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+["\\]?|[\[\]{},]', re.DOTALL)


def parse_json(body: bytes) -> object:
    """Parse one JSON body.

    Raises:
        MalformedRequestError: The bytes are not JSON as described above.
        InvalidTextError: A string or a key holds NUL or a lone surrogate.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedRequestError(
            f"The body is not UTF-8 (byte {error.start} cannot be read); send JSON in UTF-8.",
            position=error.start,
        ) from None
    if not text.strip():
        raise MalformedRequestError("The body is empty; send a JSON object.")
    _check_structure(text)
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_int=_bounded_integer,
            parse_float=_finite_float,
        )
    except json.JSONDecodeError as error:
        raise MalformedRequestError(
            f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
            line=error.lineno,
            column=error.colno,
        ) from None
    _check_strings(value)
    return value


def _check_structure(text: str) -> None:
    depth = 0
    for count, match in enumerate(_TOKEN.finditer(text)):
        token = text[match.start()]
        if token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise MalformedRequestError(
                f"The JSON is nested deeper than {MAX_DEPTH} levels; flatten it.", limit=MAX_DEPTH
            )
        if count >= MAX_STRUCTURE:
            raise MalformedRequestError(
                f"The JSON has more than {MAX_STRUCTURE} values; no request needs that many.",
                limit=MAX_STRUCTURE,
            )


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated, _ = counts.most_common(1)[0]
        raise MalformedRequestError(
            f"The key {repeated[:64]!a} is given twice in one object; give it once."
        )
    return members


def _refuse_constant(name: str) -> object:
    raise MalformedRequestError(f"{name} is not JSON; send a finite number or leave the field out.")


def _bounded_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise MalformedRequestError(
            f"An integer has {len(digits)} characters; at most {MAX_INTEGER_DIGITS} are read.",
            limit=MAX_INTEGER_DIGITS,
        )
    return int(digits)


def _finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise MalformedRequestError("A number is too large to be read; send a finite number.")
    return number


def _check_strings(value: object) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            check_text(item, field="string of the request", is_required=False)
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
