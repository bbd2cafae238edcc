"""The whole model in one pass, phase mask split at t: plain, dense; the engine's reference.

Shape suffixes: T tokens, M hidden size, H query heads, G KV heads, D head size.
"""

import torch
from torch import Tensor

from orthros_kernels.partial_attention.reference import partial_attention_reference
from orthros_kernels.phase_attention.reference import phase_attention_reference
from orthros_service.model import attention
from orthros_service.model.rope import RotaryTable, rotate
from orthros_service.model.transformer import Attention, DecoderLayer, Transformer


@torch.inference_mode()
def phase_logits(model: Transformer, token_ids: Tensor, *, num_prefill: int) -> Tensor:
    """Logits [T, V] fp32: tokens before `num_prefill` in prefill mode, the others in decode mode.

    Args:
        model: The model.
        token_ids: [T] int64.
        num_prefill: t, 0 to T; 0 is full attention.
    """
    x: Tensor = model.embed_tokens(token_ids)
    rotary = RotaryTable(model.config, device=token_ids.device)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        normed = layer.input_norm(x)
        out_HTD = _attention(layer.attention, normed, model, rotary, num_prefill)
        x = x + layer.attention.o_proj(out_HTD.to(x.dtype).transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_norm(x))
    return model.logits(x).float()


def _attention(
    module: Attention, x_TM: Tensor, model: Transformer, rotary: RotaryTable, num_prefill: int
) -> Tensor:
    orthros = model.orthros
    q, k, v = module.project(x_TM)
    num_tokens, scale = x_TM.shape[0], q.shape[-1] ** -0.5
    positions = torch.arange(num_tokens)
    k_rotated = rotate(k, *rotary.cos_sin(positions))
    parts = []
    if num_prefill:
        first = slice(0, num_prefill)
        last_exact = orthros.window + orthros.tile + orthros.num_sinks - 1
        parts.append(
            phase_attention_reference(
                rotate(q[:, first], *rotary.cos_sin(positions[first])),
                rotate(q[:, first], *rotary.cos_sin(positions[first].clamp(max=last_exact))),
                k_rotated[:, first],
                v[:, first],
                window=orthros.window,
                tile=orthros.tile,
                num_sinks=orthros.num_sinks,
                scale=scale,
            )
        )
    if num_prefill < num_tokens:
        rest = slice(num_prefill, num_tokens)
        q_rest = rotate(q[:, rest], *rotary.cos_sin(positions[rest]))
        if module.temperature_H is not None:
            log_length = (
                ((positions[rest] + 1).float() / attention.TEMPERATURE_START).clamp(min=1).log()
            )
            tau = 1 + torch.tensor(module.temperature_H)[:, None] * log_length
            q_rest = q_rest * tau[..., None]
        group = q.shape[0] // k.shape[0]
        out, _ = partial_attention_reference(
            q_rest,
            k_rotated.repeat_interleave(group, 0),
            v.repeat_interleave(group, 0),
            scale=scale,
            visible_RN=positions[None, :] <= positions[rest][:, None],
        )
        parts.append(out)
    return torch.cat(parts, 1)
