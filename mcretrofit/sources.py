"""From a MODEL argument to files: a folder, a file, an index, `builtin:NAME` or a hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.errors import RetrofitError, unknown
from mcretrofit.rawfile import file_size, read_json, show

_SAFE = (".safetensors",)
_PICKLED = (".pth", ".pt", ".bin")
_PREFERENCE = (
    (("model.safetensors", "model.safetensors.index.json"), _SAFE),
    (("pytorch_model.bin", "pytorch_model.bin.index.json"), _PICKLED),
)
_NOT_WEIGHTS = {
    *("calibration.safetensors", "gates.safetensors", "training_args.bin"),
    *("optimizer.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "tokenizer*"]
_HUB_PICKLED = [*_HUB_FILES, "pytorch_model*.bin"]
_HUB_TOKENIZER = ["tokenizer*", "special_tokens_map.json"]


class Source(NamedTuple):
    """Where the weights lie; `listed` is the index's promise: tensor name -> file name."""

    folder: Path | None
    weights: tuple[Path, ...]
    listed: dict[str, str]
    config: dict[str, Any]


def locate(model: str | Path, config: str | Path | None = None) -> Source:
    """Find a model's files without opening the weights; RetrofitError says what is missing."""
    place = _place(model)
    folder = place if place.is_dir() else place.parent
    weights = _weights_in(place) if place.is_dir() else place
    beside = folder / "config.json"
    chosen = _config_file(config) if config is not None else beside
    settings = read_json(chosen) if config is not None or os.path.lexists(beside) else {}
    is_model_folder = place.is_dir() or os.path.lexists(beside)
    if weights.name.endswith(".index.json"):
        files, listed = _from_index(weights)
        return Source(folder, files, listed, settings)
    if not weights.name.endswith(_SAFE + _PICKLED):
        raise RetrofitError(
            f"{show(place)} is not a model: expected a folder, a .safetensors, .pth or .bin file "
            "or an .index.json"
        )
    return Source(folder if is_model_folder else None, (weights,), {}, settings)


def _place(model: str | Path) -> Path:
    text = os.fspath(model)
    if text.startswith("builtin:"):
        return _builtin(text.removeprefix("builtin:"))
    path = Path(os.path.expanduser(text))
    if text and os.path.exists(path):
        return path
    file_like = text.endswith((*_SAFE, *_PICKLED, ".json"))
    if isinstance(model, str) and _HUB_ID.fullmatch(text) and not file_like:
        return _from_hub(text)
    raise RetrofitError(f"no such file or folder: {show(text) or '(an empty path)'}")


def _builtin(name: str) -> Path:
    root = Path(__file__).parent / "checkpoints"
    known = [folder.parent.name for folder in root.glob("*/config.json")]
    if name not in known:
        raise unknown("builtin model", name, known)
    return root / name


def _from_hub(text: str) -> Path:
    folder = _fetched(text, _HUB_FILES)
    if not any(folder.glob("*.safetensors")):
        folder = _fetched(text, _HUB_PICKLED)
    return folder


def hub_tokenizer(name: str) -> Path:
    """The folder of another repository's tokenizer, for checkpoints that are published without one."""
    return _fetched(name, _HUB_TOKENIZER)


def _fetched(text: str, files: list[str]) -> Path:
    name, _, revision = text.partition("@")
    from huggingface_hub import constants, errors, snapshot_download

    try:
        folder = snapshot_download(
            name, revision=revision or None, allow_patterns=files, ignore_patterns=["*/*"]
        )
    except Exception as error:
        # whatever the network stack raises, the user needs one line
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
            reason = "it is not in the hub's cache here, and HF_HUB_OFFLINE is set"
        raise RetrofitError(
            f"no such file or folder: {text}; nor could it be fetched as a hub id: {show(reason)}"
        ) from error
    return Path(folder)


def _config_file(config: str | Path) -> Path:
    path = Path(os.path.expanduser(config))
    return path / "config.json" if path.is_dir() else path


def _weights_in(folder: Path) -> Path:
    try:
        names = sorted(set(os.listdir(folder)) - _NOT_WEIGHTS)
    except OSError as error:
        raise RetrofitError(f"{show(folder)}: {(error.strerror or '').lower()}") from error
    for fixed, suffixes in _PREFERENCE:
        for name in fixed:
            if name in names:
                return folder / name
        loose = [name for name in names if name.endswith(suffixes)]
        if len(loose) == 1:
            return folder / loose[0]
        if loose:
            listing = ", ".join(map(show, loose[:4]))
            raise RetrofitError(
                f"{show(folder)} has {len(loose)} weight files and no index ({listing}): name one"
            )
    hint = " (a wrapped folder: its caching.json names the base)" if "caching.json" in names else ""
    raise RetrofitError(f"{show(folder)} holds no weights{hint}")


def _from_index(index: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise RetrofitError(f"{show(index)} has no weight_map of tensor names to files")
    suffixes = _PICKLED if index.name.endswith(".bin.index.json") else _SAFE
    names = list(dict.fromkeys(map(repr, listed.values())))
    shards = {repr(name): _shard(index, name, suffixes) for name in listed.values()}
    return tuple(shards[name] for name in names), listed


def _shard(index: Path, name: Any, suffixes: tuple[str, ...]) -> Path:
    plain = isinstance(name, str) and name.isprintable() and not set(name) & set("/\\:")
    if not plain or not name.endswith(suffixes):
        raise RetrofitError(
            f"{show(index)} names '{show(name)}' as a shard: expected a plain {suffixes[0]} file name"
        )
    shard = index.parent / name
    if not os.path.lexists(shard):
        raise RetrofitError(f"{show(shard)} is missing, but {index.name} lists it")
    folder = index.parent.resolve()
    # a hub cache keeps its snapshots as links into blobs/ of the same model
    root = folder.parent.parent if folder.parent.name == "snapshots" else folder
    if root not in shard.resolve().parents:
        raise RetrofitError(f"{show(shard)} is a link that leaves its folder")
    file_size(shard)
    return shard
