"""Measure a model's heads on plain text, without gradients: which forget slowly, how scores spread.

A head (or, with a decay a channel, a channel) is slow when its time constant
`tau = -1 / mean_t(log decay_t)` exceeds `config.tau` tokens; only those are worth caching.
"""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError
from mcretrofit.gates import Gate
from mcretrofit.memories import Streams
from mcretrofit.registry import load
from mcretrofit.retrofit import Cover, listening
from mcretrofit.surprise import with_scores

TOKENS = 4096  # read in all, in windows of at least four segments
RIDGE = 1e-2  # of the mean key energy, added before whitening


class Head(NamedTuple):
    """What was measured of one head, and whether it is cached."""

    mixer: str
    head: int
    tau: float  # tokens; infinite without decay, the median of the channels' where each has its own
    slow: int  # channels above the threshold
    keys: int
    cached: bool
    why: str
    mean: float | None = None
    std: float | None = None


class Calibration(NamedTuple):
    """The covers to attach with, and the table that explains them."""

    covers: dict[str, Cover]
    heads: list[Head]


class _Heard:
    """Running sums of one mixer's decays and key moments."""

    def __init__(self) -> None:
        self.count = 0
        self.decay: Tensor | None = None
        self.moment: Tensor | None = None
        self.asked: Tensor | None = None
        self.shape = (0, 0)

    def add(self, streams: Streams, valid: Tensor | None) -> None:
        keys = nn.functional.normalize(streams.k.float(), dim=-1).flatten(0, 1)
        self.shape = tuple(keys.shape[1:])
        self.count += keys.shape[0]
        queries = nn.functional.normalize(streams.q.float(), dim=-1).flatten(0, 1)
        moment, asked = (torch.einsum("thk,thl->hkl", x, x) for x in (keys, queries))
        self.moment = moment if self.moment is None else self.moment + moment
        self.asked = asked if self.asked is None else self.asked + asked
        if streams.decay is not None:
            decay = streams.decay.float().flatten(0, 1).sum(0)
            self.decay = decay if self.decay is None else self.decay + decay

    def taus(self) -> Tensor:
        """Time constants `[H, K]` in tokens."""
        heads, keys = self.shape
        if self.decay is None:
            return torch.full((heads, keys), float("inf"))
        # by magnitude: the negative of a gate that never closes may be a negative zero
        taus = 1 / (self.decay / self.count).clamp_max(0).abs()
        return taus[:, None].expand(-1, keys) if taus.dim() == 1 else taus

    def whitening(self, heads: list[int], mask: Tensor) -> Tensor:
        """`(E[k k^T] + ridge)^-1/2` of some heads `[H', K, K]` among their cached channels."""
        second = self.moment[heads] / self.count * mask[:, None] * mask[..., None]
        ridge = RIDGE * second.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        values, vectors = torch.linalg.eigh(second + ridge * torch.eye(second.shape[-1]))
        root = values.clamp_min(1e-12).rsqrt()
        inverse = vectors @ torch.diag_embed(root) @ vectors.transpose(-1, -2)
        return inverse * mask[:, None] * mask[..., None]

    def turned(self, heads: list[int], matrices: Tensor) -> Tensor:
        """Columns along the axes of the questions that `matrices [H', K, K]` make, longest first."""
        second = matrices.transpose(-1, -2) @ (self.asked[heads] / self.count) @ matrices
        return matrices @ torch.linalg.eigh(second).eigenvectors.flip(-1)


def shipped_text(name: str = "calibration") -> str:
    """The public-domain prose in the package."""
    return (resources.files("mcretrofit") / "text" / f"{name}.txt").read_text(encoding="utf-8")


