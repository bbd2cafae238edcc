"""The rotary part of config.json: older (rope_theta, rope_scaling) and newer (rope_parameters)."""

from dataclasses import dataclass
from typing import Literal, cast

from orthros_service.errors import ModelError
from orthros_service.model.json_fields import JsonFields

RopeKind = Literal["linear", "llama3", "yarn"]

DEFAULT_THETA = 10000.0
MIN_THETA = 2.0

MEMBERS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
COMMON_MEMBERS = frozenset(
    {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context.

    Args:
        kind: The rule; "linear" divides all frequencies, "llama3" and "yarn" the low ones.
        factor: By how much, >= 1.
        original_max_position_embeddings: Context before the stretch; never None for llama3, yarn.
        low_freq_factor: llama3 only: frequencies that turn less often than this within the original
            context are divided by factor.
        high_freq_factor: llama3 only: those that turn more often than this are kept.
        attention_factor: yarn only: scale of cos and sin; None derives it from factor and mscale.
        beta_fast: yarn only: frequencies that turn more often within the original context are kept.
        beta_slow: yarn only: those that turn less often are divided by factor.
        mscale: yarn only: weight of ln(factor) in the derived scale's numerator.
        mscale_all_dim: yarn only: the same in its denominator.
        is_truncated: yarn only: whether the ramp's ends are rounded to whole dimensions.
    """

    kind: RopeKind
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    is_truncated: bool = True


def read_rope(fields: JsonFields, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Read theta and the scaling from config.json.

    Raises:
        ModelError: An unknown rope type or member, a wrong value, or a head rotated in part.
    """
    _require_full_rotation(fields)
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise ModelError(
            f"{fields.source}: both 'rope_parameters' and 'rope_scaling' are given; allowed is one."
        )
    theta = fields.number("rope_theta", default=DEFAULT_THETA, minimum=MIN_THETA)
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    if not fields.has(name):
        return theta, None
    rope = fields.nested(name)
    _require_full_rotation(rope)
    theta = rope.number("rope_theta", default=theta, minimum=MIN_THETA)
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", MEMBERS, default="default")
    unknown = sorted(set(rope.members) - MEMBERS[kind] - COMMON_MEMBERS)
    if unknown:
        allowed = sorted(MEMBERS[kind] | COMMON_MEMBERS)
        raise ModelError(
            f"{rope.source}: unknown members {unknown} for rope type {kind!r}; "
            f"allowed are {allowed}."
        )
    if kind == "default":
        return theta, None
    return theta, _read_scaling(rope, cast("RopeKind", kind), max_position_embeddings)


def _require_full_rotation(fields: JsonFields) -> None:
    if fields.number("partial_rotary_factor", default=1.0, minimum=0.0) != 1.0:
        raise fields.error("partial_rotary_factor", "1: the whole head is rotated")


def _read_scaling(rope: JsonFields, kind: RopeKind, max_position_embeddings: int) -> RopeScaling:
    factor = rope.number("factor", minimum=1.0)
    original = "original_max_position_embeddings"
    match kind:
        case "linear":
            context = rope.integer(original) if rope.has(original) else None
            return RopeScaling(kind=kind, factor=factor, original_max_position_embeddings=context)
        case "llama3":
            low = rope.number("low_freq_factor", minimum=1e-6)
            high = rope.number("high_freq_factor", minimum=1e-6)
            if high <= low:
                raise rope.error("high_freq_factor", f"a number above low_freq_factor, {low}")
            return RopeScaling(
                kind=kind,
                factor=factor,
                original_max_position_embeddings=rope.integer(original),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            return _read_yarn(rope, factor, rope.integer(original, default=max_position_embeddings))


def _read_yarn(rope: JsonFields, factor: float, original_context: int) -> RopeScaling:
    beta_fast = rope.number("beta_fast", default=32.0, minimum=1e-6)
    beta_slow = rope.number("beta_slow", default=1.0, minimum=1e-6)
    if beta_fast <= beta_slow:
        raise rope.error("beta_fast", f"a number above beta_slow, {beta_slow}")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original_context,
        attention_factor=rope.optional_number("attention_factor", minimum=1e-6),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=rope.optional_number("mscale", minimum=0.0),
        mscale_all_dim=rope.optional_number("mscale_all_dim", minimum=0.0),
        is_truncated=rope.boolean("truncate", default=True),
    )
