"""Prefill mode over packed steps: the kernel against the dense reference, and the carry."""

import os
from itertools import pairwise

import pytest
import torch

from orthros_kernels import KernelError
from orthros_kernels.phase_attention.op import packed_phase_attention
from orthros_kernels.phase_attention.packed import PackedCarry, PackedSteps, next_carry, pack_steps
from orthros_kernels.phase_attention.reference import phase_attention_reference
from orthros_kernels.phase_attention.triton_kernel import (
    CONFIGS,
    PhaseConfig,
    phase_attention_triton,
)

IS_COMPILED = os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_COMPILED else "cpu")
DTYPES = [torch.float16, torch.bfloat16] if IS_COMPILED else [torch.float16, torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# The interpreter is slow: small tiles there, the served tile where kernels are compiled.
TILE = 128 if IS_COMPILED else 16
SMALL_CONFIGS = [PhaseConfig(m, n, 4, 2) for m in (16, 32) for n in (16, 32)]


class Documents:
    """Whole documents from which packed steps are cut, with the answer of the dense reference."""

    def __init__(
        self, lengths: list[int], heads: tuple[int, int, int], window: int, tile: int, sinks: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        num_q_heads, num_kv_heads, head_dim = heads
        self.head_dim, self.window, self.tile, self.sinks = head_dim, window, tile, sinks
        self.scale = head_dim**-0.5
        self.q, self.k, self.v, self.expected = [], [], [], []
        for length in lengths:
            q = torch.randn(num_q_heads, length, head_dim, device=DEVICE).to(dtype)
            k = torch.randn(num_kv_heads, length, head_dim, device=DEVICE)
            v = torch.randn(num_kv_heads, length, head_dim, device=DEVICE).to(dtype)
            positions = torch.arange(length, device=DEVICE)
            k = self.turned(k, positions).to(dtype)
            last = positions.clamp(max=window + tile + sinks - 1)
            out = phase_attention_reference(
                self.turned(q.float(), positions), self.turned(q.float(), last), k, v,
                window=window, tile=tile, num_sinks=sinks, scale=self.scale,
            )  # fmt: skip
            self.q.append(q.transpose(0, 1))
            self.k.append(k)
            self.v.append(v)
            self.expected.append(out.transpose(0, 1))

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.head_dim // 2
        angle = positions[:, None].double() * 1e4 ** -(torch.arange(half, device=DEVICE) / half)
        return angle.cos().float(), angle.sin().float()

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(positions)
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def step(
        self, pieces: list[tuple[int, int, int]], carry: PackedCarry | None, **arguments: object
    ) -> tuple[float, PackedSteps, torch.Tensor, torch.Tensor]:
        """Relative error of one packed step over (document, begin, end) pieces."""
        cu_seqlens = [0]
        for _, begin, end in pieces:
            cu_seqlens.append(cu_seqlens[-1] + end - begin)
        steps = pack_steps(
            cu_seqlens, [b for _, b, _ in pieces], window=self.window, tile=self.tile, device=DEVICE
        )
        q = torch.cat([self.q[d][b:e] for d, b, e in pieces])
        # As a fused projection leaves it: heads of one token side by side, with others after them.
        q = torch.cat((q, q.new_zeros(q.shape[0], 2, q.shape[2])), 1)[:, : q.shape[1]]
        k = torch.cat([self.k[d][:, b:e] for d, b, e in pieces], 1)
        v = torch.cat([self.v[d][:, b:e] for d, b, e in pieces], 1)
        positions = torch.cat([torch.arange(b, e, device=DEVICE) for _, b, e in pieces])
        common = {
            "carry": carry,
            "cos_sin": self.angles(positions),
            "sink_cos_sin": self.angles(
                torch.arange(self.window + self.tile + self.sinks, device=DEVICE)
            ),
            "num_sinks": self.sinks,
            "scale": self.scale,
        }
        out = torch.full(q.shape, torch.nan, device=DEVICE, dtype=q.dtype)
        if arguments.pop("is_reference", False):
            out = packed_phase_attention(q, k, v, steps, **common, backend="reference")
        else:
            phase_attention_triton(q, k, v, steps, **common, out=out, **arguments)
        wanted = torch.cat([self.expected[d][b:e] for d, b, e in pieces])
        error = ((out.float() - wanted).norm() / wanted.norm()).item()
        return error, steps, k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, TILE - 1, TILE, TILE + 1, 5 * TILE + 3])
@pytest.mark.parametrize(("window_tiles", "sinks"), [(4, 4), (1, 4), (2, 0), (3, 16)])
def test_the_kernel_equals_the_dense_reference(
    num_tokens: int, window_tiles: int, sinks: int, dtype: torch.dtype
) -> None:
    documents = Documents([num_tokens], (6, 2, 32), window_tiles * TILE, TILE, sinks, dtype)
    error, *_ = documents.step([(0, 0, num_tokens)], None)
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(2, 2, 64), (3, 1, 80), (4, 2, 96), (4, 1, 128)], ids=str)
def test_every_head_size_grouped_and_not(heads: tuple[int, int, int]) -> None:
    documents = Documents([3 * TILE + 5], heads, TILE, TILE, 4, DTYPES[0])
    error, *_ = documents.step([(0, 0, 3 * TILE + 5)], None)
    assert error < TOLERANCE[DTYPES[0]]


