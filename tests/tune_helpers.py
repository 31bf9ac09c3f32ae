"""A pico checkpoint to tune, a folder to do it in, and what a run left there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import ROOT, pico

from mcretrofit import tunelog
from mcretrofit.calibrate import shipped_text

SMALL = """
length: 256
steps: 12
warmup: 2
held_out: 1
check_every: 6
keep_every: 2
least_recall: 0
caching: {segment: 32, heads: all, rank: 4}
"""


def checkpoint(folder: Path) -> Path:
    """A model of bytes that says its trained length."""
    return pico(folder, max_position_embeddings=192)


def working(folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recipe and some text."""
    (folder / "small.yaml").write_text(f"model: {base}\ndata: text.txt\n{SMALL}")
    (folder / "text.txt").write_text(shipped_text()[:4000])
    monkeypatch.chdir(folder)
    return folder


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in tunelog.read(folder / tunelog.NAME) if row["kind"] == "train"]


def process(*words: str) -> subprocess.Popen:
    places = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], env=environment, **quiet)
