"""Run a probe on a model, with caching and without it, on the same samples.

Prompts are read in pieces with the growing cache, so that logits of a long prompt never exist at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.clock import Clock
from mcretrofit.errors import RetrofitError
from mcretrofit.positions import by_position, trained_length
from mcretrofit.registry import load
from mcretrofit.segments import SegmentCache
from mcretrofit.tasks import ALIASES, Sample
from mcretrofit.tokenizer import Tokenizer

PIECE = 1024  # tokens of a row that are read at once
BATCH = 16384  # tokens of all rows of a batch


class Outcome(NamedTuple):
    """One cell: a score a sample, the bytes of cached segments after the longest prompt, seconds.

    `windows` are (start, end, bits per byte) by position, of text alone; `prefill` are the seconds
    without decoding, `step` those of one decoding step (0 where nothing was decoded).
    """

    scores: list[float]
    cache_bytes: int
    seconds: float
    windows: tuple[tuple[int, int, float], ...] = ()
    prefill: float = 0.0
    step: float = 0.0

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


def task_samples(task: str, **request: Any) -> list[Sample]:
    """The samples of a task by its name or alias; options that the task does not know are errors."""
    module = load("tasks", ALIASES.get(task, task))
    return module.samples(**{k: v for k, v in request.items() if v is not None})


def metric(task: str, sample: Sample | None = None) -> str:
    """`accuracy` or `bits_per_byte`, or what a task calls the metric of a sample."""
    module = load("tasks", ALIASES.get(task, task))
    own = getattr(module, "metric", None)
    return module.METRIC if own is None or sample is None else own(sample)


def run(
    model: nn.Module,
    tokenizer: Tokenizer,
    task: str,
    samples: list[Sample],
    tick: Callable[[int], None] = lambda _: None,
    begin: Callable[[list[Sample]], None] = lambda _: None,
) -> Outcome:
    """Score every sample; `begin` is told of a batch before it is read, `tick(n)` of n read ones."""
    module = load("tasks", ALIASES.get(task, task))
    way = _way(samples[0])
    scores, held, started, clock = [0.0] * len(samples), 0, time.monotonic(), Clock()
    spent: list[Tensor] = []
    # rows of one length need no padding
    order = sorted(range(len(samples)), key=lambda i: samples[i].tokens)
    for some in _batches([samples[i] for i in order]):
        begin(some)
        done, cache, *losses = way(model, tokenizer, module, some, clock)
        for score in done:
            scores[order.pop(0)] = score
        spent += losses
        held = max(held, segment_bytes(cache) // len(some))
        tick(len(some))
    seconds = time.monotonic() - started
    windows = by_position(spent, samples, trained_length(model))
    step = clock.seconds / max(clock.steps, 1)
    return Outcome(scores, held, seconds, windows, seconds - clock.seconds, step)


def _way(sample: Sample) -> Callable:
    if sample.labels:
        return _labelled
    return _windows if sample.ids else _forced if sample.pieces else _completed


def segment_bytes(cache: Any) -> int:
    """Bytes of cached segments that ride on a model's cache (zero on a bare model)."""
    states = getattr(cache, "states", None)
    holders = (
        [s.get("segments") for s in states.values()]
        if isinstance(states, dict)
        else [getattr(layer, "segments", None) for layer in getattr(cache, "layers", [])]
    )
    return sum(s.nbytes() for s in holders if isinstance(s, SegmentCache))


def read_pieces(
    model: nn.Module, ids: Tensor, mask: Tensor | None, keep: int = 0
) -> Iterator[tuple]:
    """`(start, logits, cache)` of each piece of `ids [B, T]`; `keep` logits of the last piece only."""
    cache = None
    for start in range(0, ids.shape[1], PIECE):
        piece = ids[:, start : start + PIECE]
        last = start + PIECE >= ids.shape[1]
        seen = None if mask is None else mask[:, : start + piece.shape[1]]
        few = {"logits_to_keep": keep if last else 1} if keep else {}
        out = model(
            input_ids=piece, attention_mask=seen, use_cache=True, **_as_cache(model, cache), **few
        )
        cache = out.past_key_values if "past_key_values" in out else out["cache_params"]
        yield start, out.logits, cache


def _as_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    return {} if cache is None else {"past_key_values": cache}


def _batches(samples: list[Sample]) -> Iterator[list[Sample]]:
    some: list[Sample] = []
    for sample in samples:
        longest = max(s.tokens for s in (*some, sample))
        if some and longest * (len(some) + 1) > BATCH:
            yield some
            some = []
        some.append(sample)
    yield some


