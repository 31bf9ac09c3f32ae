"""The run folder: `rows.jsonl`, append-only, and claims, so that processes can share it.

A row is one line, written by one call and synced under a lock: a process that is killed loses at most
the row that it was writing. What it left of that is a torn last line, which the next writer ends.
A claim is a lock on a file that the kernel frees with its process; no dead one has to be found.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.errors import RetrofitError

ROWS, CLAIMS = "rows.jsonl", "claims"
NEEDED = ("id", "task", "length", "metric", "score", "verdict")


class Read(NamedTuple):
    """Rows by their ids, the first of each, and a line for each thing in the file that is none."""

    rows: dict[str, dict[str, Any]]
    faults: list[str]


class Claim(NamedTuple):
    """A locked file; the lock goes with `release`, or with the process."""

    path: Path
    handle: int

    def release(self) -> None:
        # before the lock goes: whoever holds this very file open sees that it is no longer there
        self.path.unlink(missing_ok=True)
        os.close(self.handle)


class Ledger:
    """The finished cells of a run folder, shared with other processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / ROWS
        self.rows: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []
        self._seen: tuple[int, int] | None = None
        try:
            (folder / CLAIMS).mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise _failed(folder, error) from error
        self.refresh()
        self._sweep()

    def _sweep(self) -> None:
        """Remove what processes left that were killed between a row and the end of its claim."""
        for name in self.rows.keys() & set(os.listdir(self.folder / CLAIMS)):
            path = self.folder / CLAIMS / name
            handle = _locked(path)
            if handle is not None:
                Claim(path, handle).release()

    def refresh(self) -> None:
        """Read what others wrote since."""
        self._refresh(locked=False)

    def _refresh(self, locked: bool) -> None:
        found = self.path.stat()
        if self._seen != (found.st_size, found.st_mtime_ns):
            self.rows, self.faults = read(self.path, locked)
            self._seen = found.st_size, found.st_mtime_ns

    def append(self, row: Mapping[str, Any]) -> bool:
        """Write a row, synced; False where the file has its id already."""
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            with open(self.path, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._refresh(locked=True)
                if row["id"] in self.rows:
                    return False
                whole = _ends(file)
                out = os.open(self.path, os.O_WRONLY | os.O_APPEND)
                try:
                    written = os.write(out, line if whole else b"\n" + line)
                    os.fsync(out)
                finally:
                    os.close(out)
                if written < len(line):
                    raise RetrofitError(f"cannot write {self.path}: the disk took part of a row")
        except OSError as error:
            raise _failed(self.path, error) from error
        self.refresh()
        return True

    def claim(self, name: str) -> Claim | None:
        """A cell to measure; None where another process is at it or where it is finished."""
        path = self.folder / CLAIMS / name
        handle = _locked(path)
        if handle is None:
            return None
        claim = Claim(path, handle)
        self.refresh()
        if name in self.rows:
            claim.release()
            return None
        who = {"pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(who).encode(), 0)
        return claim


def read(path: Path, locked: bool = False) -> Read:
    """Every row of a file; a malformed line is named by its number and left out.

    It waits for a writer unless this process is the one that has the file `locked`.
    """
    try:
        with open(path, "rb") as file:
            if not locked:
                fcntl.flock(file, fcntl.LOCK_SH)
            lines = file.read().split(b"\n")
    except OSError as error:
        raise _failed(path, error) from error
    rows: dict[str, dict[str, Any]] = {}
    faults = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row, fault = _parsed(line)
        if fault is not None:
            torn = "; a process stopped while it wrote it" if number == len(lines) else ""
            faults.append(f"{path}, line {number}: {fault}{torn}; left out")
        elif row is not None:
            rows.setdefault(row["id"], row)
    return Read(rows, faults)


def _parsed(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None, "not JSON"
    if not isinstance(row, dict):
        return None, "not a JSON object"
    missing = [name for name in NEEDED if row.get(name) is None]
    if missing:
        return None, f"{missing[0]} is missing"
    return row, None


def _ends(file: Any) -> bool:
    """Whether the file's last line is whole."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _locked(path: Path) -> int | None:
    """A locked handle of the file at `path`, made if needed; None where another process has it."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _failed(path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        try:
            if os.fstat(handle).st_ino == os.stat(path).st_ino:
                return handle
        except FileNotFoundError:
            pass
        # its last owner removed it between our two steps
        os.close(handle)


def _failed(path: Path, error: OSError) -> RetrofitError:
    return RetrofitError(f"{path} cannot be used: {(error.strerror or str(error)).lower()}")
