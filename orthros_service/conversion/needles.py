"""Facts that are hidden in a document: their sentences, questions and answers.

The forms are our own; those of public benchmarks stay for tests alone.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

_WORDS = json.loads(files(__package__).joinpath("words.json").read_text(encoding="utf-8"))
ADJECTIVES, NOUNS, NAMES, CITIES, DAYS = (words.split() for words in _WORDS.values())


@dataclass(frozen=True, slots=True)
class Fact:
    """A text that stands in a document, and what is asked about it."""

    text: str
    question: str
    answer: str


def draw_fact(rng: random.Random) -> Fact:
    """A fact in one of the forms."""
    return rng.choice(_FORMS)(rng)


def _number(rng: random.Random) -> Fact:
    key = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    value = "".join(rng.choices("0123456789", k=rng.choice((5, 6, 7))))
    return Fact(
        f"The secret number of the {key} is {value}.",
        f"What is the secret number of the {key}?",
        f"The secret number of the {key} is {value}.",
    )


def _city(rng: random.Random) -> Fact:
    name, city = f"{rng.choice(NAMES)} {rng.choice('ABCDEFGHKLMPRST')}.", rng.choice(CITIES)
    return Fact(
        f"The favourite city of {name} is {city}.",
        f"Which city does {name} like best?",
        f"{name} likes {city} best.",
    )


def _password(rng: random.Random) -> Fact:
    key, value = rng.choice(NOUNS), "-".join(rng.choice(NOUNS) for _ in range(3))
    return Fact(
        f"Whoever asks for the {key} must say the words {value}.",
        f"Which words must be said to get the {key}?",
        value,
    )


def _meeting(rng: random.Random) -> Fact:
    who = f"{rng.choice(NAMES)} and {rng.choice(NAMES)}"
    when = f"{rng.choice(DAYS)} at {rng.randint(1, 12)}"
    return Fact(
        f"{who} agreed to meet on {when} o'clock.",
        f"When did {who} agree to meet?",
        f"On {when} o'clock.",
    )


_FORMS: tuple[Callable[[random.Random], Fact], ...] = (_number, _number, _city, _password, _meeting)
