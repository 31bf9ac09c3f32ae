"""A configuration from tensors alone, for checkpoints in the FLA format: what shapes settle, no more.

Every candidate is built on the meta device and kept only if its tensors are exactly those found.
What no shape shows (activations, epsilons, normalisers) has the format's default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from math import gcd
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
# family -> a tensor of every layer that none of the others has, and one that it must not have
MARKS = {
    "gla": ("attn.gk_proj.0.weight", None),
    "delta_net": ("attn.b_proj.weight", "attn.a_proj.weight"),
    "gated_deltanet": ("attn.a_proj.weight", "attn.D"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def marked(shapes: Shapes) -> list[str]:
    """The families whose marks a checkpoint bears, in the order of the table."""
    first = {m[2] for m in map(_LAYER.fullmatch, shapes) if m and m[1] == "0"}
    return [name for name, (has, lacks) in MARKS.items() if has in first and lacks not in first]


def common(shapes: Shapes) -> dict[str, Any] | None:
    """The fields that every family has; None where this is not the FLA format."""
    layers = {int(m[1]) for m in map(_LAYER.fullmatch, shapes) if m}
    embedded = shapes.get("model.embeddings.weight", ())
    wide = shapes.get("model.layers.0.mlp.gate_proj.weight", ())
    if len(embedded) != 2 or len(wide) != 2 or layers != set(range(len(layers))):
        return None
    return {
        "vocab_size": embedded[0],
        "hidden_size": embedded[1],
        "intermediate_size": wide[0],
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }


def candidates(family: str, shapes: Shapes, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Configurations whose tensors may be those found: every number of heads that divides."""
    own = {m[2]: s for n, s in shapes.items() if (m := _LAYER.fullmatch(n)) and m[1] == "0"}
    width = fields["hidden_size"]
    keys, values = own["attn.k_proj.weight"][0], own["attn.v_proj.weight"][0]
    base = {
        **fields,
        "use_short_conv": "attn.q_conv1d.weight" in own,
        "conv_size": own.get("attn.q_conv1d.weight", (4,))[-1],
    }
    gated = "attn.g_proj.weight" in own
    base["use_gate" if family in ("delta_net", "gated_deltanet") else "use_output_gate"] = gated
    if family == "gla":
        base["gate_low_rank_dim"] = own["attn.gk_proj.0.weight"][0]
    if family == "gated_deltanet":
        # value heads may share keys: nothing tells how many key heads there are, unless one
        shared = own["attn.a_proj.weight"][0]
        for count in (n for n in range(1, shared + 1) if shared % n == 0 == keys % n):
            wide = values * count / (shared * keys)
            grouped = {"num_heads": count, "num_v_heads": shared, "head_dim": keys // count}
            yield {**base, **grouped, "expand_v": wide}
        return
    heads = [n for n in range(1, gcd(keys, values) + 1) if keys % n == 0 == values % n]
    for count, fuse in product(heads, [True, False] if family == "gla" else [None]):
        made = {**base, "num_heads": count, "expand_k": keys / width, "expand_v": values / width}
        yield made if fuse is None else {**made, "fuse_norm": fuse}
