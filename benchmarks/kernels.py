"""The attention kernels on a CUDA device against the fastest full attention that torch has there.

One run, ratios within it; every configuration is checked against the reference before it is timed.
From the repository root:

    python benchmarks/kernels.py                        # all parts, JSON to benchmarks/results
    python benchmarks/kernels.py --parts phase --quick
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import (
    copy_gb_per_s,
    describe_device,
    matmul_tflop_per_s,
    time_graph_ms,
    time_ms,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from orthros_kernels import packed_phase_attention
from orthros_kernels.decode_attention import triton_kernel as decode_kernel
from orthros_kernels.decode_attention.plan import KeyRun, build_plan, move_plan
from orthros_kernels.decode_attention.reference import decode_attention_reference
from orthros_kernels.phase_attention import triton_kernel as phase_kernel
from orthros_kernels.phase_attention.packed import pack_steps

SHAPES = {"135M": (9, 3, 64), "8B": (32, 8, 128)}
TILE, SINKS, LAYERS = 128, 4, 30
DTYPE = torch.bfloat16
Row = dict[str, Any]


def angles(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, [N, D/2] fp32."""
    exponent = torch.arange(head_dim // 2, device="cuda", dtype=torch.float64) * 2 / head_dim
    angle = positions.double()[:, None] * 1e5**-exponent
    return angle.cos().float(), angle.sin().float()


def phase_inputs(num_tokens: int, heads: int, kv_heads: int, dim: int, window: int) -> Row:
    """Queries as the projection leaves them, keys and values as they lie in a segment."""
    projected = torch.randn(num_tokens, heads + 2 * kv_heads, dim, device="cuda", dtype=DTYPE)
    kv = torch.randn(2, kv_heads, num_tokens, dim, device="cuda", dtype=DTYPE)
    return {
        "q": projected[:, :heads],
        "k": kv[0],
        "v": kv[1],
        "steps": pack_steps([0, num_tokens], [0], window=window, tile=TILE, device="cuda"),
        "carry": None,
        "cos_sin": angles(torch.arange(num_tokens, device="cuda"), dim),
        "sink_cos_sin": angles(torch.arange(window + TILE + SINKS, device="cuda"), dim),
        "num_sinks": SINKS,
        "scale": dim**-0.5,
    }


def phase_flops(num_tokens: int, heads: int, dim: int, window: int) -> float:
    """Useful operations: window, half of the diagonal tile and the sinks, two products."""
    return 4.0 * num_tokens * heads * dim * (window + TILE / 2 + SINKS)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; NaN stays NaN."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def checked_phase_configs(heads: int, kv_heads: int, dim: int, window: int) -> list[Row]:
    """Every configuration that compiles and agrees with the reference at a small size."""
    inputs = phase_inputs(2 * window + 5 * TILE + 17, heads, kv_heads, dim, window)
    expected = packed_phase_attention(**inputs, backend="reference")
    rows = []
    for config in phase_kernel.CONFIGS:
        try:
            out = torch.full_like(expected, torch.nan)
            phase_kernel.phase_attention_triton(**inputs, out=out, config=config)
            error = relative_error(out, expected)
        except Exception as problem:
            print(f"  {config} does not run: {str(problem)[:200]}")
            continue
        rows.append({"config": config, "error": error, "is_right": error < 1e-2})
        if not error < 1e-2:
            print(f"  {config} is WRONG: relative error {error}")
    return [row for row in rows if row["is_right"]]


def phase_part(is_quick: bool) -> list[Row]:
    """Prefill-mode attention by length, window and configuration."""
    rows = []
    cases = [("135M", 512), ("8B", 512)] if is_quick else [
        ("135M", 512), ("135M", 256), ("135M", 1024), ("8B", 512),
    ]  # fmt: skip
    for shape, window in cases:
        heads, kv_heads, dim = SHAPES[shape]
        good = checked_phase_configs(heads, kv_heads, dim, window)
        inputs = phase_inputs(2**17, heads, kv_heads, dim, window)
        timed = []
        for entry in good:
            config = entry["config"]
            ms = time_ms(
                partial(phase_kernel.phase_attention_triton, **inputs, config=config),
                repetitions_ms=20,
            )
            timed.append((ms, config))
            flops = phase_flops(2**17, heads, dim, window)
            rows.append(
                {"part": "phase", "shape": shape, "window": window, "tokens": 2**17, "ms": ms,
                 "config": str(config), "tflop_per_s": flops / ms / 1e9, "error": entry["error"]}
            )  # fmt: skip
            print(f"  {shape} W {window} {config}: {ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s")
        if not timed:
            continue
        best = min(timed, key=lambda pair: pair[0])[1]
        for tokens in (2**13, 2**15, 2**17, 2**18, 2**20):
            if shape == "8B" and tokens > 2**18:
                continue
            sized = phase_inputs(tokens, heads, kv_heads, dim, window)
            ms = time_ms(partial(phase_kernel.phase_attention_triton, **sized, config=best))
            rows.append(
                {"part": "phase best", "shape": shape, "window": window, "tokens": tokens,
                 "ms": ms, "config": str(best)}
            )  # fmt: skip
            print(f"  {shape} W {window} {tokens:>8} tokens: {ms:.3f} ms ({best})")
            del sized
    return rows


def full_attention_ms(tokens: int, shape: str) -> Row:
    """Causal full attention of torch's backends, queries and keys rotated already."""
    heads, kv_heads, dim = SHAPES[shape]
    q, k, v = (
        torch.randn(1, n, tokens, dim, device="cuda", dtype=DTYPE)
        for n in (heads, kv_heads, kv_heads)
    )
    result: Row = {"part": "full", "shape": shape, "tokens": tokens}
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                result[name] = time_ms(
                    lambda: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    ),
                    repetitions_ms=150,
                )
        except RuntimeError as problem:
            result[name] = None
            result[f"{name}_problem"] = str(problem)[:200]
    print(f"  full attention {shape} {tokens} tokens: {result}")
    return result


