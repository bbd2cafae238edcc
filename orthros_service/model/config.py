"""What a model directory says about its model: config.json and, optionally, our orthros.json.

Torch-free, so that the gateway may read it. Anything that the transformer would silently compute
differently is refused here, with a `ModelError` that names file, field, value and what is allowed.
"""

from dataclasses import dataclass
from pathlib import Path

from orthros_service.errors import ModelError
from orthros_service.model.json_fields import JsonFields, is_finite_number, read_json_object
from orthros_service.model.rope_config import RopeScaling, read_rope

__all__ = ["ModelConfig", "OrthrosConfig", "RopeScaling", "load_model_config"]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures and their `model_type`; SmolLM and SmolLM2 are LlamaForCausalLM."""

UNSUPPORTED_MEMBERS = {
    "quantization_config": "quantized weights",
    "num_experts": "mixtures of experts",
    "num_local_experts": "mixtures of experts",
    "no_rope_layers": "layers without rotary embeddings",
}

DEFAULT_CONVERTED_FULL_PREFILL_TOKENS = 2048
DEFAULT_MAX_CONTEXT_TOKENS = 2**21
"""Positions work at any length and memory sets the real limit; this bounds what may be asked."""

DESCRIPTIVE_MEMBERS = frozenset({"name", "base_model", "source", "licence", "weights_note"})
"""Members of orthros.json that only people read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-family decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrthrosConfig:
    """How this model runs Orthros attention.

    Args:
        window: Tokens of the block-aligned sliding window; a multiple of tile.
        num_sinks: First tokens that stay visible to every token.
        tile: Tokens per tile, the kernels' grain.
        is_converted: Whether the weights were trained with the phase mask.
        trained_context_tokens: Longest context that training covered.
        full_prefill_max_tokens: Longest document that is prefilled in full attention.
        max_context_tokens: Longest context of one request, answer included.
        decode_temperature: c_h per layer and query head; None is 0 everywhere.
        evidence_layers: Layers whose attention the evidence pass reads.
    """

    window: int = 512
    num_sinks: int = 4
    tile: int = 128
    is_converted: bool
    trained_context_tokens: int
    full_prefill_max_tokens: int
    max_context_tokens: int
    decode_temperature: tuple[tuple[float, ...], ...] | None
    evidence_layers: tuple[int, ...]


def load_model_config(directory: Path) -> tuple[ModelConfig, OrthrosConfig]:
    """Read config.json and, if it is there, orthros.json.

    Without orthros.json the model counts as unconverted: documents up to the context of the
    original model are prefilled in full attention.

    Raises:
        ModelError: The directory or a file is missing, or a member is missing, wrong or of an
            unsupported kind.
    """
    if not directory.is_dir():
        raise ModelError(
            f"The model directory {directory} does not exist; make the default one with "
            "'orthros models prepare'."
        )
    fields = read_json_object(directory / "config.json")
    config = _read_model(fields)
    original_context = _original_context(fields, config)
    path = directory / "orthros.json"
    orthros = read_json_object(path) if path.exists() else JsonFields(source=str(path), members={})
    return config, _read_orthros(orthros, config, original_context)


