"""A checkpoint without config.json: the configuration is what its shapes settle, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_helpers import pico
from safetensors.torch import load_file, save_file

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError
from mcretrofit.exporting import export
from mcretrofit.loading import load_model
from mcretrofit.streaming import stream

CASES = {
    "gla": {"expand_k": 0.5},
    "delta_net": {},
    "gated_deltanet": {"num_v_heads": 1},
    "gated_deltaproduct": {},
    "comba": {"use_output_gate": False},
    "kda": {"expand_v": 2.0},
    "retnet": {"expand_v": 2.0},
    "linear_attn": {},
}
# what the shapes of a family leave open, and what of it settles the rest
OPEN = {
    "linear_attn": ({"feature_map": "elu"}, "do not tell feature_map of", {"feature_map": "elu"}),
    "hgrn2": ({}, "do not tell expand_ratio of", {"expand_ratio": 16}),
    "mamba2": ({}, "n_groups and state_size.*product, 16, alone", {"state_size": 8}),
    "gated_deltanet": (
        {"num_heads": 2, "num_v_heads": 2},
        "do not tell expand_v, head_dim, num_heads of",
        {"num_heads": 2},
    ),
}


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_shapes_settle_it(family, tmp_path):
    base = pico(tmp_path / "base", family, **CASES[family])
    with_config, ids = load_model(open_checkpoint(base)), torch.arange(40)[None]
    (base / "config.json").unlink()
    without = load_model(open_checkpoint(base))
    assert without.config.family == family
    assert torch.equal(without(ids).logits, with_config(ids).logits)


@pytest.mark.parametrize("family", OPEN)
@torch.no_grad()
def test_what_they_leave_open_is_named_and_may_be_all_that_is_given(family, tmp_path):
    fields, told, enough = OPEN[family]
    base = pico(tmp_path / "base", family, **fields)
    if family == "mamba2":
        as_others_store_it(base)
    with_config, ids = load_model(open_checkpoint(base)), torch.arange(40)[None]
    (base / "config.json").unlink()
    with pytest.raises(RetrofitError, match=f"{told}.*--config config.json"):
        load_model(open_checkpoint(base))
    (tmp_path / "some.json").write_text(json.dumps(enough))
    without = load_model(open_checkpoint(base, tmp_path / "some.json"))
    assert torch.equal(without(ids).logits, with_config(ids).logits)


def as_others_store_it(base: Path) -> None:
    """Our own names in the layout that this family's checkpoints have."""
    others = {"model.embeddings.": "backbone.embeddings.", "model.norm.": "backbone.norm_f."}
    others |= {"model.layers.": "backbone.layers."}
    tensors = load_file(base / "model.safetensors")
    for ours, theirs in others.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, base / "model.safetensors")


def test_tensors_of_nothing_known_are_refused(tmp_path):
    base = pico(tmp_path / "base")
    (base / "config.json").unlink()
    tensors = load_file(base / "model.safetensors")
    for name in list(tensors):
        if ".attn." in name:
            tensors[name.replace(".attn.", ".mixer.")] = tensors.pop(name)
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(RetrofitError, match="do not tell its model_type.*--config config.json"):
        load_model(open_checkpoint(base))
    half = {"backbone.layers.0.mixer.dt_bias": torch.zeros(2)}
    save_file(half, tmp_path / "half.safetensors")
    with pytest.raises(RetrofitError, match="not a whole Mamba-2's"):
        load_model(open_checkpoint(tmp_path / "half.safetensors"))


@pytest.mark.parametrize("named", [True, False], ids=["config.json", "inferred"])
@torch.no_grad()
def test_gate_and_up_in_one_tensor_as_early_fla_had_them(named, tmp_path):
    base = pico(tmp_path / "base", "gla")
    want, ids = load_model(open_checkpoint(base)), torch.arange(40)[None]
    tensors = load_file(base / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp."
        up = tensors.pop(f"{at}up_proj.weight")
        tensors[f"{at}gate_proj.weight"] = torch.cat([tensors[f"{at}gate_proj.weight"], up])
    save_file(tensors, base / "model.safetensors")
    if not named:
        (base / "config.json").unlink()
    got = load_model(open_checkpoint(base))
    assert torch.equal(got(ids).logits, want(ids).logits)
    found = stream(base)
    export(found.loaded.model, tmp_path / "out", checkpoint=None, tensors=found.tensors)
    assert torch.equal(load_model(open_checkpoint(tmp_path / "out"))(ids).logits, want(ids).logits)


def test_a_file_saved_on_a_gpu_opens_on_a_cpu(tmp_path, monkeypatch):
    tensors = {"w": torch.arange(4.0)}
    # what torch.save notes of a storage on a GPU
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
    for name, zipped in (("zip.pth", True), ("legacy.pth", False)):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert b"cuda:0" in (tmp_path / name).read_bytes()
        found = open_checkpoint(tmp_path / name).read("w")
        assert found.device.type == "cpu" and torch.equal(found, tensors["w"])
