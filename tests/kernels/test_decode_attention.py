"""Decode mode over documents and tails: the kernel and its plan against the dense reference."""

import os

import pytest
import torch

from orthros_kernels import KernelError
from orthros_kernels.decode_attention.op import decode_attention
from orthros_kernels.decode_attention.plan import (
    KeyRun,
    PlanSize,
    build_plan,
    move_plan,
    overwrite_plan,
)
from orthros_kernels.decode_attention.reference import decode_attention_reference
from orthros_kernels.decode_attention.triton_kernel import CONFIGS, decode_attention_triton

IS_COMPILED = os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_COMPILED else "cpu")
DTYPES = [torch.float16, torch.bfloat16] if IS_COMPILED else [torch.float16, torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAYERS = 2


def _segment(num_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(LAYERS, 2, kv_heads, num_tokens, head_dim, device=DEVICE).to(dtype)


def _int8(segment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = segment.float().abs().amax((3, 4)) / 127
    return (segment.float() / scale[..., None, None]).round().to(torch.int8), scale.contiguous()


def _compare(
    runs: list[KeyRun],
    num_rows: int,
    heads: int,
    dtype: torch.dtype,
    *,
    num_programs: int = 8,
    has_temperature: bool = False,
    **arguments: object,
) -> None:
    kv_heads, head_dim = runs[0].segments[0].shape[2], runs[0].segments[0].shape[4]
    projected = torch.randn(num_rows, heads + 2, head_dim, device=DEVICE).to(dtype)
    q = projected[:, :heads]
    entries = sum(len(run.rows) for run in runs)
    angles = torch.rand(entries, head_dim // 2, device=DEVICE) * 6
    cos_sin = angles.cos(), angles.sin()
    log_length = temperature = stretch = None
    if has_temperature:
        log_length = torch.rand(num_rows, device=DEVICE)
        temperature = torch.rand(heads, device=DEVICE)
        stretch = 1 + log_length[:, None] * temperature[None]
    plan = build_plan(runs, num_rows=num_rows, num_q_heads=heads, num_programs=num_programs)
    plan = move_plan(plan, DEVICE)
    for layer in range(LAYERS):
        out = torch.full((num_rows, heads, head_dim), torch.nan, device=DEVICE).to(dtype)
        _, lse = decode_attention_triton(
            q, plan, layer, cos_sin=cos_sin, num_kv_heads=kv_heads, scale=head_dim**-0.5,
            log_length=log_length, temperature=temperature, out=out, **arguments,
        )  # fmt: skip
        wanted, wanted_lse = decode_attention_reference(
            q, runs, layer, cos_sin=cos_sin, scale=head_dim**-0.5, temperature_RH=stretch
        )
        assert (out.float() - wanted).norm() / wanted.norm() < TOLERANCE[dtype]
        torch.testing.assert_close(lse, wanted_lse, atol=2e-2, rtol=2e-3)


def _shared_and_tails(kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[KeyRun]:
    """Three sequences: two on one document of two segments, one on it and another; own tails."""

    def segment(num_tokens: int) -> torch.Tensor:
        return _segment(num_tokens, kv_heads, head_dim, dtype)

    return [
        KeyRun(segments=(segment(300), segment(77)), rows=(0, 1, 2, 3)),
        KeyRun(segments=(segment(1),), rows=(3,)),
        KeyRun(segments=(segment(40),), rows=(0,), limits=(1,)),
        KeyRun(segments=(segment(300),), rows=(1, 2), limits=(290, 291)),
        KeyRun(segments=(segment(16),), rows=(3,), limits=(16,)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (2, 2, 64), (4, 1, 80)])
def test_documents_shared_by_rows_and_private_tails_equal_one_softmax(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    _compare(_shared_and_tails(kv_heads, head_dim, dtype), 4, heads, dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 50])
def test_every_configuration_and_number_of_rows(config: object, num_rows: int) -> None:
    dtype = DTYPES[-1]
    runs = [
        KeyRun(segments=(_segment(600, 1, 64, dtype),), rows=tuple(range(num_rows))),
        KeyRun(
            segments=(_segment(num_rows + 9, 1, 64, dtype),),
            rows=tuple(range(num_rows)),
            limits=tuple(range(10, num_rows + 10)),
        ),
    ]
    _compare(runs, num_rows, 3, dtype, config=config)


def test_a_decode_temperature_sharpens_by_row_and_head() -> None:
    _compare(_shared_and_tails(2, 32, DTYPES[-1]), 4, 4, DTYPES[-1], has_temperature=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_keys_and_values_are_read_with_their_scales(dtype: torch.dtype) -> None:
    runs = []
    for run in _shared_and_tails(2, 32, torch.float32):
        pairs = [_int8(segment) for segment in run.segments]
        runs.append(
            KeyRun(
                segments=tuple(segment for segment, _ in pairs),
                rows=run.rows,
                limits=run.limits,
                scales=tuple(scale for _, scale in pairs),
            )
        )
    _compare(runs, 4, 4, dtype)


def test_a_composed_document_is_one_softmax_over_keys_turned_to_their_offsets() -> None:
    """Turning the query back by an offset equals turning the keys forward by it."""
    dtype, head_dim, tokens = DTYPES[-1], 64, (50, 30)
    frequency = 100.0 ** -(torch.arange(head_dim // 2, device=DEVICE) / (head_dim // 2))
    documents = [_segment(n, 1, head_dim, torch.float32) for n in tokens]
    q = torch.randn(1, 2, head_dim, device=DEVICE)

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None].double() * frequency
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    local = [document.clone() for document in documents]
    for document, n in zip(local, tokens, strict=True):
        document[:, 0] = turned(document[:, 0], torch.arange(n, device=DEVICE))
    position = torch.tensor([sum(tokens)], device=DEVICE)
    offsets = torch.tensor([0, tokens[0]], device=DEVICE)
    angles = (position - offsets)[:, None].double() * frequency
    runs = [KeyRun(segments=(document.to(dtype),), rows=(0,)) for document in local]
    plan = move_plan(build_plan(runs, num_rows=1, num_q_heads=2, num_programs=4), DEVICE)
    out, _ = decode_attention(
        q.to(dtype), plan, 1, cos_sin=(angles.cos().float(), angles.sin().float()),
        scale=head_dim**-0.5, backend="triton",
    )  # fmt: skip
    keys = torch.cat([document[1, 0] for document in documents], 1)
    keys = turned(keys, torch.arange(sum(tokens), device=DEVICE))
    values = torch.cat([document[1, 1] for document in documents], 1)
    scores = turned(q.transpose(0, 1), position) @ keys.transpose(1, 2) * head_dim**-0.5
    wanted = (scores.softmax(-1) @ values)[:, 0]
    assert (out[0].float() - wanted).norm() / wanted.norm() < TOLERANCE[dtype]


def test_a_plan_with_room_gives_the_same_numbers_and_rows_without_keys_get_zeros() -> None:
    dtype = DTYPES[-1]
    runs = [KeyRun(segments=(_segment(70, 1, 32, dtype),), rows=(0, 1), limits=(70, 0))]
    sizes = [None, PlanSize(rows=2, entries=5, items=9, slots=12, block_m=32)]
    q = torch.randn(2, 2, 32, device=DEVICE).to(dtype)
    outs = []
    for size in sizes:
        plan = build_plan(runs, num_rows=2, num_q_heads=2, num_programs=2, size=size)
        plan = move_plan(plan, DEVICE)
        angles = torch.zeros(plan.size.entries, 16, device=DEVICE)
        out, lse = decode_attention(
            q, plan, 0, cos_sin=(angles.cos(), angles.sin()), scale=0.2, backend="triton"
        )
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        assert torch.isneginf(lse[1]).all()
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1])
    with pytest.raises(KernelError, match="cannot take"):
        overwrite_plan(
            move_plan(build_plan(runs, num_rows=2, num_q_heads=2, num_programs=2), DEVICE), plan
        )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rows": (0, 0)}, "only once"),
        ({"rows": (5,)}, "rows 5"),
        ({"rows": ()}, "at least one row"),
        ({"segments": ()}, "at least one segment"),
        ({"segments": (torch.zeros(2, 2, 1, 0, 32),)}, "n > 0"),
        ({"segments": (torch.zeros(2, 2, 1, 8, 32).transpose(3, 4),)}, "contiguous"),
        ({"limits": (1, 2)}, "one number per row"),
        ({"scales": (torch.ones(2, 2, 1),)}, "int8"),
        ({"segments": (torch.zeros(2, 2, 1, 8, 32, dtype=torch.int8),)}, "int8"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_by_name(change: dict, word: str) -> None:
    arguments = {"segments": (torch.zeros(2, 2, 1, 8, 32),), "rows": (0,)} | change
    with pytest.raises(KernelError, match=word):
        build_plan([KeyRun(**arguments)], num_rows=1, num_q_heads=2, num_programs=4)


def test_wrong_arguments_are_refused_by_name() -> None:
    runs = [KeyRun(segments=(torch.zeros(2, 2, 1, 8, 32),), rows=(0,))]
    plan = build_plan(runs, num_rows=1, num_q_heads=2, num_programs=4)
    angles = torch.zeros(1, 16)
    good = {"q": torch.zeros(1, 2, 32), "layer": 0, "cos_sin": (angles, angles), "scale": 1.0}
    for change, word in (
        ({"q": torch.zeros(1, 2, 24)}, "head size 24"),
        ({"q": torch.zeros(2, 2, 32)}, "1 rows"),
        ({"q": torch.zeros(1, 2, 32).half()}, "float16"),
        ({"layer": 2}, "layer 2"),
        ({"cos_sin": (angles, angles.double())}, "sin must be"),
        ({"log_length": torch.zeros(1)}, "go together"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
    ):
        with pytest.raises(KernelError, match=word):
            decode_attention(**{"plan": plan} | good | change)
