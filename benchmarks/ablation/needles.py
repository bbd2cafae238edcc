"""Facts that are hidden in a document: their sentences, questions and answers."""

import random
from collections.abc import Callable

from orthros_service.conversion.needles import ADJECTIVES, CITIES, DAYS, NAMES, NOUNS

Fact = tuple[str, str, str]
"""Sentence, question, answer."""


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("0123456789", k=count))


def _number(rng: random.Random, pick: Callable[..., str]) -> Fact:
    key = f"{pick(ADJECTIVES)} {pick(NOUNS)}"
    value = _digits(rng, rng.choice((5, 6, 7)))
    return (
        f"The secret number of the {key} is {value}.",
        f"What is the secret number of the {key}?",
        f"The secret number of the {key} is {value}.",
    )


def _city(rng: random.Random, pick: Callable[..., str]) -> Fact:
    name, city = f"{pick(NAMES)} {rng.choice('ABCDEFGHKLMPRST')}.", pick(CITIES)
    return (
        f"The favourite city of {name} is {city}.",
        f"Which city does {name} like best?",
        f"{name} likes {city} best.",
    )


def _password(_rng: random.Random, pick: Callable[..., str]) -> Fact:
    key, value = pick(NOUNS), "-".join(pick(NOUNS) for _ in range(3))
    return (
        f"Whoever asks for the {key} must say the words {value}.",
        f"Which words must be said to get the {key}?",
        value,
    )


def _meeting(rng: random.Random, pick: Callable[..., str]) -> Fact:
    who, when = f"{pick(NAMES)} and {pick(NAMES)}", f"{pick(DAYS)} at {rng.randint(1, 12)}"
    return (
        f"{who} agreed to meet on {when} o'clock.",
        f"When did {who} agree to meet?",
        f"On {when} o'clock.",
    )


def _safe(rng: random.Random, pick: Callable[..., str]) -> Fact:
    key, value = f"{pick(ADJECTIVES)} {pick(NOUNS)}", _digits(rng, 7)
    return (
        f"To open the {key}, enter the code {value} and wait.",
        f"Which code opens the {key}?",
        value,
    )


def _price(rng: random.Random, pick: Callable[..., str]) -> Fact:
    key, value = f"{pick(ADJECTIVES)} {pick(NOUNS)}", rng.randint(1000, 99999)
    return (
        f"At the auction the {key} was sold for {value} crowns.",
        f"For how many crowns was the {key} sold at the auction?",
        str(value),
    )


FORMS = (_number, _number, _city, _password, _meeting)
UNSEEN_FORMS = (_safe, _price)
