"""Training sequences for gates: prose with facts planted at many distances from their questions.

Sentences are those of the compact dialect (`tasks/_recall.py`). A fact is stated once and asked once:
at the end of the text, or anywhere after it. What cannot be foreseen weighs little, answers weigh more
than prose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.tasks import _recall as recall
from mcretrofit.tasks._fit import check_spelling
from mcretrofit.tasks._haystack import NOISE
from mcretrofit.tokenizer import Tokenizer

FIRST = 0.1  # loss weight of what nobody could foresee: facts and questions
NOISY = 0.2  # share of the needles that lie in the noise haystack
LAST = 0.75  # share of the questions that come at the end of the text
APART = 40  # tokens of text to a fact, at least
MOST = 0.75  # of a sequence may be facts and questions
COUNTS = {"needles": (1, 2, 4, 8), "pairs": (1, 2, 4, 8, 16, 24, 32), "prose": (0,)}
FACTS = 8  # of a sequence at most, unless said
KINDS = tuple(COUNTS)
LEAST = 64  # tokens of text that are worth cutting


class Row(NamedTuple):
    """Token ids, the loss weight of each, and `[start, stop)` of the answers."""

    ids: list[int]
    weights: list[float]
    answers: list[tuple[int, int]]


class Piece(NamedTuple):
    """Token ids that go in at a place of the text: what is said, its answer, what ends it."""

    place: float  # in [0, 1], of the text
    said: list[int]
    answer: list[int]
    end: list[int]

    @property
    def size(self) -> int:
        return len(self.said) + len(self.answer) + len(self.end)


class Feed:
    """Sequence `number` of a stream; it hangs on the seed and the number alone."""

    def __init__(
        self, tokenizer: Tokenizer, text: str, answer_weight: float, seed: int, facts: int = FACTS
    ) -> None:
        self.tokenizer, self.weight, self.seed = tokenizer, answer_weight, seed
        self.most = facts
        self.texts = [tokenizer.encode(text), tokenizer.encode("\n".join([NOISE] * 100))]
        if len(self.texts[0]) < LEAST:
            raise RetrofitError(
                f"the data has {len(self.texts[0])} tokens here, too few to plant facts in: "
                "give more text (--data)"
            )
        # where a word starts: a fact in the middle of one would be in no text
        self.starts = [
            [i for i, token in enumerate(ids) if tokenizer.decode([token])[:1].isspace()]
            for ids in self.texts
        ]
        check_spelling("tune", tokenizer, recall.pair_line("red apple", "824"))

    def row(self, number: int, length: int, mix: Mapping[str, float]) -> Row:
        """Sequence `number` of `length + 1` tokens, of a kind that `mix` weighs.

        Raises `UsageError` where not one fact and its question fit.
        """
        rng = Random(f"tune/{self.seed}/{number}")
        kind = rng.choices(list(mix), list(mix.values()))[0]
        most = min(self.most, length // APART)
        counts = [c for c in COUNTS[kind] if c <= most] or [1]
        facts = self._facts(kind, rng.choice(counts), rng)
        room = int(MOST * (length + 1))
        if facts and sum(p.size for p in facts[0]) > room:
            least = int(sum(p.size for p in facts[0]) / MOST) + 1
            raise UsageError(f"--length {length}: a fact and its question need at least {least}")
        pieces: list[Piece] = []
        for fact in facts:
            if sum(p.size for p in (*pieces, *fact)) <= room:
                pieces += fact
        noisy = kind == "needles" and rng.random() < NOISY
        return self._laid(sorted(pieces), noisy, length + 1, rng)

    def _facts(self, kind: str, count: int, rng: Random) -> list[tuple[Piece, Piece]]:
        """Facts with their questions."""
        values = map(str, rng.sample(range(100, 1000), count))
        keys = recall.compact_keys(rng, count)
        return [self._fact(kind, *pair, rng) for pair in zip(keys, values, strict=True)]

    def _fact(self, kind: str, key: str, value: str, rng: Random) -> tuple[Piece, Piece]:
        first = rng.random()
        later = 1.0 if rng.random() < LAST else rng.uniform(first, 1.0)
        if kind == "needles":
            texts = (f" {recall.needle(key, value)}", f" {recall.stem(key)}", f" {value}", ".")
        else:
            line, stem = recall.pair_line(key, value), recall.pair_stem(key)
            texts = (f"\n{line}\n", f"\n{stem}", f" {value}", "\n")
        said, *question = map(self.tokenizer.encode, texts)
        return Piece(first, said, [], []), Piece(later, *question)

    def _laid(self, pieces: list[Piece], which: int, room: int, rng: Random) -> Row:
        """The pieces in a stretch of a text, which starts over where it is too short."""
        text, starts = self.texts[which], self.starts[which]
        prose = room - sum(p.size for p in pieces)
        start, at = rng.randrange(len(text)), 0
        row = Row([], [], [])

        def add(more: list[int], weight: float) -> None:
            row.ids.extend(more)
            row.weights.extend([weight] * len(more))

        for place, said, answer, end in [*pieces, Piece(1.0, [], [], [])]:
            until = max(at, round(place * prose))
            if starts and until < prose:
                # the word that starts here or, in the text's next round, the first one
                there = (start + until) % len(text)
                word = bisect_left(starts, there)
                ahead = (
                    starts[word] - there if word < len(starts) else len(text) - there + starts[0]
                )
                until = min(until + ahead, prose)
            add([text[(start + i) % len(text)] for i in range(at, until)], 1.0)
            at = until
            add(said, FIRST)
            if answer:
                row.answers.append((len(row.ids), len(row.ids) + len(answer)))
            add(answer, self.weight)
            add(end, 1.0)
        return row
