"""Timing on a CUDA device, and the ceilings that figures are held against."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

VOCAB_SIZE = 49152


def time_ms(function: Callable[[], Any], *, repetitions_ms: int = 60) -> float:
    """Median milliseconds of one call, device time, caches flushed between calls."""
    return float(
        triton.testing.do_bench(function, warmup=20, rep=repetitions_ms, return_mode="median")
    )


def time_graph_ms(function: Callable[[], Any], *, replays: int = 20) -> float:
    """Median milliseconds of one replay of a CUDA graph that holds one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_gb_per_s() -> float:
    """Device-to-device copy, bytes read plus bytes written."""
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    ms = time_ms(lambda: target.copy_(source))
    return 2 * source.numel() * source.element_size() / ms / 1e6


def matmul_tflop_per_s() -> float:
    """A large bf16 matrix product on random data."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_ms(lambda: a @ b) / 1e9


def describe_device() -> dict[str, Any]:
    """The device and the versions that a figure was measured with."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
    }


def random_tokens(count: int) -> Tensor:
    """Token ids, [count]."""
    return torch.randint(0, VOCAB_SIZE, (count,), device="cuda")


def seconds(function: Callable[[], Any], repetitions: int) -> float:
    """Median wall time, device synchronized."""
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
