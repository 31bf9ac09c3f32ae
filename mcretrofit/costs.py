"""What a model is made of and what caching it costs, from headers alone (MATH.md 15).

A cached segment holds, for every covered head, its end state (`K V` floats, or the weights of its
network) and its router's summary; logarithmic segments hold one state for each of log2 n levels. A
softmax attention of the same shape would keep `K + V` numbers a token and head. Spare room in buffers
is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.config import VARIANTS, CachingConfig, stored_config
from mcretrofit.errors import RetrofitError
from mcretrofit.exporting import check_covers
from mcretrofit.model import tokenizer_of
from mcretrofit.registry import load
from mcretrofit.skeleton import Mixer, Skeleton, skeleton
from mcretrofit.tensorfile import DTYPES
from mcretrofit.wrapped import NAME, base_of, check_base, is_wrapped, read

FLOAT = 4  # states and summaries are float32


class Cost(NamedTuple):
    """One variant at one length: bytes held, and multiply-adds that a token's reads take."""

    variant: str
    length: int
    segments: int
    cached_bytes: int
    kv_bytes: int
    read_macs: int
    kv_macs: int

    @property
    def ratio(self) -> float:
        """Cached bytes against the KV cache."""
        return self.cached_bytes / self.kv_bytes


class Described(NamedTuple):
    """A model as its headers tell it, and how it is wrapped where it is."""

    name: str
    checkpoint: Checkpoint
    skeleton: Skeleton
    tokenizer: str | None
    trained_length: int | None
    config: CachingConfig | None = None
    covers: dict[str, dict[str, Any]] | None = None  # caching.json's or config.json's, by mixer

    @property
    def state_bytes(self) -> int:
        """Recurrent states of all heads: what the unmodified model carries."""
        return sum(m.heads * m.running for m in self.skeleton.mixers) * FLOAT

    @property
    def covered(self) -> dict[str, int]:
        """How many heads of each mixer are cached; all where that is not known."""
        if self.covers is None:
            return {m.name: m.heads for m in self.skeleton.mixers}
        heads = {name: len(layer["heads"]) for name, layer in self.covers.items()}
        return {m.name: heads.get(m.name, 0) for m in self.skeleton.mixers}

    @property
    def each(self) -> dict[str, dict[str, list]]:
        """Settings of the cached heads of mixers whose heads have their own."""
        return {n: layer["each"] for n, layer in (self.covers or {}).items() if "each" in layer}


def describe(model: str | Path, config: str | Path | None = None) -> Described:
    """Read a model's headers (and a wrapped folder's own files); raises `RetrofitError`."""
    if is_wrapped(model):
        kept = read(model)
        checkpoint = base_of(kept)
        check_base(kept, checkpoint)
        stored = json.loads((Path(model) / NAME).read_text(encoding="utf-8"))
        covers = stored["layers"] if stored["calibrated"] else None
        return _described(str(model), checkpoint, kept.config, covers)
    checkpoint = open_checkpoint(model, config)
    exported = checkpoint.config.get("caching")
    if exported is None:
        return _described(str(model), checkpoint)
    caching = stored_config(exported, f"{model}: config.json: caching")
    covers = checkpoint.config.get("covers") or {}
    check_covers(covers, checkpoint)
    return _described(str(model), checkpoint, caching, covers)


def _described(name: str, checkpoint: Checkpoint, *wrapping: Any) -> Described:
    bones = skeleton(checkpoint)
    try:
        tokenizer = tokenizer_of(checkpoint, bones.model).name
    except RetrofitError:
        tokenizer = None
    length = getattr(bones.model.config, "max_position_embeddings", None)
    return Described(name, checkpoint, bones, tokenizer, length, *wrapping)


def costs(described: Described, config: CachingConfig, lengths: Sequence[int]) -> list[Cost]:
    """Every variant at every length with the segment and router of `config`."""
    return [
        cost(described, config.replace(variant=variant), length)
        for variant in VARIANTS
        for length in lengths
    ]


def cost(described: Described, config: CachingConfig, length: int) -> Cost:
    """One cell; every head of a mixer counts where it is not known which are cached."""
    bones, covered = described.skeleton, described.covered
    closed = length // config.segment
    logarithmic = config.preset.segmentation == "logarithmic"
    held = closed.bit_length() if logarithmic else closed
    sparse = config.preset.aggregator == "ssc"
    states = scores = numbers = reads = 0
    for mixer in bones.mixers:
        heads = covered[mixer.name]
        states += heads * mixer.cached
        own = described.each.get(mixer.name, {})
        scores += heads * _summary(mixer, config, own.get("router"))
        counts = own.get("top_k", [config.top_k] * heads) if sparse else [held] * heads
        reads += sum(min(count, held) for count in counts) * mixer.cached
        numbers += mixer.heads * (mixer.keys + mixer.values) * length
    return Cost(
        config.variant,
        length,
        held,
        held * (states + scores) * FLOAT,
        numbers * DTYPES[bones.dtype][1],
        reads + held * scores * config.routed,
        numbers,
    )


def segment_bytes(mixer: Mixer, heads: int, config: CachingConfig) -> int:
    """Bytes that one closed segment of `heads` heads of a mixer takes."""
    return heads * (mixer.cached + _summary(mixer, config)) * FLOAT


def _summary(mixer: Mixer, config: CachingConfig, routers: Sequence[str] | None = None) -> int:
    """Numbers that the widest router keeps of a segment and head."""
    widths = []
    for router in (load("routers", name) for name in routers or (config.router,)):
        few = config.directions if router.UNIT else 0
        widths.append(router.width(min(few or mixer.keys, mixer.keys)))
    return max(widths)


def of_networks(bones: Skeleton, config: CachingConfig) -> list[str]:
    """What to know of segments that are networks: what they cost, and how they come about."""
    deep = [m for m in bones.mixers if m.deep]
    if not deep:
        return []
    notes, width = [], DTYPES[bones.dtype][1]
    held = sum(segment_bytes(m, m.heads, config) for m in deep)
    rival = sum(m.heads * (m.keys + m.values) for m in deep) * width
    if held > rival * config.segment and config.preset.segmentation == "constant":
        notes.append(
            f"cached networks take {held / (rival * config.segment):.3g} times the memory of a KV "
            f"cache of the same shape in {bones.dtype}: a segment of {config.segment} tokens is "
            f"{held} bytes, and as many as {held // rival} tokens of a KV cache (MATH 15)"
        )
    if config.init == "carry_delta":
        notes.append(
            "init carry_delta: what a segment wrote itself is no difference of networks, so that "
            "every token is written twice, on from the past and afresh from M_0"
        )
    return notes


def too_long(config: CachingConfig, keys: Mapping[str, Sequence[int]]) -> str | None:
    """A warning where a segment exceeds `d^2 / 32` for a mixer's cached channels d (MATH 16)."""
    if not config.routed or not any(keys.values()):
        return None
    least, name = min((d, name) for name, some in keys.items() for d in some)
    most = least * least // 32
    if config.segment <= most:
        return None
    return (
        f"segment {config.segment} exceeds d^2/32 = {most} for the {least} cached channels of a "
        f"head in {name}: scores may not tell segments apart (a rule of thumb); "
        f"--segment {max(most, 1)} fits"
    )
