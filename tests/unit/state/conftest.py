"""Small states with known contents."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orthros_service.settings import StateSettings
from orthros_service.state.store import StateStore
from orthros_service.state.transport import LocalTransport
from orthros_service.state.types import (
    STORAGE_DTYPES,
    AttentionState,
    KVDtype,
    Segment,
    StateHandle,
    StateLayout,
)

KEY = "ab" * 32

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


@pytest.fixture
def open_store(tmp_path):
    def make(*, memory_bytes=1 << 20, uri=None, header_ids=()) -> StateStore:
        settings = StateSettings(uri=uri or str(tmp_path / "states"), memory_bytes=memory_bytes)
        return StateStore(settings=settings, transport=LocalTransport(), header_ids=header_ids)

    return make


@pytest.fixture
def make_handle(layout, make_segments):
    def make(num_tokens=10, *, key=KEY, seed=0) -> StateHandle:
        state = AttentionState(layout=layout, segments=make_segments(num_tokens, seed=seed))
        return StateHandle(
            content_key=key,
            layout=layout,
            segments=tuple(state.segments),
            num_tokens=state.num_tokens,
            num_bytes=state.num_bytes,
        )

    return make


@pytest.fixture
def assert_same() -> Callable[[StateHandle, StateHandle], None]:
    def check(left: StateHandle, right: StateHandle) -> None:
        assert left.content_key == right.content_key
        assert left.layout == right.layout
        assert (left.num_tokens, left.num_bytes) == (right.num_tokens, right.num_bytes)
        assert len(left.segments) == len(right.segments)
        for one, other in zip(left.segments, right.segments, strict=True):
            assert one.start == other.start
            for name in ("token_ids", "char_starts", "char_ends", "kv"):
                assert np.array_equal(getattr(one, name), getattr(other, name))

    return check


@pytest.fixture
def files(tmp_path) -> Callable[[str], list[Path]]:
    """Lists what the store has on disk, by pattern."""
    return lambda pattern: sorted((tmp_path / "states").rglob(pattern))
