"""A configuration from tensors alone, for checkpoints in the FLA format: what shapes settle, no more.

Every candidate is built on the meta device and kept only if its tensors are exactly those found.
What no shape shows (activations, epsilons, normalisers) has the format's default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import gcd
from typing import Any, NamedTuple

from mcretrofit.models._feature_maps import FIXED

Shapes = Mapping[str, tuple[int, ...]]
# family -> tensors of a layer one of which it has, and one that it must not have
MARKS = {
    "gla": (("attn.gk_proj.0.weight",), None),
    "delta_net": (("attn.b_proj.weight",), "attn.a_proj.weight"),
    "gated_deltanet": (("attn.a_proj.weight",), "attn.D"),
    "gated_deltaproduct": (("attn.b_proj.weight",), "attn.D"),
    "comba": (("attn.D",), None),
    "kda": (("attn.f_proj.0.weight",), None),
    "retnet": (("attn.g_norm_swish_gate.weight", "attn.g_norm.weight"), "attn.i_proj.weight"),
    "linear_attn": (("attn.norm.weight",), None),
    "hgrn2": (("attn.i_proj.weight",), None),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Own(NamedTuple):
    """The first layer's mixer, by its tensors, and the fields that every family has."""

    shapes: dict[str, tuple[int, ...]]
    fields: dict[str, Any]

    def rows(self, name: str) -> int:
        """Outputs of a projection, or the length of a vector; 0 where there is none."""
        return self.shapes.get(f"attn.{name}", (0,))[0]

    @property
    def gated(self) -> bool:
        return "attn.g_proj.weight" in self.shapes

    @property
    def width(self) -> int:
        return self.fields["hidden_size"]

    @property
    def read(self) -> int:
        """Values of all heads, which the output projection takes."""
        return self.shapes["attn.o_proj.weight"][1]


def marked(shapes: Shapes) -> list[str]:
    """The families whose marks a checkpoint bears, in the order of the table."""
    first = {m[2] for m in map(_LAYER.fullmatch, shapes) if m and m[1] == "0"}
    return [n for n, (has, lacks) in MARKS.items() if first & set(has) and lacks not in first]


def common(shapes: Shapes) -> dict[str, Any] | None:
    """The fields that every family has; None where this is not the FLA format."""
    layers = {int(m[1]) for m in map(_LAYER.fullmatch, shapes) if m}
    embedded = shapes.get("model.embeddings.weight", ())
    wide = shapes.get("model.layers.0.mlp.gate_proj.weight", ())
    mixer = shapes.get("model.layers.0.attn.o_proj.weight", ())
    flat = [len(shape) != 2 for shape in (embedded, wide, mixer)]
    if any(flat) or layers != set(range(len(layers))):
        return None
    return {
        "vocab_size": embedded[0],
        "hidden_size": embedded[1],
        "intermediate_size": wide[0],
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "use_lower_bound": "model.lower_bounds" in shapes,
    }


