"""The decoder of the Llama family (Llama, Mistral, Qwen 2 and 3, SmolLM) around Orthros attention.

Shape suffixes: R rows (tokens), M hidden size, V vocabulary, H query heads, G KV heads, D head
size.
"""

import torch
from torch import Tensor, nn

from orthros_kernels import add_rms_norm, rms_norm, swiglu
from orthros_service.model.attention import attend, write_keys_values
from orthros_service.model.batches import (
    Batch,
    DecodeBatch,
    PackedPrefillBatch,
    PlannedDecodeBatch,
    PrivateTail,
    TrainingBatch,
    layer_views,
)
from orthros_service.model.config import ModelConfig, OrthrosConfig
from orthros_service.model.fused_attention import HeadNorms, attend_fused, write_fused
from orthros_service.model.rope import RotaryTable
from orthros_service.model.training_attention import attend_training


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return rms_norm(x, self.weight, eps=self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalized sum, and the sum itself, in one pass over memory."""
        return add_rms_norm(x, residual, self.weight, eps=self.eps)


class Attention(nn.Module):
    """Projections around the two computation patterns."""

    def __init__(self, layer: int, config: ModelConfig, orthros: OrthrosConfig) -> None:
        super().__init__()
        self.layer = layer
        self.heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        width = config.num_q_heads * config.head_dim
        self.qkv_proj = nn.Linear(
            config.hidden_size, sum(self.heads) * config.head_dim, bias=config.has_qkv_bias
        )
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.has_o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else None
        c_LH = orthros.decode_temperature
        self.temperature_H = None if c_LH is None else c_LH[layer]

    def project(self, x_RM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [H, R, D], keys and values [G, R, D], head-normed, not rotated."""
        qkv = self.qkv_proj(x_RM).unflatten(-1, (sum(self.heads), self.head_dim)).transpose(0, 1)
        q, k, v = qkv.split(self.heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(self, x_RM: Tensor, batch: Batch) -> Tensor:
        """Attention output, [R, M]; keys and values are written where the batch says."""
        if isinstance(batch, PackedPrefillBatch | PlannedDecodeBatch):
            out_RHD = attend_fused(
                self.layer,
                self.qkv_proj(x_RM),
                batch,
                heads=self.heads,
                head_dim=self.head_dim,
                norms=self._head_norms(),
            )
            fused: Tensor = self.o_proj(out_RHD.flatten(1))
            return fused
        q, k, v = self.project(x_RM)
        if isinstance(batch, TrainingBatch):
            rows = attend_training(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), batch)
            trained: Tensor = self.o_proj(rows.flatten(1))
            return trained
        temperature_H = (
            None
            if self.temperature_H is None
            else torch.tensor(self.temperature_H, dtype=torch.float32, device=q.device)
        )
        out_HRD = attend(self.layer, q, k, v, batch, temperature_H=temperature_H)
        projected: Tensor = self.o_proj(out_HRD.transpose(0, 1).flatten(1))
        return projected

    def write(self, x_RM: Tensor, batch: Batch) -> None:
        """Keys and values only."""
        if isinstance(batch, PackedPrefillBatch | PlannedDecodeBatch):
            write_fused(
                self.layer,
                self.qkv_proj(x_RM),
                batch,
                heads=self.heads,
                norms=self._head_norms(),
            )
            return
        assert not isinstance(batch, TrainingBatch), "training stores no keys and values"
        _, k, v = self.project(x_RM)
        write_keys_values(self.layer, k, v, batch)

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(
            q_weight=self.q_norm.weight, k_weight=self.k_norm.weight, eps=self.q_norm.eps
        )


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(
            config.hidden_size, 2 * config.intermediate_size, bias=config.has_mlp_bias
        )
        self.down_proj = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.has_mlp_bias
        )

    def forward(self, x_RM: Tensor) -> Tensor:
        """[R, M] -> [R, M]."""
        out: Tensor = self.down_proj(swiglu(self.gate_up_proj(x_RM)))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, layer: int, config: ModelConfig, orthros: OrthrosConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(layer, config, orthros)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x_RM: Tensor, update_RM: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """One layer; its last sum is left to the next norm, which makes it in the same pass.

        Args:
            x_RM: Residual stream.
            update_RM: Output of the layer before that is not added yet; None for the first layer.
            batch: The phase and its context.

        Returns:
            Residual stream, and this layer's update to it, both [R, M].
        """
        normed, x_RM = self.enter(x_RM, update_RM)
        normed, x_RM = self.post_norm.add(self.attention(normed, batch), x_RM)
        return x_RM, self.mlp(normed)

    def enter(self, x_RM: Tensor, update_RM: Tensor | None) -> tuple[Tensor, Tensor]:
        """Input of the attention, and the residual stream with the update in it."""
        if update_RM is None:
            return self.input_norm(x_RM), x_RM
        return self.input_norm.add(update_RM, x_RM)


class Transformer(nn.Module):
    """Embedding, layers, final norm and head; positions and phase come with the batch."""

    def __init__(self, config: ModelConfig, orthros: OrthrosConfig) -> None:
        super().__init__()
        self.config = config
        self.orthros = orthros
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(index, config, orthros) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: nn.Module | None = (
            None
            if config.has_tied_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def hidden_states(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """Last layer's output before the final norm, [R, M], for int64 token ids [R]."""
        x: Tensor = self.embed_tokens(token_ids)
        update: Tensor | None = None
        for layer in self.layers:
            x, update = layer(x, update, batch)
        return x if update is None else x + update

    def write_document(self, token_ids: Tensor, batch: Batch) -> None:
        """Fill the batch's K/V for document tokens; the last layer stops at its keys and values."""
        x: Tensor = self.embed_tokens(token_ids)
        update: Tensor | None = None
        for layer in self.layers[:-1]:
            x, update = layer(x, update, batch)
        last = self.layers[-1]
        assert isinstance(last, DecoderLayer)
        last.attention.write(last.enter(x, update)[0], batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [R, V] in the model's dtype."""
        normed = self.norm(hidden)
        if self.lm_head is None:
            return nn.functional.linear(normed, self.embed_tokens.weight)
        out: Tensor = self.lm_head(normed)
        return out

    def new_kv(self, num_tokens: int) -> Tensor:
        """Uninitialized keys and values for so many tokens, [L, 2, G, N, D]."""
        weight = self.embed_tokens.weight
        shape = (
            self.config.num_layers,
            2,
            self.config.num_kv_heads,
            num_tokens,
            self.config.head_dim,
        )
        return torch.empty(shape, dtype=weight.dtype, device=weight.device)


@torch.inference_mode()
def full_logits(model: Transformer, token_ids: Tensor) -> Tensor:
    """Logits of one sequence in full attention, [T, V] fp32, for int64 token ids [T]."""
    num_tokens = token_ids.shape[0]
    device = token_ids.device
    table = RotaryTable(model.config, device=device)
    batch = DecodeBatch(
        cos_sin=table.cos_sin(torch.arange(num_tokens, device=device)),
        documents=(),
        tails=(
            PrivateTail(
                first_row=0,
                num_rows=num_tokens,
                layers=layer_views(model.new_kv(num_tokens)),
                length=0,
            ),
        ),
    )
    return model.logits(model.hidden_states(token_ids, batch)).float()
