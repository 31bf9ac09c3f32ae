"""Training sequences: prose with needles, key-value lines and repeated passages, from a text folder.

The sentences are those of the compact dialect (`tasks/_recall.py`), so that what a model learns is what
the probes ask. A sequence is `(ids [length + 1], weights [length])`; what cannot be foreseen weighs little.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mcretrofit.errors import RetrofitError
from mcretrofit.tasks import _recall as recall
from mcretrofit.tasks._haystack import NOISE

FIRST = 0.1  # loss weight of what nobody could foresee: needles and questions
# tokens of their own for keys and values: recall that a model of two narrow layers learns in seconds
KEYS = [f"<key {i}>" for i in range(128)]
VALUES = [f"<value {i}>" for i in range(32)]
APART = 8  # tokens of a sequence for each fact of `symbols`


class Piece(NamedTuple):
    """Token ids and the loss weight of each."""

    ids: list[int]
    weight: float


class Corpus(NamedTuple):
    """Token streams of the prose and where their sentences end."""

    streams: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    encode: Callable[[str], list[int]]


def read_text(folder: str | Path) -> list[str]:
    """Every `.txt` of a folder (or the one file), sorted by name; raises for what is not UTF-8."""
    folder = Path(folder)
    if not folder.exists():
        raise RetrofitError(f"{folder}: no such file or folder of text")
    files = sorted(folder.rglob("*.txt")) if folder.is_dir() else [folder]
    files = [f for f in files if f.is_file()]
    if not files:
        raise RetrofitError(f"{folder}: no text to train on (a .txt file or a folder of them)")
    return [_utf8(file) for file in files]


def _utf8(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RetrofitError(f"{file}: {reason.lower()}") from error


def corpus(texts: list[str], encode: Callable[[str], list[int]]) -> Corpus:
    """The texts as they are, joined to one line, and the noise haystack, as token streams."""
    joined = [" ".join(t.split()) for t in texts]
    noise = "\n".join([NOISE] * 400)
    streams = [
        np.concatenate([np.asarray(encode(t), np.int32) for t in ts]) for ts in (texts, joined)
    ]
    streams.append(np.asarray(encode(noise), np.int32))
    ends = [np.flatnonzero(s == encode(".")[0]) + 1 for s in streams]
    return Corpus(tuple(streams), tuple(ends), encode)


def train_tokenizer(texts: list[str], vocab_size: int, seed: int, symbols: bool = False):
    """A byte-level BPE whose digits stand alone, over the texts and the probes' sentences.

    With `symbols` it also has every one of KEYS and VALUES as one token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(seed)
    keys = [recall.compact_keys(rng, 1)[0] for _ in range(100_000)]
    said = "".join(f" {recall.needle(k, '0')}\n{recall.pair_line(k, '0')}\n" for k in keys)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", *(KEYS + VALUES if symbols else ())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, said], trainer)
    return tokenizer


def sequence(corpus: Corpus, kind: str, length: int, answer: float, rng: random.Random):
    """One training sequence of one of `KINDS`."""
    inserted, final = KINDS[kind](corpus.encode, answer, length, rng)
    room = length + 1 - sum(len(p.ids) for p in (*inserted, *final))
    which = 2 if kind == "needles" and rng.random() < 0.1 else rng.randrange(2)
    stream, ends = corpus.streams[which], corpus.ends[which]
    start = rng.randrange(len(stream) - room)
    prose = stream[start : start + room].tolist()
    if kind == "copy":
        prose = _repeat(prose, rng)
    cuts = [int(e) - start for e in ends[np.searchsorted(ends, start) :][:400] if e < start + room]
    pieces = _insert(prose, cuts, inserted, rng) + list(final)
    ids = [i for p in pieces for i in p.ids]
    weights = [p.weight for p in pieces for _ in p.ids]
    return ids[: length + 1], weights[1 : length + 1]


def _insert(
    prose: list[int], cuts: list[int], inserted: list[Piece], rng: random.Random
) -> list[Piece]:
    spots = sorted(rng.choice(cuts) if cuts else rng.randrange(len(prose)) for _ in inserted)
    pieces, at = [], 0
    for spot, piece in zip(spots, inserted, strict=True):
        pieces += [Piece(prose[at:spot], 1.0), piece]
        at = spot
    return [*pieces, Piece(prose[at:], 1.0)]


def _repeat(prose: list[int], rng: random.Random) -> list[int]:
    size = rng.randrange(16, min(96, len(prose) // 4))
    source = rng.randrange(len(prose) - 2 * size)
    target = rng.randrange(source + size, len(prose) - size)
    return prose[:target] + prose[source : source + size] + prose[target + size :]


def _needles(encode: Callable, answer: float, length: int, rng: random.Random):
    room = length // 32
    count = min(rng.choice((0, 1, 1, 2, 2, 4, 6)), max(1, length // 40))
    facts = _facts(count, rng)
    inserted = [Piece(encode(" " + recall.needle(*fact)), FIRST) for fact in facts]
    final = []
    for key, value in _asked(facts, min(12, room), rng):
        final += _answered(encode, " " + recall.stem(key), value, answer, ".")
    return inserted, final


def _pairs(encode: Callable, answer: float, length: int, rng: random.Random):
    room = length // 20
    facts = _facts(min(rng.choice((1, 2, 4, 4, 6, 8, 12)), max(1, length // 28)), rng)
    inserted = [Piece(encode("\n" + recall.pair_line(*fact) + "\n"), FIRST) for fact in facts]
    final = [Piece(encode("\n"), 1.0)]
    for key, value in _asked(facts, min(24, room), rng):
        final += _answered(encode, recall.pair_stem(key), value, answer, "\n")
    return inserted, final


def _symbols(encode: Callable, answer: float, length: int, rng: random.Random):
    """A fact for every `APART` tokens, keys and values being tokens, and each asked for once."""
    count = min(length // APART, len(KEYS))
    facts = list(zip(rng.sample(KEYS, count), rng.choices(VALUES, k=count), strict=True))
    inserted = [Piece(encode(key + value), FIRST) for key, value in facts]
    final = []
    for key, value in rng.sample(facts, count):
        final += [Piece(encode(key), FIRST), Piece(encode(value), answer)]
    return inserted, final


def _facts(count: int, rng: random.Random) -> list[tuple[str, str]]:
    return [(key, recall.compact_value(rng)) for key in recall.compact_keys(rng, count)]


def _asked(facts: list[tuple[str, str]], count: int, rng: random.Random) -> list[tuple[str, str]]:
    """`count` questions: every fact once in random order, then some again."""
    asked = rng.sample(facts, len(facts))
    return (asked + rng.choices(facts, k=count))[:count] if facts else []


def _answered(encode: Callable, stem: str, value: str, answer: float, end: str) -> list[Piece]:
    """A question, the space and digits of its answer, and what ends the sentence."""
    parts = ((stem, FIRST), (" ", 1.0), (value, answer), (end, 1.0))
    return [Piece(encode(text), weight) for text, weight in parts]


def _nothing(encode: Callable, answer: float, length: int, rng: random.Random):
    return [], []


KINDS = {
    "needles": _needles,
    "pairs": _pairs,
    "symbols": _symbols,
    "copy": _nothing,
    "prose": _nothing,
}
