from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from orthros_service.model.config import ModelConfig, load_model_config
from orthros_service.model.rope import RotaryTable, rotate

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn_ramp_beyond_the_last_pair": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "rope_theta": 8.0,
        "beta_fast": 200,
    },
}


def tables(tmp_path: Path, scaling: str) -> tuple[LlamaConfig, ModelConfig]:
    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_theta": 100000.0, **SCALINGS[scaling]},
    )
    theirs.save_pretrained(tmp_path)
    return theirs, load_model_config(tmp_path)[0]


@pytest.mark.parametrize("position", [1, 8191, 1_000_000, 2_000_000])
def test_cosines_and_sines_are_those_of_fp64_angles_at_any_length(
    position: int, tmp_path: Path
) -> None:
    _, config = tables(tmp_path, "default")
    exponents = np.arange(0, 64, 2, dtype=np.longdouble) / 64
    angles = position / np.longdouble(100000) ** exponents
    cos, sin = RotaryTable(config, device="cpu").cos_sin(torch.tensor([position]))
    assert torch.equal(cos[:, :32], cos[:, 32:])
    assert torch.equal(sin[:, :32], -sin[:, 32:])
    for ours, exact in ((cos[:, :32], np.cos(angles)), (sin[:, 32:], np.sin(angles))):
        error = np.abs(ours[0].double().numpy() - exact.astype(np.float64))
        assert (error / np.abs(exact)).max() < 1e-6


def test_fp32_angles_would_fail_the_test_above(tmp_path: Path) -> None:
    theirs, config = tables(tmp_path, "default")
    positions = torch.tensor([[1_000_000]])
    cos, _ = RotaryTable(config, device="cpu").cos_sin(positions[0])
    golden, _ = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    assert (cos - golden[0]).abs().max() > 1e-3


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_equal_those_of_transformers(scaling: str, tmp_path: Path) -> None:
    theirs, config = tables(tmp_path, scaling)
    positions = torch.arange(0, 8192, 7)
    golden_cos, golden_sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    cos, sin = RotaryTable(config, device="cpu").cos_sin(positions)
    assert cos.shape == (positions.shape[0], 64)
    golden_sin[..., :32] *= -1
    # The golden angles are fp32: at 8192 they are off by up to 8192 * 2^-23.
    torch.testing.assert_close(cos, golden_cos[0], atol=1.5e-3, rtol=0)
    torch.testing.assert_close(sin, golden_sin[0], atol=1.5e-3, rtol=0)
    first = slice(0, 4)
    torch.testing.assert_close(cos[first], golden_cos[0, first], atol=5e-6, rtol=0)
    torch.testing.assert_close(sin[first], golden_sin[0, first], atol=5e-6, rtol=0)


def test_rotation_equals_that_of_transformers(tmp_path: Path) -> None:
    theirs, config = tables(tmp_path, "yarn")
    q, k = torch.randn(1, 5, 20, 64), torch.randn(1, 2, 20, 64)
    positions = torch.arange(20)
    golden = LlamaRotaryEmbedding(theirs)(q, positions[None])
    golden_q, golden_k = apply_rotary_pos_emb(q, k, *golden)
    cos, sin = RotaryTable(config, device="cpu").cos_sin(positions)
    torch.testing.assert_close(rotate(q, cos, sin), golden_q, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(k, cos, sin), golden_k, atol=2e-5, rtol=1e-5)


def test_scores_depend_on_distances_only(tmp_path: Path) -> None:
    _, config = tables(tmp_path, "llama3")
    table = RotaryTable(config, device="cpu")
    q, k = torch.randn(64), torch.randn(64)
    scores = []
    for offset in (0, 1000, 1_000_000):
        cos, sin = table.cos_sin(torch.tensor([offset + 300, offset]))
        scores.append(rotate(q, cos[0], sin[0]) @ rotate(k, cos[1], sin[1]))
    torch.testing.assert_close(scores[1], scores[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(scores[2], scores[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotation_keeps_dtype_and_rounds_once(dtype: torch.dtype, tmp_path: Path) -> None:
    _, config = tables(tmp_path, "default")
    cos, sin = RotaryTable(config, device="cpu").cos_sin(torch.tensor([777]))
    x = torch.randn(3, 1, 64).to(dtype)
    out = rotate(x, cos, sin)
    assert out.dtype == dtype
    assert torch.equal(out, rotate(x.float(), cos, sin).to(dtype))


def test_tables_hold_nothing_per_position(tmp_path: Path) -> None:
    _, config = tables(tmp_path, "default")
    table = RotaryTable(config, device="cpu")
    table.cos_sin(torch.arange(1000))
    held = [value for value in vars(table).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in held) == config.head_dim // 2