def _left_padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, None if bool(mask.all()) else mask


@torch.no_grad()
def _completed(
    model: nn.Module, tokenizer: Tokenizer, module: Any, some: list[Sample], clock: Clock
):
    """Greedy completions; a row is done when its score cannot rise any more."""
    prompts = [tokenizer.encode(s.prompt) for s in some]
    ids, mask = _left_padded(prompts, model.device)
    *_, (_, logits, cache) = read_pieces(model, ids, mask, keep=1)
    said: list[list[int]] = [[] for _ in some]
    scores, whole = [0.0] * len(some), getattr(module, "WHOLE", False)
    for _ in range(max(s.max_new_tokens for s in some)):
        token = logits[:, -1].argmax(-1, keepdim=True)
        for row, one in zip(said, token[:, 0].tolist(), strict=True):
            row.append(one)
        if whole and all(tokenizer.eos_id in row for row in said):
            break
        if not whole:
            scores = _scores(module, tokenizer, some, said)
        if min(scores) == 1.0:
            break
        mask = None if mask is None else F.pad(mask, (0, 1), value=1)
        with clock.step():
            out = model(
                input_ids=token, attention_mask=mask, use_cache=True, **_as_cache(model, cache)
            )
        logits = out.logits
    return _scores(module, tokenizer, some, said) if whole else scores, cache


def _scores(
    module: Any, tokenizer: Tokenizer, some: list[Sample], said: list[list[int]]
) -> list[float]:
    """The score of each completion up to its own limit or the end of text."""
    scores = []
    for sample, ids in zip(some, said, strict=True):
        ids = ids[: sample.max_new_tokens]
        ended = ids.index(tokenizer.eos_id) if tokenizer.eos_id in ids else len(ids)
        scores.append(module.score(sample, tokenizer.decode(ids[:ended])))
    return scores


@torch.no_grad()
def _labelled(
    model: nn.Module, tokenizer: Tokenizer, module: Any, some: list[Sample], clock: Clock
):
    """Share of the labels that are the likeliest next id at their place."""
    ids, labels = (
        torch.tensor(rows, device=model.device)
        for rows in ([s.ids for s in some], [s.labels for s in some])
    )
    right, cache = [], None
    for start, logits, kept in read_pieces(model, ids, None):
        right.append(logits.argmax(-1) == labels[:, start : start + logits.shape[1]])
        cache = kept
    asked = labels >= 0
    hits = (torch.cat(right, 1) & asked).sum(1) / asked.sum(1)
    return hits.tolist(), cache


@torch.no_grad()
def _forced(model: nn.Module, tokenizer: Tokenizer, module: Any, some: list[Sample], clock: Clock):
    """Share of the answers whose every token is the likeliest one, the true answers being read."""
    rows, spans = [], []
    for sample in some:
        ids: list[int] = []
        places = []
        for text, is_answer in sample.pieces:
            more = tokenizer.encode(text)
            if is_answer:
                places.append((len(ids), len(ids) + len(more)))
            ids += more
        rows.append(ids)
        spans.append(places)
    ids, mask = _left_padded(rows, model.device)
    cache, likeliest = None, []
    for _, logits, kept in read_pieces(model, ids, mask):
        likeliest.append(logits.argmax(-1))
        cache = kept
    right = F.pad(torch.cat(likeliest, 1)[:, :-1] == ids[:, 1:], (1, 0))
    scores = []
    for b, places in enumerate(spans):
        lead = ids.shape[1] - len(rows[b])
        hits = [bool(right[b, lead + i : lead + j].all()) for i, j in places]
        scores.append(sum(hits) / len(hits))
    return scores, cache


@torch.no_grad()
def _windows(model: nn.Module, tokenizer: Tokenizer, module: Any, some: list[Sample], clock: Clock):
    """Bits per byte of windows of text."""
    ids = torch.tensor([s.ids for s in some], device=model.device)
    pieces, cache = [], None
    for start, logits, kept in read_pieces(model, ids, None):
        target = ids[:, start + 1 : start + 1 + logits.shape[1]]
        wide = logits[:, : target.shape[1]].float()
        losses = F.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none")
        pieces.append(losses.view_as(target).double().cpu())
        cache = kept
    spent = torch.cat(pieces, 1)
    nats = spent.sum(1)
    if not bool(nats.isfinite().all()):
        raise RetrofitError("the model gives non-finite losses on this text")
    return [module.score(s, n) for s, n in zip(some, nats.tolist(), strict=True)], cache, spent
