"""Mamba-2 as transformers, FLA and state-spaces store it: `backbone.layers.N.{norm,mixer}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mcretrofit.errors import RetrofitError
from mcretrofit.models._layout import Layout, Part

Shapes = Mapping[str, tuple[int, ...]]
_NAMES = (
    (re.compile(r"^backbone\.embeddings?\."), "model.embeddings."),
    (re.compile(r"^backbone\.norm_f\."), "model.norm."),
    (re.compile(r"^backbone\."), "model."),
)
_RENAMED = {"layer_norm_epsilon": "norm_eps", "time_step_limit": "dt_limit"}
# what state-spaces' configuration calls the fields, and what it leaves out
_SSM = {"headdim": "head_dim", "d_state": "state_size", "d_conv": "conv_kernel"}
_SSM |= {"ngroups": "n_groups", "expand": "expand", "bias": "use_bias", "dt_limit": "dt_limit"}
_SSM |= {"conv_bias": "use_conv_bias", "rmsnorm": "rmsnorm", "D_has_hdim": "D_has_hdim"}
_SSM |= {"norm_before_gate": "norm_before_gate"}
# state-spaces publishes weights alone; this is what its own evaluation reads text with
_TOKENIZER = "EleutherAI/gpt-neox-20b"


def from_layout(shapes: Shapes, config: dict[str, Any]) -> Layout | None:
    """The three layouts of other hosts as ours; None for any other.

    Raises RetrofitError for what state-spaces' code builds beside plain Mamba-2.
    """
    if not any(re.fullmatch(r"backbone\.layers\.\d+\.mixer\.dt_bias", name) for name in shapes):
        return None
    fields = _state_spaces(config) if "d_model" in config else _renamed(config)
    fields["vocab_size"] = next(s[0] for n, s in shapes.items() if "embedding" in n)
    return Layout(fields, {_ours(name): Part(name, tuple(s)) for name, s in shapes.items()})


def _ours(name: str) -> str:
    for pattern, to in _NAMES:
        if pattern.match(name):
            return pattern.sub(to, name)
    return name


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """transformers' and FLA's fields; the former have groups where the latter have none."""
    theirs = any(name in config for name in _RENAMED)
    fields = {"n_groups": 8 if theirs else 1, "hidden_act": "silu"}
    fields |= {_RENAMED.get(name, name): value for name, value in config.items()}
    return {**fields, "dt_limit": _limit(fields.get("dt_limit"))}


def _state_spaces(config: dict[str, Any]) -> dict[str, Any]:
    ssm = dict(config.get("ssm_cfg") or {})
    if ssm.pop("layer", "Mamba1") != "Mamba2":
        raise RetrofitError("state-spaces' configuration: ssm_cfg.layer is not Mamba2")
    for name in ("d_intermediate", "attn_layer_idx"):
        if config.get(name):
            raise RetrofitError(f"state-spaces' configuration: {name} is set, which is no Mamba-2")
    if not config.get("rms_norm", True):
        raise RetrofitError("state-spaces' configuration: rms_norm is false, which is no Mamba-2")
    fields = {_SSM[name]: value for name, value in ssm.items() if name in _SSM}
    return {
        **{"hidden_size": config["d_model"], "num_hidden_layers": config["n_layer"]},
        **{"hidden_act": "silu", "tie_word_embeddings": config.get("tie_embeddings", True)},
        **{**fields, "dt_limit": _limit(fields.get("dt_limit"))},
        **{"bos_token_id": None, "eos_token_id": None, "tokenizer": _TOKENIZER},
    }


def _limit(given: list[Any] | None) -> list[float] | None:
    """`(low, high)` of a time step, None where it is free; JSON writes infinity in two ways."""
    if given is None:
        return None
    low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in given)
    return None if (low, high) == (0.0, float("inf")) else [low, high]
