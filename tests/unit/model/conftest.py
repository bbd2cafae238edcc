"""Tiny random models as Hugging Face directories, and the prepared default model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteModel = Callable[..., Path]
EditJson = Callable[..., None]

REPOSITORY = Path(__file__).resolve().parents[3]
DEFAULT_MODEL = REPOSITORY / "models" / "smollm2-135m-instruct"

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Save a tiny model of `transformers` whose every weight, bias and norm is random."""

    def write(kind: str = "Llama", name: str = "tiny", **options: Any) -> Path:
        import torch
        import transformers

        shard_size = options.pop("max_shard_size", "1GB")
        config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **options})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.2 * noise if "norm" in parameter_name else 0.2 * noise)
        directory = tmp_path / name
        model.save_pretrained(directory, max_shard_size=shard_size)
        return directory

    return write


@pytest.fixture
def edit_json() -> EditJson:
    """Change members of a JSON file; None removes one."""

    def edit(path: Path, **members: Any) -> None:
        content = json.loads(path.read_text()) if path.exists() else {}
        for name, value in members.items():
            if value is None:
                content.pop(name, None)
            else:
                content[name] = value
        path.write_text(json.dumps(content))

    return edit


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model, prepared now if it is not there yet."""
    from orthros_service.model.prepare import prepare_default

    prepare_default(DEFAULT_MODEL, progress=lambda _: None)
    return DEFAULT_MODEL
