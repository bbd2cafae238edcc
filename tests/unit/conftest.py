"""Fixtures that several unit test folders share: a tiny tokenizer directory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# The same examples in every run and nothing written; shared fixtures are read only.
settings.register_profile(
    "unit",
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("unit")

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRAINING_TEXT = [
    "The keeper of the light wrote in the log every night, and the sea answered in the morning.",
    "Wer die Tür öffnet, sieht das Meer; où est la clé? 鍵はどこですか。 Ответ: 42, 1 234 567.",
    "system user assistant im_start im_end endoftext <| |> \n\n\t  😀 🏳️‍🌈 e\u0301",
]

WriteTokenizer = Callable[..., Path]


@pytest.fixture(scope="session")
def write_tokenizer_dir() -> WriteTokenizer:
    """A function that writes a model directory without weights around a `tokenizers.Tokenizer`."""

    def write(
        directory: Path,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = CHATML,
        eos_token: str | None = "<|im_end|>",
        bos_token: str | None = None,
    ) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {
            "chat_template": chat_template,
            "eos_token": eos_token,
            "bos_token": {"content": bos_token} if bos_token else None,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory

    return write


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE with all 256 bytes, a few merges and the ChatML control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer: Tokenizer,
    write_tokenizer_dir: WriteTokenizer,
) -> Path:
    """A directory that `Tokenizer.from_directory` loads: `tiny_tokenizer` and a ChatML template."""
    return write_tokenizer_dir(tmp_path_factory.mktemp("tiny_tokenizer"), tiny_tokenizer)
