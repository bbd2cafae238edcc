"""Linear layers whose weights are also kept as int8, for the few rows of a decode step on the CPU.

A decode step reads every weight once per token, so it is bound by bytes; int8 halves those of
bf16. Wide inputs are
bound by arithmetic and keep the native weights.
"""

import torch
from torch import Tensor, nn

from orthros_service.model.transformer import Transformer

# Above this many rows the native product is faster (measured on AVX-512 with bf16).
MAX_ROWS = 12


class Int8Linear(nn.Module):
    """A linear layer with per-output-channel symmetric int8 weights for narrow inputs.

    Args:
        linear: The layer to wrap; its weight stays in use for wide inputs.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        # Typed as always there in torch, though it is None for layers without a bias.
        self.bias: nn.Parameter | None = linear.bias
        wide = linear.weight.detach().float()
        scale = (wide.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        self.quantized = (wide / scale[:, None]).round().to(torch.int8)
        self.scale = scale.to(linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out]."""
        if x.shape[0] > MAX_ROWS:
            return nn.functional.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.quantized, self.scale)
        return out if self.bias is None else out + self.bias


def quantize_for_decode(model: Transformer) -> None:
    """Give every linear layer, and a tied head, int8 weights for narrow inputs; in place."""
    linears = {
        name: module
        for name, module in model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    for name, linear in linears.items():
        owner, _, child = name.rpartition(".")
        setattr(model.layers.get_submodule(owner), child, Int8Linear(linear))
    if model.lm_head is not None:
        assert isinstance(model.lm_head, nn.Linear)
        model.lm_head = Int8Linear(model.lm_head)
        return
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(model.embed_tokens.weight, requires_grad=False)
    model.lm_head = Int8Linear(head)
