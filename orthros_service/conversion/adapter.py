"""Low-rank updates on every linear layer of a frozen model: attach, merge, save and load.

Source: Hu et al. 2021, "LoRA".
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from orthros_service.errors import ModelError
from orthros_service.model.transformer import Transformer

FORMAT = "orthros-adapter-1"


class LowRankLinear(nn.Module):
    """A frozen linear layer and its trainable update: x W^T + b + x A^T B^T.

    Args:
        linear: The layer; its parameters are frozen.
        rank: r; A is [r, in], random, and B [out, r], zero, both fp32.
        generator: Draws A.
    """

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        weight = linear.weight
        down = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        self.down = nn.Parameter(down.to(weight.device))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out] in x's dtype."""
        low = nn.functional.linear(x, self.down.to(x.dtype))
        update = nn.functional.linear(low, self.up.to(x.dtype))
        out: Tensor = self.linear(x) + update
        return out

    def merged_weight(self) -> Tensor:
        """The weight with the update in it, rounded once, in the layer's dtype."""
        weight = self.linear.weight
        return (weight.float() + self.up.float() @ self.down.float()).to(weight.dtype)


def attach(model: Transformer, rank: int, *, seed: int) -> None:
    """Freeze a model and put an update on every linear layer of its decoder layers."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        for parent, name in (
            (layer.attention, "qkv_proj"),
            (layer.attention, "o_proj"),
            (layer.mlp, "gate_up_proj"),
            (layer.mlp, "down_proj"),
        ):
            setattr(parent, name, LowRankLinear(getattr(parent, name), rank, generator))


def merge(model: Transformer) -> None:
    """Put plain layers with merged weights back in place of the updates."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LowRankLinear):
                child.linear.weight = nn.Parameter(child.merged_weight(), requires_grad=False)
                setattr(module, name, child.linear)


def updates(model: Transformer) -> dict[str, Tensor]:
    """The trainable tensors by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def save_adapter(model: Transformer, path: Path, *, base_digest: str) -> None:
    """Write the updates, with the digest of the model that they belong to.

    Raises:
        ModelError: The file cannot be written; the one before it stays.
    """
    temporary = path.with_name(f".{path.name}.partial")
    tensors = {name: tensor.detach().cpu() for name, tensor in updates(model).items()}
    about = {"format": FORMAT, "base_digest": base_digest}
    try:
        save_file(tensors, temporary, metadata={"orthros": json.dumps(about)})
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be written: {error}.") from error


def load_adapter(model: Transformer, path: Path, *, base_digest: str) -> None:
    """Read updates into an attached model.

    Raises:
        ModelError: The file is missing, damaged, of another model or of another shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("orthros", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as an adapter: {error}.") from error
    if about.get("format") != FORMAT:
        raise ModelError(f"{path} is not an adapter of this format, {FORMAT}.")
    if about.get("base_digest") != base_digest:
        raise ModelError(f"{path} belongs to another model than the one given.")
    own = updates(model)
    if tensors.keys() != own.keys() or any(tensors[n].shape != own[n].shape for n in own):
        raise ModelError(f"{path} has updates of another rank or number than this conversion.")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
