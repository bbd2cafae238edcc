"""The scripts of the ablation, from a tiny model and tiny rows to a report."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "ablation"
HIDDEN, INNER, VOCABULARY, ROW_TOKENS, ROWS = 64, 96, 50, 640, 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random model of one layer, one head."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    layer = {
        **{f"self_attn.{name}_proj.weight": random(HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj.weight": random(INNER, HIDDEN),
        "mlp.up_proj.weight": random(INNER, HIDDEN),
        "mlp.down_proj.weight": random(HIDDEN, INNER),
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    weights = {f"model.layers.0.{name}": tensor for name, tensor in layer.items()}
    weights["model.embed_tokens.weight"] = random(VOCABULARY, HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    shape = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(shape))
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows that are all alike: a document of 400 tokens and a segment of each kind."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, ROW_TOKENS).astype(np.uint16)
    directory = tmp_path / "data"
    directory.mkdir()
    for name, rows in (("train", ROWS), ("eval", 1)):
        np.savez(
            directory / f"{name}.npz",
            tokens=np.tile(tokens, (rows, 1)),
            documents=np.array([(row, 0, 400) for row in range(rows)], np.int32),
            segments=np.array(
                [
                    (row, 512 + 24 * kind, 20, 12, kind, 100)
                    for row in range(rows)
                    for kind in range(4)
                ],
                np.int32,
            ),
        )
    return directory


def test_training_lowers_the_loss_and_every_run_is_evaluated(
    tmp_path: Path, model: Path, data: Path
) -> None:
    output = tmp_path / "ablation.json"
    command = [
        sys.executable, SCRIPTS / "train.py", "--model", model, "--data", data,
        "--runs", "start", "w128:0", "state128:1", "--output", output,
        "--device", "cpu", "--no-compile",
    ]  # fmt: skip

    subprocess.run(command, check=True, timeout=120)

    start, *trained = json.loads(output.read_text())["runs"]
    assert "training" not in start
    assert [(run["variant"], run["seed"]) for run in trained] == [("w128", 0), ("state128", 1)]
    for run in trained:
        assert run["training"]["steps"] == ROWS
        assert len(run["evaluation"]["segments"]) == 4
        before, after = (
            np.mean([segment["loss"] for segment in each["evaluation"]["segments"]])
            for each in (start, run)
        )
        assert after < 0.9 * before
    assert any(gate != 0 for layer in trained[1]["alpha"] for gate in layer)
