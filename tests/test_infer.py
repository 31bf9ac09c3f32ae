"""A checkpoint without config.json: the configuration is what its shapes settle, or a refusal."""

from __future__ import annotations

import pytest
import torch
from cli_helpers import pico

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError
from mcretrofit.loading import load_model

CASES = {
    "gla": {"expand_k": 0.5},
    "delta_net": {},
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


def test_what_they_leave_open_is_named(tmp_path):
    base = pico(tmp_path / "base", "linear_attn")
    (base / "config.json").unlink()
    with pytest.raises(RetrofitError, match="do not tell its model_type.*--config config.json"):
        load_model(open_checkpoint(base))


def test_heads_that_may_be_shared_are_left_open(tmp_path):
    base = pico(tmp_path / "base", "gated_deltanet", num_heads=2, num_v_heads=2)
    (base / "config.json").unlink()
    with pytest.raises(RetrofitError, match="do not tell expand_v, head_dim, num_heads"):
        load_model(open_checkpoint(base))


def test_a_file_saved_on_a_gpu_opens_on_a_cpu(tmp_path, monkeypatch):
    tensors = {"w": torch.arange(4.0)}
    # what torch.save notes of a storage on a GPU
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
    for name, zipped in (("zip.pth", True), ("legacy.pth", False)):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=zipped)
        assert b"cuda:0" in (tmp_path / name).read_bytes()
        found = open_checkpoint(tmp_path / name).read("w")
        assert found.device.type == "cpu" and torch.equal(found, tensors["w"])
