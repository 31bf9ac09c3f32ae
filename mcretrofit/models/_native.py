"""Models that transformers itself implements: found by the op that their mixers call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from mcretrofit import registry
from mcretrofit.errors import RetrofitError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# the types that the laws run over -> the op of their mixers; others that call a known op load too
HOSTS = {
    "bailing_hybrid": "kda",
    "bamba": "mamba2",
    "falcon_h1": "mamba2",
    "granitemoehybrid": "mamba2",
    "kimi_linear": "kda",
    "mamba2": "mamba2",
    "nemotron_h": "mamba2",
    "olmo_hybrid": "gated_delta_rule",
    "qwen3_5_moe_text": "gated_delta_rule",
    "qwen3_5_text": "gated_delta_rule",
    "qwen3_next": "gated_delta_rule",
    "zamba2": "mamba2",
}


def native_class(model_type: str) -> type[PreTrainedModel]:
    """transformers' causal language model for `model_type`, if its mixers call an op that we know.

    Raises RetrofitError for a type that nobody knows and for models without a recurrent mixer.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    families = ", ".join(registry.names("models"))
    if model_type not in CONFIG_MAPPING_NAMES:
        raise RetrofitError(f"unknown model_type {model_type!r} (known: {families})")
    # by name: after an import of fla, transformers' Auto classes return fla's for some types
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    name = name if isinstance(name, str) or name is None else name[0]
    with torch_fallbacks():
        found = getattr(import_module("transformers"), name) if name else None
        ops = [] if found is None else recurrent_ops(sys.modules[found.__module__])
    if found is None or not ops:
        raise RetrofitError(
            f"model_type {model_type!r} has no recurrent mixer that can be retrofitted "
            f"(families: {families}; of transformers': those that call {', '.join(known_ops())})"
        )
    return found


def known_ops() -> list[str]:
    """Every name that a host may call one of `ops/` by."""
    return [name for op in registry.names("ops") for name in registry.load("ops", op).NAMES]


def recurrent_ops(module: object) -> list[str]:
    """The ops of `ops/` that a modeling module calls."""
    return [name for name in known_ops() if hasattr(module, name)]


@contextmanager
def torch_fallbacks() -> Iterator[None]:
    """Modeling code imported inside takes its torch functions where there is no GPU.

    It would bind to an installed fla without asking for a device, and crash in its first forward.
    """
    if torch.cuda.is_available():
        yield
        return
    absent = object()
    before = sys.modules.get("fla", absent)
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is absent:
            del sys.modules["fla"]
        else:
            sys.modules["fla"] = before
