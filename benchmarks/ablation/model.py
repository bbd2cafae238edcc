"""The model of the ablation: a Llama with low-rank updates and the phase mask, in plain torch.

Only what differs between the runs is a switch: the window, and the gated read of a decayed
linear-attention state over what lies left of it (docs/architecture.md, "The attention").
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from orthros_kernels import PhaseLayout, phase_training_attention
from orthros_kernels.phase_training.layout import TILE

HALF_LIVES = (1024.0, 8192.0, 65536.0)


@dataclass(frozen=True, slots=True)
class Variant:
    """What a run trains.

    Args:
        window: W.
        has_state: Whether prefill-mode tokens read the state left of their window.
        num_sinks: s.
        rope_theta: Base of the rotation.
        rank: Of the updates on every linear layer.
    """

    window: int = 512
    has_state: bool = False
    num_sinks: int = 4
    rope_theta: float = 2e6
    rank: int = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row on the device.

    Args:
        tokens: int64 [T].
        layout: Where documents and segments lie.
        positions: int64 [T], of every token in its own sequence.
        is_document: bool [T].
        document_of_tile: int64 [T / 128], -1 for tiles without document tokens.
    """

    tokens: Tensor
    layout: PhaseLayout
    positions: Tensor
    is_document: Tensor
    document_of_tile: Tensor


class LowRank(nn.Module):
    """A frozen linear layer and its trainable low-rank update.

    Args:
        weight: [out, in], bf16.
        rank: Of the update.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        out_dim, in_dim = weight.shape
        self.down = nn.Parameter(torch.randn(rank, in_dim, device=weight.device) / in_dim**0.5)
        self.up = nn.Parameter(torch.zeros(out_dim, rank, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] bf16 -> [T, out] bf16."""
        update = functional.linear(functional.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return functional.linear(x, self.weight) + update


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in fp32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D] by angles [T, D/2]."""
    first, second = x.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)


def gated(gate_and_up: Tensor) -> Tensor:
    """SwiGLU of the two halves."""
    gate, up = gate_and_up.chunk(2, -1)
    return functional.silu(gate) * up


class State(nn.Module):
    """The gated read of a decayed state: o = a + alpha_h sigmoid(u_h . x + beta_h) RMSNorm(b).

    b_i = q_i . S[c(i) - W/128 - 1], S[c] = sum over tiles u <= c of gamma^(128 (c - u)) U_u, and
    U_u the sum over the tile's tokens j (sinks left out) of gamma^(tokens to its end)
    norm(k_j)^T v_j.
    Queries and keys are not rotated.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, window: int) -> None:
        super().__init__()
        half_lives = torch.tensor([HALF_LIVES[g % len(HALF_LIVES)] for g in range(kv_heads)])
        gamma = torch.exp2(-1.0 / half_lives)
        self.theta = nn.Parameter(torch.log(gamma / (1 - gamma)))
        self.alpha = nn.Parameter(torch.zeros(heads))
        self.gate = nn.Parameter(torch.zeros(heads, hidden))
        self.beta = nn.Parameter(torch.zeros(heads))
        self._distance = window // TILE + 1

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, row: Row, sinks: int) -> Tensor:
        """What is added to the attention's output, [T, H, D]."""
        tokens, heads, dim = q.shape
        kv_heads, tiles = k.shape[1], tokens // TILE
        rate = functional.logsigmoid(self.theta)
        to_end = torch.arange(TILE - 1, -1, -1, device=q.device)
        weight = torch.exp(rate[None, :] * to_end[:, None]).repeat(tiles, 1)
        counts = (row.is_document & (row.positions >= sinks)).unsqueeze(1)
        keys = functional.normalize(k.float(), dim=-1) * (weight * counts).unsqueeze(-1)
        keys = keys.to(q.dtype).view(tiles, TILE, kv_heads, dim)
        updates = torch.einsum("tjgd,tjge->tgde", keys, v.reshape(tiles, TILE, kv_heads, dim))
        tile = torch.arange(tiles, device=q.device)
        apart = tile[:, None] - tile[None, :] - self._distance
        is_same = row.document_of_tile[:, None] == row.document_of_tile[None, :]
        reach = (apart >= 0) & is_same & (row.document_of_tile >= 0)[:, None]
        decay = torch.exp(rate[:, None, None] * (TILE * apart.clamp_min(0))) * reach
        flat = updates.float().transpose(0, 1).reshape(kv_heads, tiles, dim * dim)
        state = (decay @ flat).to(q.dtype).view(kv_heads, tiles, dim, dim)
        queries = q.view(tiles, TILE, kv_heads, heads // kv_heads, dim)
        read = torch.einsum("tighd,gtde->tighe", queries, state).reshape(tokens, heads, dim)
        ones = torch.ones(dim, device=q.device)
        opening = (
            torch.sigmoid(functional.linear(x, self.gate.to(x.dtype)).float() + self.beta)
            * self.alpha
        )
        added = rms_norm(read, ones) * opening.to(x.dtype).unsqueeze(-1)
        return added * row.is_document[:, None, None]


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, weights: dict[str, Tensor], config: "Config", variant: Variant) -> None:
        super().__init__()
        self._config, self._variant = config, variant
        attention = [weights[f"self_attn.{name}_proj.weight"] for name in "qkv"]
        self.qkv = LowRank(torch.cat(attention), variant.rank)
        self.out = LowRank(weights["self_attn.o_proj.weight"], variant.rank)
        inner = [weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
        self.gate_up = LowRank(torch.cat(inner), variant.rank)
        self.down = LowRank(weights["mlp.down_proj.weight"], variant.rank)
        self.register_buffer("norm", weights["input_layernorm.weight"])
        self.register_buffer("mlp_norm", weights["post_attention_layernorm.weight"])
        self.state = (
            State(config.hidden, config.heads, config.kv_heads, variant.window).to(self.norm.device)
            if variant.has_state
            else None
        )

    def forward(self, x: Tensor, row: Row, angles: "Angles") -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        config, variant = self._config, self._variant
        h = fast["norm"](x, self.norm)
        heads = self.qkv(h).view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], 1)
        attended = phase_training_attention(
            fast["rotate"](q, angles.cos, angles.sin),
            fast["rotate"](q, angles.sink_cos, angles.sink_sin),
            fast["rotate"](k, angles.cos, angles.sin),
            v,
            row.layout,
            window=variant.window,
            num_sinks=variant.num_sinks,
            scale=config.head_dim**-0.5,
        )
        if self.state is not None:
            attended = attended + self.state(h, q, k, v, row, variant.num_sinks)
        x = x + self.out(attended.reshape(len(x), -1))
        return x + self.down(fast["gated"](self.gate_up(fast["norm"](x, self.mlp_norm))))


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of the model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Angles:
    """cos and sin [T, D/2], at the tokens' positions and as queries score the sinks."""

    cos: Tensor
    sin: Tensor
    sink_cos: Tensor
    sink_sin: Tensor


