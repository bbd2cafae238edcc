"""Training attention with the phase mask against compiled FlexAttention, on a CUDA device.

One document with 16 question segments of 64 tokens behind it, bf16, the 135M shape. Both compute
the same mask; FlexAttention scores the sinks with the same queries as everything else, as it has no
second ones, and so has a little less to do. Every configuration is checked against the dense
reference at a small size before it is timed. From the repository root:

    python benchmarks/training_attention.py
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_timing import describe_device, time_ms
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from orthros_kernels.phase_training.layout import TILE, DocumentSpan, PhaseLayout
from orthros_kernels.phase_training.op import phase_training_attention
from orthros_kernels.phase_training.reference import phase_training_reference
from orthros_kernels.phase_training.triton_kernel import (
    FORWARD_CONFIGS,
    GRAD_KV_CONFIGS,
    GRAD_Q_CONFIGS,
    TrainingConfig,
    default_config,
    phase_training_backward,
    phase_training_forward,
)

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
WINDOW, SINKS = 512, 4
SEGMENTS, SEGMENT_TOKENS = 16, 64
LENGTHS = (2**17, 2**16, 2**14)
DTYPE = torch.bfloat16
SHAPE = {
    "heads": (HEADS, KV_HEADS, HEAD_DIM),
    "window": WINDOW,
    "sinks": SINKS,
    "segments": (SEGMENTS, SEGMENT_TOKENS),
    "dtype": str(DTYPE),
}
ARGUMENTS: dict[str, Any] = {"window": WINDOW, "num_sinks": SINKS, "scale": HEAD_DIM**-0.5}
PASSES = {"forward": FORWARD_CONFIGS, "grad_q": GRAD_Q_CONFIGS, "grad_kv": GRAD_KV_CONFIGS}
MAX_ERROR = 2e-2
Row = dict[str, Any]


def made_layout(num_tokens: int) -> PhaseLayout:
    """One document of so many tokens and its segments."""
    first = -(-num_tokens // TILE) * TILE
    segments = [(first + SEGMENT_TOKENS * i, SEGMENT_TOKENS) for i in range(SEGMENTS)]
    span = DocumentSpan(start=0, num_tokens=num_tokens, segments=tuple(segments))
    return PhaseLayout.build([span]).to("cuda")


def made_inputs(num_rows: int) -> tuple[list[Tensor], Tensor]:
    """q, q_sink, k and v that want a gradient, and a gradient of the output."""
    heads = (HEADS, HEADS, KV_HEADS, KV_HEADS)
    inputs = [torch.randn(num_rows, n, HEAD_DIM, device="cuda", dtype=DTYPE) for n in heads]
    grad_out = torch.randn(num_rows, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    return [x.requires_grad_() for x in inputs], grad_out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; NaN stays NaN."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def flops(num_tokens: int) -> float:
    """Operations of the forward pass that the mask asks for; the gradients take 2.5 times these."""
    pairs = num_tokens * (WINDOW + TILE / 2 + SINKS)
    pairs += SEGMENTS * SEGMENT_TOKENS * (num_tokens + SEGMENT_TOKENS / 2)
    return 4.0 * HEADS * HEAD_DIM * pairs


class SmallCase:
    """A size at which the dense reference is quick, with a document that ends inside a tile."""

    def __init__(self) -> None:
        self.layout = made_layout(1500)
        self.inputs, self.grad_out = made_inputs(self.layout.num_tokens)
        exact = [x.detach().float().requires_grad_() for x in self.inputs]
        out = phase_training_reference(*exact, self.layout, **ARGUMENTS)
        grads = torch.autograd.grad(out, exact, self.grad_out.float())
        self.expected = [out.detach(), *grads]

    def error(self, config: TrainingConfig) -> float:
        """The largest relative error of output and gradients; NaN if there is one."""
        inputs = [x.detach() for x in self.inputs]
        common = {**ARGUMENTS, "config": config}
        blank = torch.full_like(self.grad_out, torch.nan)
        out, lse = phase_training_forward(*inputs, self.layout, **common, out=blank)
        q, q_sink, k, v = (torch.full_like(x, torch.nan) for x in inputs)
        grads = phase_training_backward(
            self.grad_out, *inputs, out, lse, self.layout, **common, grads=(q, q_sink, k, v)
        )
        pairs = zip((out, *grads), self.expected, strict=True)
        errors = [relative_error(actual, expected) for actual, expected in pairs]
        return max(errors, key=lambda error: error if error == error else float("inf"))


def flex_mask(num_tokens: int, num_rows: int) -> BlockMask:
    """The same mask in FlexAttention's terms, its block lists written down, not searched for."""
    num_blocks, document_blocks = num_rows // TILE, num_tokens // TILE
    block = torch.arange(num_blocks, device="cuda")
    row, key = block[:, None], block[None, :]
    is_document = row < document_blocks
    # A block inside the window is whole even where it holds the sinks.
    is_full = torch.where(
        is_document, (key < row) & (key >= row - WINDOW // TILE), key < document_blocks
    )
    is_partial = ((key == row) | (is_document & (key == 0))) & ~is_full

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_window = (kv <= q) & ((kv < SINKS) | (kv >= q // TILE * TILE - WINDOW))
        same_segment = (q - num_tokens) // SEGMENT_TOKENS == (kv - num_tokens) // SEGMENT_TOKENS
        in_document = kv < num_tokens
        by_segment = in_document | ((kv <= q) & same_segment)
        return ((q < num_tokens) & in_window) | ((q >= num_tokens) & by_segment)

    def listed(is_block: Tensor) -> tuple[Tensor, Tensor]:
        order = is_block.int().argsort(dim=1, descending=True, stable=True)
        return is_block.sum(1).int()[None, None], order.int()[None, None].contiguous()

    return BlockMask.from_kv_blocks(
        *listed(is_partial),
        *listed(is_full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(num_rows, num_rows),
    )


def flex_function(num_tokens: int, num_rows: int) -> Callable[..., Tensor]:
    """(q, k, v) in [1, H, T, D] -> output."""
    mask = flex_mask(num_tokens, num_rows)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(
        q, k, v, block_mask=mask, scale=ARGUMENTS["scale"], enable_gqa=True
    )


def time_both(function: Callable[[], Tensor], leaves: list[Tensor], grad_out: Tensor) -> Row:
    """Forward, and forward with the gradients of the leaves."""
    return {
        "forward_ms": time_ms(function),
        "step_ms": time_ms(lambda: torch.autograd.grad(function(), leaves, grad_out)),
    }


def ours_row(num_tokens: int) -> Row:
    """The operator as a model calls it."""
    layout = made_layout(num_tokens)
    inputs, grad_out = made_inputs(layout.num_tokens)
    return time_both(
        lambda: phase_training_attention(*inputs, layout, **ARGUMENTS), inputs, grad_out
    )


def flex_row(num_tokens: int) -> Row:
    """Compiled FlexAttention, and how far the operator is from it where sinks get the same q."""
    layout = made_layout(num_tokens)
    (q, _, k, v), grad_out = made_inputs(layout.num_tokens)
    function = flex_function(num_tokens, layout.num_tokens)
    leaves = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]
    grad_out = grad_out.transpose(0, 1)[None].contiguous()
    out = function(*leaves)
    ours = phase_training_attention(q.detach(), q.detach(), k.detach(), v.detach(), layout,
                                    **ARGUMENTS)  # fmt: skip
    row = {"difference": relative_error(ours, out[0].transpose(0, 1))}
    return row | time_both(lambda: function(*leaves), leaves, grad_out)


def config_row(num_tokens: int, config: TrainingConfig) -> Row:
    """Both passes in one configuration, launched directly."""
    layout = made_layout(num_tokens)
    leaves, grad_out = made_inputs(layout.num_tokens)
    inputs = [x.detach() for x in leaves]
    common = {**ARGUMENTS, "config": config}
    forward_ms = time_ms(lambda: phase_training_forward(*inputs, layout, **common))
    out, lse = phase_training_forward(*inputs, layout, **common)
    backward_ms = time_ms(
        lambda: phase_training_backward(grad_out, *inputs, out, lse, layout, **common)
    )
    step_ms = forward_ms + backward_ms
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, "step_ms": step_ms}


class Report:
    """Rows as they come, a time limit, and failures that do not take the rest with them."""

    def __init__(self, output: Path, budget_s: float) -> None:
        self.output, self.deadline = output, time.perf_counter() + budget_s
        self.result: Row = {"machine": describe_device(), "shape": SHAPE, "rows": []}

    def add(self, what: Row, measure: Callable[[], Row]) -> Row | None:
        """The measured row, or None if it failed or the time is up."""
        row, is_good = dict(what), False
        if time.perf_counter() > self.deadline:
            row["problem"] = "not run: out of time"
        else:
            try:
                row |= measure()
                is_good = True
            except Exception as problem:
                row["problem"] = f"{type(problem).__name__}: {problem}"[:400]
            # What a failure or a large case leaves behind is not the next one's burden.
            torch.cuda.empty_cache()
        self.result["rows"].append(row)
        print({name: round(x, 4) if isinstance(x, float) else str(x) for name, x in row.items()})
        self.write()
        return row if is_good else None

    def write(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.result, indent=1, default=str) + "\n")


def fastest_config(report: Report, small: SmallCase) -> TrainingConfig:
    """The fastest configuration of each pass, the others by default, among those that are right."""
    default = best = default_config(HEAD_DIM, DTYPE)
    for which, all_blocks in PASSES.items():
        times: list[tuple[float, Any]] = []
        for blocks in all_blocks:
            config = replace(default, **{which: blocks})

            def measure(config: TrainingConfig = config) -> Row:
                error = small.error(config)
                row: Row = {"error": error, "is_right": error < MAX_ERROR}
                return row | config_row(LENGTHS[0], config)

            row = report.add({"what": which, "at": LENGTHS[0], "config": blocks}, measure)
            if row is not None and row["is_right"]:
                times.append((row["forward_ms" if which == "forward" else "backward_ms"], blocks))
        if times:
            best = replace(best, **{which: min(times, key=lambda pair: pair[0])[1]})
    return best


def add_ratios(rows: list[Row]) -> None:
    """FlexAttention's time over each row's, and the rate of useful operations."""
    rows = [row for row in rows if "tokens" in row and "step_ms" in row]
    flex = {row["tokens"]: row for row in rows if row["what"] == "flex"}
    for row in rows:
        for which, work in (("forward", 1.0), ("step", 3.5)):
            ms = row[f"{which}_ms"]
            row[f"{which}_tflop_per_s"] = work * flops(row["tokens"]) / ms / 1e9
            if row["tokens"] in flex:
                row[f"{which}_ratio"] = flex[row["tokens"]][f"{which}_ms"] / ms


def print_table(rows: list[Row]) -> None:
    """Milliseconds and ratios by length."""
    print("  tokens  what     forward ms   step ms   Flex / it: forward   step")
    for row in sorted((r for r in rows if "step_tflop_per_s" in r), key=lambda r: r["tokens"]):
        ratios = [row.get(f"{which}_ratio", float("nan")) for which in ("forward", "step")]
        print(
            f"{row['tokens']:>8}  {row['what']:8} {row['forward_ms']:>10.3f} "
            f"{row['step_ms']:>9.3f} {ratios[0]:>20.2f} {ratios[1]:>6.2f}"
        )


def main() -> None:
    """Default and FlexAttention at the longest row first, then what the time allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=50.0, help="start no case after this")
    default_output = Path("benchmarks/results/training_attention.json")
    parser.add_argument("--output", type=Path, default=default_output)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.output, arguments.budget_s)
    print(report.result["machine"])
    small = SmallCase()
    default = default_config(HEAD_DIM, DTYPE)
    report.add({"what": "check", "config": default}, lambda: {"error": small.error(default)})
    for tokens in LENGTHS:
        report.add({"what": "default", "tokens": tokens}, lambda n=tokens: ours_row(n))
    report.add({"what": "flex", "tokens": LENGTHS[0]}, lambda: flex_row(LENGTHS[0]))
    report.result["fastest_config"] = best = fastest_config(report, small)
    for tokens in LENGTHS:
        report.add({"what": "fastest", "tokens": tokens}, lambda n=tokens: config_row(n, best))
    for tokens in LENGTHS[1:]:
        report.add({"what": "flex", "tokens": tokens}, lambda n=tokens: flex_row(n))
    add_ratios(report.result["rows"])
    report.write()
    print_table(report.result["rows"])
    print(f"fastest: {best}")


if __name__ == "__main__":
    main()
