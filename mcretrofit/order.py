"""Bases and variants trained from scratch side by side: does the order of the paper's tables come out?

A recipe names models, variants and which of them meet. Every cell is one short training on the same data
in the same order, then recall and prose on held-out text. Seeds are the outermost loop, so that a
run that was stopped early has the same number of seeds almost everywhere. A run folder is shared and
resumed as a sweep's is: `rows.jsonl`, claims, and for each cell the state and the losses of its training.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mcretrofit.config import from_mapping
from mcretrofit.corpus import Corpus, corpus, read_text, train_tokenizer
from mcretrofit.errors import RetrofitError, UsageError, unknown
from mcretrofit.ledger import Ledger
from mcretrofit.pretrain import fresh
from mcretrofit.recipe import Recipe, read_mapping
from mcretrofit.steps import batch, losses, train
from mcretrofit.together import attach_

HELD = 20  # one part of so many of every text is held out
# what is asked of a trained model: the kind of sequence, its metric and the name in `losses`
PROBES = {"symbols": ("accuracy", "answers"), "prose": ("nats_per_token", "prose")}
BATCH = 16  # sequences of a probe at once


@dataclass(frozen=True)
class Order:
    """A recipe (YAML). `train` is what all rows share (`recipe.Recipe`), `models` what each adds to it.

    `variants` are `caching` settings, None for no caching; `rows` lists `models` and `variants`, each of
    which meets each; `expected` are pairs of variants of which the first should recall more.
    """

    text: str
    train: dict
    models: dict
    variants: dict
    rows: list
    seeds: list = field(default_factory=lambda: [0, 1, 2])
    lengths: list = field(default_factory=lambda: [128, 256, 512])
    samples: int = 32
    expected: list = field(default_factory=list)

    def cells(self) -> Iterator[Cell]:
        """Every training, seed after seed; raises naming what does not fit."""
        for seed in self.seeds:
            for row in self.rows:
                for name in row["models"]:
                    for variant in row["variants"]:
                        yield self._cell(name, variant, seed)

    def _cell(self, name: str, variant: str, seed: int) -> Cell:
        if name not in self.models:
            raise unknown("model", str(name), self.models)
        if variant not in self.variants:
            raise unknown("variant", str(variant), self.variants)
        given = {"text": self.text, **self.train, **self.models[name], "seed": seed}
        caching = self.variants[variant]
        if caching is not None:
            given["caching"] = {**(given.get("caching") or {}), **caching}
        else:
            given.pop("caching", None)
        given["model"] = {**self.train.get("model", {}), **self.models[name].get("model", {})}
        recipe = from_mapping(Recipe, given, f"order: {name}, {variant}")
        return Cell(name, variant, recipe, identity(recipe))


class Cell(NamedTuple):
    """One training."""

    model: str
    variant: str
    recipe: Recipe
    id: str


def read_order(path: Path, **given: Any) -> Order:
    """The recipe of a YAML file, `given` winning over it; every cell is checked."""
    order = from_mapping(Order, read_mapping(path, given), str(path))
    for row in order.rows:
        if not isinstance(row, dict) or set(row) != {"models", "variants"}:
            raise UsageError(f"{path}: rows: {row!r} has to have models and variants, nothing else")
    if not list(order.cells()):
        raise UsageError(f"{path}: no rows to train")
    return order


def identity(recipe: Recipe) -> str:
    """A name for a training, the same wherever its text lies."""
    said = json.dumps(asdict(replace(recipe, text="")), sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def run(order: Order, folder: Path, tick: Callable[[Cell, list[dict]], None]) -> Path:
    """Train and measure every cell that `folder` has no rows of; another process may do the same.

    Raises `RetrofitError` for the first training that failed once all others are done.
    """
    ledger = Ledger(folder)
    texts = read_text(order.text)
    cells = list(order.cells())
    encode = _encoder(cells[0].recipe, texts, folder)
    data, held = (corpus(part, encode) for part in split(texts))
    failed: list[str] = []
    for cell in cells:
        wanted = {name: probe for probe in _probes(order) for name in [_row_id(cell, *probe)]}
        claim = None if wanted.keys() <= ledger.rows.keys() else ledger.claim(cell.id)
        if claim is None:
            tick(cell, [])
            continue
        try:
            rows = _measured(cell, wanted, order.samples, data, held, folder / "cells" / cell.id)
            tick(cell, [row for row in rows if ledger.append(row)])
        except RetrofitError as error:
            failed.append(f"{cell.model}, {cell.variant}, seed {cell.recipe.seed}: {error}")
        finally:
            claim.release()
    if failed:
        more = f" ({len(failed)} of {len(cells)} trainings failed)" if len(failed) > 1 else ""
        raise RetrofitError(failed[0] + more)
    return ledger.path


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """What is trained on, and the end of every text, which is not."""
    cuts = [len(text) - len(text) // HELD for text in texts]
    pairs = list(zip(texts, cuts, strict=True))
    return [text[:cut] for text, cut in pairs], [text[cut:] for text, cut in pairs]


def _probes(order: Order) -> list[tuple[str, int]]:
    return [(task, length) for task in PROBES for length in order.lengths]


def _row_id(cell: Cell, task: str, length: int) -> str:
    return f"{cell.id}-{task}-{length}"


def _encoder(recipe: Recipe, texts: list[str], folder: Path) -> Callable[[str], list[int]]:
    """One tokenizer for all cells, kept in the run folder."""
    from tokenizers import Tokenizer

    kept = folder / "tokenizer.json"
    if not kept.exists():
        made = train_tokenizer(split(texts)[0], recipe.vocab_size, 0, symbols=True)
        # another process may be about to read it
        partial = kept.with_suffix(f".{time.monotonic_ns()}")
        made.save(str(partial))
        partial.replace(kept)
    tokenizer = Tokenizer.from_file(str(kept))
    if tokenizer.get_vocab_size() > recipe.vocab_size:
        raise RetrofitError(
            f"{kept} has more tokens than the recipe's {recipe.vocab_size}: give another --out"
        )
    return lambda text: tokenizer.encode(text).ids


def _measured(
    cell: Cell,
    wanted: dict[str, tuple[str, int]],
    samples: int,
    data: Corpus,
    held: Corpus,
    place: Path,
) -> list[dict[str, Any]]:
    place.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    model = fresh(cell.recipe)
    if cell.recipe.cached is not None:
        attach_(model, cell.recipe.cached)
    train(model, cell.recipe, data, place / "leg-0.pt")
    spent = time.process_time() - started
    said = {"model": cell.model, "variant": cell.variant, "seed": cell.recipe.seed, "n": samples}
    said |= {"cell": cell.id, "parameters": sum(p.numel() for p in model.parameters())}
    said |= {"cpu_seconds": round(spent, 1), "verdict": "trained"}
    rows = []
    for name, (task, length) in wanted.items():
        metric, key = PROBES[task]
        score = _score(model.eval(), cell.recipe, held, task, length, samples)[key]
        rows.append({"id": name, "task": task, "length": length, "metric": metric, "score": score})
    (place / "leg-0.pt").unlink()
    return [{**row, **said} for row in rows]


@torch.no_grad()
def _score(
    model: torch.nn.Module, recipe: Recipe, held: Corpus, task: str, length: int, samples: int
) -> dict[str, float]:
    """Means over `samples` held-out sequences of `length` tokens, the same for every cell."""
    asked = replace(
        recipe, mix={task: 1}, length=length, batch=samples, stages=[], seed=1000, caching=None
    )
    ids, weights = batch(held, asked, 0)
    parts = zip(ids.split(BATCH), weights.split(BATCH), strict=True)
    found = [losses(model, *part)[1] for part in parts]
    return {name: sum(row[name] for row in found) / len(found) for name in found[0]}
