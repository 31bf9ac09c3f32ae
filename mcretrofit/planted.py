"""Planted facts in plain text: what a search for settings is judged by.

Key-value lines and single sentences are hidden in the calibration text and asked at its end, the true
answers being read: some heads find the one kind and some the other. Plain windows of the same text are
the other half of the judgement.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.evaluate import read_pieces, task_samples
from mcretrofit.surprise import text_loss
from mcretrofit.tasks._haystack import essay
from mcretrofit.tasks._recall import compact_keys, compact_value, needle, pair_stem, stem
from mcretrofit.tokenizer import Tokenizer

NEEDLES = 2  # sentences hidden in a sequence,
ROOM = 512  # where it has so many tokens for each of them

LEAST = 3  # segments of a sequence: the second one has nothing to choose from

Pieces = tuple[tuple[str, bool], ...]  # texts to be encoded apart, and which of them are answers


class Planted(NamedTuple):
    """Token ids of one sequence, and for each answer its first and last token and its fact's."""

    ids: list[int]
    answers: list[tuple[int, int]]  # [start, stop) of each answer
    facts: list[tuple[int, int]]  # [start, stop) of the line that holds it


class Losses(NamedTuple):
    """Nats a token: one number an answer, and the prose of each sequence."""

    answers: Tensor  # [A]
    prose: float  # of the plain windows
    right: Tensor  # [A], whether every token of an answer is the likeliest one


def planted(
    tokenizer: Tokenizer, text: str, *, length: int, count: int, pairs: int, seed: int
) -> list[Planted]:
    """`count` sequences of at most `length` tokens; raises where facts do not fit or cannot be spelt."""
    # refused as a text: a long word would be taken for the name of a file
    essay(text)
    sentences = min(NEEDLES, length // ROOM)
    hidden = [_needles(Random(f"needles {seed} {i}"), sentences, pairs) for i in range(count)]
    samples = task_samples(
        "mqar",
        length=length - _room(tokenizer, sentences, hidden),
        count=count,
        seed=seed,
        tokenizer=tokenizer,
        haystack=text,
        pairs=pairs,
        queries=min(pairs, 8),
    )
    every = zip(samples, hidden, strict=True)
    return [_placed(tokenizer, _hide(one.pieces, facts, sentences)) for one, facts in every]


class _Needle(NamedTuple):
    """A fact told in a sentence, at which share of the text."""

    key: str
    value: str
    depth: float


def _needles(rng: Random, count: int, pairs: int) -> list[_Needle]:
    """More than `count`: one whose key a pair has as well is passed over."""
    keys = compact_keys(rng, count + pairs) if count else []
    return [_Needle(key, compact_value(rng), rng.random()) for key in keys]


def _room(tokenizer: Tokenizer, count: int, hidden: list[list[_Needle]]) -> int:
    """The tokens to leave free for `count` sentences and their questions, and one more of each."""
    told = [f" {needle(one.key, one.value)} " for facts in hidden for one in facts]
    return 2 * (count + 1) * max((len(tokenizer.encode(words)) for words in told), default=0)


def _hide(pieces: Pieces, facts: list[_Needle], count: int) -> Pieces:
    """`count` of the facts as sentences in the first piece, asked before all else is."""
    (context, _), *rest = pieces
    lines = context.split("\n")
    free = [one for one in facts if not any(x.startswith(pair_stem(one.key)) for x in lines)]
    asked: list[tuple[str, bool]] = []
    for one in free[:count]:
        end = context.rfind(". ", 0, int(len(context) * one.depth))
        at = 0 if end < 0 else end + 2
        context = f"{context[:at]}{needle(one.key, one.value)} {context[at:]}"
        asked += [(f" {stem(one.key)}", False), (f" {one.value}", True), (".", False)]
    return ((context, False), *asked, *rest)


def _placed(tokenizer: Tokenizer, pieces: Pieces) -> Planted:
    ids: list[int] = []
    spans, said = [], pieces[0][0]
    for words, is_answer in pieces:
        more = tokenizer.encode(words)
        if is_answer:
            spans.append((len(ids), len(ids) + len(more)))
        ids += more
    facts = []
    for (question, _), (value, is_answer) in zip(pieces, pieces[1:], strict=False):
        if is_answer:
            line = f"{question}{value}".strip()
            at = said.index(line)
            cuts = (said[:at].rstrip(" "), said[: at + len(line)])
            facts.append(tuple(len(tokenizer.encode(words)) for words in cuts))
    return Planted(ids, spans, facts)


def plain_windows(prose: Tensor, segment: int, length: int) -> Tensor:
    """Windows `[B, T]` as long as facts of `length` tokens: what few segments leave alone, many may not.

    Raises `RetrofitError` where there is no third segment.
    """
    flat = prose.flatten()
    whole = min(len(flat), length) // segment * segment
    if whole < LEAST * segment:
        raise RetrofitError(
            f"calibrate compares segments: a sequence (--length {length}) and the text ({len(flat)} "
            f"whole tokens) have to hold {LEAST} of {segment} tokens at least"
        )
    return flat[: len(flat) // whole * whole].view(-1, whole)


@torch.no_grad()
def losses(model: nn.Module, some: list[Planted], prose: Tensor) -> Losses:
    """Read every sequence, and windows `prose [B, T]`, in pieces.

    Raises `RetrofitError` where a loss is not finite.
    """
    answers, right = [], []
    for one in some:
        ids = torch.tensor([one.ids], device=model.device)
        each, likely = [], []
        for start, logits, _ in read_pieces(model, ids, None):
            target = ids[0, start + 1 : start + 1 + logits.shape[1]]
            wide = logits[0, : len(target)].float()
            each.append(F.cross_entropy(wide, target, reduction="none"))
            likely.append(wide.argmax(-1) == target)
        loss, hit = torch.cat(each).double().cpu(), torch.cat(likely).cpu()
        if not bool(loss.isfinite().all()):
            raise RetrofitError("the model gives non-finite losses on the calibration text")
        answers += [loss[i - 1 : j - 1].mean() for i, j in one.answers]
        right += [hit[i - 1 : j - 1].all() for i, j in one.answers]
    return Losses(torch.stack(answers), text_loss(model, prose), torch.stack(right).double())
