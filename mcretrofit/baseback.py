"""The way back: the checkpoint that a wrapped or an exported folder was made from, unmodified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from mcretrofit import registry
from mcretrofit._shards import Stored, write_weights
from mcretrofit.atomic import write_atomic_folder
from mcretrofit.beside import carried
from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.decoder import DecoderConfig
from mcretrofit.errors import RetrofitError
from mcretrofit.tensorfile import DTYPES
from mcretrofit.wrapped import base_of, check_base, is_wrapped, read

SHARD = 5_000_000_000
_ADDED = ("auto_map", "caching", "covers")


def write_base(
    place: str | Path, target: Path, *, config: str | Path | None = None, force: bool = False
) -> Path:
    """Write the base into `target`, weights byte for byte where its files still exist.

    An exported folder holds its base's tensors bit for bit; they get the family's own configuration.
    Raises `RetrofitError`, also where the base is no longer what was wrapped.
    """
    if is_wrapped(place):
        kept = read(place)
        checkpoint = base_of(kept)
        check_base(kept, checkpoint)
        config = kept.base.get("config") or config
    else:
        checkpoint = open_checkpoint(place, config)
    sources = [place, checkpoint.path, *checkpoint.files()]
    with write_atomic_folder(Path(target), force=force, sources=sources) as folder:
        for name, file in carried(checkpoint).items():
            shutil.copyfile(file, folder / name)
        if checkpoint.config.get("caching") is None:
            _copy(checkpoint, folder, config)
        else:
            _without_gates(checkpoint, folder)
    return Path(target)


def _copy(checkpoint: Checkpoint, folder: Path, config: str | Path | None) -> None:
    files = checkpoint.files()
    beside = files[0].parent
    settings = beside / "config.json" if config is None else Path(config).expanduser()
    settings = settings / "config.json" if settings.is_dir() else settings
    if settings.is_file():
        shutil.copyfile(settings, folder / "config.json")
    listed = [index for index in beside.glob("*.index.json") if len(files) > 1]
    for file in (*files, *listed):
        shutil.copyfile(file, folder / file.name)


def _without_gates(checkpoint: Checkpoint, folder: Path) -> None:
    fields = {name: v for name, v in checkpoint.config.items() if name not in _ADDED}
    # transformers' own classes kept their configuration, our decoder has its own
    if fields.get("model_type") == DecoderConfig.model_type:
        family = fields.pop("family", None)
        if not isinstance(family, str):
            raise RetrofitError(f"{checkpoint.path}: config.json names no family")
        fields["model_type"] = registry.load("models", family).MODEL_TYPES[0]
        fields.pop("architectures", None)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = {name: _stored(checkpoint, name) for name in checkpoint.names() if ".mc." not in name}
    write_weights(folder, tensors, SHARD)


def _stored(checkpoint: Checkpoint, name: str) -> Stored:
    dtype = getattr(torch, DTYPES[checkpoint.dtype(name)][0])
    return Stored(checkpoint.shape(name), dtype, lambda: checkpoint.pieces(name))
