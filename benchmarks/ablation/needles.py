"""Forms of hidden facts that only the evaluation shows; the others are the conversion's."""

import random

from orthros_service.conversion.needles import ADJECTIVES, NOUNS, Fact


def draw_unseen_fact(rng: random.Random) -> Fact:
    """A fact in a form that training never shows."""
    return rng.choice((_safe, _price))(rng)


def _safe(rng: random.Random) -> Fact:
    key = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    value = "".join(rng.choices("0123456789", k=7))
    return Fact(
        f"To open the {key}, enter the code {value} and wait.",
        f"Which code opens the {key}?",
        value,
    )


def _price(rng: random.Random) -> Fact:
    key, value = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", rng.randint(1000, 99999)
    return Fact(
        f"At the auction the {key} was sold for {value} crowns.",
        f"For how many crowns was the {key} sold at the auction?",
        str(value),
    )
