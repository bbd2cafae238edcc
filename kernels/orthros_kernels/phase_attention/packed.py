"""Prefill steps of several documents in one packed row, with the carry of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from orthros_kernels.errors import check


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSteps:
    """Which documents' steps stand one after another, and where in its document each begins.

    Args:
        cu_seqlens: Where the steps begin and, last, where the row ends: [B + 1], rising from 0.
        starts: Position of each step's first token in its document, [B]; multiples of `tile`.
        window: W, a multiple of `tile`.
        tile: Tokens per tile.
        cu_context: Where each step's context begins in the packed context, [B + 1].
        tiles: int32 [tiles, 2] on the device: step, first row in it.
        sequences: int32 [B, 4] on the device: first row, rows, start, first row of context.
    """

    cu_seqlens: tuple[int, ...]
    starts: tuple[int, ...]
    window: int
    tile: int
    cu_context: tuple[int, ...]
    tiles: Tensor
    sequences: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps."""
        return self.cu_seqlens[-1]

    def context_tokens(self, index: int) -> int:
        """Tokens of the window that a step needs of the steps before it."""
        return min(self.starts[index], self.window)


def pack_steps(
    cu_seqlens: Sequence[int],
    starts: Sequence[int],
    *,
    window: int,
    tile: int,
    device: torch.device | str,
) -> PackedSteps:
    """Check the steps and build the tables that the kernel reads.

    Raises:
        KernelError: A step is empty, starts inside a tile, or the window is no multiple of it.
    """
    check(
        tile > 0 and window > 0 and window % tile == 0,
        f"window {window} must be a positive multiple of tile {tile}",
    )
    check(
        len(cu_seqlens) >= 2 and cu_seqlens[0] == 0,
        "cu_seqlens must begin with 0 and hold one number more than there are steps",
    )
    lengths = [end - begin for begin, end in pairwise(cu_seqlens)]
    check(min(lengths) > 0, f"cu_seqlens {list(cu_seqlens)} holds an empty step")
    check(
        len(starts) == len(lengths),
        f"starts holds {len(starts)} numbers for {len(lengths)} steps",
    )
    for start in starts:
        check(start >= 0 and start % tile == 0, f"start {start} must be a multiple of tile {tile}")
    cu_context = [0]
    for start in starts:
        cu_context.append(cu_context[-1] + min(start, window))
    tiles = [(i, row) for i, length in enumerate(lengths) for row in range(0, length, tile)]
    sequences = list(zip(cu_seqlens[:-1], lengths, starts, cu_context[:-1], strict=True))
    return PackedSteps(
        cu_seqlens=tuple(cu_seqlens),
        starts=tuple(starts),
        window=window,
        tile=tile,
        cu_context=tuple(cu_context),
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        sequences=torch.tensor(sequences, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCarry:
    """What the steps need of the tokens before them; stays the same size however many they are.

    Args:
        k_context: Rotated keys of each step's last min(start, W) tokens, [G, sum, D]; unit stride
            in D.
        v_context: Values, like k_context.
        k_sinks: Keys of each document's first s tokens, [B, G, s, D]; not read where start is 0.
        v_sinks: Values, like k_sinks.
    """

    k_context: Tensor
    v_context: Tensor
    k_sinks: Tensor
    v_sinks: Tensor


def next_carry(
    steps: PackedSteps, carry: PackedCarry | None, k: Tensor, v: Tensor, *, num_sinks: int
) -> PackedCarry:
    """The carry after these steps, for each document's next one.

    Args:
        steps: The steps just done; each must have ended on a tile's border to be continued.
        carry: Their own carry; None if every one was its document's first.
        k: Rotated keys of the steps, [G, T, D].
        v: Values, [G, T, D].
        num_sinks: s.

    Returns:
        Copies: the steps' keys and values may be let go.

    Raises:
        KernelError: A step that starts a document is shorter than the sinks.
    """
    contexts: tuple[list[Tensor], list[Tensor]] = ([], [])
    sinks: tuple[list[Tensor], list[Tensor]] = ([], [])
    for index, (begin, end) in enumerate(pairwise(steps.cu_seqlens)):
        is_first = steps.starts[index] == 0
        check(
            not is_first or end - begin >= num_sinks,
            f"step {index} has {end - begin} tokens, fewer than the {num_sinks} sinks",
        )
        wanted = min(steps.starts[index] + end - begin, steps.window)
        for which, own in enumerate((k, v)):
            parts = [own[:, max(begin, end - wanted) : end]]
            missing = wanted - (end - begin)
            if missing > 0 and carry is not None:
                context = (carry.k_context, carry.v_context)[which]
                context_end = steps.cu_context[index + 1]
                parts.insert(0, context[:, context_end - missing : context_end])
            contexts[which].append(torch.cat(parts, 1))
            if is_first:
                sinks[which].append(own[:, begin : begin + num_sinks])
            else:
                assert carry is not None
                sinks[which].append((carry.k_sinks, carry.v_sinks)[which][index])
    return PackedCarry(
        k_context=torch.cat(contexts[0], 1),
        v_context=torch.cat(contexts[1], 1),
        k_sinks=torch.stack(sinks[0]),
        v_sinks=torch.stack(sinks[1]),
    )
