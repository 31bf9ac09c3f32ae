"""Raw files that nobody vouches for: regular ones only, strict JSON, one-line refusals."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from mcretrofit.errors import RetrofitError

JSON_LIMIT = 100_000_000


def show(text: object) -> str:
    """A path or a name for a message: always one printable line, never a page."""
    text = str(text)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"


def file_size(path: Path) -> int:
    """The bytes of a regular file; folders, pipes, devices and missing files are refused."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RetrofitError(f"{show(path)}: {reason.lower()}") from error
    if not stat.S_ISREG(status.st_mode):
        raise RetrofitError(f"{show(path)} is not a regular file")
    return status.st_size


def refuse_pointer(path: Path, head: bytes | bytearray) -> None:
    """Refuse what a clone without Git LFS or a failed download leaves in place of weights."""
    if head.startswith(b"version https://git-lfs"):
        raise RetrofitError(
            f"{show(path)} is a Git LFS pointer, not weights: run git lfs pull in its folder"
        )
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        raise RetrofitError(f"{show(path)} is a web page, not weights: download it again")


def parse_json(raw: bytes | bytearray, where: str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no key twice, no absurd nesting; `where` names it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ValueError(f"the key '{show(twice)}' appears twice")
        return result

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise RetrofitError(f"{where} is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise RetrofitError(f"{where} is not valid JSON: {show(error)}") from error
    if not isinstance(parsed, dict):
        raise RetrofitError(f"{where} is not a JSON object but a {type(parsed).__name__}")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file, with the strictness of `parse_json`."""
    size = file_size(path)
    if size > JSON_LIMIT:
        raise RetrofitError(f"{show(path)} has {size} bytes, far too many for a JSON file")
    return parse_json(read_bytes(path, 0, size), show(path))


def read_bytes(path: Path, start: int, size: int) -> bytearray:
    """Exactly `size` bytes of a file from byte `start` on."""
    buffer = bytearray(size)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            got = file.readinto(buffer)
    except OSError as error:
        raise RetrofitError(f"{show(path)}: {(error.strerror or str(error)).lower()}") from error
    if got != size:
        raise RetrofitError(f"{show(path)} ended {size - got} bytes early: did it change?")
    return buffer
