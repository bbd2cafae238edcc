"""int8 decode weights: close to the native ones for few rows, exactly those for many."""

import torch
from torch import nn

from orthros_service.model.int8_linear import MAX_ROWS, Int8Linear


def _layer(has_bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 96, bias=has_bias).bfloat16().requires_grad_(False)


def test_few_rows_stay_within_the_rounding_of_int8() -> None:
    for has_bias in (False, True):
        layer = _layer(has_bias)
        x = torch.randn(3, 64).bfloat16()
        expected, actual = layer(x).float(), Int8Linear(layer)(x).float()
        assert 0 < (actual - expected).norm() / expected.norm() < 0.02


def test_many_rows_use_the_native_weights() -> None:
    layer = _layer(True)
    x = torch.randn(MAX_ROWS + 1, 64).bfloat16()
    assert torch.equal(Int8Linear(layer)(x), layer(x))


def test_a_row_of_zeros_is_kept() -> None:
    layer = _layer(False)
    layer.weight[5] = 0
    out = Int8Linear(layer)(torch.ones(1, 64).bfloat16())
    assert out[0, 5] == 0
    assert torch.isfinite(out).all()
