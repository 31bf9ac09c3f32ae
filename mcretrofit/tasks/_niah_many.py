"""Needles among needles: several keys, values or questions in one prompt (RULER, 2404.06654)."""

from __future__ import annotations

import uuid
from functools import partial
from random import Random
from typing import NamedTuple

from mcretrofit.errors import UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._fit import check_request, check_room, check_spelling, largest, stream
from mcretrofit.tasks._haystack import NOISE, Essay
from mcretrofit.tasks._niah import (
    DEPTHS,
    SEED_STEP,
    Request,
    draw_key,
    draw_value,
    find_prose,
    key_count,
)
from mcretrofit.tasks._templates import Template, load_template


class Shape(NamedTuple):
    """What a task hides. `haystack`: `essay`, or `needle` = nothing but needles of other keys."""

    task: str
    haystack: str = "essay"
    kind: str = "numbers"
    uuid_keys: bool = False
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1

    @property
    def answers(self) -> int:
        return self.queries * self.values


class Plan(NamedTuple):
    """A request with its names resolved; `prose` is None where the haystack has none."""

    shape: Shape
    template: Template
    prose: Essay | None
    request: Request


class Facts(NamedTuple):
    """One sample: (depth in percent, sentence, is asked for), first to last, and its question."""

    needles: tuple[tuple[float, str, bool], ...]
    queries: tuple[str, ...]
    answers: tuple[str, ...]
    start: int
    others: Others


class Others:
    """The needles of other keys; the first n of them are the same whatever the length."""

    def __init__(self, plan: Plan, rng: Random, taken: set[str], answers: set[str]) -> None:
        self._plan, self._rng, self._taken, self._answers = plan, rng, taken, answers
        self._made: list[str] = []

    def first(self, count: int) -> list[str]:
        while len(self._made) < count:
            key = new_key(self._plan, self._rng, self._taken)
            value = new_value(self._plan, self._rng, self._answers)
            self._made.append(_sentence(self._plan, key, value))
        return self._made[:count]


def hide_many(shape: Shape, request: Request) -> list[Sample]:
    """Samples of a shape; a depth is that of the one needle asked for, where there is one."""
    check_request(shape.task, length=request.length, depth=request.depth, count=request.count)
    template = load_template(request.template, plural=shape.answers > 1)
    plan = Plan(shape, template, _prose(shape, template, request), request)
    facts = [_facts(plan, index) for index in range(request.count)]
    for sentence in {needle[1] for fact in facts for needle in fact.needles}:
        check_spelling(shape.task, request.tokenizer, sentence)
    check_room(shape.task, max(_cost(plan, fact, 1) for fact in facts), request.length)
    return [_sample(plan, fact) for fact in facts]


def new_key(plan: Plan, rng: Random, taken: set[str]) -> str:
    """A key that is not taken yet, which it is from then on."""
    kind = plan.template.keys
    while True:
        if plan.shape.uuid_keys and kind == "long":
            key = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        else:
            key = draw_key(rng.randrange(key_count(kind)), kind)
        # once all are used a probe may still ask for more; `_sample` refuses what needs them
        if key not in taken or len(taken) >= key_count(kind):
            taken.add(key)
            return key


def new_value(plan: Plan, rng: Random, taken: set[str]) -> str:
    """A value that is none of `taken`: a wrong needle never answers right."""
    while True:
        value = draw_value(rng, plan.shape.kind, plan.template.digits)
        if value not in taken:
            return value


def _prose(shape: Shape, template: Template, request: Request) -> Essay | None:
    if shape.haystack == "essay":
        return find_prose(shape.task, shape.haystack, template, request.haystack)
    if request.haystack is not None:
        raise UsageError(
            f"{shape.task} hides its needle among others and takes no haystack: leave it out"
        )
    return None


def _sentence(plan: Plan, key: str, value: str) -> str:
    return plan.template.needle.format(type=plan.shape.kind, key=key, value=value)


