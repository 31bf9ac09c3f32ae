"""Needle in a haystack with one needle, in the dialect of a template (RULER, arXiv 2404.06654)."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from mcretrofit.errors import UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._fit import check_request, check_room, check_spelling, largest, stream
from mcretrofit.tasks._haystack import NOISE, Essay, essay, read_text
from mcretrofit.tasks._templates import Template, load_template
from mcretrofit.tasks._words import ADJECTIVES, LONG_ADJECTIVES, LONG_NOUNS, NOUNS
from mcretrofit.tokenizer import Tokenizer

# RULER: 40 values of linspace(0, 100), rounded
DEPTHS = tuple(round(100 * i / 39) for i in range(40))

# primes: seeds, and samples of one seed, walk through all keys before one comes back
SEED_STEP, KEY_STEP = 1_000_003, 611_953


class Request(NamedTuple):
    """What a caller asks of every task."""

    length: int
    depth: float | None
    count: int
    seed: int
    tokenizer: Tokenizer
    template: str | Path
    haystack: str | Path | None


class Needle(NamedTuple):
    """One hidden fact: its question's words, its sentence, and where it goes."""

    key: str
    value: str
    sentence: str
    depth: float
    start: int


class Plan(NamedTuple):
    """A request with its names resolved; `prose` is None where the haystack is noise."""

    task: str
    values: str
    template: Template
    prose: Essay | None
    request: Request


def hide(task: str, *, haystack: str, values: str, request: Request) -> list[Sample]:
    """Samples with one needle; `haystack` and `values` are the task's own, a template's win."""
    check_request(task, length=request.length, depth=request.depth, count=request.count)
    template = load_template(request.template)
    prose = find_prose(task, haystack, template, request.haystack)
    plan = Plan(task, values, template, prose, request)
    needles = [_needle(plan, index) for index in range(request.count)]
    # first of all, so that a length that cannot work ends before any search
    check_room(task, max(_cost(plan, needle, 1) for needle in needles), request.length)
    return [_sample(plan, needle) for needle in needles]


def find_prose(task: str, own: str, template: Template, given: str | Path | None) -> Essay | None:
    """The prose that a dialect or a task hides needles in; None where it hides them in noise."""
    kind = template.haystack or own
    if given in ("noise", "essay"):
        if template.haystack is None and given != own:
            other = "niah_single_1" if given == "noise" else "niah_single_2"
            raise UsageError(f"{task} has the {own} haystack in this dialect: ask for {other}")
        kind, given = str(given), None
    if kind == "essay":
        return essay(read_text(given))
    if given is not None:
        raise UsageError(f"{task} hides its needle in noise; for a text ask for niah_single_2")
    return None


def _needle(plan: Plan, index: int) -> Needle:
    request, template, prose = plan.request, plan.template, plan.prose
    rng = stream(plan.task, request.seed, index)
    key = draw_key(request.seed * SEED_STEP + index, template.keys)
    value = draw_value(rng, plan.values, template.digits)
    # drawn even where a depth is given: the rest of the stream stays the same at every depth
    drawn = rng.choice(DEPTHS) if prose else 100 * rng.random()
    start = rng.choice(prose.starts) if prose and template.start == "random" else 0
    sentence = template.needle.format(type=plan.values, key=key, value=value)
    check_spelling(plan.task, request.tokenizer, sentence)
    return Needle(key, value, sentence, drawn if request.depth is None else request.depth, start)


def draw_key(number: int, kind: str) -> str:
    """Key `number` of all there are, which consecutive numbers walk through in leaps."""
    adjectives, nouns = (LONG_ADJECTIVES, LONG_NOUNS) if kind == "long" else (ADJECTIVES, NOUNS)
    place = number * KEY_STEP % key_count(kind)
    adjective, noun = adjectives[place // len(nouns)], nouns[place % len(nouns)]
    return f"{adjective}-{noun}" if kind == "long" else f"{adjective} {noun}"


def key_count(kind: str) -> int:
    """How many keys of a kind there are."""
    adjectives, nouns = (LONG_ADJECTIVES, LONG_NOUNS) if kind == "long" else (ADJECTIVES, NOUNS)
    return len(adjectives) * len(nouns)


def draw_value(rng: Random, values: str, digits: int | None) -> str:
    """A number of `digits` (7 unless said), or a uuid where `values` says so."""
    if values == "uuids" and digits is None:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    digits = digits or 7
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def _prompt(plan: Plan, needle: Needle, size: int) -> str:
    """The prompt with `size` noise units, or words of prose, around the needle."""
    template = plan.template
    if plan.prose is None:
        lines = [NOISE] * size
        lines.insert(int(size * needle.depth / 100), needle.sentence)
        context = "\n".join(lines)
    else:
        sentences = plan.prose.sentences(size, needle.start)
        at = int(len(sentences) * needle.depth / 100)
        parts = [" ".join(sentences[:at]), needle.sentence, " ".join(sentences[at:])]
        context = " ".join(part for part in parts if part or template.blank_sides)
    asked = template.prompt + template.answer_prefix
    return asked.format(type=plan.values.rstrip("s"), context=context, query=needle.key)


def _cost(plan: Plan, needle: Needle, size: int) -> int:
    prompt = _prompt(plan, needle, size)
    return len(plan.request.tokenizer.encode(prompt)) + plan.template.max_new_tokens


def _sample(plan: Plan, needle: Needle) -> Sample:
    size = largest(partial(_cost, plan, needle), plan.request.length, 1)
    prompt = _prompt(plan, needle, size)
    at = prompt.index(needle.sentence)
    asked = (plan.template.prompt + plan.template.answer_prefix).split("{context}")[1]
    asked = asked.format(type=plan.values.rstrip("s"), query=needle.key)
    return Sample(
        prompt=prompt,
        answers=(needle.value,),
        tokens=_cost(plan, needle, size),
        max_new_tokens=plan.template.max_new_tokens,
        depth=needle.depth,
        seed=plan.request.seed,
        dialect=plan.template.name,
        needle_span=(at, at + len(needle.sentence)),
        question=len(prompt) - len(asked),
    )
