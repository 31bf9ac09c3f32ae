"""What a cell needs before it is run: bytes of cached segments and of memory, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mcretrofit.config import CachingConfig
from mcretrofit.costs import FLOAT, Described, cost
from mcretrofit.errors import RetrofitError
from mcretrofit.evaluate import BATCH, PIECE
from mcretrofit.rows import Probe
from mcretrofit.tensorfile import DTYPES

READ = 2048  # tokens that are scored at once (`segments.blocks`)
SPARE = 2  # buffers double when full
STREAMS = 12  # copies of a piece's streams that a mixer holds at its worst


class Need(NamedTuple):
    """Bytes: the weights, the cached segments of one row, and everything of a batch at its peak."""

    weights: int
    cached: int
    peak: int


def need(described: Described, config: CachingConfig | None, probe: Probe, device: str) -> Need:
    """An upper estimate: every head of a mixer counts as cached where it is not known which are."""
    bones = described.skeleton
    width = DTYPES[bones.dtype][1]
    # half precision is computed in float32 on a CPU
    weights = bones.parameters * (max(width, FLOAT) if device == "cpu" else width)
    rows = max(1, min(BATCH // probe.length, probe.count))
    piece = rows * min(PIECE, probe.length)
    widest = max((m.heads * (2 * m.keys + m.values) for m in bones.mixers), default=0)
    text = bones.model.config.get_text_config()
    working = piece * (2 * text.vocab_size + STREAMS * widest + 8 * text.hidden_size) * FLOAT
    cached = 0
    if config is not None:
        made = cost(described, config, probe.length)
        cached = made.cached_bytes
        heads = max(m.heads for m in bones.mixers)
        working += 3 * rows * min(READ, probe.length) * heads * made.segments * FLOAT
    states = rows * described.state_bytes
    return Need(weights, cached, weights + states + rows * cached * SPARE + working)


def refuse(
    described: Described, cells: Iterable[tuple[CachingConfig | None, Probe]], device: str
) -> None:
    """Raise `RetrofitError` with the numbers where a cell is predicted not to fit."""
    free = available(device)
    for config, probe in cells:
        found = need(described, config, probe, device)
        if free is not None and found.peak > free:
            how = "the base" if config is None else f"{config.variant}, segment {config.segment}"
            raise RetrofitError(
                f"{probe.task} at {probe.length} tokens ({how}) is predicted to need "
                f"{_giga(found.peak)}, {_giga(found.weights)} of it weights and "
                f"{_giga(found.cached)} a row cached segments, but {_giga(free)} are free on "
                f"{device}: shorter --lengths, longer segments or a larger machine"
            )


def available(device: str = "cpu") -> int | None:
    """Bytes of memory that are free; None where the system does not tell."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    limits = [found for found in (_meminfo(), _group()) if found is not None]
    return min(limits) if limits else None


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _group() -> int | None:
    """What a container's limit leaves."""
    place = Path("/sys/fs/cgroup")
    try:
        most = int((place / "memory.max").read_text())
        return most - int((place / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def _giga(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
