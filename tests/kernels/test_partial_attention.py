"""Decode-mode attention: partial softmaxes over runs of keys merge into one softmax."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orthros_kernels import (
    KernelError,
    attention_mass,
    causal_attention,
    full_attention,
    merge_partials,
    partial_attention,
)
from orthros_kernels.partial_attention.reference import (
    merge_partials_reference,
    partial_attention_reference,
)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_keys", [1, 2, 127, 255, 256, 257, 1000, 2048])
@pytest.mark.parametrize("rows", [1, 3, 24, 32, 33, 200])
def test_fast_path_equals_the_reference(num_keys: int, rows: int) -> None:
    q, k, v = (
        _random(3, rows, 16),
        _random(3, num_keys, 16, seed=1),
        _random(3, num_keys, 16, seed=2),
    )
    out, lse = partial_attention(q, [(k, v)], scale=0.25)
    expected_out, expected_lse = partial_attention_reference(q, k, v, scale=0.25)
    torch.testing.assert_close(out, expected_out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(borders=st.lists(st.integers(1, 299), max_size=12, unique=True))
def test_merging_any_split_of_the_keys_equals_one_softmax(borders: list[int]) -> None:
    q, k, v = _random(2, 5, 8), _random(2, 300, 8, seed=1), _random(2, 300, 8, seed=2)
    edges = [0, *sorted(borders), 300]
    runs = [(k[:, a:b], v[:, a:b]) for a, b in pairwise(edges)]
    parts = [partial_attention(q, [run], scale=0.4) for run in runs]
    out, lse = merge_partials(parts)
    expected_out, expected_lse = partial_attention_reference(q, k, v, scale=0.4)
    at_once = partial_attention(q, runs, scale=0.4)
    torch.testing.assert_close(at_once[0], expected_out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(at_once[1], expected_lse, atol=2e-6, rtol=1e-5)
    alone = full_attention(q, runs, scale=0.4)
    torch.testing.assert_close(alone, expected_out, atol=2e-6, rtol=1e-5)
    plain_out, plain_lse = merge_partials_reference(parts)
    torch.testing.assert_close(plain_out, expected_out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(plain_lse, expected_lse, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(out, expected_out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (1, 90), (7, 7), (90, 90), (7, 90), (64, 300)]
)
def test_causal_attention_shows_each_query_its_past_only(num_queries: int, num_keys: int) -> None:
    q, k, v = (
        _random(6, num_queries, 8),
        _random(2, num_keys, 8, seed=1),
        _random(2, num_keys, 8, seed=2),
    )
    out, lse = causal_attention(q, k, v, scale=0.3)
    context = num_keys - num_queries
    visible = torch.arange(num_keys)[None] <= torch.arange(num_queries)[:, None] + context
    expected_out, expected_lse = partial_attention_reference(
        q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), scale=0.3, visible_RN=visible
    )
    torch.testing.assert_close(out, expected_out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)


def test_the_masses_of_all_runs_add_up_to_the_number_of_rows() -> None:
    q, k, v = _random(2, 5, 8), _random(2, 300, 8, seed=1), _random(2, 300, 8, seed=2)
    _, lse = partial_attention(q, [(k, v)], scale=0.4)
    masses = [attention_mass(q, k[:, a : a + 100], lse, scale=0.4) for a in (0, 100, 200)]
    assert sum(mass.sum() for mass in masses).item() == pytest.approx(10, abs=1e-4)
    weights = torch.softmax(q @ k.transpose(1, 2) * 0.4, -1).sum((0, 1))
    torch.testing.assert_close(torch.cat(masses), weights, atol=1e-6, rtol=1e-5)


def test_no_run_is_refused() -> None:
    with pytest.raises(KernelError, match="at least one run"):
        partial_attention(_random(2, 5, 8), [], scale=1.0)


@pytest.mark.parametrize("rows", [3, 24, 40])
def test_bfloat16_stays_within_its_rounding_of_the_reference(rows: int) -> None:
    q, k, v = (_random(3, n, 64, seed=n).bfloat16() for n in (rows, 700, 701))
    v = v[:, :700]
    out, lse = partial_attention(
        q, [(k[:, :300], v[:, :300]), (k[:, 300:], v[:, 300:])], scale=0.125
    )
    expected_out, expected_lse = partial_attention_reference(q, k, v, scale=0.125)
    assert (out.float() - expected_out).norm() / expected_out.norm() < 1e-2
    assert (lse - expected_lse).abs().max() < 1e-2


@pytest.mark.parametrize(
    ("q", "k", "named"),
    [
        (_random(2, 5, 8), _random(2, 0, 8), "at least one key"),
        (_random(2, 5, 8), _random(2, 9, 4), "head size"),
        (_random(3, 5, 8), _random(2, 9, 8), "KV heads"),
        (_random(2, 5, 8).bfloat16(), _random(2, 9, 8), "agree"),
    ],
)
def test_a_wrong_argument_is_named(q: torch.Tensor, k: torch.Tensor, named: str) -> None:
    with pytest.raises(KernelError, match=named):
        partial_attention(q, [(k, k)], scale=1.0)
