"""Probes; one file = one task. This file is their contract and nothing else.

A task module has a one-line docstring and
- `METRIC`: `"accuracy"` or `"bits_per_byte"`; optionally `metric(sample)`, that of a sample's data set;
- `samples(*, length, depth=None, count, seed, tokenizer, template="ruler", haystack=None)
  -> list[Sample]`: the same arguments give the same samples, in every process;
- `score(sample, completion) -> float`: for accuracy the share, in [0, 1], of the answers that the
  completion contains; bits per byte of a summed loss for `perplexity`;
- `WHOLE = True` where the score of a longer completion may be lower: it is taken once, at the end.
A task of the user's data takes `data` (a file) too, and a task may have options of its own.
Lengths are in tokens of the tokenizer and include the reserved new tokens; they are never exceeded.
Every request that cannot be met raises `UsageError`.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIASES = {"niah": "niah_single_1"}


@dataclass(frozen=True)
class Sample:
    """One prompt and what must come after it.

    `tokens` = prompt tokens + `max_new_tokens`. `needle_span` = characters of the first needle in
    the prompt. `depth` is in percent. `dialect` names the wording: never mix two in one table.
    """

    prompt: str
    answers: tuple[str, ...]
    tokens: int
    max_new_tokens: int
    depth: float | None
    seed: int
    dialect: str
    needle_span: tuple[int, int] | None = None
    # the character of the prompt where its question starts
    question: int | None = None
    # teacher-forced tasks: (text, is_answer), to be encoded apart and concatenated
    pieces: tuple[tuple[str, bool], ...] = ()
    # (character offset of the answer in the prompt, answer), in the order of the answer pieces
    queries: tuple[tuple[int, str], ...] = ()
    # the set that a sample of the user's data is from, and what its metric needs beside the answers
    dataset: str | None = None
    classes: tuple[str, ...] = ()
    # ids without text: beside each the id that has to follow it, or -100
    labels: tuple[int, ...] = ()
    # windows of text: the ids themselves, the bytes that each stands for, and their sum
    ids: tuple[int, ...] = ()
    token_bytes: tuple[int, ...] = ()
    bytes: int = 0
