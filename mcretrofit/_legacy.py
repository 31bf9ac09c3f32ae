"""The pickle inside a legacy .pth: what it claims is added up before torch makes room for it."""

from __future__ import annotations

import os
import pickletools
from collections.abc import Iterator
from typing import BinaryIO

_LONGEST = 100_000_000  # bytes of a list of tensors, their values apart


class Clipped:
    """A file that is never asked for more bytes than it has: a reader makes room for all it asks."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size = file, os.fstat(file.fileno()).st_size
        self.tell, self.seek, self.readinto = file.tell, file.seek, file.readinto

    def read(self, count: int = -1) -> bytes:
        """Up to `count` bytes, all that are left where it is negative."""
        left = max(0, self.size - self.file.tell())
        return self.file.read(left if count < 0 else min(count, left))

    def readline(self, count: int = -1) -> bytes:
        """A line, or as much of it as a name may have."""
        return self.file.readline(_LONGEST if count < 0 else count)


def check_claims(file: Clipped) -> None:
    """Raise ValueError for storages that are larger, in all, than the file; rewinds it."""
    claims: dict[str, int] = {}
    # magic number, version, machine, objects
    for _ in range(4):
        for key, elements in _storages(file):
            claims[key] = max(elements, claims.get(key, 0))
    if min(claims.values(), default=0) < 0 or sum(claims.values()) > file.size:
        raise ValueError("its tensors claim more bytes than the file has")
    file.seek(0)


def _storages(file: Clipped) -> Iterator[tuple[str, int]]:
    """Key and number of elements of every storage that one pickle names."""
    number, texts, memo = 0, ["", ""], {}
    for operation, value, at in pickletools.genops(file):
        name = operation.name
        if (at or 0) > _LONGEST:
            raise ValueError("its pickle is far too large for a list of tensors")
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if value is None else value] = texts[-1]
        elif "GET" in name:
            texts = [texts[-1], memo.get(value, "")]
        elif "PERSID" in name:
            # ('storage', its type, its key, its device, its elements, None)
            yield texts[0], number
        else:
            texts = [texts[-1], value] if "UNICODE" in name or "STRING" in name else texts
            number = value if type(value) is int else number
