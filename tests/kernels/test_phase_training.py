"""Training attention: output and gradients against the dense reference, and the packed layout."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from orthros_kernels import KernelError
from orthros_kernels.phase_attention.reference import phase_attention_reference
from orthros_kernels.phase_training.layout import DocumentSpan, PhaseLayout
from orthros_kernels.phase_training.op import phase_training_attention
from orthros_kernels.phase_training.reference import phase_training_reference
from orthros_kernels.phase_training.triton_kernel import (
    FORWARD_CONFIGS,
    GRAD_KV_CONFIGS,
    GRAD_Q_CONFIGS,
    BlockConfig,
    TrainingConfig,
    default_config,
    phase_training_backward,
    phase_training_forward,
)

IS_COMPILED = os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_COMPILED else "cpu")
DTYPES = [torch.float16, torch.bfloat16] if IS_COMPILED else [torch.float16, torch.float32]
# Norm of the difference over the norm.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

SHORT = [DocumentSpan(start=128 * at, num_tokens=n) for at, n in ((0, 1), (1, 127), (2, 128))]
ROWS: dict[str, tuple[list[DocumentSpan], int | None]] = {
    "ragged documents, none asked": (
        [*SHORT, DocumentSpan(start=384, num_tokens=129)],
        513,
    ),
    "short segments in one tile": (
        [DocumentSpan(start=0, num_tokens=300, segments=((384, 1), (385, 60), (445, 1)))],
        None,
    ),
    "segments over several tiles, with gaps": (
        [DocumentSpan(start=128, num_tokens=129, segments=((384, 30), (420, 200), (700, 50)))],
        800,
    ),
    "several documents": (
        [
            DocumentSpan(start=0, num_tokens=127, segments=((128, 64), (192, 100))),
            DocumentSpan(start=384, num_tokens=1, segments=((512, 1),)),
            DocumentSpan(start=640, num_tokens=300),
        ],
        940,
    ),
    "a text wholly in decode mode": (
        [
            DocumentSpan(start=0, num_tokens=0, segments=((0, 270),)),
            DocumentSpan(start=384, num_tokens=20, segments=((512, 16),)),
        ],
        None,
    ),
    "a document longer than the window": (
        [DocumentSpan(start=0, num_tokens=650, segments=((768, 9), (777, 3)))],
        780,
    ),
}


@dataclass
class Case:
    """Inputs of one packed row and what the reference makes of them."""

    layout: PhaseLayout
    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    grad_out: Tensor
    arguments: dict
    expected: list[Tensor]


def made_case(
    name: str, *, heads: tuple[int, int, int] = (2, 1, 64), window: int = 256, num_sinks: int = 4,
    dtype: torch.dtype = DTYPES[-1], split_tokens: int = 4096,
) -> Case:  # fmt: skip
    spans, num_tokens = ROWS[name]
    layout = PhaseLayout.build(spans, num_tokens=num_tokens, split_tokens=split_tokens)
    num_q_heads, num_kv_heads, head_dim = heads
    num_tokens = layout.num_tokens
    # As a fused projection leaves it: queries, keys and values of one token side by side.
    fused = torch.randn(num_tokens, 2 * (num_q_heads + num_kv_heads), head_dim, device=DEVICE)
    inputs = fused.to(dtype).split((num_q_heads, num_q_heads, num_kv_heads, num_kv_heads), 1)
    grad_out = torch.randn(num_tokens, num_q_heads, head_dim, device=DEVICE).to(dtype)
    arguments = {"window": window, "num_sinks": num_sinks, "scale": head_dim**-0.5}
    exact = [x.float().requires_grad_() for x in inputs]
    out = phase_training_reference(*exact, layout, **arguments)
    grads = torch.autograd.grad(out, exact, grad_out.float(), allow_unused=True)
    return Case(layout.to(DEVICE), inputs, grad_out, arguments, [out.detach(), *grads])


def run(case: Case, config: TrainingConfig | None = None) -> list[Tensor]:
    """Output and the four gradients, written over NaN."""
    out = torch.full_like(case.grad_out, torch.nan)
    common = {**case.arguments, "config": config}
    _, lse = phase_training_forward(*case.inputs, case.layout, **common, out=out)
    grads = tuple(torch.full(x.shape, torch.nan, dtype=x.dtype, device=DEVICE) for x in case.inputs)
    phase_training_backward(
        case.grad_out, *case.inputs, out, lse, case.layout, **common, grads=grads
    )
    return [out, *grads]


def check_case(case: Case, config: TrainingConfig | None = None) -> None:
    is_padding = torch.ones(case.layout.num_tokens, dtype=torch.bool, device=DEVICE)
    for span in case.layout.documents:
        for start, length in ((span.start, span.num_tokens), *span.segments):
            is_padding[start : start + length] = False
    names = ("out", "grad_q", "grad_q_sink", "grad_k", "grad_v")
    for name, actual, expected in zip(names, run(case, config), case.expected, strict=True):
        assert actual[is_padding].eq(0).all(), f"{name} in rows of padding"
        # Some gradients are zero, such as that of the only key's score.
        norm = max(expected.norm().item(), 1e-2 * expected.numel() ** 0.5)
        error = (actual.float() - expected).norm().item() / norm
        assert error < TOLERANCE[case.grad_out.dtype], f"{name} is off by {error}"


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    ("heads", "window", "num_sinks"),
    [((2, 1, 64), 128, 4), ((2, 2, 64), 256, 0), ((3, 1, 80), 128, 16)],
    ids=["sinks", "no sinks", "head size 80"],
)
def test_output_and_gradients_equal_the_reference(
    name: str, heads: tuple[int, int, int], window: int, num_sinks: int
) -> None:
    check_case(made_case(name, heads=heads, window=window, num_sinks=num_sinks))


@pytest.mark.parametrize("sinks", [1, 16, 128])
def test_any_number_of_sinks(sinks: int) -> None:
    check_case(made_case([*ROWS][-1], window=128, num_sinks=sinks))


@pytest.mark.parametrize("name", ["several documents", "a document longer than the window"])
def test_half_precision(name: str) -> None:
    check_case(made_case(name, dtype=DTYPES[0]))


@pytest.mark.parametrize(
    "name", ["segments over several tiles, with gaps", "a document longer than the window"]
)
def test_a_document_split_over_programs(name: str) -> None:
    check_case(made_case(name, heads=(2, 2, 64), split_tokens=128))


@pytest.mark.skipif(not IS_COMPILED, reason="the interpreter is slow")
@pytest.mark.parametrize("heads", [(3, 1, 96), (4, 2, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_larger_head_sizes(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for name in ROWS:
        check_case(made_case(name, heads=heads, dtype=dtype))


def tried_configs(head_dim: int) -> list[TrainingConfig]:
    """Each pass in each of its configurations, the others as they are by default."""
    default = default_config(head_dim, DTYPES[-1])
    if not IS_COMPILED:
        shapes = [BlockConfig(m, n, 4, 1) for m, n in ((64, 64), (64, 128), (128, 32))]
        return [TrainingConfig(forward=x, grad_q=x, grad_kv=x) for x in shapes]
    return [
        *(replace(default, forward=x) for x in FORWARD_CONFIGS),
        *(replace(default, grad_q=x) for x in GRAD_Q_CONFIGS),
        *(replace(default, grad_kv=x) for x in GRAD_KV_CONFIGS),
    ]


@pytest.mark.parametrize("head_dim", [64, 128] if IS_COMPILED else [64])
def test_every_configuration(head_dim: int) -> None:
    names = [*ROWS][2:] if IS_COMPILED else ["short segments in one tile"]
    for name in names:
        case = made_case(name, heads=(2, 1, head_dim), window=128)
        for config in tried_configs(head_dim):
            check_case(case, config)


def test_two_runs_give_the_same_bits() -> None:
    case = made_case("several documents", split_tokens=128)
    assert all(a.equal(b) for a, b in zip(run(case), run(case), strict=True))


def test_the_operator_is_differentiable_in_either_backend() -> None:
    case = made_case("short segments in one tile")
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    for backend in ("triton", "reference"):
        out = phase_training_attention(*leaves, case.layout, **case.arguments, backend=backend)
        # A gradient as a sum leaves it: expanded, with strides of zero.
        grads = torch.autograd.grad(out.float().sum(), leaves)
        if backend == "triton":
            first = [out.detach(), *grads]
    tolerance = TOLERANCE[case.grad_out.dtype]
    for actual, expected in zip(first, [out, *grads], strict=True):
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < tolerance


def test_document_rows_of_the_reference_are_prefill_mode() -> None:
    layout = PhaseLayout.build([DocumentSpan(start=128, num_tokens=700, segments=((896, 5),))])
    q, q_sink = torch.randn(2, layout.num_tokens, 4, 64)
    k, v = torch.randn(2, layout.num_tokens, 2, 64)
    out = phase_training_reference(q, q_sink, k, v, layout, window=256, num_sinks=4, scale=0.1)
    rows = slice(128, 828)
    expected = phase_attention_reference(
        *(x[rows].transpose(0, 1) for x in (q, q_sink, k, v)),
        window=256, tile=128, num_sinks=4, scale=0.1,
    ).transpose(0, 1)  # fmt: skip
    torch.testing.assert_close(out[rows], expected, rtol=1e-5, atol=1e-5)


def test_segment_rows_of_the_reference_see_their_document_and_themselves() -> None:
    span = DocumentSpan(start=128, num_tokens=200, segments=((384, 70), (454, 3)))
    layout = PhaseLayout.build([DocumentSpan(start=0, num_tokens=9), span])
    q, k, v = torch.randn(3, layout.num_tokens, 2, 64)
    out = phase_training_reference(
        q, torch.full_like(q, 7.0), k, v, layout, window=128, num_sinks=4, scale=0.1
    )
    for row, begin in ((384, 384), (453, 384), (454, 454), (456, 454)):
        seen = [*range(128, 328), *range(begin, row + 1)]
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q[row], k[seen]) * 0.1, -1)
        expected = torch.einsum("hn,nhd->hd", weights, v[seen])
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)


def test_a_long_document_is_split_and_a_long_segment_needs_few_masks() -> None:
    span = DocumentSpan(start=0, num_tokens=1000, segments=((1024, 64), (1088, 400)))
    layout = PhaseLayout.build([span], split_tokens=512)
    runs = {
        tile: layout.items[begin:end, 1:].tolist()
        for tile, begin, end in layout.other_tiles.tolist()
    }
    document = [[0, 0, 512], [0, 512, 1000]]
    assert runs[8] == [*document, [1, 1024, 1152]]
    assert runs[10] == [*document, [0, 1088, 1280], [1, 1280, 1408]]
    assert layout.key_tiles[0].tolist() == [0, 0, 8, 8, 12, 1000, 0]
    assert layout.key_tiles[8].tolist() == [0, 0, 12, 0, 0, 1152, 1]


@pytest.mark.parametrize(
    ("spans", "word"),
    [
        ([], "documents is empty"),
        ([(0, 0, ())], "document 0 has 0 tokens and 0 segments"),
        ([(0, -1, ((0, 4),))], "document 0 has -1 tokens"),
        ([(64, 10, ())], "document 0 starts at 64; it must start at a multiple of 128"),
        ([(-128, 10, ())], "document 0 starts at -128"),
        ([(128, 10, ()), (0, 10, ())], "document 1 starts at 0, before .* ends at 138"),
        ([(0, 129, ()), (128, 10, ())], "document 1 starts at 128, before .* ends at 129"),
        ([(0, 10, ((10, 5),))], "segment 0 of document 0 starts at 10; the first one"),
        ([(0, 200, ((128, 5),))], "segment 0 of document 0 starts at 128, before .* ends at 200"),
        ([(0, 10, ((128, 0),))], "segment 0 of document 0 has 0 tokens"),
        ([(0, 10, ((128, 9), (130, 9)))], "segment 1 of document 0 starts at 130, before"),
        ([(0, 10, ((128, 9),)), (128, 10, ())], "document 1 starts at 128, before"),
        ([(0, 300, ((384, 9),))], "num_tokens is 390, but the last run ends at 393"),
    ],
)
def test_runs_that_cannot_be_are_refused(spans: list[tuple], word: str) -> None:
    with pytest.raises(KernelError, match=word):
        PhaseLayout.build(
            [DocumentSpan(start=s, num_tokens=n, segments=segments) for s, n, segments in spans],
            num_tokens=390,
        )


def test_wrong_arguments_are_refused_by_name() -> None:
    layout = PhaseLayout.build([DocumentSpan(start=0, num_tokens=20)], num_tokens=20)
    q, k = torch.zeros(20, 4, 64), torch.zeros(20, 2, 64)
    good = {
        "q": q, "q_sink": q, "k": k, "v": k, "layout": layout,
        "window": 128, "num_sinks": 4, "scale": 1.0,
    }  # fmt: skip
    phase_training_attention(**good)
    for change, word in (
        ({"q": q[0]}, "q has shape"),
        ({"q": torch.zeros(20, 4, 32)}, "head size 32"),
        ({"q": q.double()}, "q is torch.float64"),
        ({"q": q[:19]}, "q has 19 rows, layout 20"),
        ({"q": torch.zeros(20, 3, 64)}, "3 query heads on 2"),
        ({"q_sink": q[:, :3]}, "q_sink has shape"),
        ({"k": k[0]}, "k has shape"),
        ({"k": k.half()}, "k is torch.float16"),
        ({"v": k[:, :1]}, "v has shape"),
        ({"v": torch.zeros(20, 64, 2).transpose(1, 2)}, "v must have unit stride"),
        ({"layout": layout.to("meta")}, "layout is on meta"),
        ({"window": 100}, "window 100"),
        ({"num_sinks": 129}, "num_sinks 129"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ):
        with pytest.raises(KernelError, match=word):
            phase_training_attention(**good | change)
    with pytest.raises(KernelError, match="split_tokens is 100"):
        PhaseLayout.build([DocumentSpan(start=0, num_tokens=20)], split_tokens=100)
