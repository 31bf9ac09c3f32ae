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
    if not config.keys() & {"model_type", "hidden_size", "d_model"}:
        config = {**_inferred(shapes, config), **config}
    fields = _state_spaces(config) if "d_model" in config else _renamed(config)
    fields["vocab_size"] = next(s[0] for n, s in shapes.items() if "embedding" in n)
    return Layout(fields, {_ours(name): Part(name, tuple(s)) for name, s in shapes.items()})


def _inferred(shapes: Shapes, config: dict[str, Any]) -> dict[str, Any]:
    """What shapes settle: all but into how many groups the keys of all states are divided."""
    own = {n.split(".", 3)[3]: s for n, s in shapes.items() if n.startswith("backbone.layers.0.")}
    layers = {n.split(".")[2] for n in shapes if n.startswith("backbone.layers.")}
    try:
        (width, inner), count = own["mixer.out_proj.weight"], own["mixer.A_log"][0]
        mixed, _, kernel = own["mixer.conv1d.weight"]
        keys = (mixed - inner) // 2
        groups = _groups(keys, config)
        return {
            **{"hidden_size": width, "expand": inner / width, "head_dim": inner // count},
            **{"n_groups": groups, "state_size": keys // groups, "conv_kernel": kernel},
            **{"num_hidden_layers": len(layers), "use_bias": "mixer.in_proj.bias" in own},
            **{"use_conv_bias": "mixer.conv1d.bias" in own, "rmsnorm": "mixer.norm.weight" in own},
            **{"D_has_hdim": own["mixer.D"][0] != count},
            "tie_word_embeddings": "lm_head.weight" not in shapes,
        }
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, RetrofitError):
            raise
        raise RetrofitError("no config.json, and the tensors are not a whole Mamba-2's") from error


def _groups(keys: int, config: dict[str, Any]) -> int:
    if "n_groups" in config or keys == 1:
        return config.get("n_groups", 1)
    if "state_size" in config:
        return keys // config["state_size"]
    raise RetrofitError(
        "no config.json names a Mamba-2's n_groups and state_size, and its tensors tell their "
        f"product, {keys}, alone; say one of them: --config config.json"
    )


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
