"""RWKV-5.2 and 6 in BlinkDL's layout against BlinkDL's own formulas, one token at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError
from mcretrofit.loading import load_model

WIDTH, KEY, LAYERS, VOCABULARY, LOW, DECAY = 32, 8, 2, 50, 4, 6
VERSIONS = pytest.mark.parametrize("version", [5, 6])
Weights = dict[str, Tensor]


def made(version: int) -> Weights:
    """Random weights with the names and shapes that BlinkDL's trainer saves."""
    torch.manual_seed(0)
    vector, square, head = (1, 1, WIDTH), (WIDTH, WIDTH), (WIDTH // KEY, KEY)
    block = {f"{ln}.{part}": (WIDTH,) for ln in ("ln1", "ln2") for part in ("weight", "bias")}
    block |= {f"att.{n}.weight": square for n in ("receptance", "key", "value", "gate", "output")}
    block |= {"att.ln_x.weight": (WIDTH,), "att.ln_x.bias": (WIDTH,), "att.time_faaaa": head}
    block |= {"ffn.key.weight": (48, WIDTH), "ffn.value.weight": (WIDTH, 48)}
    block |= {"ffn.receptance.weight": square}
    if version == 5:
        block |= {f"att.time_mix_{s}": vector for s in "kvrg"} | {"att.time_decay": head}
        block |= {f"ffn.time_mix_{s}": vector for s in "kr"}
    else:
        block |= {f"att.time_maa_{s}": vector for s in "xwkvrg"} | {"att.time_decay": vector}
        block |= {"att.time_maa_w1": (WIDTH, 5 * LOW), "att.time_maa_w2": (5, LOW, WIDTH)}
        block |= {"att.time_decay_w1": (WIDTH, DECAY), "att.time_decay_w2": (DECAY, WIDTH)}
        block |= {f"ffn.time_maa_{s}": vector for s in "kr"}
    shapes = {"emb.weight": (VOCABULARY, WIDTH), "head.weight": (VOCABULARY, WIDTH)}
    shapes |= {
        f"{ln}.{p}": (WIDTH,) for ln in ("blocks.0.ln0", "ln_out") for p in ("weight", "bias")
    }
    shapes |= {f"blocks.{i}.{n}": s for i in range(LAYERS) for n, s in block.items()}
    return {name: torch.randn(shape) * 0.4 for name, shape in shapes.items()}


def norm(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"])


def mixed(x: Tensor, last: Tensor, w: Weights, at: str) -> tuple[list[Tensor], Tensor]:
    """The inputs of r, k, v and g of one token, and its decay `[H, K]` in (0, 1)."""
    if f"{at}.time_mix_r" in w:
        shares = [w[f"{at}.time_mix_{s}"].view(-1) for s in "rkvg"]
        decay = torch.exp(-torch.exp(w[f"{at}.time_decay"]))
        return [x * s + last * (1 - s) for s in shares], decay
    change, vector = last - x, {n: w[f"{at}.time_maa_{n}"].view(-1) for n in "xwkvrg"}
    low = torch.tanh((x + change * vector["x"]) @ w[f"{at}.time_maa_w1"]).view(5, 1, -1)
    more = dict(zip("wkvrg", torch.bmm(low, w[f"{at}.time_maa_w2"])[:, 0], strict=True))
    at_w, *rest = (x + change * (vector[s] + more[s]) for s in "wrkvg")
    log = torch.tanh(at_w @ w[f"{at}.time_decay_w1"]) @ w[f"{at}.time_decay_w2"]
    decay = torch.exp(-torch.exp(w[f"{at}.time_decay"].view(-1) + log))
    return rest, decay.view(-1, KEY)


def attend(x: Tensor, last: Tensor, state: Tensor, w: Weights, at: str) -> tuple[Tensor, Tensor]:
    """One token through the time mixing: its output and the new state `[H, K, V]`."""
    inputs, decay = mixed(x, last, w, at)
    names = ("receptance", "key", "value", "gate")
    r, k, v, g = (w[f"{at}.{n}.weight"] @ i for n, i in zip(names, inputs, strict=True))
    r, k, v = (s.view(-1, KEY) for s in (r, k, v))
    write = k[:, :, None] * v[:, None, :]
    out = torch.einsum("hk,hkv->hv", r, state + w[f"{at}.time_faaaa"][:, :, None] * write)
    out = out.flatten()[None] / 8
    out = F.group_norm(out, WIDTH // KEY, w[f"{at}.ln_x.weight"], w[f"{at}.ln_x.bias"], 1e-5)
    return w[f"{at}.output.weight"] @ (out[0] * F.silu(g)), decay[:, :, None] * state + write


def feed(x: Tensor, last: Tensor, w: Weights, at: str) -> Tensor:
    def half(s: str) -> Tensor:
        if f"{at}.time_mix_{s}" in w:
            share = w[f"{at}.time_mix_{s}"].view(-1)
            return x * share + last * (1 - share)
        return x + (last - x) * w[f"{at}.time_maa_{s}"].view(-1)

    value = w[f"{at}.value.weight"] @ F.relu(w[f"{at}.key.weight"] @ half("k")).square()
    return torch.sigmoid(w[f"{at}.receptance.weight"] @ half("r")) * value


def reference(w: Weights, ids: list[int]) -> Tensor:
    """Logits `[T, vocabulary]`."""
    rows, zero = [], torch.zeros(WIDTH)
    lasts = {(i, part): zero for i in range(LAYERS) for part in ("att", "ffn")}
    states = [torch.zeros(WIDTH // KEY, KEY, KEY) for _ in range(LAYERS)]
    for token in ids:
        x = norm(w["emb.weight"][token], w, "blocks.0.ln0")
        for i in range(LAYERS):
            y = norm(x, w, f"blocks.{i}.ln1")
            out, states[i] = attend(y, lasts[i, "att"], states[i], w, f"blocks.{i}.att")
            x, lasts[i, "att"] = x + out, y
            y = norm(x, w, f"blocks.{i}.ln2")
            x, lasts[i, "ffn"] = x + feed(y, lasts[i, "ffn"], w, f"blocks.{i}.ffn"), y
        rows.append(w["head.weight"] @ norm(x, w, "ln_out"))
    return torch.stack(rows)


def written(folder: Path, weights: Weights) -> Path:
    save_file(weights, folder / "weights.safetensors")
    return folder / "weights.safetensors"


@VERSIONS
@torch.no_grad()
def test_a_bare_file_is_the_model_of_the_formulas(version, tmp_path):
    weights, ids = made(version), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    model = load_model(open_checkpoint(written(tmp_path, weights)))
    assert model.config.family == f"rwkv{version}"
    want = reference(weights, ids)
    torch.testing.assert_close(model(torch.tensor([ids])).logits[0], want, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    again = load_model(open_checkpoint(tmp_path / "saved"))
    assert torch.equal(again(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)


@VERSIONS
def test_what_does_not_fit_is_named(version, tmp_path):
    weights = made(version)
    cases = {
        "no place in a plain": {"blocks.1.att.strange": torch.ones(2)},
        "is a shard missing": {"blocks.0.ffn.key.weight": None},
        "1 tensor missing": {"blocks.1.ln2.bias": None},
    }
    for expected, changes in cases.items():
        kept = {n: t for n, t in {**weights, **changes}.items() if t is not None}
        with pytest.raises(RetrofitError, match=expected):
            load_model(open_checkpoint(written(tmp_path, kept)))