def candidates(family: str, shapes: Shapes, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Configurations whose tensors may be those found: every number of heads that divides."""
    own = {m[2]: s for n, s in shapes.items() if (m := _LAYER.fullmatch(n)) and m[1] == "0"}
    conv = own.get("attn.q_conv1d.weight")
    base = {**fields, "use_short_conv": conv is not None}
    base |= {"conv_size": conv[-1]} if conv else {}
    try:
        yield from _FAMILIES[family](Own(own, base))
    # sizes that do not divide are nobody's
    except (KeyError, IndexError, ZeroDivisionError):
        return


def _divided(own: Own, **more: Any) -> Iterator[dict[str, Any]]:
    keys, values = own.rows("k_proj.weight"), own.rows("v_proj.weight")
    for count in (n for n in range(1, gcd(keys, values) + 1) if keys % n == 0 == values % n):
        wide = {"expand_k": keys / own.width, "expand_v": values / own.width}
        yield {**own.fields, "num_heads": count, **wide, **more}


def _gla(own: Own) -> Iterator[dict[str, Any]]:
    more = {"gate_low_rank_dim": own.rows("gk_proj.0.weight"), "use_output_gate": own.gated}
    for one, fuse in product(_divided(own, **more), (True, False)):
        yield {**one, "fuse_norm": fuse}


def _delta_net(own: Own) -> Iterator[dict[str, Any]]:
    return _divided(own, use_gate=own.gated)


def _gated_deltanet(own: Own) -> Iterator[dict[str, Any]]:
    # value heads may share keys: nothing tells how many key heads there are, unless one
    shared, keys = own.rows("a_proj.weight"), own.rows("k_proj.weight")
    for count in (n for n in range(1, shared + 1) if shared % n == 0 == keys % n):
        yield _delta(own, count, shared, keys // count) | {"use_gate": own.gated}


def _delta(own: Own, count: int, shared: int, key: int) -> dict[str, Any]:
    heads = {"num_heads": count, "num_v_heads": shared, "head_dim": key}
    return {**own.fields, **heads, "expand_v": own.read / shared / key}


def _comba(own: Own) -> Iterator[dict[str, Any]]:
    count = own.rows("D")
    made = _delta(own, count, own.rows("a_proj.weight"), own.rows("k_proj.weight") // count)
    yield {**made, "use_output_gate": own.gated}


def _kda(own: Own) -> Iterator[dict[str, Any]]:
    shared = own.rows("A_log")
    key = own.rows("dt_bias") // shared
    yield _delta(own, own.rows("k_proj.weight") // key, shared, key)


def _deltaproduct(own: Own) -> Iterator[dict[str, Any]]:
    writes = own.rows("k_proj.weight") // own.rows("q_proj.weight")
    count = own.rows("b_proj.weight") // writes
    made = _delta(own, count, count, own.rows("q_proj.weight") // count)
    gates = {"use_output_gate": own.gated, "use_forget_gate": own.rows("a_proj.weight") > 0}
    # with one write a token it is a gated DeltaNet or a DeltaNet
    if writes > 1:
        yield {**made, **gates, "num_householder": writes}


def _grouped(own: Own, norm: str) -> dict[str, Any]:
    """Heads by the norm of their read; keys and values may be shared among them."""
    count, queries = own.read // own.rows(norm), own.rows("q_proj.weight")
    kept = count * own.rows("k_proj.weight") // queries
    wide = {"expand_k": queries / own.width, "expand_v": own.read / own.width}
    return {**own.fields, "num_heads": count, "num_kv_heads": kept, **wide}


def _retnet(own: Own) -> Iterator[dict[str, Any]]:
    fused = own.rows("g_norm_swish_gate.weight") > 0
    made = _grouped(own, "g_norm_swish_gate.weight" if fused else "g_norm.weight")
    yield {**made, "use_output_gate": own.gated, "fuse_norm": fused or not own.gated}


def _linear_attn(own: Own) -> Iterator[dict[str, Any]]:
    maps = {name.split(".")[1] for name in own.shapes if name.startswith("attn.feature_map")}
    parts = {name.split(".", 2)[2] for name in own.shapes if name.startswith("attn.feature_map")}
    names: tuple[str, ...] = tuple(FIXED)
    if "layer1.weight" in parts:
        names = ("elementwise_product",)
    elif parts:
        names = ("hedgehog",) if "layer.bias" in parts else ("t2r",)
    for name in names:
        tied = len(maps) == 1
        yield {**_grouped(own, "norm.weight"), "feature_map": name, "tie_feature_map_qk": tied}


def _hgrn2(own: Own) -> Iterator[dict[str, Any]]:
    # a head's width is the same for keys and values: nothing tells it
    for ratio in (n for n in range(1, own.width + 1) if own.width % n == 0):
        affine = own.rows("g_norm.weight") > 0
        yield {**own.fields, "expand_ratio": ratio, "elementwise_affine": affine}


_FAMILIES: dict[str, Callable[[Own], Iterator[dict[str, Any]]]] = {
    "gla": _gla,
    "delta_net": _delta_net,
    "gated_deltanet": _gated_deltanet,
    "gated_deltaproduct": _deltaproduct,
    "comba": _comba,
    "kda": _kda,
    "retnet": _retnet,
    "linear_attn": _linear_attn,
    "hgrn2": _hgrn2,
}
