"""Decode-mode attention over one run of keys: checks and dispatch."""

from collections.abc import Sequence

from torch import Tensor

from orthros_kernels.errors import check
from orthros_kernels.partial_attention.cpu import (
    KeysValues,
    causal_attention_cpu,
    full_attention_cpu,
    merge_partials_cpu,
    partial_attention_cpu,
)
from orthros_kernels.partial_attention.reference import Partial


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check(k.shape == v.shape, f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}")
    check(k.shape[1] > 0, "k must hold at least one key")
    check(q.shape[-1] == k.shape[-1], f"q has head size {q.shape[-1]}, k has {k.shape[-1]}")
    check(
        q.dtype == k.dtype == v.dtype,
        f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must agree",
    )


def _check_runs(q: Tensor, runs: Sequence[KeysValues]) -> None:
    check(len(runs) > 0, "runs must hold at least one run of keys and values")
    for k, v in runs:
        _check(q, k, v)
        check(q.shape[0] == k.shape[0], f"q has {q.shape[0]} KV heads, k has {k.shape[0]}")


def partial_attention(q: Tensor, runs: Sequence[KeysValues], *, scale: float) -> Partial:
    """Attend rows of queries to every key of one or several runs, without a mask.

    Args:
        q: [G, R, D]; R rows are the query heads of a KV head times the queries that share the keys.
        runs: Keys and values of each run, both [G, N, D], N >= 1; unit stride in D. Not modified.
        scale: Softmax scale, usually D ** -0.5.

    Returns:
        Output [G, R, D] of one softmax over all runs, and the fp32 log-sum-exp of the scores
        [G, R], with which `merge_partials` joins it to others.

    Raises:
        KernelError: Shapes or dtypes do not fit, or there is no run.
    """
    _check_runs(q, runs)
    return partial_attention_cpu(q, runs, scale=scale)


def full_attention(q: Tensor, runs: Sequence[KeysValues], *, scale: float) -> Tensor:
    """`partial_attention` for queries that see nothing else: no log-sum-exp.

    Args:
        q: [G, R, D].
        runs: Keys and values of each run, both [G, N, D], N >= 1.
        scale: Softmax scale.

    Returns:
        Output [G, R, D].

    Raises:
        KernelError: Shapes or dtypes do not fit, or there is no run.
    """
    _check_runs(q, runs)
    return full_attention_cpu(q, runs, scale=scale)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Partial:
    """Attend the last n of c + n tokens causally.

    Args:
        q: [H, n, D], queries of the last n tokens.
        k: [G, c + n, D].
        v: Like k.
        scale: Softmax scale.

    Returns:
        Output [H, n, D] and fp32 log-sum-exp [H, n].

    Raises:
        KernelError: Shapes or dtypes do not fit.
    """
    _check(q, k, v)
    check(q.shape[0] % k.shape[0] == 0, f"{q.shape[0]} query heads on {k.shape[0]} KV heads")
    check(q.shape[1] <= k.shape[1], f"{q.shape[1]} queries but only {k.shape[1]} keys")
    return causal_attention_cpu(q, k, v, scale=scale)


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """One softmax over several runs of keys, from each run's output and log-sum-exp.

    Args:
        partials: At least one (output [.., D], log-sum-exp [..]).

    Returns:
        Merged output (fp32 if there were several) and log-sum-exp.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    check(len(partials) > 0, "partials must hold at least one run")
    return merge_partials_cpu(partials)
