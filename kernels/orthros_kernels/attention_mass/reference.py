"""Plain reference: probability that queries give to each key of a run, under a known total."""

from torch import Tensor


def attention_mass_reference(
    q_GRD: Tensor, k_GND: Tensor, lse_GR: Tensor, *, scale: float
) -> Tensor:
    """Sum over heads and rows of exp(score - lse), [N] fp32."""
    scores = q_GRD.float() @ k_GND.float().transpose(1, 2) * scale
    return (scores - lse_GR[..., None]).exp().sum((0, 1))
