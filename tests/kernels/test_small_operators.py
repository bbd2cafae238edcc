"""Norm, SwiGLU, writing of keys and values, attention mass: Triton against plain torch."""

import os

import pytest
import torch

from orthros_kernels import (
    KernelError,
    add_rms_norm,
    attention_mass,
    rms_norm,
    rotary_scatter,
    rotary_write,
    swiglu,
)
from orthros_kernels.rms_norm.triton_kernel import rms_norm_triton
from orthros_kernels.rotary_write.reference import keys_values_reference
from orthros_kernels.rotary_write.triton_kernel import rotary_write_triton

IS_COMPILED = os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_COMPILED else "cpu")
DTYPES = [torch.float16, torch.bfloat16] if IS_COMPILED else [torch.float16, torch.float32]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 80), (33, 576), (2, 3, 64)], ids=str)
def test_the_norm_and_the_sum_before_it_equal_torch(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual = _random(*shape, dtype=dtype), _random(*shape, dtype=dtype)
    weight = _random(shape[-1], dtype=dtype)
    normed = rms_norm(x, weight, eps=1e-5, backend="triton")
    assert _error(normed, rms_norm(x, weight, eps=1e-5, backend="reference")) < TOLERANCE[dtype]
    normed, total = add_rms_norm(x, residual, weight, eps=1e-5, backend="triton")
    wanted, wanted_total = add_rms_norm(x, residual, weight, eps=1e-5, backend="reference")
    assert torch.equal(total, wanted_total)
    assert _error(normed, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_number_of_rows_per_program_reads_strided_rows(rows: int) -> None:
    dtype = DTYPES[-1]
    x = _random(11, 200, dtype=dtype)[:, :100]
    weight = _random(100, dtype=dtype)
    normed, _ = rms_norm_triton(x, None, weight, eps=1e-5, rows=rows)
    assert _error(normed, rms_norm(x, weight, eps=1e-5, backend="reference")) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (5, 96), (3, 2050)])
def test_swiglu_equals_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = _random(rows, 2 * width, dtype=dtype)
    wanted = swiglu(gate_up.float(), backend="reference")
    assert _error(swiglu(gate_up, backend="triton"), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "head_dim"), [(1, 64), (37, 64), (5, 80), (3, 128)])
