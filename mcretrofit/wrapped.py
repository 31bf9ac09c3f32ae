"""The folder that `wrap` writes: caching.json, calibration and gate tensors, never a base tensor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mcretrofit import __version__
from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.config import CachingConfig, stored_config
from mcretrofit.each import check_each
from mcretrofit.errors import RetrofitError
from mcretrofit.gates import Gate
from mcretrofit.rawfile import read_json
from mcretrofit.retrofit import Cover
from mcretrofit.tensorfile import (
    read_header,
    read_tensor,
    write_atomic_folder,
    write_safetensors,
)

FORMAT = 1
NAME = "caching.json"


class Wrapped(NamedTuple):
    """A wrapped folder as read: `covers` is None where nothing was calibrated."""

    folder: Path
    base: dict[str, Any]
    config: CachingConfig
    covers: dict[str, Cover] | None
    gates: dict[str, torch.Tensor]


def sizes(cover: Cover) -> dict[str, Any]:
    """What a file says of a cover besides its tensors."""
    each = {"each": cover.each} if cover.each else {}
    return {"heads": cover.heads, "total": cover.total, "keys": cover.mask.shape[1], **each}


def check_heads(layer: dict[str, Any], where: str) -> None:
    """Refuse heads that are not distinct ones of a mixer's `total`."""
    heads, total = layer["heads"], layer["total"]
    known = isinstance(heads, list) and type(total) is int
    if not known or not all(type(h) is int and 0 <= h < total for h in heads):
        raise RetrofitError(f"{where}: heads has to list numbers from 0 on, below its total")
    if len(set(heads)) < len(heads):
        raise RetrofitError(f"{where}: heads names one twice")


def is_wrapped(path: str | Path) -> bool:
    """Whether a path is a folder that `wrap` wrote."""
    return (Path(path) / NAME).is_file()


def write(
    target: Path,
    config: CachingConfig,
    checkpoint: Checkpoint,
    covers: dict[str, Cover] | None,
    reasons: dict[str, list[str]],
    card: str,
    *,
    model_config: str | None = None,
    gates: dict[str, torch.Tensor] | None = None,
    full_hash: bool = True,
    force: bool = False,
) -> Path:
    """Write the folder atomically. `reasons` says of every head why it is cached or not."""
    local = Path(checkpoint.path).exists()
    base = {
        "path": str(Path(checkpoint.path).resolve()) if local else checkpoint.path,
        "config": None if model_config is None else str(Path(model_config).resolve()),
        "revision": checkpoint.revision,
        "fingerprint": checkpoint.fingerprint(),
        "sha256": checkpoint.sha256() if full_hash else None,
    }
    layers = {name: {**sizes(c), "why": reasons[name]} for name, c in (covers or {}).items()}
    stored = {
        "format": FORMAT,
        "mcretrofit": __version__,
        "base": base,
        "caching": asdict(config),
        "calibrated": covers is not None,
        "layers": layers,
    }
    with write_atomic_folder(target, force=force, sources=[checkpoint.path]) as folder:
        (folder / NAME).write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")
        if covers is not None:
            write_safetensors(folder / "calibration.safetensors", _tensors(covers))
        if gates:
            write_safetensors(folder / "gates.safetensors", gates)
    return target


def read(path: str | Path) -> Wrapped:
    """Read a wrapped folder strictly; raises `RetrofitError` naming what does not fit."""
    folder = Path(path)
    stored = read_json(folder / NAME)
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        found = stored.get("format") if isinstance(stored, dict) else None
        raise RetrofitError(
            f"{folder / NAME}: format {found!r}, this version reads {FORMAT}; wrap the model again"
        )
    try:
        config = stored_config(stored["caching"], str(folder / NAME))
        base, layers, calibrated = stored["base"], stored["layers"], stored["calibrated"]
        told = (base.get(name) or "" for name in ("config", "revision", "sha256"))
        if not all(isinstance(text, str) and text.isprintable() for text in (base["path"], *told)):
            raise TypeError("base: its path, config, revision and sha256 have to be texts")
        if not isinstance(calibrated, bool):
            raise TypeError("calibrated has to be true or false")
        covers = _covers(folder, layers) if calibrated else None
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RetrofitError(f"{folder / NAME}: damaged ({reason}); wrap the model again") from error
    gates = {}
    if (folder / "gates.safetensors").exists():
        gates = {n: read_tensor(i) for n, i in read_header(folder / "gates.safetensors").items()}
    return Wrapped(folder, base, config, covers, gates)


