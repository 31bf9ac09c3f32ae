"""What an exported model attaches before its tensors are loaded, whoever's class it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mcretrofit.config import CachingConfig
from mcretrofit.retrofit import Cover, retrofit_


def attach_(
    model: nn.Module, caching: Mapping[str, Any], covers: Mapping[str, Mapping[str, Any]]
) -> None:
    """Wrap a model, on any device, so that every `*.mc.*` tensor of its file has a home."""
    homes = {name: _home(cover) for name, cover in covers.items()}
    if homes:
        retrofit_(model, CachingConfig(**caching), homes)


def _home(cover: Mapping[str, Any]) -> Cover:
    heads, keys = list(cover["heads"]), cover["keys"]
    whiten = torch.eye(keys).repeat(len(heads), 1, 1) if cover["whiten"] else None
    return Cover(
        heads,
        cover["total"],
        torch.ones(len(heads), keys),
        whiten=whiten,
        each=cover.get("each"),
    )