def test_keys_and_values_are_written_rotated_side_by_side_and_scattered(
    num_rows: int, head_dim: int, dtype: torch.dtype, has_norm: bool
) -> None:
    heads, kv_heads, layers, capacity = 3, 2, 2, 50
    qkv = _random(num_rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.rand(num_rows, head_dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    k_norm = (_random(head_dim, dtype=dtype), 1e-5) if has_norm else None
    k, v = keys_values_reference(
        qkv, cos, sin, num_q_heads=heads, num_kv_heads=kv_heads, k_norm=k_norm
    )
    kv = torch.full((2, kv_heads, num_rows + 3, head_dim), torch.nan, device=DEVICE).to(dtype)
    k_out, v_out = kv[0, :, 1 : num_rows + 1], kv[1, :, 2 : num_rows + 2]
    rotary_write(
        qkv, cos, sin, k_out=k_out, v_out=v_out, num_q_heads=heads, k_norm=k_norm, backend="triton"
    )
    assert _error(k_out, k) < TOLERANCE[dtype]
    assert torch.equal(v_out, v)
    assert kv.isnan().any(-1).sum() == 2 * kv_heads * 3

    segments = torch.full((3, layers, 2, kv_heads, capacity, head_dim), torch.nan, device=DEVICE)
    segments = segments.to(dtype)
    owners = torch.arange(num_rows, device=DEVICE) % 3
    rows = torch.arange(num_rows, device=DEVICE) + 7
    addresses = [segments[owner].data_ptr() for owner in owners.tolist()]
    rotary_scatter(
        qkv, cos, sin,
        base_addresses=torch.tensor(addresses, device=DEVICE),
        capacities=torch.full((num_rows,), capacity, device=DEVICE),
        rows=rows, layer=1, num_q_heads=heads, num_kv_heads=kv_heads, k_norm=k_norm,
    )  # fmt: skip
    for row in range(num_rows):
        written = segments[owners[row], 1, :, :, rows[row]]
        assert _error(written[0], k[:, row]) < TOLERANCE[dtype] * 4
        assert torch.equal(written[1], v[:, row])
    assert (~segments.isnan().any(-1)).sum() == 2 * kv_heads * num_rows


def test_a_place_given_by_reference_and_by_kernel_is_the_same() -> None:
    qkv = _random(4, 4 * 64, dtype=DTYPES[-1])
    angles = torch.rand(4, 32, device=DEVICE)
    outs = []
    for rows in (None, 16, 64):
        kv = torch.empty(2, 1, 4, 64, device=DEVICE, dtype=DTYPES[-1])
        arguments = {"k_out": kv[0], "v_out": kv[1], "num_q_heads": 2, "k_norm": None}
        if rows is None:
            rotary_write(qkv, angles.cos(), angles.sin(), **arguments, backend="reference")
        else:
            rotary_write_triton(qkv, angles.cos(), angles.sin(), **arguments, rows=rows)
        outs.append(kv)
    for kv in outs[1:]:
        assert _error(kv, outs[0]) < TOLERANCE[DTYPES[-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_keys"), [(1, 5), (20, 64), (130, 201)])
def test_attention_mass_sums_to_the_probability_that_its_keys_have(
    num_rows: int, num_keys: int, dtype: torch.dtype
) -> None:
    q, k = _random(2, num_rows, 32, dtype=dtype), _random(2, num_keys, 32, dtype=dtype)
    scores = q.float() @ k.float().transpose(1, 2) * 0.3
    # Half of the probability lies elsewhere.
    lse = scores.logsumexp(-1) + torch.tensor(2.0).log()
    mass = attention_mass(q, k, lse, scale=0.3, backend="triton")
    assert _error(mass, attention_mass(q, k, lse, scale=0.3, backend="reference")) < 2e-3
    assert abs(mass.sum().item() - num_rows) < 1e-2 * num_rows


def test_arguments_that_do_not_fit_are_refused_by_name() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    qkv, angle = torch.zeros(2, 4 * 8), torch.zeros(2, 4)
    kv = torch.zeros(1, 2, 8)
    numbers = torch.zeros(2, dtype=torch.int64)
    scatter = {
        "base_addresses": numbers, "capacities": numbers, "rows": numbers, "layer": 0,
        "num_q_heads": 2, "num_kv_heads": 1,
    }  # fmt: skip
    for call, word in (
        (lambda: rms_norm(x, torch.zeros(7), eps=1e-5), "weight has shape"),
        (lambda: rms_norm(x, weight.half(), eps=1e-5), "float16"),
        (lambda: add_rms_norm(x, x[:1], weight, eps=1e-5), "residual is"),
        (lambda: rms_norm(x, weight, eps=1e-5, backend="cuda"), "backend"),
        (lambda: swiglu(torch.zeros(2, 3)), "gate_up has shape"),
        (lambda: swiglu(torch.zeros(4, 2).T), "unit stride"),
        (
            lambda: rotary_write(qkv, angle, angle, k_out=kv[:, :1], v_out=kv, num_q_heads=2),
            "k_out has shape",
        ),
        (
            lambda: rotary_write(qkv, angle, angle, k_out=kv, v_out=kv, num_q_heads=3),
            "qkv has shape",
        ),
        (
            lambda: rotary_write(qkv, angle.double(), angle, k_out=kv, v_out=kv, num_q_heads=2),
            "cos must be",
        ),
        (
            lambda: rotary_scatter(qkv, angle, angle, **scatter | {"rows": numbers[:1]}),
            "rows must be",
        ),
        (lambda: attention_mass(x[None], x[None].half(), x[None, :, 0], scale=1.0), "float16"),
    ):
        with pytest.raises(KernelError, match=word):
            call()
