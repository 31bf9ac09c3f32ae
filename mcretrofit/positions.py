"""Loss by position: bits per byte in windows that double, in units of the trained length."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mcretrofit.tasks import Sample

UNIT = 1024  # tokens, where a model does not say what it was trained at


def trained_length(model: nn.Module) -> int | None:
    """Tokens that a model was trained at, where its configuration says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def by_position(
    spent: list[Tensor], samples: list[Sample], unit: int | None
) -> tuple[tuple[int, int, float], ...]:
    """Bits per byte in windows of 0-1, 1-2, 2-4, ... times `unit` (the trained length).

    `spent` holds the nats of every token but the first of samples of one length `[B, T - 1]`.
    """
    if not spent:
        return ()
    nats = torch.cat(spent).sum(0)
    held = torch.tensor([s.token_bytes[1:] for s in samples], dtype=torch.float64).sum(0)
    windows, start, end = [], 0, unit or UNIT
    while start <= len(nats):
        part = slice(max(start - 1, 0), end - 1)
        count = float(held[part].sum())
        if count:
            bits = float(nats[part].sum()) / math.log(2) / count
            windows.append((start, min(end, len(nats) + 1), bits))
        start, end = end, 2 * end
    return tuple(windows)
