"""Tune a wrapped checkpoint: train its gates, confirm them on other facts, write the folder.

The base is frozen, and hashed before and after. Gates that are not confirmed are not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.atomic import check_target
from mcretrofit.calibrate import shipped_text, windows
from mcretrofit.config import TRAINED_RANK, CachingConfig
from mcretrofit.confirm import Confirmed, card, confirm
from mcretrofit.corpus import read_text
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.frozen import base_hash, parameters
from mcretrofit.heldout import Judge, judge
from mcretrofit.model import Loaded, load
from mcretrofit.ranks import World, joined, own_device
from mcretrofit.retrofit import retrofit_, revert_
from mcretrofit.settings import settings
from mcretrofit.training import Trained, Trainer
from mcretrofit.tunedata import Feed
from mcretrofit.tunefolder import write_tuned
from mcretrofit.tunelog import draw, refuse_other
from mcretrofit.tuning import DTYPES, Tuning
from mcretrofit.wrap import wrap
from mcretrofit.wrapped import checked_hash, is_wrapped, read

HELD = 5  # one part of so many of the text is held out
PROSE = 8192  # tokens of held-out windows at most
CONFIRM = 100_000  # held-out sequences from here on are those that confirm


class Tuned(NamedTuple):
    """What came of it; `folder` holds trained gates where `kept`."""

    folder: Path
    run: Path
    trained: Trained
    confirmed: Confirmed | None
    kept: bool
    why: str
    sha256: str
    notes: list[str]


class Places(NamedTuple):
    """The folder to read, the one to write, and that of the run."""

    source: Path
    target: Path
    run: Path


def tune(
    model: str | Path,
    tuning: Tuning,
    *,
    flags: Mapping[str, Any] | None = None,
    run: Path | None = None,
    config: Path | None = None,
    device: str = "cpu",
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
    tick: Callable[[int, dict], None] = lambda *_: None,
) -> Tuned:
    """Train the gates of a model (wrapped first where it is not) and write the folder with them.

    `flags` are caching settings. Raises `RetrofitError`, one line; what was written stays whole.
    """
    text = shipped_text() if tuning.data is None else "\n".join(read_text(tuning.data))
    chosen = {**tuning.caching, **(flags or {})}
    if not chosen.get("gate", True):
        raise UsageError("gate false: what tune trains is the gate (wrap makes a folder without)")
    with joined(device) as world:
        places = _places(model, tuning, run, chosen, config, force, world)
        loaded = _gated(places, tuning, chosen, own_device(device))
        kept = read(places.source)
        before = checked_hash(kept, loaded.checkpoint)
        inside = base_hash(loaded.model)
        for line in parameters(loaded.model, loaded.config.rank):
            say(line)
        trainer, feed, held, length = _made(loaded, tuning, text, places.run, before, world)
        trained = trainer.train(feed, held(0, 1), length, tick)
        confirmed = confirm(loaded.model, trainer, trained, held(CONFIRM, 2), tuning.prose_limit)
        if base_hash(loaded.model) != inside or loaded.checkpoint.sha256() != before:
            raise RetrofitError(
                f"{loaded.checkpoint.path}: the base changed while its gates were trained (sha256 "
                f"was {before}): nothing was written"
            )
        why = "no check was better than the start" if confirmed is None else confirmed.harm
        done = Tuned(places.target, places.run, trained, confirmed, not why, why, before, [])
        if world.first:
            said = card(confirmed, trained.best.step, before) if done.kept else ""
            write_tuned(places.target, kept, loaded, said, trained.gates if done.kept else {})
            left_out = draw(places.run)
            done.notes.extend([] if left_out is None else [left_out])
        world.wait()
    return done


def _places(
    model: str | Path,
    tuning: Tuning,
    run: Path | None,
    chosen: Mapping[str, Any],
    config: Path | None,
    force: bool,
    world: World,
) -> Places:
    """Where everything lies; a plain checkpoint is wrapped in the run's folder."""
    wrapped = is_wrapped(model)
    target = Path(tuning.out or (model if wrapped else "retrofit"))
    run = Path("runs") / f"tune-{target.resolve().name}" if run is None else run
    itself = wrapped and target.resolve() == Path(model).resolve()
    if not force and not itself and target.exists():
        raise RetrofitError(f"{target} exists: --force replaces it, --out writes to another folder")
    if not itself:
        check_target(target, force)
    if not force and itself and read(model).gates:
        raise RetrofitError(
            f"{target} holds trained gates already: --force trains them anew, --out writes elsewhere"
        )
    source = Path(model) if wrapped else run / "wrapped"
    others = sorted(set(chosen) - {"rank", "gate"})
    if wrapped and others:
        raise UsageError(
            f"{model} keeps the {others[0]} that it was wrapped with: wrap its checkpoint anew"
        )
    if not wrapped:
        wanted = _plain(settings(None, None, chosen))
        if is_wrapped(source):
            _refuse_other_wrapping(run, source, model, wanted)
        elif world.first:
            run.mkdir(parents=True, exist_ok=True)
            wrap(model, source, wanted, config=config)
    world.wait()
    return Places(source, target, run)


