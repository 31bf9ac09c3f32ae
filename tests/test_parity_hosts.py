"""Law 18 for families that transformers implements too: its own class on a CPU is the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.decoder import DecoderForCausalLM
from mcretrofit.errors import RetrofitError
from mcretrofit.loading import load_model
from mcretrofit.models._native import native_class

SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
GROUPS = pytest.mark.parametrize("groups", [1, 2])
MAMBA2 = {"hidden_size": 32, "head_dim": 16, "num_heads": 4, "state_size": 8, "vocab_size": 64}


def mamba2(folder: Path, groups: int, **fields: object) -> torch.nn.Module:
    """transformers' own Mamba-2, every parameter moved, saved in `folder`."""
    torch.manual_seed(0)
    kind = native_class("mamba2")
    config = {**MAMBA2, "num_hidden_layers": 2, "chunk_size": 16, "n_groups": groups}
    model = kind(kind.config_class(**{**config, **SPECIAL, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    return model


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@GROUPS
@torch.no_grad()
def test_mamba2_equals_transformers(groups, tmp_path):
    theirs = mamba2(tmp_path, groups, time_step_limit=(0.001, 0.7))
    ours, ids = load_model(open_checkpoint(tmp_path)), torch.randint(0, 64, (2, 75))
    assert isinstance(ours, DecoderForCausalLM)
    near(ours(ids).logits, theirs(ids).logits)
    theirs, ours = (m(ids[:, :-1], use_cache=True) for m in (theirs, ours))
    near(ours.logits, theirs.logits)


@GROUPS
@torch.no_grad()
def test_mamba2_decodes_as_transformers_does(groups, tmp_path):
    # without limits of the time step: the host's step of decoding does not apply them
    theirs = mamba2(tmp_path, groups, tie_word_embeddings=True, use_bias=True)
    ours, ids = load_model(open_checkpoint(tmp_path)), torch.randint(0, 64, (2, 41))
    for model in (theirs, ours):
        kept = "cache_params" if model is theirs else "past_key_values"
        out = model(ids[:, :35], use_cache=True)
        logits = [out.logits]
        for token in ids[:, 35:].split(1, 1):
            logits.append(model(token, use_cache=True, **{kept: out[kept]}).logits)
        near(torch.cat(logits, 1), theirs(ids).logits)


@GROUPS
@torch.no_grad()
def test_mamba2_of_state_spaces_is_the_same_model(groups, tmp_path):
    theirs, ids = mamba2(tmp_path / "theirs", groups), torch.randint(0, 64, (1, 40))
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    tensors = {n.replace("embeddings", "embedding"): t for n, t in tensors.items()}
    ssm = {"layer": "Mamba2", "headdim": 16, "d_state": 8, "ngroups": groups}
    config = {"d_model": 32, "n_layer": 2, "vocab_size": 60, "ssm_cfg": ssm, "rms_norm": True}
    config |= {"d_intermediate": 0, "attn_layer_idx": [], "tie_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    near(load_model(open_checkpoint(tmp_path)).eval()(ids).logits, theirs(ids).logits)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    near(load_model(open_checkpoint(tmp_path)).eval()(ids).logits, theirs(ids).logits)
    for fault in ({"attn_layer_idx": [1]}, {"ssm_cfg": {}}, {"d_intermediate": 64}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **fault}))
        with pytest.raises(RetrofitError, match="Mamba"):
            load_model(open_checkpoint(tmp_path))
