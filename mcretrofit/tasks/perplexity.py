"""Windows of running text for loss by position and bits per byte, which compares tokenizers."""

from __future__ import annotations

from math import log
from pathlib import Path

from mcretrofit.errors import UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tasks._fit import check_request, no_depth, stream
from mcretrofit.tasks._haystack import read_text
from mcretrofit.tasks._templates import fixed_wording
from mcretrofit.tokenizer import Tokenizer, byte_counts

METRIC = "bits_per_byte"


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
    """`count` windows of exactly `length` tokens, in text order; disjoint where they all fit."""
    check_request("perplexity", length=length, depth=None, count=count)
    no_depth("perplexity", depth)
    fixed_wording("perplexity", template)
    if haystack == "noise":
        raise UsageError("perplexity of noise says nothing: give a text, a file or a folder")
    ids = tokenizer.encode(read_text(None if haystack == "essay" else haystack))
    if length < 2:
        raise UsageError("perplexity: a window of one token predicts nothing; use at least 2")
    if len(ids) < length:
        raise UsageError(
            f"perplexity: the text has {len(ids)} tokens, fewer than one window of {length}"
        )
    return [
        _window(ids[at : at + length], seed, tokenizer)
        for at in _starts(len(ids), length, count, seed)
    ]


def score(sample: Sample, nats: float) -> float:
    """Bits per byte of the summed loss (nats) of every token but the first, which has no past."""
    return nats / log(2) / sum(sample.token_bytes[1:])


def _starts(total: int, length: int, count: int, seed: int) -> list[int]:
    slack = total - count * length
    if slack < 0:
        # they cannot all be disjoint: spread them evenly, first to last
        return [i * (total - length) // max(count - 1, 1) for i in range(count)]
    rng = stream("perplexity", seed, count)
    # sorted gaps before windows laid end to end: uniform over all disjoint placements
    return [
        i * length + gap for i, gap in enumerate(sorted(rng.choices(range(slack + 1), k=count)))
    ]


def _window(ids: list[int], seed: int, tokenizer: Tokenizer) -> Sample:
    counts = byte_counts(tokenizer, ids)
    return Sample(
        prompt=tokenizer.decode(ids),
        answers=(),
        tokens=len(ids),
        max_new_tokens=0,
        depth=None,
        seed=seed,
        dialect="text",
        ids=tuple(ids),
        token_bytes=tuple(counts),
        bytes=sum(counts),
    )
