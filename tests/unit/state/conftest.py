"""Small states with known contents."""

from collections.abc import Callable

import numpy as np
import pytest

from orthros_service.state.types import STORAGE_DTYPES, KVDtype, Segment, StateLayout

MakeSegments = Callable[..., list[Segment]]


@pytest.fixture
def layout() -> StateLayout:
    return StateLayout(
        model_digest="model-a",
        tokenizer_digest="tokenizer-a",
        num_layers=2,
        num_kv_heads=1,
        head_dim=2,
        dtype="bfloat16",
        window=4,
        num_sinks=1,
        mode="linear",
        segment_tokens=4,
    )


@pytest.fixture
def make_segments(layout: StateLayout) -> MakeSegments:
    """Build the segments of a document of so many tokens."""

    def make(num_tokens: int, *, seed: int = 0, dtype: KVDtype = "bfloat16") -> list[Segment]:
        generator = np.random.default_rng(seed)
        segments = []
        for start in range(0, num_tokens, layout.segment_tokens):
            size = min(layout.segment_tokens, num_tokens - start)
            shape = (layout.num_layers, 2, layout.num_kv_heads, size, layout.head_dim)
            bits = generator.integers(1, 30_000, size=shape).astype(STORAGE_DTYPES[dtype])
            positions = np.arange(start, start + size)
            segments.append(
                Segment(
                    start=start,
                    token_ids=generator.integers(0, 50_000, size=size).astype(np.int32),
                    char_starts=(positions * 3).astype(np.int64),
                    char_ends=(positions * 3 + 2).astype(np.int64),
                    kv=bits,
                )
            )
        return segments

    return make
