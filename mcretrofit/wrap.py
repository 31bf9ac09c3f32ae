"""Wrap a checkpoint: check it, choose and measure its heads on text, write the folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mcretrofit.atomic import check_target
from mcretrofit.calibrate import Calibration, Head, shipped_text
from mcretrofit.cards import wrapped_card
from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.choices import Choice, told
from mcretrofit.config import CachingConfig
from mcretrofit.costs import of_networks, too_long
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.model import Loaded, calibrated, load
from mcretrofit.skeleton import Skeleton, skeleton
from mcretrofit.wrapped import is_wrapped, write

if TYPE_CHECKING:
    from mcretrofit.search import Outcome


LONGEST = 16384  # tokens of a planted sequence unless said


class Search(NamedTuple):
    """How a search plants its facts."""

    length: int | None = None  # tokens; eight times the trained length by default
    count: int = 4
    pairs: int = 16
    tick: Callable[[str], None] = lambda _: None
    megabytes: float | None = None  # the most that caching may hold at that length
    milliseconds: float | None = None  # the most that it may add to a decoding step


class Wrapping(NamedTuple):
    """What was wrapped, and what a person should know of it."""

    folder: Path
    family: str
    layers: int
    wrapped: int | None  # mixers with a cached head, None where they are chosen on loading
    mixers: int
    heads: list[Head]  # none without calibration
    warnings: list[str]
    found: Outcome | None = None  # what a search on planted facts chose

    @property
    def summary(self) -> str:
        """`wrapped n of m layers`."""
        if self.wrapped is None:
            return f"wrapped {self.mixers} of {self.layers} layers, heads not chosen yet"
        return f"wrapped {self.wrapped} of {self.layers} layers"


def wrap(
    model: str | Path,
    target: Path,
    caching: CachingConfig,
    *,
    config: Path | None = None,
    text: str | None = None,
    calibrate: bool = True,
    search: Search | None = None,
    force: bool = False,
) -> Wrapping:
    """Write the wrapped folder `target`; the base is named in it and never copied.

    Without `calibrate` only headers are read; `search` chooses heads, scores and thresholds by
    planted facts. Raises `RetrofitError`, nothing half-written.
    """
    if os.path.lexists(target) and not force:
        raise RetrofitError(f"{target} exists: --force replaces it, --out writes to another folder")
    check_target(Path(target), force)
    if is_wrapped(model):
        raise UsageError(f"{model} is a wrapped folder already: wrap the checkpoint that it names")
    checkpoint = open_checkpoint(model, config)
    if checkpoint.config.get("caching") is not None:
        raise UsageError(f"{model} is an exported folder with caching in it: wrap its base")
    bones = skeleton(checkpoint)
    loaded = load(model, config=config) if calibrate else None
    made = None if loaded is None else calibrated(loaded, caching, text)
    found = None if search is None or loaded is None else searched(loaded, caching, text, search)
    if found is not None:
        made, caching = _chosen(made, found), found.config
    done = _told(Path(target), caching, bones, made)
    if done.wrapped != 0:
        done.warnings.extend(of_networks(bones, caching))
    done = done._replace(found=found)
    write(
        done.folder,
        caching,
        checkpoint,
        None if made is None else made.covers,
        _reasons(made),
        wrapped_card(_name(checkpoint), bones.family, caching, done.summary, done.heads),
        model_config=None if config is None else str(config),
        full_hash=calibrate,
        force=force,
    )
    return done


def searched(loaded: Loaded, caching: CachingConfig, text: str | None, search: Search) -> Outcome:
    """Search settings for a bare model on planted facts."""
    from mcretrofit.budget import Budget
    from mcretrofit.search import Searcher

    trained = loaded.trained_length or 4 * caching.segment
    length = search.length or min(max(8 * trained, 8 * caching.segment), LONGEST)
    return Searcher(
        loaded.model,
        loaded.tokenizer(),
        shipped_text() if text is None else text,
        caching,
        length=length,
        near=max(trained, 2 * caching.segment),
        count=search.count,
        pairs=search.pairs,
        budget=Budget(search.megabytes, search.milliseconds),
        tick=search.tick,
    ).search()


def _chosen(made: Calibration, found: Outcome) -> Calibration:
    """The calibration with the heads that the search took."""
    chosen = {(c.mixer, c.head): c for c in found.choices}
    heads = [
        head
        if (choice := chosen.get((head.mixer, head.head))) is None
        else head._replace(cached=choice.used, why=_why(choice))
        for head in made.heads
    ]
    return Calibration(found.covers, heads)


def _why(choice: Choice) -> str:
    return f"{choice.why}: {told(choice)}" if choice.used else choice.why


def _told(
    target: Path, caching: CachingConfig, bones: Skeleton, made: Calibration | None
) -> Wrapping:
    mixers = len(bones.mixers)
    if made is None:
        widths = {m.name: [m.keys] for m in bones.mixers}
        unknown = "the mean and spread of their scores"
        if caching.heads == "slow":
            unknown = f"which heads forget slowly enough to be cached, and {unknown}"
        notes = [f"not calibrated: {unknown} are unknown; the first load measures them, in memory"]
        return Wrapping(
            target, bones.family, bones.layers, None, mixers, [], _some(notes, caching, widths)
        )
    widths = {name: cover.mask.sum(1).int().tolist() for name, cover in made.covers.items()}
    count = sum(bool(cover.heads) for cover in made.covers.values())
    notes = [] if count else [nothing(caching)]
    return Wrapping(
        target, bones.family, bones.layers, count, mixers, made.heads, _some(notes, caching, widths)
    )


def nothing(caching: CachingConfig) -> str:
    """What to say where no head qualifies."""
    return (
        f"no head forgets slowly enough (time constant above {caching.tau:g} tokens): caching "
        "would do nothing here, the model computes what its base does (a lower --tau or "
        "--heads all caches anyway)"
    )


def _some(notes: list[str], caching: CachingConfig, widths: dict[str, Sequence[int]]) -> list[str]:
    warning = too_long(caching, widths)
    return notes if warning is None else [*notes, warning]


def _reasons(made: Calibration | None) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for head in [] if made is None else made.heads:
        reasons.setdefault(head.mixer, []).append(head.why)
    return reasons


def _name(checkpoint: Checkpoint) -> str:
    path = Path(checkpoint.path)
    return path.resolve().name if path.exists() else checkpoint.path