@pytest.mark.parametrize("config", CONFIGS if IS_COMPILED else SMALL_CONFIGS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128] if IS_COMPILED else [32])
def test_every_configuration(config: PhaseConfig, head_dim: int) -> None:
    tile = 128 if IS_COMPILED else 32
    lengths = [7 * tile + 3, tile + 1, 5]
    for sinks in (4, 0):
        documents = Documents(lengths, (4, 2, head_dim), 2 * tile, tile, sinks, DTYPES[-1])
        pieces = [(d, 0, n) for d, n in enumerate(lengths)]
        error, *_ = documents.step(pieces, None, config=config)
        assert error < TOLERANCE[DTYPES[-1]]


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("sinks", [4, 0])
def test_steps_of_several_documents_with_their_carries_equal_one_shot(
    sinks: int, is_reference: bool
) -> None:
    """Documents begin, continue and end at different times; every carry follows its document."""
    lengths = [6 * TILE + 5, 4 * TILE, 2 * TILE + 1]
    documents = Documents(lengths, (4, 2, 32), 2 * TILE, TILE, sinks, DTYPES[-1])
    borders = {
        0: [0, TILE, 4 * TILE, 5 * TILE, lengths[0]],
        1: [0, 3 * TILE, lengths[1]],
        2: [0, 2 * TILE, lengths[2]],
    }
    schedule = [[(0, 0), (1, 0)], [(0, 1), (2, 0)], [(0, 2), (1, 1), (2, 1)], [(0, 3)]]
    carries: dict[int, tuple[PackedCarry, PackedSteps, int]] = {}
    for turn in schedule:
        pieces = [(d, *list(pairwise(borders[d]))[n]) for d, n in turn]
        carry = _joined([carries.get(d) for d, *_ in pieces], documents)
        error, steps, k, v = documents.step(pieces, carry, is_reference=is_reference)
        assert error < TOLERANCE[DTYPES[-1]]
        after = next_carry(steps, carry, k, v, num_sinks=sinks)
        ends = pack_steps(
            steps.cu_seqlens, [_floor(e) for _, _, e in pieces], window=documents.window,
            tile=TILE, device=DEVICE,
        )  # fmt: skip
        for index, (d, *_) in enumerate(pieces):
            carries[d] = (after, ends, index)


def _floor(position: int) -> int:
    return position // TILE * TILE


def _joined(
    owners: list[tuple[PackedCarry, PackedSteps, int] | None], documents: Documents
) -> PackedCarry | None:
    """One carry for the documents of a turn, from the packed carries they were last part of."""
    if not any(owners):
        return None
    contexts, sinks = ([], []), ([], [])
    for owner in owners:
        for which in range(2):
            if owner is None:
                empty = documents.k[0]
                contexts[which].append(empty[:, :0])
                sinks[which].append(torch.full_like(empty[:, : documents.sinks], torch.nan))
                continue
            carry, steps, index = owner
            context = (carry.k_context, carry.v_context)[which]
            contexts[which].append(
                context[:, steps.cu_context[index] : steps.cu_context[index + 1]]
            )
            sinks[which].append((carry.k_sinks, carry.v_sinks)[which][index])
    return PackedCarry(
        k_context=torch.cat(contexts[0], 1),
        v_context=torch.cat(contexts[1], 1),
        k_sinks=torch.stack(sinks[0]),
        v_sinks=torch.stack(sinks[1]),
    )


def test_two_runs_give_the_same_bits() -> None:
    documents = Documents([5 * TILE + 7], (4, 2, 32), 2 * TILE, TILE, 4, DTYPES[-1])
    errors = {documents.step([(0, 0, 5 * TILE + 7)], None)[0] for _ in range(3)}
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([0], []), "cu_seqlens must begin"),
        (([0, 5, 5], [0, 0]), "empty step"),
        (([0, 5], [0, 0]), "2 numbers for 1"),
        (([0, 5], [3]), "start 3"),
    ],
)
def test_steps_that_cannot_be_are_refused(arguments: tuple, word: str) -> None:
    with pytest.raises(KernelError, match=word):
        pack_steps(*arguments, window=32, tile=16, device="cpu")
    with pytest.raises(KernelError, match="window 40"):
        pack_steps([0, 5], [0], window=40, tile=16, device="cpu")


def test_wrong_arguments_are_refused_by_name() -> None:
    steps = pack_steps([0, 20], [16], window=32, tile=16, device="cpu")
    q, k = torch.zeros(20, 4, 32), torch.zeros(2, 20, 32)
    table, sink_table = torch.zeros(20, 16), torch.zeros(52, 16)
    context, sinks = torch.zeros(2, 16, 32), torch.zeros(1, 2, 4, 32)
    carry = PackedCarry(k_context=context, v_context=context, k_sinks=sinks, v_sinks=sinks)
    good = {
        "q": q, "k": k, "v": k, "steps": steps, "carry": carry, "cos_sin": (table, table),
        "sink_cos_sin": (sink_table, sink_table), "num_sinks": 4, "scale": 1.0,
    }  # fmt: skip
    packed_phase_attention(**good)
    short = PackedCarry(k_context=context[:, 1:], v_context=context, k_sinks=sinks, v_sinks=sinks)
    for change, word in (
        ({"q": torch.zeros(20, 4, 24)}, "head size 24"),
        ({"q": q[:19]}, "19 tokens"),
        ({"q": torch.zeros(20, 32, 4).transpose(1, 2)}, "unit stride"),
        ({"q": torch.zeros(20, 3, 32)}, "3 query heads"),
        ({"k": k.half()}, "k is torch.float16"),
        ({"v": k[:, :5]}, "v has shape"),
        ({"carry": None}, "needs a carry"),
        ({"carry": short}, "k_context has shape"),
        ({"num_sinks": 17}, "num_sinks 17"),
        ({"num_sinks": 3}, "k_sinks has shape"),
        ({"cos_sin": (table, table.double())}, "cos_sin must"),
        ({"sink_cos_sin": (table, table)}, "sink_cos_sin must"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ):
        with pytest.raises(KernelError, match=word):
            packed_phase_attention(**good | change)
