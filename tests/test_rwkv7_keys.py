"""BlinkDL's RWKV-7: config from shapes, names there and back, and nothing misread as it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError
from mcretrofit.models._match import match
from mcretrofit.models._rwkv7_keys import (
    fla_shape,
    infer,
    tensor_to_fla,
    to_blinkdl,
    to_fla,
    unused,
)

shared = Path(__file__).parents[2] / "shared" / "checkpoints"
needs_shared = pytest.mark.skipif(not shared.is_dir(), reason="needs ../shared/checkpoints")


def blinkdl_shapes(
    layers: int = 2, width: int = 128, head: int = 64, vocab: int = 50
) -> dict[str, tuple[int, ...]]:
    """The shapes of a small RWKV-7 as BlinkDL's trainer saves them."""
    vector, norm = (1, 1, width), {"weight": (width,), "bias": (width,)}
    ranks = {"w": 32, "a": 24, "v": 16, "g": 48}
    shapes = {"emb.weight": (vocab, width), "head.weight": (vocab, width)}
    shapes |= {f"ln_out.{part}": shape for part, shape in norm.items()}
    for n in range(layers):
        block: dict[str, tuple[int, ...]] = {f"att.x_{stream}": vector for stream in "rwkvag"}
        for lora, rank in ranks.items():
            if n == 0 and lora == "v":
                continue
            block |= {f"att.{lora}1": (width, rank), f"att.{lora}2": (rank, width)}
            block |= {} if lora == "g" else {f"att.{lora}0": vector}
        block |= {"att.k_k": vector, "att.k_a": vector, "att.r_k": (width // head, head)}
        for name in ("receptance", "key", "value", "output"):
            block[f"att.{name}.weight"] = (width, width)
        norms = ("ln1", "ln2", "att.ln_x", *(["ln0"] if n == 0 else []))
        block |= {f"{ln}.{part}": shape for ln in norms for part, shape in norm.items()}
        block |= {
            "ffn.x_k": vector,
            "ffn.key.weight": (512, width),
            "ffn.value.weight": (width, 512),
        }
        shapes |= {f"blocks.{n}.{name}": shape for name, shape in block.items()}
    return shapes


def test_infers_config_from_shapes():
    config = infer(blinkdl_shapes())
    expected = {"hidden_size": 128, "head_dim": 64, "num_heads": 2, "intermediate_size": 512}
    expected |= {"num_hidden_layers": 2, "vocab_size": 50, "norm_first": True}
    expected |= {"decay_low_rank_dim": 32, "a_low_rank_dim": 24}
    expected |= {"v_low_rank_dim": 16, "gate_low_rank_dim": 48, "tie_word_embeddings": False}
    assert {key: config[key] for key in expected} == expected
    assert config["head_dim"] * config["norm_eps"] == pytest.approx(64e-5)
    assert "group_norm_eps" not in config
    assert infer(blinkdl_shapes(head=16))["group_norm_eps"] == 64e-5
    assert infer(blinkdl_shapes(layers=1))["num_hidden_layers"] == 1


def test_names_go_there_and_back():
    shapes = blinkdl_shapes()
    renamed = {to_fla(name): fla_shape(name, shape) for name, shape in shapes.items()}
    assert len(renamed) == len(shapes)
    assert [to_blinkdl(name) for name in renamed] == list(shapes)
    assert renamed["model.layers.1.attn.v_lora.lora.0.weight"] == (16, 128)
    assert renamed["model.layers.1.attn.v_lora.lora.2.weight"] == (128, 16)
    assert renamed["model.layers.1.attn.v_lora.lora.2.bias"] == (128,)
    assert renamed["model.layers.0.attn.x_g"] == (1, 1, 128)
    assert renamed["model.layers.0.ffn.x_k"] == renamed["model.layers.0.attn.k_a"] == (128,)
    matrix = torch.randn(128, 16)
    assert torch.equal(tensor_to_fla("blocks.1.att.v1", matrix), matrix.T)
    assert torch.equal(tensor_to_fla("blocks.1.att.key.weight", matrix), matrix)
    assert unused("blocks.0.att.v1")
    assert not unused("blocks.1.att.v1")
    for name in ("blocks.x.ln1.weight", "model.layers.0.attn.q_proj.weight", "att.w1"):
        for rename in (to_fla, to_blinkdl):
            with pytest.raises(RetrofitError, match="tensor"):
                rename(name)


BROKEN = {
    "r_k": ({"blocks.0.att.r_k": (3, 64)}, "3 heads of 64, but emb.weight 128 channels"),
    "r_k-flat": ({"blocks.0.att.r_k": (128,)}, "fits no RWKV-7"),
    "rank": ({"blocks.1.att.w1": (128, 8)}, "differ between layers"),
    "surplus": ({"blocks.0.att.new": (1,)}, "no place"),
    "gap": ({f"blocks.3.{name}.bias": (128,) for name in ("ln1", "ln2")}, "no blocks.2"),
    "no-emb": ({"emb.weight": None}, "without 'emb.weight'"),
    "no-lora": ({"blocks.1.att.g1": None}, "without 'blocks.1.att.g1'"),
    "deep": ({"blocks.0.ffn.s_emb.weight": (50, 1024)}, "DeepEmbed"),
    "rosa": ({"blocks.0.rosa.q.weight": (128, 128)}, "ROSA"),
}


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_refuses_other_shapes(case):
    changes, expected = BROKEN[case]
    shapes = {**blinkdl_shapes(), **changes}
    with pytest.raises(RetrofitError, match=expected):
        infer({name: shape for name, shape in shapes.items() if shape is not None})


OTHERS = {
    "RWKV-4 ": {"att.time_decay": (64,), "att.time_first": (64,)},
    "RWKV-5.0": {"att.time_decay": (8,), "att.ln_x.weight": (64,)},
    "RWKV-5.1": {"att.time_decay": (8, 1), "att.ln_x.weight": (64,), "att.gate.weight": (64, 64)},
    "RWKV-5.2": {"att.time_decay": (8, 8), "att.ln_x.weight": (64,), "att.gate.weight": (64, 64)},
    "RWKV-6": {"att.time_decay": (1, 1, 64), "att.time_maa_x": (1, 1, 64)},
    "Hugging Face": {"attention.time_decay": (64,)},
    "no RWKV-7": {"attn.q_proj.weight": (64, 64)},
}


@pytest.mark.parametrize("expected", OTHERS, ids=str)
def test_names_the_layout_it_refuses(expected):
    shapes = {f"blocks.0.{name}": shape for name, shape in OTHERS[expected].items()}
    with pytest.raises(RetrofitError, match=rf"{expected}.* not supported yet; known families: "):
        infer(shapes)


def test_match_accounts_for_every_tensor():
    expected = {"e": (4, 2), "w": (2,), "h": (4, 2)}
    tied = {"h": "e"}
    assert match(expected, expected) == ["e", "w", "h"]
    assert match(expected, {"e": (4, 2), "w": (2,)}, tied=tied) == ["e", "w"]
    assert match(expected, {"h": (4, 2), "w": (2,)}, tied=tied) == ["w", "h"]
    assert match(expected, expected, tied=tied) == ["e", "w"]
    assert match({"e": (4, 2)}, {"h": (4, 2)}, tied=tied) == ["h"]
    assert match({"w": (2,)}, {"w": [2], "r.inv_freq": (1,)}, harmless=["*.inv_freq"]) == ["w"]
    with pytest.raises(RetrofitError) as caught:
        match(expected, {"e": (4, 3), "x": (1,), "h": (5, 2)}, tied=tied)
    assert str(caught.value) == (
        "the checkpoint does not fit the model: 1 tensor missing (w); 1 tensor surplus (x); "
        "2 tensors of the wrong shape (e is [4, 3], expected [4, 2], h is [5, 2], expected [4, 2])"
    )
    with pytest.raises(RetrofitError, match=r"5 tensors missing \(a, b, c, \.\.\.\)"):
        match(dict.fromkeys("abcde", (1,)), {})


@needs_shared
@pytest.mark.parametrize(
    ("file", "layout"),
    [("rwkv5.2-730k-bytes.pth", "RWKV-5.2"), ("rwkv7-digit-reverser.pth", "ROSA")],
)
def test_refuses_real_files_of_other_layouts(file, layout):
    found = open_checkpoint(shared / file)
    with pytest.raises(RetrofitError, match=layout):
        infer({name: found.shape(name) for name in found.names()})


Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    """A layer norm with RWKV-7's epsilon."""
    return functional.layer_norm(x, x.shape, w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def time_mix(
    w: Weights, x: torch.Tensor, last: torch.Tensor, state: torch.Tensor, first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of a one-head RWKV-7 mixer in FLA's names: output, new state, v of layer 0."""
    mixed = {s: x + (last - x) * w[f"attn.x_{s}"].view(-1) for s in "rwkvag"}

    def lora(kind: str, activation=lambda y: y) -> torch.Tensor:
        low = activation(w[f"attn.{kind}_lora.lora.0.weight"] @ mixed[kind])
        bias = w.get(f"attn.{kind}_lora.lora.2.bias")
        return functional.linear(low, w[f"attn.{kind}_lora.lora.2.weight"], bias)

    r, k, v = (w[f"attn.{s}_proj.weight"] @ mixed[s] for s in "rkv")
    decay = torch.exp(-0.6065306597126334 * lora("w", torch.tanh).sigmoid())
    v = v if first is None else torch.lerp(v, first, lora("v").sigmoid())
    rate = lora("a").sigmoid()
    unit = functional.normalize(k * w["attn.k_k"], dim=0)
    k = k * (1 + (rate - 1) * w["attn.k_a"])
    state = state * decay - torch.outer(state @ unit, unit * rate) + torch.outer(v, k)
    scale, shift = w["attn.g_norm.weight"], w["attn.g_norm.bias"]
    out = functional.group_norm((state @ r)[None], 1, scale, shift, 64e-5)[0]
    out = out + (r * k * w["attn.r_k"][0]).sum() * v
    return (
        w["attn.o_proj.weight"] @ (out * lora("g", torch.sigmoid)),
        state,
        first if first is not None else v,
    )


def logits_of(weights: Weights, layers: int, tokens: bytes) -> torch.Tensor:
    """The logits after the last token, one token at a time from the zero state."""
    blocks = [
        {name.split(".", 3)[3]: value for name, value in weights.items() if f"layers.{n}." in name}
        for n in range(layers)
    ]
    width = weights["model.norm.weight"].numel()
    states, last = torch.zeros(layers, width, width), torch.zeros(layers, 2, width)
    for token in tokens:
        x, first = norm(weights["model.embeddings.weight"][token], blocks[0], "pre_norm"), None
        for n, w in enumerate(blocks):
            y = norm(x, w, "attn_norm")
            mixed, states[n], first = time_mix(w, y, last[n, 0], states[n], first)
            x = x + mixed
            z = norm(x, w, "ffn_norm")
            key = w["ffn.key.weight"] @ (z + (last[n, 1] - z) * w["ffn.x_k"])
            last[n] = torch.stack([y, z])
            x = x + w["ffn.value.weight"] @ key.relu().square()
    return weights["lm_head.weight"] @ norm(x, weights, "model.norm")


@needs_shared
def test_converted_weights_give_third_party_logits():
    found = open_checkpoint(shared / "rwkv7-834k-bytes.safetensors")
    assert infer({name: found.shape(name) for name in found.names()})["num_hidden_layers"] == 12
    weights = {to_fla(name): tensor_to_fla(name, found.read(name)) for name in found.names()}
    raw = bytearray((shared / "rwkv7-834k-bytes.expected-logits.f32").read_bytes())
    expected = torch.frombuffer(raw, dtype=torch.float32)
    torch.testing.assert_close(logits_of(weights, 12, b'"in'), expected, rtol=0, atol=2e-6)
