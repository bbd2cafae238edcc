import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from orthros_service.errors import InvalidValueError, ModelError
from orthros_service.model.config import load_model_config
from orthros_service.model.loading import choose_device, choose_dtype, load_model, read_weights

CPU = torch.device("cpu")


def read(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return read_weights(directory, load_model_config(directory)[0], dtype=dtype)


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a single-file model; `__` stands for a dot."""
    path = directory / "model.safetensors"
    content = load_file(path)
    for key, value in tensors.items():
        name = key.replace("__", ".")
        content.pop(name, None)
        if value is not None:
            content[name] = value
    save_file(content, path)


def test_fused_projections_hold_their_parts_in_order(write_model: Any) -> None:
    directory = write_model("Qwen2")
    theirs = load_file(directory / "model.safetensors")
    ours = read(directory)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    for kind in ("weight", "bias"):
        parts = [theirs[f"{attention}.{part}_proj.{kind}"] for part in "qkv"]
        assert torch.equal(ours[f"layers.1.attention.qkv_proj.{kind}"], torch.cat(parts))
    gate_up = [theirs[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(ours["layers.1.mlp.gate_up_proj.weight"], torch.cat(gate_up))


def test_shards_give_the_same_weights_as_one_file(write_model: Any) -> None:
    single, sharded = write_model(name="single"), write_model(name="s", max_shard_size="50KB")
    assert (single / "model.safetensors").is_file()
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    expected, weights = read(single), read(sharded)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_tied_models_have_no_head_of_their_own(write_model: Any) -> None:
    assert "lm_head.weight" not in read(write_model(tie_word_embeddings=True, name="tied"))
    assert "lm_head.weight" in read(write_model(tie_word_embeddings=False, name="untied"))


def test_a_stored_copy_of_a_tied_head_must_equal_the_embedding(write_model: Any) -> None:
    directory = write_model(tie_word_embeddings=True)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    change(directory, lm_head__weight=embedding.clone())
    assert "lm_head.weight" not in read(directory)
    change(directory, lm_head__weight=embedding + 1)
    with pytest.raises(ModelError, match="tied"):
        read(directory)


def test_rotary_frequencies_in_old_files_are_passed_over(write_model: Any) -> None:
    directory = write_model()
    expected = read(directory)
    change(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))
    assert read(directory).keys() == expected.keys()


def test_weights_survive_a_change_of_the_file(write_model: Any) -> None:
    directory = write_model()
    weights = read(directory)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert all(torch.equal(weights[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model__norm__weight": None}, "missing, first 'model.norm.weight'"),
        ({"model__layers__2__mlp__up_proj__weight": None}, "layers.2.mlp.up_proj.weight"),
        ({"model__norm__weight": torch.ones(47)}, "shape [47]; config.json calls for [48]"),
        ({"model__norm__bias": torch.ones(48)}, "unexpected for LlamaForCausalLM"),
        ({"model__layers__3__mlp__up_proj__weight": torch.ones(80, 48)}, "layers.3.mlp"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(48)}, "q_proj.bias"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(
    changes: dict[str, Tensor | None], problem: str, write_model: Any
) -> None:
    directory = write_model()
    change(directory, **changes)
    with pytest.raises(ModelError) as caught:
        read(directory)
    assert problem in caught.value.message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_non_finite_value_is_found(
    value: float, dtype: torch.dtype, write_model: Any
) -> None:
    directory = write_model()
    rows = torch.randn(97, 48)
    rows[41, 7] = value
    change(directory, lm_head__weight=rows)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' holds NaN or infinity"):
        read(directory, dtype)


def test_values_beyond_the_chosen_dtype_are_refused(write_model: Any) -> None:
    directory = write_model()
    change(directory, model__norm__weight=torch.full((48,), 1e6))
    assert read(directory, torch.bfloat16)["norm.weight"].dtype == torch.bfloat16
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' does not fit into torch\.float16"):
        read(directory, torch.float16)


def test_a_truncated_file_is_refused(write_model: Any) -> None:
    directory = write_model()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        load_model(directory, device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_loaded_model_is_whole_frozen_and_placed(kind: str, write_model: Any) -> None:
    directory = write_model(kind)
    loaded = load_model(directory, device="cpu", dtype="bfloat16")
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert {tensor.device for tensor in tensors} == {CPU}
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(tensor.requires_grad for tensor in tensors)
    assert not loaded.model.training
    stored = load_file(directory / "model.safetensors")
    assert loaded.num_parameters == sum(tensor.numel() for tensor in stored.values())
    assert (loaded.dtype, loaded.device) == (torch.bfloat16, CPU)


def test_the_choice_of_dtype_is_logged_with_its_reason(
    write_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_model(write_model(), device="cpu", dtype="float32")
    assert "torch.float32 on cpu (set explicitly), converted: False" in caplog.text


@pytest.mark.parametrize(
    ("capabilities", "dtype", "reason"),
    [
        ({"avx512_bf16": True, "amx_bf16": False, "avx2": True}, torch.bfloat16, "avx512_bf16"),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16, "amx_bf16"),
        ({"neon": True, "bf16": True}, torch.bfloat16, "bf16"),
        ({"avx512_bf16": False, "avx2": True}, torch.float32, "no bfloat16 instructions"),
        ({"architecture": "x86_64"}, torch.float32, "no bfloat16 instructions"),
    ],
)
def test_auto_is_bfloat16_only_where_the_processor_computes_in_it(
    capabilities: dict[str, Any],
    dtype: torch.dtype,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    chosen, why = choose_dtype("auto", CPU)
    assert chosen == dtype
    assert reason in why


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)]
)
def test_auto_on_a_gpu_follows_its_compute_capability(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_dtype("auto", torch.device("cuda", 0))[0] == dtype


def test_an_explicit_dtype_is_kept_everywhere() -> None:
    assert choose_dtype("float16", CPU)[0] == torch.float16
    with pytest.raises(InvalidValueError, match=r"'int4'; allowed are 'auto', 'bfloat16'"):
        choose_dtype("int4", CPU)


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_devices_are_checked_against_what_is_there(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type == ("cuda" if num_gpus else "cpu")
    for absent in ["cuda:2"] if num_gpus else ["cuda", "cuda:0"]:
        with pytest.raises(InvalidValueError, match=f"has {num_gpus} usable GPUs"):
            choose_device(absent)
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "mps", "", "cuda:²"):
        with pytest.raises(InvalidValueError, match="allowed are"):
            choose_device(wrong)