def _facts(plan: Plan, index: int) -> Facts:
    shape, template, request = plan.shape, plan.template, plan.request
    rng = stream(shape.task, request.seed, index)
    # the first key walks through all keys, as in `_niah`: questions of seeds never coincide
    keys, taken = [], set()
    if not (shape.uuid_keys and template.keys == "long"):
        keys.append(draw_key(request.seed * SEED_STEP + index, template.keys))
        taken.add(keys[0])
    while len(keys) < shape.keys:
        keys.append(new_key(plan, rng, taken))
    values, used = {}, set()
    for key in keys:
        values[key] = []
        for _ in range(shape.values):
            values[key].append(new_value(plan, rng, used))
            used.add(values[key][-1])
    asked = keys[:1] if shape.queries == 1 else rng.sample(keys, shape.queries)
    answers = tuple(value for key in asked for value in values[key])
    hidden = [(_sentence(plan, k, v), k in asked) for k in keys for v in values[k]]
    rng.shuffle(hidden)
    placed = list(zip(_depths(plan, rng, len(hidden)), hidden, strict=True))
    if request.depth is not None:
        placed = [(request.depth if one[1] else depth, one) for depth, one in placed]
    prose = plan.prose
    start = rng.choice(prose.starts) if prose and template.start == "random" else 0
    # drawn from a stream of their own, so that facts do not depend on how many there are
    others = Others(plan, stream(f"{shape.task}/others", request.seed, index), taken, set(answers))
    needles = tuple((d, *one) for d, one in sorted(placed, key=lambda pair: pair[0]))
    return Facts(needles, tuple(asked), answers, start, others)


def _depths(plan: Plan, rng: Random, count: int) -> list[float]:
    if plan.prose is None:
        return sorted(100 * rng.random() for _ in range(count))
    return sorted(rng.sample(DEPTHS, count))


def _context(plan: Plan, facts: Facts, size: int) -> str:
    """`size` words of prose, noise units or needles of other keys around the needles."""
    if plan.prose is None:
        lines = facts.others.first(size) if plan.shape.haystack == "needle" else [NOISE] * size
        for depth, sentence, _ in reversed(facts.needles):
            lines.insert(int(size * depth / 100), sentence)
        return "\n".join(lines)
    sentences = plan.prose.sentences(size, facts.start)
    parts, last = [], 0
    for depth, sentence, _ in facts.needles:
        at = int(len(sentences) * depth / 100)
        parts += [" ".join(sentences[last:at]), sentence]
        last = at
    parts.append(" ".join(sentences[last:]))
    return " ".join(part for part in parts if part or plan.template.blank_sides)


def _question(plan: Plan, facts: Facts) -> str:
    """What is asked behind the context."""
    return _worded(plan, facts).split("{context}")[1]


def _worded(plan: Plan, facts: Facts) -> str:
    *most, last = facts.queries
    query = f"{', '.join(most)}, and {last}" if most else last
    kind = plan.shape.kind if plan.shape.answers > 1 else plan.shape.kind.rstrip("s")
    template = plan.template.prompt + plan.template.answer_prefix
    return template.format(type=kind, query=query, context="{context}")


def _prompt(plan: Plan, facts: Facts, size: int) -> str:
    return _worded(plan, facts).replace("{context}", _context(plan, facts, size))


def _cost(plan: Plan, facts: Facts, size: int) -> int:
    prompt = _prompt(plan, facts, size)
    return len(plan.request.tokenizer.encode(prompt)) + plan.template.max_new_tokens


def _sample(plan: Plan, facts: Facts) -> Sample:
    shape, template, request = plan.shape, plan.template, plan.request
    size = largest(partial(_cost, plan, facts), request.length, 1)
    there = key_count(template.keys)
    words = not (shape.uuid_keys and template.keys == "long")
    if shape.haystack == "needle" and words and size >= there:
        raise UsageError(
            f"{shape.task}: {request.length} tokens hold more needles than the {there} keys of "
            f"the {template.name} dialect: ask for a shorter length"
        )
    prompt = _prompt(plan, facts, size)
    first = next(sentence for _, sentence, asked in facts.needles if asked)
    at = prompt.index(first)
    return Sample(
        prompt=prompt,
        answers=facts.answers,
        tokens=len(request.tokenizer.encode(prompt)) + template.max_new_tokens,
        max_new_tokens=template.max_new_tokens,
        depth=None
        if shape.answers > 1
        else next(depth for depth, _, asked in facts.needles if asked),
        seed=request.seed,
        dialect=template.name,
        needle_span=(at, at + len(first)),
        question=len(prompt) - len(_question(plan, facts)),
    )
