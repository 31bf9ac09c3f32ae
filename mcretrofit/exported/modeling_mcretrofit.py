"""An exported model: the decoder, wrapped as its config says before its tensors are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mcretrofit.config import CachingConfig
from mcretrofit.decoder import DecoderForCausalLM as PlainForCausalLM
from mcretrofit.exported.configuration_mcretrofit import DecoderConfig
from mcretrofit.retrofit import Cover, retrofit_


class DecoderForCausalLM(PlainForCausalLM):
    """The language model with its caching; `*.mc.*` tensors are loaded like all others."""

    config_class = DecoderConfig
    _keep_in_fp32_modules_strict = [*PlainForCausalLM._keep_in_fp32_modules_strict, r"\bmc\b"]

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        if config.caching is not None:
            attach_(self, config.caching, config.covers or {})


def attach_(
    model: PlainForCausalLM, caching: Mapping[str, Any], covers: Mapping[str, Mapping[str, Any]]
) -> None:
    """Wrap a model, on any device, so that every `*.mc.*` tensor of its file has a home."""
    homes = {name: _home(cover) for name, cover in covers.items()}
    if homes:
        retrofit_(model, CachingConfig(**caching), homes)


def _home(cover: Mapping[str, Any]) -> Cover:
    heads, keys = list(cover["heads"]), cover["keys"]
    whiten = torch.eye(keys).repeat(len(heads), 1, 1) if cover["whiten"] else None
    return Cover(heads, cover["total"], torch.ones(len(heads), keys), whiten=whiten)