fast = {"norm": rms_norm, "rotate": rotate, "gated": gated}


def compile_parts() -> None:
    """Fuse the elementwise parts."""
    for name, part in list(fast.items()):
        fast[name] = torch.compile(part, dynamic=False)


class Model(nn.Module):
    """The whole decoder; embeddings are tied and frozen.

    Args:
        directory: Hugging Face directory with one safetensors file.
        variant: What is trained.
        device: Where.
    """

    def __init__(self, directory: Path, variant: Variant, device: str) -> None:
        super().__init__()
        spec = json.loads((directory / "config.json").read_text())
        heads = spec["num_attention_heads"]
        self.config = Config(
            hidden=spec["hidden_size"],
            heads=heads,
            kv_heads=spec["num_key_value_heads"],
            head_dim=spec["hidden_size"] // heads,
        )
        self.variant = variant
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        weights = {
            name.removeprefix("model."): tensor.to(device, dtype)
            for name, tensor in load_file(directory / "model.safetensors").items()
        }
        self.register_buffer("embeddings", weights["embed_tokens.weight"])
        self.register_buffer("norm", weights["norm.weight"])
        self.layers = nn.ModuleList()
        for index in range(spec["num_hidden_layers"]):
            prefix = f"layers.{index}."
            own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            self.layers.append(Layer(own, self.config, variant))

    def forward(self, row: Row) -> Tensor:
        """Hidden states before the head, [T, hidden]."""
        reach = self.variant.window + TILE + self.variant.num_sinks - 1
        angles = Angles(*self._angles(row.positions), *self._angles(row.positions.clamp_max(reach)))
        x = self.embeddings[row.tokens]
        for layer in self.layers:
            x = layer(x, row, angles)
        return rms_norm(x, self.norm)

    def losses(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy per position and whether the target is the most likely token."""
        losses, hits = [], []
        for part, target in zip(hidden.split(4096), targets.split(4096), strict=True):
            logits = functional.linear(part, self.embeddings).float()
            losses.append(functional.cross_entropy(logits, target, reduction="none"))
            hits.append(logits.argmax(-1) == target)
        return torch.cat(losses), torch.cat(hits)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        exponent = torch.arange(half, device=positions.device, dtype=torch.float64) / half
        angle = positions.double()[:, None] * torch.exp(
            -exponent * math.log(self.variant.rope_theta)
        )
        return angle.cos().float(), angle.sin().float()
