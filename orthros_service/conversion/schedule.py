"""How the learning rate goes over a run."""

import math


def schedule(step: int, steps: int, *, warm_up: float, floor: float) -> float:
    """Share of the learning rate: a linear warm-up, then a cosine down to the floor."""
    warm = int(warm_up * steps)
    if step < warm:
        return (step + 1) / warm
    share = (step - warm) / max(1, steps - warm)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))
