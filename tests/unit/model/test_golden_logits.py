"""Full-attention logits equal those of `transformers` to fp32 rounding.

`transformers` rounds rotary angles to fp32, so its own error grows with the position; the sequences
here are long enough for every frequency to matter and short enough for a tight tolerance.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from orthros_service.model.loading import load_model
from orthros_service.model.transformer import full_logits

REPOSITORY = Path(__file__).resolve().parents[3]

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
CASES = {
    "multi_head": ("Llama", {"num_key_value_heads": 4}),
    "grouped_query": ("Llama", {}),
    "one_kv_head": ("Llama", {"num_key_value_heads": 1}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "wide_heads": ("Llama", {"head_dim": 32}),
    "attention_bias": ("Llama", {"attention_bias": True}),
    "mlp_bias": ("Llama", {"mlp_bias": True}),
    "large_eps": ("Llama", {"rms_norm_eps": 0.1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": 12}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3_attention_bias": ("Qwen3", {"attention_bias": True}),
    "linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn_options": (
        "Qwen3",
        {"rope_parameters": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
    "yarn_attention_factor": ("Qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "yarn_mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}}),
}


def largest_relative_error(directory: Path, token_ids: torch.Tensor) -> float:
    """Largest difference of our logits to the golden ones, relative to the largest golden one."""
    golden = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = golden(token_ids[None]).logits[0]
    loaded = load_model(directory, device="cpu", dtype="float32")
    logits = full_logits(loaded.model, token_ids)
    assert logits.shape == expected.shape
    assert logits.dtype == torch.float32
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_for(case: str, write_model: Any) -> None:
    kind, options = CASES[case]
    directory = write_model(kind, **options)
    token_ids = torch.randint(0, 97, (64,))
    assert largest_relative_error(directory, token_ids) < 1e-5


def test_logits_of_a_single_token_equal_transformers(write_model: Any) -> None:
    assert largest_relative_error(write_model(), torch.tensor([5])) < 1e-5


@pytest.mark.model
def test_logits_of_the_default_model_on_real_text_equal_transformers(default_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    token_ids = torch.tensor(tokenizer.encode(text).ids[:400])
    assert token_ids.shape == (400,)
    assert largest_relative_error(default_model, token_ids) < 1e-4
