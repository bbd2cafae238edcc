"""The compiled kernels at lengths of real documents, up to offsets past 2^31."""

import pytest
import torch

from orthros_kernels import KeyRun, PhaseLayout, packed_phase_attention, phase_training_attention
from orthros_kernels.decode_attention.op import decode_attention
from orthros_kernels.decode_attention.plan import build_plan, move_plan
from orthros_kernels.decode_attention.reference import decode_attention_reference
from orthros_kernels.phase_attention.packed import pack_steps
from orthros_kernels.phase_training.layout import DocumentSpan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SCALE = HEAD_DIM**-0.5
TILE, SINKS = 128, 4
MILLION = 2**20
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
LENGTHS = [1, 127, 128, 129, 8191, 65537, 262145, MILLION]


def _angles(positions):
    half = HEAD_DIM // 2
    exponent = torch.arange(half, device="cuda", dtype=torch.float64) / half
    angle = positions[:, None].double() * 2e6**-exponent
    return angle.cos().float(), angle.sin().float()


def _turned(x, positions):
    """[N, H, D] rotated at [N] positions."""
    cos, sin = (each[:, None] for each in _angles(positions))
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _expected_tile(q, k, v, tile, window):
    """Rows of one tile in fp32: a dense softmax over the sinks and the tile's window."""
    begin, end = tile * TILE, min((tile + 1) * TILE, len(q))
    positions = torch.arange(begin, end, device="cuda")
    first = max(begin - window, 0)
    keys = torch.arange(end, device="cuda")
    keys = keys[(keys < SINKS) | (keys >= first)]
    group = HEADS // KV_HEADS
    k_seen, v_seen = (x[:, keys].float().repeat_interleave(group, 0) for x in (k, v))
    own = _turned(q[begin:end], positions).transpose(0, 1)
    clamped = positions.clamp(max=window + TILE + SINKS - 1)
    for_sinks = _turned(q[begin:end], clamped).transpose(0, 1)
    scores = torch.where(
        keys < SINKS, for_sinks @ k_seen.transpose(1, 2), own @ k_seen.transpose(1, 2)
    )
    hidden = keys[None, :] > positions[:, None]
    weights = torch.softmax((scores * SCALE).masked_fill(hidden, -torch.inf), -1)
    return (weights @ v_seen).transpose(0, 1)


def _error(actual, expected):
    return ((actual.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prefill_of_any_length_is_right_at_its_start_middle_and_end(num_tokens, dtype):
    window = 512
    projected = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=dtype)
    positions = torch.arange(num_tokens, device="cuda")
    q, k, v = projected.split([HEADS, KV_HEADS, KV_HEADS], 1)
    k = torch.cat([_turned(part, at) for part, at in zip(
        k.split(65536), positions.split(65536), strict=True
    )]).to(dtype).transpose(0, 1).contiguous()  # fmt: skip
    v = v.transpose(0, 1).contiguous()
    arguments = {
        "q": q, "k": k, "v": v, "carry": None, "num_sinks": SINKS, "scale": SCALE,
        "steps": pack_steps([0, num_tokens], [0], window=window, tile=TILE, device="cuda"),
        "cos_sin": _angles(positions),
        "sink_cos_sin": _angles(torch.arange(window + TILE + SINKS, device="cuda")),
    }  # fmt: skip
    out = packed_phase_attention(**arguments)
    assert torch.equal(out, packed_phase_attention(**arguments))
    num_tiles = -(-num_tokens // TILE)
    tiles = {0, 1, 4, 5, num_tiles // 3, num_tiles // 2, num_tiles - 2, num_tiles - 1}
    for tile in sorted(t for t in tiles if 0 <= t < num_tiles):
        expected = _expected_tile(q, k, v, tile, window)
        assert _error(out[tile * TILE : (tile + 1) * TILE], expected) < TOLERANCE[dtype], tile
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("window", [128, 256, 1024, 2048])
def test_every_window_is_right(window):
    num_tokens = 5000
    q, k, v = (
        torch.randn(num_tokens, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    positions = torch.arange(num_tokens, device="cuda")
    k = _turned(k, positions).to(q.dtype).transpose(0, 1).contiguous()
    v = v.transpose(0, 1).contiguous()
    out = packed_phase_attention(
        q, k, v, pack_steps([0, num_tokens], [0], window=window, tile=TILE, device="cuda"),
        carry=None, cos_sin=_angles(positions), num_sinks=SINKS, scale=SCALE,
        sink_cos_sin=_angles(torch.arange(window + TILE + SINKS, device="cuda")),
    )  # fmt: skip
    expected = torch.cat([_expected_tile(q, k, v, tile, window) for tile in range(40)])
    assert _error(out, expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_question_over_a_million_tokens_is_right(is_int8):
    layers = 2
    segments, scales = [], []
    for _ in range(MILLION // 65536):
        segment = torch.randn(
            layers, 2, KV_HEADS, 65536, HEAD_DIM, device="cuda", dtype=torch.bfloat16
        )
        if is_int8:
            scale = segment.float().abs().amax((3, 4)) / 127
            segment = (segment.float() / scale[..., None, None]).round().to(torch.int8)
            scales.append(scale.contiguous())
        segments.append(segment)
    runs = [KeyRun(segments=tuple(segments), rows=(0, 1), scales=tuple(scales) or None)]
    plan = move_plan(
        build_plan(runs, num_rows=2, num_q_heads=HEADS, num_programs=396), torch.device("cuda")
    )
    q = torch.randn(2, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) * 4
    cos_sin = _angles(torch.tensor([MILLION, MILLION + 1], device="cuda"))
    out, lse = decode_attention(q, plan, 1, cos_sin=cos_sin, scale=SCALE)
    again, _ = decode_attention(q, plan, 1, cos_sin=cos_sin, scale=SCALE)
    expected, expected_lse = decode_attention_reference(q, runs, 1, cos_sin=cos_sin, scale=SCALE)
    assert torch.equal(out, again)
    assert _error(out, expected.float()) < 1e-2
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-2, rtol=1e-3)


def test_training_on_a_quarter_million_tokens_has_the_gradients_of_its_parts():
    # Two documents of which the first is long: the second's gradients are those it has alone.
    num_long, num_short = 262144 - 128, 3000
    spans = [
        DocumentSpan(start=0, num_tokens=num_long, segments=((num_long, 100),)),
        DocumentSpan(start=262144, num_tokens=num_short, segments=((262144 + 3072, 60),)),
    ]
    layout = PhaseLayout.build(spans).to("cuda")
    alone = PhaseLayout.build(
        [DocumentSpan(start=0, num_tokens=num_short, segments=((3072, 60),))]
    ).to("cuda")
    size = 262144 + 3200
    leaves = [
        torch.randn(size, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)
    ]
    gradients = []
    for tables, begin in ((layout, 0), (alone, 262144)):
        inputs = [leaf[begin:].clone().requires_grad_() for leaf in leaves]
        out = phase_training_attention(*inputs, tables, window=512, num_sinks=SINKS, scale=SCALE)
        part = out if begin else out[262144:]
        weight = torch.randn(
            part.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
        )
        (part.float() * weight).sum().backward()
        gradients.append([each.grad[-3200:] for each in inputs])
    for together, by_itself in zip(*gradients, strict=True):
        assert _error(together, by_itself.float()) < 1e-2
        assert torch.isfinite(together).all()
