"""What a model directory says about its tokens: vocabulary, chat template, end ids."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orthros_service.errors import ModelError

_CURE = (
    "Copy the file again from the model's original directory; "
    "for the default model run `orthros models prepare`."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The parts of a model directory that decide how text becomes tokens.

    Args:
        tokenizer_json: Content of tokenizer.json, as it was read.
        tokenizer_spec: The same, parsed.
        chat_template: Jinja source of the chat template; None if the model has none.
        special_texts: Named special tokens, such as "bos_token", as their texts.
        eos_ids: Ids that end an answer, as the configuration files list them.
    """

    tokenizer_json: bytes
    tokenizer_spec: dict[str, Any]
    chat_template: str | None
    special_texts: Mapping[str, str]
    eos_ids: frozenset[int]


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read a Hugging Face model directory.

    Raises:
        ModelError: tokenizer.json is missing, or a file cannot be read as what it should be.
    """
    path = directory / "tokenizer.json"
    raw = _read(path)
    if raw is None:
        raise ModelError(f"{path} does not exist; a model directory needs it. {_CURE}")
    config = _read_json(directory / "tokenizer_config.json")
    specials = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    eos_ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos_ids |= _ids(directory / name, _read_json(directory / name).get("eos_token_id"))
    return TokenizerFiles(
        tokenizer_json=raw,
        tokenizer_spec=_parse(path, raw),
        chat_template=_chat_template(directory, config),
        special_texts=specials,
        eos_ids=frozenset(eos_ids),
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. {_CURE}") from error


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}. {_CURE}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object. {_CURE}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    raw = _read(path)
    return {} if raw is None else _parse(path, raw)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(path: Path, value: object) -> set[int]:
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ModelError(f"{path}: eos_token_id must be an integer or a list of them. {_CURE}")
    return set(ids)


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """The template file wins over the configuration's field, as in `transformers`."""
    path = directory / "chat_template.jinja"
    raw = _read(path)
    if raw is not None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path} is not UTF-8: {error}. {_CURE}") from error
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item for item in value if isinstance(item, dict)}
        value = named.get("default", {}).get("template")
    if value is None or isinstance(value, str):
        return value
    raise ModelError(
        f"{directory / 'tokenizer_config.json'}: chat_template must be a text, or a list of "
        f"named ones with a 'default'. {_CURE}"
    )
