"""Tokenizers of several families, tiny or the default model's own."""

from pathlib import Path

import pytest
from tokenizers import Regex as RawRegex
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from orthros_service.tokenization import Tokenizer

DEFAULT_MODEL = Path(__file__).parents[3] / "models" / "smollm2-135m-instruct"

LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def tiny(tiny_tokenizer_dir) -> Tokenizer:
    return Tokenizer.from_directory(tiny_tokenizer_dir)


@pytest.fixture(scope="session")
def llama_3_like(tmp_path_factory, tiny_tokenizer, write_tokenizer_dir) -> Tokenizer:
    """The tiny vocabulary behind the word pattern of Llama 3 and Qwen, with NFC."""
    raw = RawTokenizer.from_str(tiny_tokenizer.to_str())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(RawRegex(LLAMA_3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return Tokenizer.from_directory(
        write_tokenizer_dir(tmp_path_factory.mktemp("llama_3_like"), raw)
    )


@pytest.fixture(scope="session")
def sentencepiece_like(tmp_path_factory, write_tokenizer_dir) -> Tokenizer:
    """Byte tokens for what the vocabulary lacks, and a space put in front of every text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {char: 259 + index for index, char in enumerate("▁abcdefghijklmnopqrstuvwxyz[]/INST")}
    vocab |= {"▁a": len(vocab), "[I": len(vocab) + 1}
    raw = RawTokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "a"), ("[", "I")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ raise_exception('no system turn') }}"
        "{% elif message.role == 'user' %}[INST] {{ message.content }} [/INST]"
        "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
    )
    return Tokenizer.from_directory(
        write_tokenizer_dir(
            tmp_path_factory.mktemp("sentencepiece_like"),
            raw,
            chat_template=template,
            eos_token="</s>",
            bos_token="<s>",
        )
    )


@pytest.fixture(scope="session")
def default() -> Tokenizer:
    """The default model's tokenizer."""
    if not (DEFAULT_MODEL / "tokenizer.json").exists():
        pytest.skip("the default model is not prepared; run `make model`")
    return Tokenizer.from_directory(DEFAULT_MODEL)


@pytest.fixture(
    params=[
        "tiny",
        "llama_3_like",
        "sentencepiece_like",
        pytest.param("default", marks=pytest.mark.model),
    ]
)
def tokenizer(request) -> Tokenizer:
    """Each of the tokenizers in turn."""
    return request.getfixturevalue(request.param)
