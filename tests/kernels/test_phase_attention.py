"""Prefill-mode attention: the fast path against the dense reference, and its mask."""

from itertools import pairwise

import pytest
import torch

from orthros_kernels import KernelError, phase_attention
from orthros_kernels.phase_attention.reference import (
    phase_attention_reference,
    prefill_mask,
)

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
SCALE = HEAD_DIM**-0.5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def _inputs(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(heads, num_tokens, HEAD_DIM, generator=generator)
        for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)
    )


def _stepped(
    inputs: tuple[torch.Tensor, ...], borders: list[int], window: int, tile: int, num_sinks: int
) -> torch.Tensor:
    q, q_sink, k, v = inputs
    outs = []
    for begin, end in pairwise(borders):
        first_key = max(0, begin - window)
        out = phase_attention(
            q[:, begin:end],
            q_sink[:, begin:end],
            k[:, first_key:end],
            v[:, first_key:end],
            k_sinks=k[:, :num_sinks],
            v_sinks=v[:, :num_sinks],
            start=begin,
            window=window,
            tile=tile,
            scale=SCALE,
        )
        outs.append(out)
    return torch.cat(outs, 1)


def _exact_sink_queries(
    inputs: tuple[torch.Tensor, ...], window: int, tile: int
) -> tuple[torch.Tensor, ...]:
    """As the model does: both rotations agree while all is inside the window."""
    q, q_sink, k, v = inputs
    exact = window + tile
    return q, torch.cat((q[:, :exact], q_sink[:, exact:]), 1), k, v


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 15, 16, 17, 63, 64, 65, 79, 80, 81, 200, 257])
@pytest.mark.parametrize(("window", "num_sinks"), [(64, 4), (16, 4), (32, 0), (64, 16)])
def test_fast_path_equals_the_dense_reference(num_tokens: int, window: int, num_sinks: int) -> None:
    inputs = _exact_sink_queries(_inputs(num_tokens), window, 16)
    expected = phase_attention_reference(
        *inputs, window=window, tile=16, num_sinks=num_sinks, scale=SCALE
    )
    actual = _stepped(inputs, [0, num_tokens], window, 16, num_sinks)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[torch.float32], rtol=1e-5)


@pytest.mark.parametrize(
    "borders",
    [[0, 16, 250], [0, 32, 48, 250], [0, 80, 96, 160, 250], [0, *range(16, 250, 16), 250]],
)
def test_every_stepping_equals_one_call(borders: list[int]) -> None:
    inputs = _exact_sink_queries(_inputs(250), 64, 16)
    expected = _stepped(inputs, [0, 250], 64, 16, 4)
    torch.testing.assert_close(_stepped(inputs, borders, 64, 16, 4), expected, atol=2e-6, rtol=1e-5)


def test_a_window_over_everything_is_full_causal_attention() -> None:
    q, _, k, v = _inputs(100)
    actual = _stepped((q, q, k, v), [0, 100], 128, 16, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )[0]
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_within_its_rounding_of_the_reference() -> None:
    inputs = tuple(x.bfloat16() for x in _exact_sink_queries(_inputs(300), 64, 16))
    expected = phase_attention_reference(*inputs, window=64, tile=16, num_sinks=4, scale=SCALE)
    actual = _stepped(inputs, [0, 300], 64, 16, 4).float()
    assert (actual - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]


def test_sinks_and_window_and_the_rest_partition_the_past() -> None:
    tile, window, num_sinks, num_tokens = 16, 32, 4, 150
    seen = prefill_mask(num_tokens, tile=tile, window=window, num_sinks=num_sinks)
    for query in range(num_tokens):
        num_state_tiles = max(0, query // tile - window // tile)
        in_state = {j for j in range(num_state_tiles * tile) if j >= num_sinks}
        attended = set(torch.nonzero(seen[query]).flatten().tolist())
        assert attended | in_state == set(range(query + 1))
        assert not attended & in_state


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window": 40}, "window"),
        ({"start": 5}, "start"),
        ({"q_sink": torch.zeros(HEADS, 3, HEAD_DIM)}, "q_sink"),
        ({"k": torch.zeros(KV_HEADS, 31, HEAD_DIM)}, "k has shape"),
        ({"v": torch.zeros(KV_HEADS, 32, HEAD_DIM, dtype=torch.bfloat16)}, "v is"),
        ({"k_sinks": torch.zeros(KV_HEADS, 17, HEAD_DIM)}, "k_sinks"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], named: str) -> None:
    q, q_sink, k, v = _inputs(32)
    arguments = {
        "q": q, "q_sink": q_sink, "k": k, "v": v, "k_sinks": k[:, :4], "v_sinks": v[:, :4],
        "start": 0, "window": 64, "tile": 16, "scale": SCALE,
    }  # fmt: skip
    with pytest.raises(KernelError, match=named):
        phase_attention(**{**arguments, **change})  # type: ignore[arg-type]
