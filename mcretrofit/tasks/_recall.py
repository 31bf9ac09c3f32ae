"""The sentences of the compact dialect: probes and training data share exactly these."""

from __future__ import annotations

from random import Random

from mcretrofit.errors import UsageError
from mcretrofit.tasks._words import ADJECTIVES, NOUNS


def compact_keys(rng: Random, n: int) -> list[str]:
    """`n` distinct keys such as `red apple`; at most 1,600 exist."""
    total = len(ADJECTIVES) * len(NOUNS)
    if not 0 <= n <= total:
        raise UsageError(
            f"{n} facts in one text (--pairs): there are keys for 0 to {total}, each its own"
        )
    places = (divmod(place, len(NOUNS)) for place in rng.sample(range(total), n))
    return [f"{ADJECTIVES[adjective]} {NOUNS[noun]}" for adjective, noun in places]


def compact_value(rng: Random) -> str:
    """A value of three digits, 100 to 999."""
    return str(rng.randint(100, 999))


def stem(key: str) -> str:
    """The needle up to its value; as the end of a prompt it is the question."""
    return f"The magic number for {key} is"


def needle(key: str, value: str) -> str:
    """The sentence that hides a value: `The magic number for red apple is 824.`"""
    return f"{stem(key)} {value}."


def pair_stem(key: str) -> str:
    """A key-value line up to its value: `red apple:`; the answer piece starts with a space."""
    return f"{key}:"


def pair_line(key: str, value: str) -> str:
    """A key-value line without its newline: `red apple: 824`."""
    return f"{pair_stem(key)} {value}"
