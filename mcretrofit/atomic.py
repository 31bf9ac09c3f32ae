"""Writing that happens wholly or not at all: beside the target, fsync, then rename."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mcretrofit.errors import RetrofitError

if TYPE_CHECKING:
    import torch

# one of these lies in every folder that this package writes
_OURS = ("caching.json", "config.json")


@contextmanager
def write_atomic_folder(
    target: Path, force: bool = False, *, sources: Iterable[Path | str] = ()
) -> Iterator[Path]:
    """A temporary folder to fill, which becomes `target` only if the block succeeds.

    An old `target` needs `force` and stays as it was until the new one is complete; `sources`
    are paths that it must not hold. Raises RetrofitError; on any exception nothing is left.
    """
    target = Path(os.path.abspath(target))
    check_target(target, force, sources)
    made: list[Path] = []
    work = _beside(target, "new")
    try:
        for folder in [p for p in reversed(target.parents) if not p.exists()] + [work]:
            folder.mkdir()
            made.append(folder)
        yield work
        for path in [*work.rglob("*"), work]:
            _fsync(path)
        old = _replace(work, target, force)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if not target.exists():
            _remove_empty(made)
        if isinstance(error, OSError):
            raise _cannot_write(target, error) from error
        raise
    try:
        _fsync(target.parent)
        if old:
            shutil.rmtree(old)
    except OSError as error:
        raise RetrofitError(f"{target} is complete, but clearing up failed: {error}") from error


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write `tensors` to `path` atomically; tensors that share storage are written in full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    work = _beside(path, "new")
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        # safetensors refuses two names for one storage
        plain[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    try:
        work.touch()
        # as any new file here, not for its owner alone
        mode = work.stat().st_mode
        save_file(plain, work, dict(metadata) if metadata else None)
        work.chmod(mode)
        _fsync(work)
        os.replace(work, path)
        _fsync(path.parent)
    except (OSError, SafetensorError) as error:
        raise _cannot_write(path, error) from error
    finally:
        work.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise RetrofitError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    return digest.hexdigest()


def _cannot_write(path: Path, error: Exception) -> RetrofitError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    about = getattr(error, "filename", None)
    detail = f" ({about})" if about else ""
    return RetrofitError(f"cannot write {path}: {reason}{detail}; nothing was changed")


def _beside(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}-{secrets.token_hex(4)}"


def check_target(target: Path, force: bool, sources: Iterable[Path | str] = ()) -> None:
    """Refuse to write a folder where that would destroy what is not ours, or not to be replaced."""
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise RetrofitError(f"{target} exists and is not a folder: choose another name")
    if not force:
        raise RetrofitError(f"{target} exists: use another folder, or --force to replace it")
    real, here, home = target.resolve(), Path.cwd().resolve(), Path.home().resolve()
    if any(place == real or real in place.parents for place in (here, home)):
        raise RetrofitError(
            f"refusing to replace {target}: it holds the folder you work or live in"
        )
    if any(real == place or real in place.parents for place in map(_resolved, sources)):
        raise RetrofitError(f"refusing to replace {target}: the result would be made from it")
    inside = os.listdir(target)
    if inside and (".git" in inside or not any(name in inside for name in _OURS)):
        raise RetrofitError(
            f"refusing to replace {target}: it does not look like a folder that mcretrofit wrote; "
            "remove it yourself or choose another"
        )


def _resolved(path: Path | str) -> Path:
    return Path(path).expanduser().resolve()


def _replace(work: Path, target: Path, force: bool) -> Path | None:
    if not force or not target.exists():
        os.rename(work, target)
        return None
    old = _beside(target, "old")
    os.rename(target, old)
    try:
        os.rename(work, target)
    except BaseException:
        os.rename(old, target)
        raise
    return old


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        if folder.exists() and not os.listdir(folder):
            folder.rmdir()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
