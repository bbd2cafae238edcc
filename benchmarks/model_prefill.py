"""Whole-model prefill and decode steps on a CUDA device against transformers' full attention.

The model has the shape of SmolLM2-135M and random weights: speed does not depend on them. Before
anything is timed, the kernels' keys and values are compared with those of the plain references.
From the repository root:

    python benchmarks/model_prefill.py
    python benchmarks/model_prefill.py --parts ours decode
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from full_attention_model import baseline_part
from gpu_timing import describe_device, random_tokens, seconds
from torch import Tensor

from orthros_kernels import KeyRun, force_backend
from orthros_service.engine import prefill as prefill_module
from orthros_service.engine.fused_decode import FusedDecoder
from orthros_service.engine.placement import Placement
from orthros_service.engine.prefill import PrefillEngine
from orthros_service.model.config import ModelConfig, OrthrosConfig
from orthros_service.model.loading import LoadedModel
from orthros_service.model.transformer import Transformer
from orthros_service.state.types import StateLayout

Row = dict[str, Any]
DTYPE = torch.bfloat16
LENGTHS = [2**13, 2**15, 2**16, 2**17, 3 * 2**16, 2**18, 2**19, 2**20]
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30, "num_q_heads": 9,
    "num_kv_heads": 3, "head_dim": 64, "vocab_size": 49152,
}  # fmt: skip


def build_model(window: int) -> LoadedModel:
    """Random weights, scaled so that activations stay near one."""
    config = ModelConfig(
        architecture="LlamaForCausalLM", rms_norm_eps=1e-5, rope_theta=2e6, rope_scaling=None,
        max_position_embeddings=8192, has_tied_embeddings=True, has_qkv_bias=False,
        has_o_bias=False, has_mlp_bias=False, has_qk_norm=False, **SHAPE,
    )  # fmt: skip
    orthros = OrthrosConfig(
        window=window, is_converted=False, trained_context_tokens=8192,
        full_prefill_max_tokens=2048, max_context_tokens=2**21, decode_temperature=None,
        evidence_layers=(18, 19, 20),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Transformer(config, orthros).to(DTYPE).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.03)
        else:
            torch.nn.init.ones_(parameter)
    return LoadedModel(
        model=model, config=config, orthros=orthros, digest="random", dtype=DTYPE,
        device=torch.device("cuda"), num_parameters=sum(p.numel() for p in model.parameters()),
    )  # fmt: skip


def build_engine(loaded: LoadedModel) -> PrefillEngine:
    """An engine whose steps may be as long as a document."""
    return PrefillEngine(
        loaded,
        StateLayout(
            model_digest="random", tokenizer_digest="none", num_layers=SHAPE["num_layers"],
            num_kv_heads=3, head_dim=64, dtype="bfloat16", window=loaded.orthros.window,
            num_sinks=4, mode="linear", segment_tokens=2**20,
        ),
    )  # fmt: skip


@torch.inference_mode()
def check_part(loaded: LoadedModel) -> list[Row]:
    """Kernels against references: keys and values of both modes, and logits of decode steps."""
    engine, tokens = build_engine(loaded), random_tokens(2500)
    rows = []
    for is_linear in (True, False):
        results = []
        for backend in ("triton", "reference"):
            force_backend(backend)
            part = tokens if is_linear else tokens[:300]
            results.append(engine.keys_values(part, (), start=0, is_linear=is_linear).float())
        error = ((results[0] - results[1]).norm() / results[1].norm()).item()
        rows.append({"part": "check", "mode": "linear" if is_linear else "full", "error": error})
        print(f"  {'linear' if is_linear else 'full'} prefill: relative error {error:.1e}")
    force_backend("auto")
    decoder = FusedDecoder(loaded)
    document = engine.keys_values(tokens, (), start=0, is_linear=True)
    worst = 0.0
    tails = [loaded.model.new_kv(64).zero_() for _ in range(3)]
    for step in range(3):
        place = [decode_placement([document], tail, step) for tail in tails]
        logits, _ = decoder.repeated_step(place[0])
        force_backend("reference")
        hidden, _ = FusedDecoder(loaded).hidden_states(place[1], wants_evidence=False)
        force_backend("auto")
        expected = loaded.model.logits(hidden).float()
        worst = max(worst, ((logits.float() - expected).norm() / expected.norm()).item())
    rows.append({"part": "check", "mode": "decode graph", "error": worst})
    print(f"  decode steps in a graph: relative error {worst:.1e}")
    return rows


def decode_placement(
    segments: list[Tensor], tail: Tensor, step: int, *, num_rows: int = 1
) -> Placement:
    """One row per question on one document; every row has a tail of its own in `tail`."""
    length = sum(segment.shape[3] for segment in segments)
    rows = tuple(range(num_rows))
    tails = [tail] if num_rows == 1 else list(tail.unbind())
    return Placement(
        token_ids=[7 + row for row in rows],
        positions=[length + step] * num_rows,
        runs=[
            KeyRun(segments=tuple(segments), rows=rows),
            *(KeyRun(segments=(tails[r],), rows=(r,), limits=(step + 1,)) for r in rows),
        ],
        entry_offsets=[0] * num_rows * 2,
        tail_addresses=[tails[r].data_ptr() for r in rows],
        tail_capacities=[tails[r].shape[3] for r in rows],
        tail_rows=[step] * num_rows,
        signature=tuple((str(r), tails[r].data_ptr()) for r in rows),
    )


def ours_part(loaded: LoadedModel) -> list[Row]:
    """Linear prefill by length and chunk size; peak memory beside the K/V."""
    engine, rows = build_engine(loaded), []
    for chunk in (2**14, 2**15, 2**16):
        prefill_module.FUSED_CHUNK_TOKENS = chunk
        tokens = random_tokens(2**17)
        run = lambda t=tokens: engine.keys_values(t, (), start=0, is_linear=True)  # noqa: E731
        run()
        taken = seconds(run, 5)
        rows.append({"part": "chunk", "chunk": chunk, "tokens": 2**17, "seconds": taken})
        print(f"  chunks of {chunk}: 128K in {taken * 1e3:.1f} ms")
    best = min(rows, key=lambda row: row["seconds"])["chunk"]
    prefill_module.FUSED_CHUNK_TOKENS = best
    for length in LENGTHS:
        tokens = random_tokens(length)
        run = lambda t=tokens: engine.keys_values(t, (), start=0, is_linear=True)  # noqa: E731
        run()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        taken = seconds(run, 5)
        kv_bytes = length * 23040
        peak = torch.cuda.max_memory_allocated() - before - kv_bytes
        rows.append(
            {"part": "ours", "tokens": length, "seconds": taken, "chunk": best,
             "tokens_per_s": length / taken, "peak_beside_kv_mib": peak / 2**20}
        )  # fmt: skip
        print(
            f"  {length:>8} tokens: {taken * 1e3:8.1f} ms, {length / taken / 1e6:.2f}M tokens/s, "
            f"peak beside K/V {peak / 2**20:.0f} MiB"
        )
    return rows


def decode_part(loaded: LoadedModel) -> list[Row]:
    """A decode step in a graph, and what a caller sees with the choice of the next token."""
    return [
        decode_case(loaded, length, num_rows)
        for length, num_rows in ((2**13, 1), (2**17, 1), (2**13, 32), (2**17, 32))
    ]


def decode_case(loaded: LoadedModel, length: int, num_rows: int) -> Row:
    """Questions on one document of so many tokens."""
    decoder = FusedDecoder(loaded)
    segment = torch.randn(30, 2, 3, length, 64, device="cuda", dtype=DTYPE)
    tails = torch.zeros(num_rows, 30, 2, 3, 256, 64, device="cuda", dtype=DTYPE)
    tail = tails[0] if num_rows == 1 else tails
    steps = iter(range(250))

    @torch.inference_mode()
    def step() -> Tensor:
        at = decode_placement([segment], tail, next(steps), num_rows=num_rows)
        logits, _ = decoder.repeated_step(at)
        return logits.argmax(-1).cpu()

    for _ in range(5):
        step()
    whole = seconds(step, 100)
    graph = next(iter(decoder._graphs.values())).graph
    replay = seconds(graph.replay, 50)
    print(
        f"  context {length}, {num_rows} rows: graph {replay * 1e3:.2f} ms, "
        f"with the choice of the token {whole * 1e3:.2f} ms"
    )
    return {
        "part": "decode", "context": length, "rows": num_rows, "step_ms": whole * 1e3,
        "graph_ms": replay * 1e3,
    }  # fmt: skip


def profile_part(loaded: LoadedModel) -> list[Row]:
    """Where the device's time goes in a linear prefill of 64K tokens, and in decode steps."""
    engine, tokens = build_engine(loaded), random_tokens(2**16)
    rows = []
    engine.keys_values(tokens, (), start=0, is_linear=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.keys_values(tokens, (), start=0, is_linear=True)
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:14]:
        rows.append(
            {"part": "profile", "kernel": event.key[:90], "calls": event.count,
             "ms": event.device_time_total / 1e3}
        )  # fmt: skip
        print(f"  {event.device_time_total / 1e3:8.2f} ms {event.count:>5} {event.key[:90]}")
    return rows


