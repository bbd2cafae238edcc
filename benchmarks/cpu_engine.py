"""Prefill and decode of the bare engine on the CPU beside `transformers`, same weights and dtype.

Each measurement is a process of its own, so that peak memory means something; one run for all.

    .venv/bin/python benchmarks/cpu_engine.py            # everything, about 12 minutes on 2 cores
    .venv/bin/python benchmarks/cpu_engine.py --quick    # baseline at 16K only
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import describe_machine
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
STORY = ROOT / "deployments" / "orthros_deployments" / "demo" / "a_scandal_in_bohemia.txt"
RESULTS = Path(__file__).parent / "results"
DECODE_CONTEXT = 4096
DECODE_TOKENS = 64
REPEATS, REPEATS_THEIRS = 2, 1


def story_tokens(count: int) -> list[int]:
    """So many tokens of real text; the story is repeated when it ends."""
    from orthros_service.tokenization import Tokenizer

    ids = Tokenizer.from_directory(MODEL).encode_text(STORY.read_text()).token_ids.tolist()
    return (ids * (count // len(ids) + 1))[:count]


def status_bytes(field: str) -> int:
    """A memory figure of this process from the kernel, such as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def served(decode_weights: str = "native") -> Any:
    """Our model as a worker loads it."""
    from orthros_service.engine.served_model import load_served_model
    from orthros_service.settings import ModelSettings, Settings

    settings = Settings(
        model=ModelSettings(directory=MODEL, dtype="bfloat16", decode_weights=decode_weights)
    )
    return load_served_model(settings, for_decode=True)


def story_inputs(count: int) -> tuple[Any, Any]:
    """Token ids and places of so many tokens."""
    import numpy as np

    return np.asarray(story_tokens(count), np.int32), np.arange(count + 1, dtype=np.int64)


def our_prefill(model: Any, inputs: tuple[Any, Any], mode: str) -> Any:
    """Prefill the tokens step by step; returns the state."""
    from dataclasses import replace

    from orthros_service.engine.prefill import PrefillEngine
    from orthros_service.engine.types import PrefillStep, context_segments
    from orthros_service.state.types import AttentionState

    layout = replace(model.layout, mode=mode)
    engine = PrefillEngine(model.loaded, layout)
    ids, places = inputs
    segments: list[Any] = []
    for start in range(0, len(ids), layout.segment_tokens):
        end = min(start + layout.segment_tokens, len(ids))
        step = PrefillStep(
            layout=layout,
            start=start,
            token_ids=ids[start:end],
            char_starts=places[start:end],
            char_ends=places[start + 1 : end + 1],
        )
        context = [segments[index] for index in context_segments(layout, len(segments))]
        segments.append(engine.step(step, context))
    return AttentionState(layout=layout, segments=tuple(segments))


def measure_our_prefill(count: int) -> dict[str, Any]:
    """Seconds, and the process's peak memory beside the K/V, of one linear prefill."""
    model = served()
    inputs, warm_up = story_inputs(count), story_inputs(2048)
    # A first step pays for lazy initialization; its buffers count, since they are kept for reuse.
    our_prefill(model, warm_up, "linear")
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    state = our_prefill(model, inputs, "linear")
    seconds = time.perf_counter() - started
    peak = status_bytes("VmHWM")
    working = peak - state.num_bytes
    return {"seconds": seconds, "kv_bytes": state.num_bytes, "working_bytes": working}