def windows(ids: list[int], segment: int, tokens: int = TOKENS) -> Tensor:
    """Token ids as `[B, T]` windows of whole segments; raises for less than two segments."""
    if len(ids) < 2 * segment:
        raise RetrofitError(
            f"calibration text has {len(ids)} tokens, fewer than two segments of {segment}; "
            "give a longer text or a shorter --segment"
        )
    length = min(max(4 * segment, 2048), len(ids)) // segment * segment
    count = max(1, min(len(ids), max(tokens, length)) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def hear(model: nn.Module, batch: Tensor) -> dict[str, _Heard]:
    """Run the unmodified model and keep what its mixers hand to their ops.

    Raises `RetrofitError` that names the first mixer where a value is not finite.
    """
    heard: dict[str, _Heard] = {}

    def listen(name: str, streams: Streams, valid: Tensor | None) -> None:
        if not all(bool(s.isfinite().all()) for s in streams[:-1] if s is not None):
            raise RetrofitError(
                f"{name}: values are NaN or infinite on the calibration text; "
                "look for broken weights, or load the model in float32"
            )
        heard.setdefault(name, _Heard()).add(streams, valid)

    with torch.no_grad(), listening(model, listen):
        for row in batch:
            model(input_ids=row[None].to(model.device), use_cache=False, logits_to_keep=1)
    return heard


def choose(config: CachingConfig, taus: Tensor) -> tuple[list[int], Tensor, list[str]]:
    """The cached heads, the mask of their channels `[H', K]`, and a reason for every head."""
    keys = taus.shape[1]
    if config.heads == "all":
        return (
            list(range(len(taus))),
            torch.ones_like(taus),
            ["all heads were asked for"] * len(taus),
        )
    slow = taus > config.tau
    need = min(keys, max(16, keys // 4))
    chosen, why = [], []
    for h, count in enumerate(slow.sum(1).tolist()):
        if count < need:
            why.append(f"forgets fast: {count} of {keys} channels above {config.tau:g} tokens")
            continue
        chosen.append(h)
        why.append(f"slow: {count} of {keys} channels above {config.tau:g} tokens")
    return chosen, slow[chosen].float(), why


def calibrate(model: nn.Module, ids: list[int], config: CachingConfig) -> Calibration:
    """Choose heads and measure their scores' mean and spread; the model is left as it was."""
    batch = windows(ids, config.segment)
    heard = hear(model, batch)
    if not heard:
        raise RetrofitError(f"{type(model).__name__} has no recurrent mixer that MC could wrap")
    covers, reasons = {}, {}
    for name, one in heard.items():
        chosen, mask, reasons[name] = choose(config, one.taus())
        covers[name] = Cover(
            chosen, one.shape[0], mask, whiten=_matrices(config, one, chosen, mask)
        )
    if config.routed:
        covers = with_scores(model, config, covers, batch)
    return Calibration(covers, _table(heard, covers, reasons))


def _matrices(config: CachingConfig, one: _Heard, heads: list[int], mask: Tensor) -> Tensor | None:
    """What questions are turned by `[H', K, K]`; None where they are asked as they are."""
    narrow = config.directions and load("routers", config.router).UNIT
    if not heads or not (config.whiten or narrow):
        return None
    made = one.whitening(heads, mask) if config.whiten else torch.diag_embed(mask)
    return one.turned(heads, made) if narrow else made


def _table(
    heard: dict[str, _Heard], covers: dict[str, Cover], reasons: dict[str, list[str]]
) -> list[Head]:
    rows = []
    for name, one in heard.items():
        cover, taus = covers[name], one.taus()
        for h, why in enumerate(reasons[name]):
            cached = h in cover.heads
            at = cover.heads.index(h) if cached else None
            mean, std = (
                (None, None)
                if at is None or cover.mean is None
                else (cover.mean[at].item(), cover.std[at].item())
            )
            slow = int(cover.mask[at].sum()) if cached else 0
            tau = taus[h].median().item()
            rows.append(Head(name, h, tau, slow, one.shape[1], cached, why, mean, std))
    return rows


def covered(model: nn.Module) -> int:
    """How many mixers are wrapped."""
    return sum(isinstance(getattr(m, "mc", None), Gate) for m in model.modules())
