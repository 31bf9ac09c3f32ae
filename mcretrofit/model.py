"""From whatever a user names to a live model with its tokenizer and, where it is wrapped, its caching."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mcretrofit.calibrate import Calibration, calibrate, shipped_text
from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.config import CachingConfig, stored_config
from mcretrofit.errors import RetrofitError
from mcretrofit.exporting import restore_
from mcretrofit.loading import load_model
from mcretrofit.retrofit import Cover, plans, retrofit_
from mcretrofit.sources import hub_tokenizer
from mcretrofit.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from mcretrofit.wrapped import base_of, check_base, checked_hash, is_wrapped, load_gates, read


class Loaded(NamedTuple):
    """A model ready to run. `config` is None where nothing is wrapped around it."""

    name: str
    model: nn.Module
    checkpoint: Checkpoint
    config: CachingConfig | None = None
    covers: dict[str, Cover] | None = None
    calibrated_now: bool = False  # the folder held no calibration: it was made on loading

    @property
    def wrapped(self) -> list[str]:
        """Names of the mixers that have a cached head."""
        return [n for n, c in (self.covers or {}).items() if c.heads]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights (bytes for a vocabulary of 256)."""
        return tokenizer_of(self.checkpoint, self.model)

    @property
    def trained_length(self) -> int | None:
        """Tokens that the model was trained at, where its configuration says so."""
        return getattr(self.model.config, "max_position_embeddings", None)


def load(
    model: str | Path,
    *,
    config: str | Path | None = None,
    caching: CachingConfig | None = None,
    text: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
) -> Loaded:
    """Load a checkpoint, a wrapped or an exported folder, a hub id or `builtin:NAME`.

    `caching` wraps the model in memory (calibrated on `text`, the shipped prose by default) or, for a
    wrapped folder, takes the place of its configuration. Raises `RetrofitError` with one clear line.
    """
    if is_wrapped(model):
        return _wrapped(Path(model), caching, text, dtype, device)
    checkpoint = open_checkpoint(model, config)
    loaded = Loaded(str(model), load_model(checkpoint, dtype, device), checkpoint)
    exported = checkpoint.config.get("caching")
    if exported is not None:
        return _exported(loaded, exported)
    return loaded if caching is None else attach(loaded, caching, text)


def attach(loaded: Loaded, caching: CachingConfig, text: str | None = None) -> Loaded:
    """Calibrate on text and wrap the live model."""
    made = calibrated(loaded, caching, text)
    if any(c.heads for c in made.covers.values()):
        retrofit_(loaded.model, caching, made.covers)
    return loaded._replace(config=caching, covers=made.covers)


def calibrated(loaded: Loaded, caching: CachingConfig, text: str | None = None) -> Calibration:
    """Measure the bare model's heads on text (a wrapped model has to be reverted first)."""
    ids = loaded.tokenizer().encode(shipped_text() if text is None else text)
    return calibrate(loaded.model, ids, caching)


def tokenizer_of(checkpoint: Checkpoint, model: nn.Module) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, or the one that its layout is known to go with."""
    place = checkpoint.folder
    if place is None and checkpoint.files():
        place = checkpoint.files()[0].parent
    usual = getattr(model.config, "tokenizer", None)
    if isinstance(usual, str) and (place is None or not has_tokenizer(place)):
        place = hub_tokenizer(usual)
    return load_tokenizer(place, model.config.vocab_size)


def _wrapped(
    folder: Path, caching: CachingConfig | None, text: str | None, dtype: str | None, device: str
) -> Loaded:
    kept = read(folder)
    checkpoint = base_of(kept)
    check_base(kept, checkpoint)
    if kept.base.get("sha256") is not None:
        checked_hash(kept, checkpoint)
    loaded = Loaded(str(folder), load_model(checkpoint, dtype, device), checkpoint)
    if caching is not None or kept.covers is None:
        made = attach(loaded, caching or kept.config, text)
        return made._replace(calibrated_now=True)
    if any(c.heads for c in kept.covers.values()):
        retrofit_(loaded.model, kept.config, kept.covers)
    load_gates(loaded.model, kept.gates)
    return loaded._replace(config=kept.config, covers=kept.covers)


def _exported(loaded: Loaded, stored: dict[str, Any]) -> Loaded:
    """An exported folder's model, wrapped as it was when it was exported."""
    config = stored_config(stored, f"{loaded.name}: config.json: caching")
    restore_(loaded.model, loaded.checkpoint)
    found = plans(loaded.model)
    if not found:
        raise RetrofitError(f"{loaded.name}: config.json names caching, but no mixer is wrapped")
    covers = {
        n: Cover(g.heads, p.total, g.mask, g.mean, g.std, g.whiten, p.each)
        for n, p, g in ((n, p, p.gate) for n, p in found.items())
    }
    return loaded._replace(config=config, covers=covers)
