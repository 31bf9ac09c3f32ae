"""load_model: which family, every tensor accounted for, precision, other layouts, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_helpers import pico
from huggingface_hub import constants
from nativehosts import host
from safetensors.torch import save_file
from test_families import build, near, tokens
from test_rwkv7_keys import blinkdl_shapes

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.loading import load_model
from mcretrofit.models._rwkv7_keys import to_blinkdl


def write(folder, model, config=None, **changed):
    """The model in its family's own format, with some tensors changed (None drops one)."""
    own = {**model.config.to_diff_dict(), "model_type": model.config.family}
    fields = own if config is None else config
    tensors = {n.replace(".", "__"): p.detach().clone() for n, p in model.named_parameters()}
    tensors = {**tensors, **changed}
    tensors = {n.replace("__", "."): t for n, t in tensors.items() if t is not None}
    save_file(tensors, folder / "model.safetensors")
    if fields:
        (folder / "config.json").write_text(json.dumps(fields))
    return open_checkpoint(folder)


@torch.no_grad()
def test_half_precision_computes_in_float32_on_a_cpu(tmp_path):
    model = build("gated_deltanet", tie_word_embeddings=True).to(torch.bfloat16)
    checkpoint = write(tmp_path, model, lm_head__weight=None)
    loaded = load_model(checkpoint)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded(tokens(9)).logits, model.float()(tokens(9)).logits)
    kept = load_model(checkpoint, "bfloat16")
    assert kept.model.layers[0].attn.A_log.dtype == torch.float32
    assert kept.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        load_model(checkpoint, "bfloat61")


FAULTS = {
    "missing": ({"model__norm__weight": None}, "1 tensor missing .model.norm.weight"),
    "surplus": ({"model__extra": torch.ones(2)}, "1 tensor surplus .model.extra"),
    "shape": ({"model__norm__weight": torch.ones(3)}, r"is \[3\], expected \[32\]"),
    "nan": (
        {"model__norm__weight": torch.full((32,), torch.nan)},
        "model.safetensors: tensor 'model.norm",
    ),
    "integers": ({"model__norm__weight": torch.ones(32, dtype=torch.int8)}, "quantised"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses_what_does_not_fit(fault, tmp_path):
    changed, message = FAULTS[fault]
    with pytest.raises(RetrofitError, match=message):
        load_model(write(tmp_path, build("gla"), **changed))


CONFIGS = {
    "typo": ({"model_type": "gal"}, "unknown model_type 'gal'.*gated_deltanet"),
    "attention": ({"model_type": "llama"}, "'llama' has no recurrent mixer"),
    "hybrid": ({"model_type": "gla", "attn": {"layers": [0]}}, "attn: missing num_heads"),
    "map": ({"model_type": "linear_attn", "feature_map": "hedgehgo"}, "did you mean 'hedgehog'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_refuses_other_models(case, tmp_path):
    config, message = CONFIGS[case]
    with pytest.raises(RetrofitError, match=message):
        load_model(write(tmp_path, build("gla"), config))


@torch.no_grad()
def test_normalised_linear_attention_is_refused_at_the_op(tmp_path):
    with pytest.raises(RetrofitError, match="norm_feature_map"):
        build("linear_attn", norm_feature_map=True)(tokens(5))


@torch.no_grad()
def test_rwkv7_in_blinkdl_layout_needs_no_config(tmp_path):
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in blinkdl_shapes().items()}
    save_file(tensors, tmp_path / "weights.safetensors")
    loaded = load_model(open_checkpoint(tmp_path / "weights.safetensors"))
    assert {to_blinkdl(name) for name in loaded.state_dict()} == set(tensors)
    assert torch.equal(
        loaded.model.layers[1].attn.w_lora.lora[0].weight, tensors["blocks.1.att.w1"].T
    )
    ids = tokens(9) % 50
    assert loaded(ids).logits.isfinite().all()
    loaded.save_pretrained(tmp_path / "saved")
    again = load_model(open_checkpoint(tmp_path / "saved"))
    assert torch.equal(again(ids).logits, loaded(ids).logits)


@torch.no_grad()
def test_rwkv7_with_its_mixes_in_one_tensor(tmp_path):
    model = build("rwkv7")
    changed = {}
    for layer in range(2):
        mixer, prefix = model.model.layers[layer].attn, f"model__layers__{layer}__attn__x_"
        changed |= {f"{prefix}{s}": None for s in "rwkvag"}
        changed[f"{prefix}x"] = torch.stack([getattr(mixer, f"x_{s}").view(-1) for s in "rwkvag"])
    near(
        load_model(write(tmp_path, model, **changed))(tokens(70)).logits,
        model(tokens(70)).logits,
        0,
    )


@torch.no_grad()
def test_a_hub_id_is_read_from_the_cache_without_a_network(tmp_path, monkeypatch):
    # as the hub's client lays its cache out: tests run with HF_HUB_OFFLINE=1
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--someone--model"
    snapshot, blobs = place / "snapshots" / ("c0ffee" * 7)[:40], place / "blobs"
    base = pico(tmp_path / "base")
    for folder in (snapshot, blobs, place / "refs"):
        folder.mkdir(parents=True)
    (place / "refs" / "main").write_text(snapshot.name)
    for file in base.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs", file.name))
    for name in ("someone/model", f"someone/model@{snapshot.name}"):
        checkpoint = open_checkpoint(name)
        assert checkpoint.revision == snapshot.name
        assert load_model(checkpoint)(torch.arange(9)[None]).logits.isfinite().all()
    with pytest.raises(RetrofitError) as caught:
        open_checkpoint("someone/absent")
    assert str(caught.value) == (
        "no such file or folder: someone/absent; nor could it be fetched as a hub id: it is not in "
        "the hub's cache here, and HF_HUB_OFFLINE is set"
    )


def test_a_false_config_of_transformers_own_class_allocates_nothing(tmp_path, monkeypatch):
    host("olmo_hybrid").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = type(host("olmo_hybrid"))
    monkeypatch.setattr(found, "from_pretrained", lambda *_, **__: pytest.fail("was loaded"))
    for lie in ({"vocab_size": 4_000_000}, {"intermediate_size": 10_000_000}):
        (tmp_path / "config.json").write_text(json.dumps(config | lie))
        with pytest.raises(RetrofitError, match="asks for [0-9]+ numbers, its tensors hold"):
            load_model(open_checkpoint(tmp_path))


def test_what_cannot_be_printed_is_shown_quoted():
    with pytest.raises(UsageError) as caught:
        CachingConfig(rank="\x00\n")
    assert str(caught.value) == r"--rank '\x00\n': has to be a whole number of at least 0"