PARTS: dict[str, Callable[[LoadedModel], list[Row]]] = {
    "check": check_part,
    "ours": ours_part,
    "decode": decode_part,
    "profile": profile_part,
    "baseline": lambda _: baseline_part(),
}


def print_ratios(rows: list[Row]) -> None:
    """Speed-up at every length that both sides have."""
    ours = {row["tokens"]: row["seconds"] for row in rows if row["part"] == "ours"}
    for row in rows:
        if row["part"] == "baseline" and "seconds" in row and row["tokens"] in ours:
            row["speed_up"] = row["seconds"] / ours[row["tokens"]]
            print(f"  {row['tokens']:>8} tokens: {row['speed_up']:.1f}x {row['kernel']}")


def main() -> None:
    """Run the chosen parts; one that fails does not take the others with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/model_prefill.json")
    )
    arguments = parser.parse_args()
    loaded = build_model(arguments.window)
    result: Row = {"machine": describe_device(), "window": arguments.window, "shape": SHAPE}
    rows: list[Row] = []
    for name in arguments.parts:
        begin = time.perf_counter()
        print(f"{name}:")
        try:
            rows += PARTS[name](loaded)
        except Exception:
            traceback.print_exc()
            rows.append({"part": name, "problem": traceback.format_exc()[-500:]})
        torch.cuda.empty_cache()
        print(f"{name} took {time.perf_counter() - begin:.0f} s")
        print_ratios(rows) if name == "baseline" else None
        arguments.output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
