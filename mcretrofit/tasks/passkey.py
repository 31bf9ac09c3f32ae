"""Passkey retrieval in the wording of Landmark Attention (arXiv 2305.16300)."""

from __future__ import annotations

from pathlib import Path

from mcretrofit.errors import UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._fit import check_request, check_room, check_spelling, largest, stream
from mcretrofit.tasks._haystack import NOISE
from mcretrofit.tasks._score import string_match_all as score
from mcretrofit.tasks._templates import fixed_wording
from mcretrofit.tokenizer import Tokenizer

__all__ = ["METRIC", "samples", "score"]

METRIC = "accuracy"

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
    "them. I will quiz you about the important information there."
)
NEEDLE = "The pass key is {n}. Remember it. {n} is the pass key."
QUESTION = "What is the pass key? The pass key is"
MAX_NEW_TOKENS = 16


def samples(
    *,
    length: int,
    depth: float | None = None,
    count: int,
    seed: int,
    tokenizer: Tokenizer,
    template: str | Path = "ruler",
    haystack: str | Path | None = None,
) -> list[Sample]:
    """`count` prompts of at most `length` tokens; the filler is whole sentences of the noise unit.

    Keys have five digits (the published range is 1 to 50,000): a shorter one would be found
    inside other numbers by chance.
    """
    check_request("passkey", length=length, depth=depth, count=count)
    fixed_wording("passkey", template)
    if haystack not in (None, "noise"):
        raise UsageError("passkey has its own filler and takes no haystack: leave it out")
    made = []
    for index in range(count):
        rng = stream("passkey", seed, index)
        needle = NEEDLE.format(n=rng.randint(10_000, 50_000))
        drawn = 100 * rng.random()
        made.append((needle, drawn if depth is None else depth))

    def cost(needle: str, place: float, size: int) -> int:
        return len(tokenizer.encode(_prompt(needle, place, size))) + MAX_NEW_TOKENS

    for needle, _ in made:
        check_spelling("passkey", tokenizer, needle)
    check_room("passkey", max(cost(needle, place, 1) for needle, place in made), length)
    done = []
    for needle, place in made:
        size = largest(lambda n, a=needle, d=place: cost(a, d, n), length, 1)
        done.append(_sample(needle, place, seed, _prompt(needle, place, size), tokenizer))
    return done


def _prompt(needle: str, depth: float, size: int) -> str:
    unit = [f"{sentence}." for sentence in NOISE.removesuffix(".").split(". ")]
    filler = [unit[i % len(unit)] for i in range(size)]
    at = int(size * depth / 100)
    # the filler starts over behind the needle, as published
    parts = (" ".join(filler[:at]), needle, " ".join(filler[: size - at]))
    return "\n".join((TASK, *parts, QUESTION))


def _sample(needle: str, depth: float, seed: int, prompt: str, tokenizer: Tokenizer) -> Sample:
    at = prompt.index(needle)
    return Sample(
        prompt=prompt,
        answers=(needle.rsplit(". ", 1)[1].split(" ", 1)[0],),
        tokens=len(tokenizer.encode(prompt)) + MAX_NEW_TOKENS,
        max_new_tokens=MAX_NEW_TOKENS,
        depth=depth,
        seed=seed,
        dialect="landmark",
        needle_span=(at, at + len(needle)),
        question=len(prompt) - len(QUESTION),
    )
