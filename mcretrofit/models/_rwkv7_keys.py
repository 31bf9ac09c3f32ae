"""RWKV-7 as BlinkDL stores it (arXiv 2503.14456): its config from shapes, its names as FLA's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcretrofit.errors import RetrofitError
from mcretrofit.registry import names as registered

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]

_TOP = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
_MATRICES = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
_BLOCK = {
    **{f"{ln}.{part}": f"{to}.{part}" for ln, to in _NORMS.items() for part in ("weight", "bias")},
    **{f"att.{name}.weight": f"attn.{to}.weight" for name, to in _MATRICES.items()},
    **{f"att.{name}": f"attn.{name}" for name in ("k_k", "k_a", "r_k")},
    **{f"att.x_{stream}": f"attn.x_{stream}" for stream in "rwkvag"},
    **{f"att.{lora}1": f"attn.{lora}_lora.lora.0.weight" for lora in "wavg"},
    **{f"att.{lora}2": f"attn.{lora}_lora.lora.2.weight" for lora in "wavg"},
    **{f"att.{lora}0": f"attn.{lora}_lora.lora.2.bias" for lora in "wav"},
    **{f"ffn.{name}": f"ffn.{name}" for name in ("x_k", "key.weight", "value.weight")},
}
_BACK = {fla: blinkdl for blinkdl, fla in _BLOCK.items()}
_TOP_BACK = {fla: blinkdl for blinkdl, fla in _TOP.items()}
_LORAS = {
    "decay_low_rank_dim": "w1",
    "a_low_rank_dim": "a1",
    "v_low_rank_dim": "v1",
    "gate_low_rank_dim": "g1",
}
_LOW_RANK = re.compile(r"blocks\.\d+\.att\.[wavg][12]")
_TOKEN_SHIFT = re.compile(r"blocks\.\d+\.att\.x_[rwkvag]")
# BlinkDL's ln_x keeps this epsilon for every head size, FLA's is head_dim * norm_eps
_GROUP_NORM_EPS = 64e-5


def to_fla(name: str) -> str:
    """FLA's name for a BlinkDL tensor; RetrofitError if RWKV-7 has no such tensor."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if found and found.group(2) in _BLOCK:
        return f"model.layers.{found.group(1)}.{_BLOCK[found.group(2)]}"
    if name not in _TOP:
        raise RetrofitError(f"tensor '{name}' has no place in a plain RWKV-7")
    return _TOP[name]


def to_blinkdl(name: str) -> str:
    """BlinkDL's name for an FLA tensor, the inverse of `to_fla`."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if found and found.group(2) in _BACK:
        return f"blocks.{found.group(1)}.{_BACK[found.group(2)]}"
    if name not in _TOP_BACK:
        raise RetrofitError(f"tensor '{name}' has no name in BlinkDL's RWKV-7 layout")
    return _TOP_BACK[name]


def unused(name: str) -> bool:
    """Whether BlinkDL may store it for nothing: layer 0 makes v_first, so it mixes no v."""
    return re.fullmatch(r"blocks\.0\.att\.v[012]", name) is not None


def fla_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a BlinkDL tensor of `shape` has under its FLA name.

    Low-rank matrices are stored as [in, out] and turn; [1, 1, D] becomes [D] except in the
    time mixing's x_*, where FLA too keeps [1, 1, D]; everything else agrees.
    """
    if _LOW_RANK.fullmatch(name):
        return shape[::-1]
    single = len(shape) == 3 and shape[:2] == (1, 1)
    return shape[2:] if single and not _TOKEN_SHIFT.fullmatch(name) else shape