def transformers_model() -> Any:
    """The same weights in `transformers`, SDPA attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()


def measure_their_prefill(count: int) -> dict[str, Any]:
    """Seconds of one forward pass that keeps the cache, last logits only."""
    import torch

    model = transformers_model()
    with torch.inference_mode():
        model(torch.tensor([story_tokens(512)]), use_cache=True, logits_to_keep=1)
        base = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        ids = torch.tensor([story_tokens(count)])
        started = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_bytes": status_bytes("VmHWM") - base}


def measure_our_decode(questions: int, weights: str) -> dict[str, Any]:
    """Tokens per second of greedy answers on one document."""
    from orthros_service.engine.decode import DecodeEngine
    from orthros_service.engine.types import DecodeWork
    from orthros_service.state.types import StateHandle
    from orthros_service.tokenization.stream import TextStream
    from orthros_service.types import SamplingParameters

    model = served(weights)
    state = our_prefill(model, story_inputs(DECODE_CONTEXT), "full")
    engine = DecodeEngine(
        model.loaded, model.layout, new_stream=lambda: TextStream(model.tokenizer)
    )
    handle = StateHandle(
        content_key="story",
        layout=state.layout,
        segments=(),
        num_tokens=state.num_tokens,
        num_bytes=state.num_bytes,
    )
    for index in range(questions):
        work = DecodeWork(
            request_id=str(index),
            documents=(handle,),
            tail_ids=tuple(story_tokens(24 + index)),
            sampling=SamplingParameters(max_tokens=DECODE_TOKENS + 8),
            stop_ids=frozenset(),
        )
        engine.add(work, [state])
    for _ in range(4):
        engine.step()
    steps = []
    for _ in range(DECODE_TOKENS):
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    return {
        "tokens_per_s": questions / statistics.median(steps),
        "step_ms": statistics.median(steps) * 1e3,
    }


def measure_their_decode() -> dict[str, Any]:
    """Tokens per second with its own cache, batch 1."""
    import torch

    model = transformers_model()
    steps = []
    with torch.inference_mode():
        ids = torch.tensor([story_tokens(DECODE_CONTEXT)])
        out = model(ids, use_cache=True, logits_to_keep=1)
        for _ in range(DECODE_TOKENS // 2):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            started = time.perf_counter()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            steps.append(time.perf_counter() - started)
    return {
        "tokens_per_s": 1 / statistics.median(steps),
        "step_ms": statistics.median(steps) * 1e3,
    }


MEASURES = {
    "our_prefill": lambda argument: measure_our_prefill(int(argument)),
    "their_prefill": lambda argument: measure_their_prefill(int(argument)),
    "our_decode": lambda argument: measure_our_decode(
        int(argument.split(",")[0]), argument.split(",")[1]
    ),
    "their_decode": lambda argument: measure_their_decode(),
}


def run(name: str, argument: str = "") -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", name, argument]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    Console(stderr=True).print(f"{name} {argument}: {result}")
    return result


def best_of(repeats: int, name: str, argument: str) -> dict[str, Any]:
    """The fastest of several runs: what else the machine does only ever adds time."""
    results = [run(name, argument) for _ in range(repeats)]
    return min(results, key=lambda result: float(result["seconds"]))


def main() -> None:
    """Run everything, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--quick", action="store_true", help="baseline at 16K only")
    arguments = parser.parse_args()
    if arguments.child:
        name, argument = arguments.child
        print(json.dumps(MEASURES[name](argument)))
        return
    lengths = [16384, 32768, 65536]
    compared = lengths[:1] if arguments.quick else lengths[:2]
    ours = {count: best_of(REPEATS, "our_prefill", str(count)) for count in lengths}
    theirs = {count: best_of(REPEATS_THEIRS, "their_prefill", str(count)) for count in compared}
    decode = {
        "ours, native weights, 1 question": run("our_decode", "1,native"),
        "transformers": run("their_decode"),
        "ours, int8 weights, 1 question": run("our_decode", "1,int8"),
        "ours, native weights, 8 questions": run("our_decode", "8,native"),
        "ours, int8 weights, 8 questions": run("our_decode", "8,int8"),
    }
    report(ours, theirs, decode, "cpu_engine_quick" if arguments.quick else "cpu_engine")


def report(
    ours: dict[int, dict[str, Any]],
    theirs: dict[int, dict[str, Any]],
    decode: dict[str, dict[str, Any]],
    name: str,
) -> None:
    """Write the JSON and print the tables."""
    rates = {count: count / result["seconds"] for count, result in ours.items()}
    working = {count: result["working_bytes"] for count, result in ours.items()}
    result = {
        "what": "bare engine, smollm2-135m-instruct as dequantized, bf16, batch 1, real text",
        "command": "python benchmarks/cpu_engine.py",
        "machine": describe_machine("torch", "transformers", "orthros-service"),
        "prefill_linear": {str(count): value for count, value in ours.items()},
        "prefill_transformers_sdpa": {str(count): value for count, value in theirs.items()},
        "prefill_speedup": {
            str(count): theirs[count]["seconds"] / ours[count]["seconds"] for count in theirs
        },
        "cost_per_token_spread_ratio": max(rates.values()) / min(rates.values()) - 1,
        "working_memory_spread_ratio": max(working.values()) / min(working.values()) - 1,
        "decode_at_4096": decode,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    table = Table(title="Prefill, bf16, batch 1")
    for column in (
        "tokens",
        "ours, s",
        "tokens/s",
        "MiB beside K/V",
        "transformers, s",
        "speed-up",
    ):
        table.add_column(column, justify="right")
    for count, value in ours.items():
        other = theirs.get(count)
        table.add_row(
            str(count),
            f"{value['seconds']:.1f}",
            f"{rates[count]:.0f}",
            f"{value['working_bytes'] / 2**20:.0f}",
            f"{other['seconds']:.1f}" if other else "",
            f"{other['seconds'] / value['seconds']:.1f}x" if other else "",
        )
    console = Console()
    console.print(table)
    table = Table(title=f"Decode at {DECODE_CONTEXT} tokens of context")
    for column in ("system", "tokens/s", "ms per step"):
        table.add_column(column, justify="right" if column != "system" else "left")
    for name, value in decode.items():
        table.add_row(name, f"{value['tokens_per_s']:.1f}", f"{value['step_ms']:.1f}")
    console.print(table)
    console.print(f"Written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
