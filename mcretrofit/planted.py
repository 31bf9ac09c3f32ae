"""Planted facts in plain text: what a search for settings is judged by.

Key-value lines are hidden in the calibration text and asked at its end, the true answers being read;
plain windows of the same text are the other half of the judgement.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.evaluate import read_pieces, task_samples
from mcretrofit.surprise import text_loss
from mcretrofit.tokenizer import Tokenizer


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
    samples = task_samples(
        "mqar",
        length=length,
        count=count,
        seed=seed,
        tokenizer=tokenizer,
        haystack=text,
        pairs=pairs,
        queries=min(pairs, 8),
    )
    return [_placed(tokenizer, sample) for sample in samples]


def _placed(tokenizer: Tokenizer, sample: Any) -> Planted:
    ids: list[int] = []
    spans, said = [], sample.pieces[0][0]
    for words, is_answer in sample.pieces:
        more = tokenizer.encode(words)
        if is_answer:
            spans.append((len(ids), len(ids) + len(more)))
        ids += more
    facts = []
    for (stem, _), (value, is_answer) in zip(sample.pieces, sample.pieces[1:], strict=False):
        if is_answer:
            line = f"{stem}{value}".strip()
            before = len(tokenizer.encode(said[: said.index(line)]))
            facts.append((before, before + len(tokenizer.encode(line))))
    return Planted(ids, spans, facts)


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
