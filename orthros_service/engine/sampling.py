"""The choice of the next token: it depends on a sequence's own logits and generator alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from orthros_service.errors import EngineError
from orthros_service.types import SamplingParameters

# First guess at how many tokens a nucleus holds; it grows until their mass is enough.
_FIRST_NUCLEUS_TOKENS = 256
_NUCLEUS_GROWTH = 8
# Seeds of any size are accepted; a torch generator takes 64 bits.
_SEED_MODULUS = 2**63


def make_generator(parameters: SamplingParameters) -> torch.Generator | None:
    """Build the random generator that one sequence keeps for its whole life.

    Args:
        parameters: How the sequence's tokens are chosen.

    Returns:
        A generator on the CPU (one number a token is drawn from it, whatever device the logits
        are on): seeded with `parameters.seed`, or from the system's entropy where that is None.
        None for a greedy sequence.
    """
    if parameters.temperature <= 0:
        return None
    generator = torch.Generator(device="cpu")
    if parameters.seed is None:
        generator.seed()
    else:
        generator.manual_seed(parameters.seed % _SEED_MODULUS)
    return generator


def sample(
    logits: Tensor,
    parameters: Sequence[SamplingParameters],
    generators: Sequence[torch.Generator | None],
) -> Tensor:
    """Choose one token for each sequence of a batch.

    Temperature comes first, then top-k, then top-p on what top-k left. Equal logits rank by the
    lower id, everywhere: half-precision logits tie often. Sampled rows are chosen one by one, so
    that no row's result can depend on its neighbours.

    Args:
        logits: [B, V], any floating dtype and device, all finite. Not modified.
        parameters: One per row.
        generators: One per row, from `make_generator`; a sampled row advances its own by exactly
            one draw.

    Returns:
        Token ids, [B] int64, on the device of the logits.

    Raises:
        EngineError: A logit is not finite, the counts differ, or a sampled row has no generator.
    """
    if not logits.shape[0] == len(parameters) == len(generators):
        raise EngineError(
            f"Sampling got {logits.shape[0]} rows of logits, {len(parameters)} parameters and "
            f"{len(generators)} generators; each row needs one of each.",
            phase="decode",
        )
    # Two passes without a copy of the logits; NaN passes through both, and the first of equal
    # maxima is returned. `argmax` is several times slower on half-precision rows on the CPU.
    highest, tokens = logits.max(dim=-1)
    _reject_non_finite(highest, logits.amin(dim=-1))
    for row, (row_parameters, generator) in enumerate(zip(parameters, generators, strict=True)):
        if row_parameters.temperature > 0:
            if generator is None:
                raise EngineError(
                    f"Row {row} is sampled but has no random generator.", phase="decode"
                )
            tokens[row] = _sample_row(logits[row], row_parameters, generator)
    return tokens


def _reject_non_finite(highest: Tensor, lowest: Tensor) -> None:
    is_finite = highest.isfinite() & lowest.isfinite()
    if not bool(is_finite.all()):
        rows = (~is_finite).nonzero().flatten().tolist()
        raise EngineError(
            f"The model gave logits that are not finite for rows {rows}.", phase="decode"
        )


def _sample_row(
    logits_V: Tensor, parameters: SamplingParameters, generator: torch.Generator
) -> Tensor:
    """Sample from one row by inverting its cumulative distribution at one uniform number."""
    uniform = torch.rand((), generator=generator, dtype=torch.float64).item()
    scores_V = logits_V.float()
    # The maximum becomes exactly 0, so no temperature, however small, can overflow.
    scores_V = (scores_V - scores_V.max()) / max(
        parameters.temperature, torch.finfo(torch.float32).tiny
    )
    ids: Tensor | None = None
    if parameters.top_k is not None and parameters.top_k < scores_V.numel():
        ids = _top_ids(scores_V, max(1, parameters.top_k))
        scores_V = scores_V[ids]
    probabilities = scores_V.softmax(dim=-1)
    if parameters.top_p < 1:
        nucleus = _nucleus_ids(probabilities, parameters.top_p)
        probabilities = probabilities[nucleus]
        ids = nucleus if ids is None else ids[nucleus]
    cumulative = probabilities.double().cumsum(dim=-1)
    total = cumulative[-1]
    # Strictly below the total, so that a trailing token of probability 0 is never the answer.
    target = torch.minimum(total * uniform, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True)
    return index if ids is None else ids[index]


def _top_ids(scores_V: Tensor, count: int) -> Tensor:
    """The `count` best ids in ascending order; of equal scores the lower ids."""
    threshold = scores_V.topk(count, sorted=False).values.min()
    above = (scores_V > threshold).nonzero().flatten()
    tied = (scores_V == threshold).nonzero().flatten()
    return torch.cat((above, tied[: count - above.numel()])).sort().values


def _nucleus_ids(probabilities_V: Tensor, top_p: float) -> Tensor:
    """The fewest most likely ids whose mass is at least top_p, at least one, most likely first."""
    num_tokens = probabilities_V.numel()
    count = min(_FIRST_NUCLEUS_TOKENS, num_tokens)
    while True:
        ids = _top_ids(probabilities_V, count)
        order = probabilities_V[ids].sort(descending=True, stable=True).indices
        ids = ids[order]
        cumulative = probabilities_V[ids].double().cumsum(dim=-1)
        if count == num_tokens or bool(cumulative[-1] >= top_p):
            # A token belongs to the nucleus while the mass before it is below top_p.
            size = 1 + int((cumulative[:-1] < top_p).sum())
            return ids[:size]
        count = min(count * _NUCLEUS_GROWTH, num_tokens)