def _read_model(fields: JsonFields) -> ModelConfig:
    architecture = _architecture(fields)
    for name, kind in UNSUPPORTED_MEMBERS.items():
        if fields.has(name):
            raise fields.error(name, f"its absence: {kind} are not supported")
    fields.choice("hidden_act", ["silu"])
    _check_layer_types(fields)
    num_q_heads, num_kv_heads, head_dim = _heads(fields, architecture)
    max_positions = fields.integer("max_position_embeddings")
    theta, scaling = read_rope(fields, max_positions)
    has_attention_bias = fields.boolean("attention_bias", default=False)
    has_mlp_bias = fields.boolean("mlp_bias", default=False)
    if has_attention_bias and architecture not in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        raise fields.error("attention_bias", f"false for {architecture}")
    if has_mlp_bias and architecture != "LlamaForCausalLM":
        raise fields.error("mlp_bias", f"false for {architecture}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", minimum=1e-12),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        has_tied_embeddings=fields.boolean("tie_word_embeddings", default=False),
        has_qkv_bias=has_attention_bias or architecture == "Qwen2ForCausalLM",
        has_o_bias=has_attention_bias,
        has_mlp_bias=has_mlp_bias,
        has_qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _architecture(fields: JsonFields) -> str:
    names = fields.require("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(ARCHITECTURES):
        raise fields.error("architectures", "a list of one of " + ", ".join(ARCHITECTURES))
    architecture = str(names[0])
    fields.choice("model_type", [ARCHITECTURES[architecture]], default=ARCHITECTURES[architecture])
    return architecture


def _check_layer_types(fields: JsonFields) -> None:
    kinds = fields.members.get("layer_types") or []
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise fields.error("layer_types", f"a list of {' and '.join(allowed)}")


def _heads(fields: JsonFields, architecture: str) -> tuple[int, int, int]:
    num_q_heads = fields.integer("num_attention_heads")
    is_llama = architecture == "LlamaForCausalLM"
    num_kv_heads = fields.integer("num_key_value_heads", default=num_q_heads if is_llama else None)
    if num_q_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of the {num_q_heads} attention heads")
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim"):
        if architecture == "Qwen3ForCausalLM":
            fields.require("head_dim")
        if hidden_size % num_q_heads:
            raise fields.error("hidden_size", f"a multiple of the {num_q_heads} attention heads")
    head_dim = fields.integer("head_dim", default=hidden_size // num_q_heads)
    if head_dim % 2:
        raise ModelError(
            f"{fields.source}: the head size is {head_dim}; allowed is an even number."
        )
    return num_q_heads, num_kv_heads, head_dim


def _original_context(fields: JsonFields, config: ModelConfig) -> int:
    """Tokens that the original model attends to fully and saw in training."""
    context = config.max_position_embeddings
    scaling = config.rope_scaling
    if scaling is not None and scaling.original_max_position_embeddings is not None:
        context = min(context, scaling.original_max_position_embeddings)
    if config.architecture == "MistralForCausalLM":
        # The window is on unless it is null; older files leave it out and mean 4096.
        has_window = fields.has("sliding_window") or "sliding_window" not in fields.members
    elif config.architecture.startswith("Qwen"):
        has_window = fields.boolean("use_sliding_window", default=False)
    else:
        has_window = False
    return min(context, fields.integer("sliding_window", default=4096)) if has_window else context


def _read_orthros(fields: JsonFields, config: ModelConfig, original_context: int) -> OrthrosConfig:
    known = set(OrthrosConfig.__dataclass_fields__) | DESCRIPTIVE_MEMBERS
    unknown = sorted(set(fields.members) - known)
    if unknown:
        raise ModelError(
            f"{fields.source}: unknown members {unknown}; allowed are {sorted(known)}."
        )
    is_converted = fields.boolean("is_converted", default=False)
    trained = fields.integer(
        "trained_context_tokens", default=None if is_converted else original_context
    )
    max_context = fields.integer(
        "max_context_tokens", default=max(DEFAULT_MAX_CONTEXT_TOKENS, trained)
    )
    if trained > max_context:
        raise fields.error("max_context_tokens", f"at least trained_context_tokens, {trained}")
    full_prefill = fields.integer(
        "full_prefill_max_tokens",
        default=min(DEFAULT_CONVERTED_FULL_PREFILL_TOKENS, trained) if is_converted else trained,
    )
    if full_prefill > max_context:
        raise fields.error("full_prefill_max_tokens", f"at most max_context_tokens, {max_context}")
    tile = fields.integer("tile", default=128)
    window = fields.integer("window", default=512)
    if window % tile:
        raise ModelError(
            f"{fields.source}: 'window' is {window}; allowed is a multiple of 'tile', {tile}."
        )
    num_sinks = fields.integer("num_sinks", default=4, minimum=0)
    if num_sinks > tile:
        raise fields.error("num_sinks", f"at most 'tile', {tile}")
    return OrthrosConfig(
        window=window,
        num_sinks=num_sinks,
        tile=tile,
        is_converted=is_converted,
        trained_context_tokens=trained,
        full_prefill_max_tokens=full_prefill,
        max_context_tokens=max_context,
        decode_temperature=_decode_temperature(fields, config),
        evidence_layers=_evidence_layers(fields, config.num_layers),
    )


def _decode_temperature(
    fields: JsonFields, config: ModelConfig
) -> tuple[tuple[float, ...], ...] | None:
    if not fields.has("decode_temperature"):
        return None
    rows = fields.members["decode_temperature"]
    is_valid = isinstance(rows, list) and len(rows) == config.num_layers
    for row in rows if is_valid else ():
        is_valid = is_valid and isinstance(row, list) and len(row) == config.num_q_heads
        is_valid = is_valid and all(is_finite_number(value) for value in row)
    if not is_valid:
        raise fields.error(
            "decode_temperature",
            f"{config.num_layers} lists of {config.num_q_heads} finite numbers each",
        )
    return tuple(tuple(float(value) for value in row) for row in rows)


def _evidence_layers(fields: JsonFields, num_layers: int) -> tuple[int, ...]:
    if not fields.has("evidence_layers"):
        # Measured on the default model: precision of citations peaks at 0.6 of the depth, and falls
        # steeply on both sides (benchmarks/citations.py).
        first = max(0, min(round(0.6 * num_layers), num_layers - 3))
        return tuple(range(first, min(first + 3, num_layers)))
    layers = fields.members["evidence_layers"]
    allowed = f"a list of at least one layer from 0 to {num_layers - 1}, ascending, each once"
    if not isinstance(layers, list) or not layers:
        raise fields.error("evidence_layers", allowed)
    if not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < num_layers for i in layers
    ):
        raise fields.error("evidence_layers", allowed)
    if layers != sorted(set(layers)):
        raise fields.error("evidence_layers", allowed)
    return tuple(layers)