def _refuse_other_wrapping(
    run: Path, source: Path, model: str | Path, wanted: CachingConfig
) -> None:
    kept = read(source)
    name = str(Path(model).resolve()) if Path(model).exists() else str(model)
    then, now = {"model": kept.base["path"]}, {"model": name}
    then |= {f"caching {name}": value for name, value in vars(kept.config).items()}
    now |= {f"caching {name}": value for name, value in vars(wanted).items()}
    refuse_other(run, then, now)


def _plain(caching: CachingConfig) -> CachingConfig:
    if not caching.routed:
        raise UsageError(
            f"variant {caching.variant} takes every segment alike: there is no gate to train "
            "(grm, soup, ssc and loglinear have one)"
        )
    return caching.replace(gate=False, rank=0)


def _gated(places: Places, tuning: Tuning, chosen: Mapping[str, Any], device: str) -> Loaded:
    """The wrapped model with fresh gates."""
    loaded = load(places.source, dtype=DTYPES[tuning.dtype], device=device)
    rank = settings(None, None, {"rank": TRAINED_RANK, **chosen}).rank
    if not loaded.wrapped:
        raise RetrofitError(
            f"no head of {places.source} is cached, so that there is no gate to train; its caching.json "
            "says why of each (`mcretrofit wrap --heads all` caches them anyway)"
        )
    caching = _plain(loaded.config).replace(gate=True, rank=rank)
    revert_(loaded.model)
    retrofit_(loaded.model, caching, loaded.covers)
    return loaded._replace(config=caching)


def _made(
    loaded: Loaded, tuning: Tuning, text: str, run: Path, base: str, world: World
) -> tuple[Trainer, Feed, Callable[[int, int], Judge], int]:
    """The trainer, its data, and held-out sequences from a number on, one or several times as many."""
    tokenizer, caching = loaded.tokenizer(), loaded.config
    length = tuning.tokens(caching.segment, loaded.trained_length)
    near = min(loaded.trained_length or 4 * caching.segment, length)
    cut = len(text) - len(text) // HELD
    said = (tuning.answer_weight, tuning.seed)
    feed = Feed(tokenizer, text[:cut], *said, tuning.facts)
    unseen = Feed(tokenizer, text[cut:], said[0], said[1] + 1, tuning.facts)
    prose = unseen.texts[0]
    if len(prose) < 2 * caching.segment:
        raise RetrofitError(
            f"a fifth of the data is held out, {len(prose)} tokens here: less than two segments of "
            f"{caching.segment}; give more text (--data)"
        )
    plain = windows(prose, caching.segment, PROSE)
    fixed = {
        "base": base,
        "a text whose sha256 begins": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
    fixed["cached heads"] = {name: cover.heads for name, cover in loaded.covers.items()}
    fixed |= {"processes": world.size, "length": length}
    fixed |= {n: v for n, v in tuning.fixed().items() if n != "length"}
    fixed |= {f"caching {name}": value for name, value in vars(caching).items()}
    run.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(loaded.model, tuning, run, fixed, world)
    return (
        trainer,
        feed,
        lambda first, times: judge(unseen, times * tuning.held_out, (length, near), plain, first),
        length,
    )