def base_name(kept: Wrapped) -> str:
    """What a wrapped folder names as its base, at the revision that it was made from."""
    base, revision = kept.base["path"], kept.base.get("revision")
    if Path(base).exists():
        return base
    if Path(base).is_absolute():
        raise RetrofitError(
            f"{kept.folder}: its base {base} is not there: put it back, or wrap it where it is now"
        )
    return f"{base.split('@')[0]}@{revision}" if revision else base


def base_of(kept: Wrapped) -> Checkpoint:
    """The checkpoint that a wrapped folder names."""
    return open_checkpoint(base_name(kept), kept.base.get("config"))


def check_base(wrapped: Wrapped, checkpoint: Checkpoint) -> None:
    """Refuse a base whose files are not those that were wrapped."""
    if checkpoint.fingerprint() != wrapped.base.get("fingerprint"):
        raise RetrofitError(
            f"{checkpoint.path}: its tensors are not those that {wrapped.folder} was made from; "
            "wrap it again, or put the old file back"
        )


def checked_hash(kept: Wrapped, checkpoint: Checkpoint) -> str:
    """The SHA-256 of the base on disk; raises where it is not the one that was wrapped."""
    found, stored = checkpoint.sha256(), kept.base.get("sha256")
    if stored is not None and stored != found:
        raise RetrofitError(
            f"{checkpoint.path}: the base changed since {kept.folder} was made: its sha256 "
            f"is {found[:16]}..., not {stored[:16]}...; put the old file back or wrap it again"
        )
    return found


def content(folder: Path) -> str:
    """A digest of what the folder adds to its base: settings, calibration and gates."""
    files = [folder / name for name in (NAME, "calibration.safetensors", "gates.safetensors")]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files if f.exists())).hexdigest()


def load_gates(model: nn.Module, gates: dict[str, torch.Tensor]) -> None:
    """Trained gate tensors (`<mixer>.mc.weight`, `.bias`) into a wrapped model."""
    places = {
        f"{name}.mc.{p}": value
        for name, module in model.named_modules()
        if isinstance(getattr(module, "mc", None), Gate)
        for p, value in module.mc.named_parameters()
    }
    strange = set(gates) - set(places)
    if strange:
        raise RetrofitError(f"gates.safetensors: {sorted(strange)[0]!r} has no place in this model")
    with torch.no_grad():
        for name, value in gates.items():
            if places[name].shape != value.shape:
                raise RetrofitError(
                    f"gates.safetensors: {name} is {list(value.shape)}, not {list(places[name].shape)}"
                )
            places[name].copy_(value)


def _tensors(covers: dict[str, Cover]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{field}": getattr(cover, field)
        for name, cover in covers.items()
        for field in ("mask", "mean", "std", "whiten")
        if getattr(cover, field) is not None
    }


def _covers(folder: Path, layers: dict[str, Any]) -> dict[str, Cover]:
    header = read_header(folder / "calibration.safetensors")
    covers = {}
    for name, layer in layers.items():
        check_heads(layer, f"{folder / NAME}: {name}")
        have = {
            field: read_tensor(header[f"{name}.{field}"])
            for field in ("mask", "mean", "std", "whiten")
            if f"{name}.{field}" in header
        }
        heads, keys = len(layer["heads"]), layer["keys"]
        sizes = {
            "mask": [heads, keys],
            "mean": [heads],
            "std": [heads],
            "whiten": [heads, keys, keys],
        }
        for field, tensor in have.items():
            fits = list(tensor.shape) == sizes[field]
            if not fits or not tensor.isfinite().all():
                raise RetrofitError(
                    f"{folder / 'calibration.safetensors'}: {name}.{field} "
                    f"{'is not finite' if fits else 'does not fit caching.json'}; wrap the model again"
                )
        each = layer.get("each")
        check_each(each, len(layer["heads"]), f"{folder / NAME}: {name}")
        covers[name] = Cover(layer["heads"], layer["total"], **have, each=each)
    return covers