def full_part(is_quick: bool) -> list[Row]:
    """The baselines."""
    sizes = [(2**15, "135M"), (2**17, "135M"), (2**17, "8B")]
    return [full_attention_ms(*size) for size in (sizes[1:] if is_quick else sizes)]


def decode_runs(tokens: int, shape: str, num_rows: int, *, is_int8: bool = False) -> list[KeyRun]:
    """One document in segments of 8K tokens seen by every row, and a tail of 40 tokens each."""
    _, kv_heads, dim = SHAPES[shape]
    segments, scales = [], []
    for _ in range(-(-tokens // 8192)):
        n = min(8192, tokens)
        segment = torch.randn(LAYERS, 2, kv_heads, n, dim, device="cuda", dtype=DTYPE)
        if is_int8:
            scale = segment.float().abs().amax((3, 4)) / 127
            segment = (segment.float() / scale[..., None, None]).round().to(torch.int8)
            scales.append(scale.contiguous())
        segments.append(segment)
    rows = tuple(range(num_rows))
    runs = [KeyRun(segments=tuple(segments), rows=rows, scales=tuple(scales) if is_int8 else None)]
    if not is_int8:
        tails = torch.randn(num_rows, LAYERS, 2, kv_heads, 256, dim, device="cuda", dtype=DTYPE)
        runs += [KeyRun(segments=(tails[r],), rows=(r,), limits=(40,)) for r in rows]
    return runs


def decode_case(runs: list[KeyRun], num_rows: int, shape: str, config: Any, programs: int) -> Row:
    """Milliseconds of one layer, out of a graph over all layers, and the error of one layer."""
    heads, kv_heads, dim = SHAPES[shape]
    q = torch.randn(num_rows, heads + 2 * kv_heads, dim, device="cuda", dtype=DTYPE)[:, :heads]
    plan = move_plan(
        build_plan(runs, num_rows=num_rows, num_q_heads=heads, num_programs=programs),
        torch.device("cuda"),
    )
    cos_sin = angles(torch.arange(plan.size.entries, device="cuda"), dim)

    def one(layer: int) -> tuple[Tensor, Tensor]:
        return decode_kernel.decode_attention_triton(
            q, plan, layer, cos_sin=cos_sin, num_kv_heads=kv_heads, scale=dim**-0.5, config=config
        )

    out, _ = one(3)
    expected, _ = decode_attention_reference(q, runs, 3, cos_sin=cos_sin, scale=dim**-0.5)
    ms = time_graph_ms(lambda: [one(layer) for layer in range(LAYERS)]) / LAYERS
    read = sum(s[0].numel() * s.element_size() for run in runs[:1] for s in run.segments)
    return {
        "ms": ms,
        "gb_per_s": read / ms / 1e6,
        "error": relative_error(out, expected),
        "items": plan.size.items,
        "block_m": plan.size.block_m,
        "config": str(config),
    }


def decode_part(is_quick: bool) -> list[Row]:
    """Decode attention at 128K tokens: one question, 32 on one document, int8, 8B shape."""
    rows = []
    copy = copy_gb_per_s()
    cases = [("135M", 1, False), ("135M", 32, False), ("135M", 1, True)]
    if not is_quick:
        cases += [("135M", 8, False), ("8B", 1, False), ("8B", 32, False)]
    for shape, num_rows, is_int8 in cases:
        runs = decode_runs(2**17, shape, num_rows, is_int8=is_int8)
        for config in decode_kernel.CONFIGS:
            for programs in (264, 396):
                case = {"part": "decode", "shape": shape, "rows": num_rows, "int8": is_int8}
                try:
                    case |= decode_case(runs, num_rows, shape, config, programs)
                except Exception as problem:
                    print(f"  {config} does not run: {str(problem)[:200]}")
                    continue
                case |= {"programs": programs, "of_copy": case["gb_per_s"] / copy}
                rows.append(case)
        mine = [r for r in rows if (r["shape"], r["rows"], r["int8"]) == (shape, num_rows, is_int8)]
        for row in sorted(mine, key=lambda row: row["ms"])[:3]:
            print(
                f"  {shape} {num_rows} rows int8={is_int8}: {row['ms'] * 1e3:.1f} us a layer, "
                f"{row['gb_per_s']:.0f} GB/s ({row['of_copy']:.0%} of copy), error "
                f"{row['error']:.1e}, {row['programs']} programs, {row['config']}"
            )
        wrong = [row for row in mine if not row["error"] < 1e-2]
        for row in wrong:
            print(f"  WRONG: {row}")
    return rows


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "phase": phase_part,
    "full": full_part,
    "decode": decode_part,
}


def main() -> None:
    """Run the chosen parts; one that fails does not take the others with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/kernels.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result: Row = {
        "machine": describe_device(),
        "copy_gb_per_s": copy_gb_per_s(),
        "matmul_tflop_per_s": matmul_tflop_per_s(),
        "rows": [],
    }
    print({key: value for key, value in result.items() if key != "rows"})
    for name in arguments.parts:
        begin = time.perf_counter()
        print(f"{name}:")
        try:
            result["rows"] += PARTS[name](arguments.quick)
        except Exception:
            traceback.print_exc()
            result["rows"].append({"part": name, "problem": traceback.format_exc()[-500:]})
        torch.cuda.empty_cache()
        print(f"{name} took {time.perf_counter() - begin:.0f} s")
        arguments.output.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