def tensor_to_fla(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of BlinkDL's tensor `name` laid out as FLA stores them (see `fla_shape`)."""
    turned = tensor.mT if _LOW_RANK.fullmatch(name) else tensor
    return turned.reshape(fla_shape(name, tuple(tensor.shape))).contiguous()


def refuse_others(shapes: Shapes) -> None:
    """Raise RetrofitError, naming the layout found, unless this is BlinkDL's RWKV-7."""
    layout = _layout(shapes)
    if layout != "RWKV-7":
        known = ", ".join(registered("models"))
        raise RetrofitError(f"{layout} is not supported yet; known families: {known}")


def infer(shapes: Shapes) -> dict[str, Any]:
    """A config in FLA's RWKV7Config fields from BlinkDL's shapes; RetrofitError for others.

    `group_norm_eps` appears only where FLA's head_dim * norm_eps would not be BlinkDL's 64e-5.
    """
    refuse_others(shapes)
    for name in shapes:
        to_fla(name)
    layers = _count_layers(shapes)
    vocab_size, hidden_size = _size(shapes, "emb.weight", 2)
    heads, head_dim = _size(shapes, "blocks.0.att.r_k", 2)
    intermediate_size, _ = _size(shapes, "blocks.0.ffn.key.weight", 2)
    if heads * head_dim != hidden_size:
        raise RetrofitError(
            f"blocks.0.att.r_k says {heads} heads of {head_dim}, but emb.weight {hidden_size} channels"
        )
    config = {
        "model_type": "rwkv7",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "hidden_ratio": intermediate_size / hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "num_heads": heads,
        "value_dim": [hidden_size] * layers,
        **{field: _rank(shapes, lora, layers) for field, lora in _LORAS.items()},
        "hidden_act": "sqrelu",
        "norm_first": "blocks.0.ln0.weight" in shapes,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "tie_word_embeddings": "head.weight" not in shapes,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return config if head_dim == 64 else {**config, "group_norm_eps": _GROUP_NORM_EPS}


def _size(shapes: Shapes, name: str, dimensions: int) -> tuple[int, ...]:
    if name not in shapes:
        raise RetrofitError(f"RWKV-7 layout without '{name}': is a shard missing?")
    shape = tuple(shapes[name])
    if len(shape) != dimensions or 0 in shape:
        raise RetrofitError(f"'{name}' has the shape {list(shape)}, which fits no RWKV-7")
    return shape


def _count_layers(shapes: Shapes) -> int:
    found = {int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")}
    gap = next((layer for layer in range(len(found)) if layer not in found), None)
    if gap is not None:
        raise RetrofitError(f"RWKV-7 layout with blocks up to {max(found)}, but no blocks.{gap}")
    return len(found)


def _rank(shapes: Shapes, lora: str, layers: int) -> int:
    # a single layer has no v LoRA, so any rank describes it
    first = 1 if lora == "v1" else 0
    ranks = {_size(shapes, f"blocks.{n}.att.{lora}", 2)[1] for n in range(first, layers)}
    if len(ranks) > 1:
        raise RetrofitError(
            f"the low-rank sizes of att.{lora} differ between layers: {sorted(ranks)}"
        )
    return ranks.pop() if ranks else 32


def _layout(shapes: Shapes) -> str:
    def has(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in shapes)

    if has(r"^rosa\d|\.rosa"):
        return "the RWKV-7 layout with ROSA blocks"
    if has(r"\.(attention|self_attn)\.time_(decay|maa)") or has(r"^(model|rwkv)\.blocks\."):
        return "Hugging Face's layout of RWKV-4, 5 or 6"
    if has(r"\.time_maa_"):
        return "the RWKV-6 layout"
    if has(r"\.att\.time_decay$"):
        return f"the RWKV-{_old_version(shapes, has(r'.att.ln_x.'), has(r'.att.gate.'))} layout"
    if has(r"\.att\.r_k$"):
        deep = has(r"\.ffn\.s_emb|\.qkv\.")
        return "the RWKV-7a/7b layout (DeepEmbed)" if deep else "RWKV-7"
    return "this layout (no RWKV-7 tensor such as blocks.0.att.r_k)"


def _old_version(shapes: Shapes, normalised: bool, gated: bool) -> str:
    if not normalised:
        return "4"
    decay = next(tuple(shape) for name, shape in shapes.items() if name.endswith("att.time_decay"))
    if len(decay) > 1 and decay[1] > 1:
        return "5.2"
    return "5.1" if gated else "5.0"
