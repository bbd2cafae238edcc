"""Prefill, one stateless step at a time: tokens and a carry in, a segment out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orthros_kernels import pack_steps
from orthros_service.engine.fused_decode import FusedDecoder
from orthros_service.engine.placement import place_document_rows
from orthros_service.engine.types import PrefillStep
from orthros_service.errors import CancelledError, StateMismatchError
from orthros_service.model.attention import log_length
from orthros_service.model.batches import (
    DecodeBatch,
    PackedPrefillBatch,
    PrefillBatch,
    PrefillCarry,
    PrivateTail,
    SharedContext,
    layer_views,
    segment_views,
)
from orthros_service.model.loading import LoadedModel
from orthros_service.model.rope import RotaryTable
from orthros_service.state.tensors import kv_bits, kv_tensor
from orthros_service.state.types import Segment, StateLayout

# Tokens that run through the model at once. Bounds working memory and the time until a
# cancellation is seen.
CHUNK_TOKENS = 1024
# On a GPU a step must be long enough to fill it; in decode mode its cost per token grows.
FUSED_CHUNK_TOKENS = 65536
FUSED_FULL_CHUNK_TOKENS = 4096


def carry_from_context(
    context: Sequence[Tensor], *, start: int, window: int, num_sinks: int
) -> PrefillCarry | None:
    """The linear carry, read from the segments that hold the beginning and the last window.

    Args:
        context: Keys and values [L, 2, G, n, D] of the first and the last segment (one tensor if
            they are the same).
        start: Tokens before this step.
        window: W, at most the length of a segment.
        num_sinks: s.

    Returns:
        None at the beginning of a document.
    """
    if start == 0:
        return None
    last = context[-1]
    seen = min(start, window)
    return PrefillCarry(
        window=last[:, :, :, last.shape[3] - seen :], sinks=context[0][:, :, :, :num_sinks]
    )


class PrefillEngine:
    """Runs prefill steps of one model on one device; stateless, not thread-safe."""

    def __init__(
        self, loaded: LoadedModel, layout: StateLayout, *, uses_kernels: bool | None = None
    ) -> None:
        """Bind a model.

        Args:
            loaded: The model on its device.
            layout: What its states look like; `mode` is ignored.
            uses_kernels: Whether steps run through the CUDA kernels' interfaces; None for wherever
                the model lies on a GPU.

        Raises:
            StateMismatchError: The segment size does not fit the model's tile and window.
        """
        self._model = loaded.model
        self._device = loaded.device
        self._layout = layout
        self._tile = loaded.orthros.tile
        self._rotary = RotaryTable(loaded.config, device=loaded.device)
        is_fused = loaded.device.type == "cuda" if uses_kernels is None else uses_kernels
        self._fused = FusedDecoder(loaded) if is_fused else None
        if layout.segment_tokens % self._tile or layout.segment_tokens < layout.window:
            raise StateMismatchError(
                f"segment_tokens is {layout.segment_tokens}; it must be a multiple of the "
                f"tile {self._tile} and at least the window {layout.window}."
            )

    @torch.inference_mode()
    def step(
        self,
        step: PrefillStep,
        context: Sequence[Segment],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Segment:
        """Compute the keys and values of one segment.

        Args:
            step: The tokens; `step.layout.mode` chooses the attention pattern.
            context: The segments named by `context_segments`, in order.
            is_cancelled: Polled every `CHUNK_TOKENS` tokens.

        Returns:
            A new segment that the caller owns.

        Raises:
            StateMismatchError: The step or its context belongs to another model or position.
            CancelledError: `is_cancelled` said so.
        """
        step.layout.check_matches(self._layout)
        self._check_context(step, context)
        token_ids = torch.tensor(step.token_ids, dtype=torch.int64, device=self._device)
        before = tuple(kv_tensor(s, self._layout.dtype, self._device) for s in context)
        kv = self.keys_values(
            token_ids,
            before,
            start=step.start,
            is_linear=step.layout.mode == "linear",
            is_cancelled=is_cancelled,
        )
        return Segment(
            start=step.start,
            token_ids=step.token_ids,
            char_starts=step.char_starts,
            char_ends=step.char_ends,
            kv=kv_bits(kv, self._layout.dtype),
        )

    @torch.inference_mode()
    def keys_values(
        self,
        token_ids: Tensor,
        before: tuple[Tensor, ...],
        *,
        start: int,
        is_linear: bool,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """`step` on the device: nothing is packed for storage.

        Args:
            token_ids: int64 [n].
            before: Keys and values of the segments that the step needs.
            start: Position of the first token.
            is_linear: Prefill mode; otherwise decode mode.
            is_cancelled: Polled at every chunk.

        Returns:
            [L, 2, G, n, D].

        Raises:
            CancelledError: `is_cancelled` said so.
        """
        kv = self._model.new_kv(token_ids.shape[0])
        if self._fused is None:
            chunk_tokens = CHUNK_TOKENS
        else:
            chunk_tokens = FUSED_CHUNK_TOKENS if is_linear else FUSED_FULL_CHUNK_TOKENS
        for begin in range(0, token_ids.shape[0], chunk_tokens):
            if is_cancelled():
                raise CancelledError("The prefill step was cancelled.", phase="prefill")
            chunk = token_ids[begin : begin + chunk_tokens]
            if is_linear:
                self._linear_chunk(chunk, kv, before, start, begin)
            elif self._fused is None:
                self._full_chunk(chunk, kv, before, start, begin)
            else:
                ids = chunk.tolist()
                self._fused.write_document(place_document_rows(ids, kv, before, start, begin))
        return kv

    def _linear_chunk(
        self, token_ids: Tensor, kv: Tensor, before: tuple[Tensor, ...], start: int, begin: int
    ) -> None:
        layout = self._layout
        num_tokens = token_ids.shape[0]
        first = start + begin
        positions = torch.arange(first, first + num_tokens, device=self._device)
        last_exact = layout.window + self._tile + layout.num_sinks - 1
        carry = self._carry(kv, before, start, begin)
        kv_out = kv[:, :, :, begin : begin + num_tokens]
        if self._fused is not None:
            self._model.write_document(
                token_ids,
                PackedPrefillBatch(
                    steps=pack_steps(
                        [0, num_tokens],
                        [first],
                        window=layout.window,
                        tile=self._tile,
                        device=self._device,
                    ),
                    cos_sin=self._rotary.half_cos_sin(positions),
                    sink_cos_sin=self._rotary.half_cos_sin(
                        torch.arange(last_exact + 1, device=self._device)
                    ),
                    carry=carry,
                    kv_out=kv_out,
                    num_sinks=layout.num_sinks,
                ),
            )
            return
        self._model.write_document(
            token_ids,
            PrefillBatch(
                start=first,
                cos_sin=self._rotary.cos_sin(positions),
                sink_cos_sin=self._rotary.cos_sin(positions.clamp(max=last_exact)),
                carry=carry,
                kv_out=kv_out,
                window=layout.window,
                tile=self._tile,
                num_sinks=layout.num_sinks,
            ),
        )

    def _carry(
        self, kv: Tensor, before: tuple[Tensor, ...], start: int, begin: int
    ) -> PrefillCarry | None:
        """The carry at a chunk inside the step: the window may reach into the segment before."""
        layout = self._layout
        sizes = {"window": layout.window, "num_sinks": layout.num_sinks}
        if begin == 0:
            return carry_from_context(before, start=start, **sizes)
        own = kv[:, :, :, max(0, begin - layout.window) : begin]
        missing = min(start + begin, layout.window) - own.shape[3]
        if missing > 0:
            own = torch.cat((before[-1][:, :, :, before[-1].shape[3] - missing :], own), 3)
        first = before[0] if before else kv
        return PrefillCarry(window=own, sinks=first[:, :, :, : layout.num_sinks])

    def _full_chunk(
        self, token_ids: Tensor, kv: Tensor, before: tuple[Tensor, ...], start: int, begin: int
    ) -> None:
        num_tokens = token_ids.shape[0]
        first = start + begin
        positions = torch.arange(first, first + num_tokens, device=self._device)
        shared = SharedContext(layers=segment_views(before), rows=None, cos_sin=None)
        tail = PrivateTail(first_row=0, num_rows=num_tokens, layers=layer_views(kv), length=begin)
        self._model.write_document(
            token_ids,
            DecodeBatch(
                cos_sin=self._rotary.cos_sin(positions),
                documents=(shared,) if before else (),
                tails=(tail,),
                log_length_R=log_length(positions, self._model.orthros.decode_temperature),
            ),
        )

    def _check_context(self, step: PrefillStep, context: Sequence[Segment]) -> None:
        expected_end = step.start
        if step.start % self._layout.segment_tokens:
            raise StateMismatchError(
                f"A prefill step begins at token {step.start}, which is not a multiple of "
                f"segment_tokens {self._layout.segment_tokens}."
            )
        if step.start and (not context or context[0].start or context[-1].end != expected_end):
            raise StateMismatchError(
                f"A prefill step at token {step.start} needs the first segment and the one that "
                "ends there."
            )
