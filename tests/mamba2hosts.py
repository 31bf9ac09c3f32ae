"""Mamba-2 as transformers and as state-spaces' own code save it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from mcretrofit.models._native import native_class

SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
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


def state_spaces(folder: Path, groups: int, **fields: object) -> tuple[torch.nn.Module, dict]:
    """A `pytorch_model.bin` and configuration of state-spaces' code, and transformers' same model."""
    theirs = mamba2(folder / "theirs", groups, **fields)
    tensors = load_file(folder / "theirs" / "model.safetensors")
    tensors = {n.replace("embeddings", "embedding"): t for n, t in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    ssm = {"layer": "Mamba2", "headdim": 16, "d_state": 8, "ngroups": groups}
    config = {
        "d_model": 32,
        "n_layer": 2,
        "vocab_size": theirs.config.vocab_size - 4,
        "ssm_cfg": ssm,
        "rms_norm": True,
    }
    config |= {"d_intermediate": 0, "attn_layer_idx": [], "tie_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return theirs, config
