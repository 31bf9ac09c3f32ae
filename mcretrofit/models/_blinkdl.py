"""RWKV-5.2 and 6 as BlinkDL stores them: sizes from shapes, tensors under our names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mcretrofit.errors import RetrofitError
from mcretrofit.models._layout import Part

Shapes = Mapping[str, tuple[int, ...]]
Table = Mapping[str, tuple[str, Callable[[Tensor], Tensor]]]
# BlinkDL divides a head's read by eight before its norm: the epsilon is eight squared times as large
GROUP_NORM_EPS = 64e-5


def same(tensor: Tensor) -> Tensor:
    """As it is."""
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """`[1, 1, D]` -> `[D]`."""
    return tensor.reshape(-1)


def turned(tensor: Tensor) -> Tensor:
    """`[in, out]` -> `[out, in]`."""
    return tensor.mT


_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
TOP = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
BLOCK: Table = {
    **{
        f"{name}.{part}": (f"{to}.{part}", same)
        for name, to in _NORMS.items()
        for part in ("weight", "bias")
    },
    **{
        f"att.{name}.weight": (f"attn.{to}_proj.linear.weight", same)
        for name, to in (("receptance", "r"), ("key", "k"), ("value", "v"), ("gate", "g"))
    },
    "att.output.weight": ("attn.o_proj.weight", same),
    "att.time_faaaa": ("attn.bonus", same),
    "ffn.key.weight": ("ffn.key.linear.weight", same),
    "ffn.receptance.weight": ("ffn.receptance.linear.weight", same),
    "ffn.value.weight": ("ffn.value.weight", same),
}


def parts(shapes: Shapes, table: Table, version: str) -> dict[str, Part]:
    """Every stored tensor under our name; RetrofitError for one that the version does not have."""
    found = {}
    for name, shape in shapes.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if block and block.group(2) in table:
            to, convert = table[block.group(2)]
            to = f"model.layers.{block.group(1)}.{to}"
        elif name in TOP:
            to, convert = TOP[name], same
        else:
            raise RetrofitError(f"tensor '{name}' has no place in a plain {version}")
        turned_shape = convert(torch.empty(shape, device="meta")).shape
        found[to] = Part(name, tuple(turned_shape), convert)
    return found


def sizes(shapes: Shapes, version: str) -> dict[str, Any]:
    """The configuration that every version has; RetrofitError where a tensor is not there."""
    for name in ("emb.weight", "blocks.0.att.time_faaaa", "blocks.0.ffn.key.weight"):
        if len(shapes.get(name, ())) != 2:
            raise RetrofitError(f"{version} layout without '{name}': is a shard missing?")
    layers = {int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")}
    vocabulary, width = shapes["emb.weight"]
    heads, key = shapes["blocks.0.att.time_faaaa"]
    if len(layers) <= max(layers):
        raise RetrofitError(f"{version} layout with blocks up to {max(layers)}, but some missing")
    if heads * key != width:
        raise RetrofitError(
            f"blocks.0.att.time_faaaa says {heads} heads of {key}, but emb.weight {width} channels"
        )
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_heads": heads,
        "intermediate_size": shapes["blocks.0.ffn.key.weight"][0],
        "norm_first": "blocks.0.ln0.weight" in shapes,
        "group_norm_eps": GROUP_NORM_EPS,
        "tie_word_embeddings": "head.weight" not in shapes,
        "bos_token_id": None,
        "eos_token_id": None,
    }
