"""Pico configurations of the models that transformers itself implements with a recurrent mixer."""

from __future__ import annotations

import inspect
from functools import cache

import torch
from torch import Tensor, nn

from mcretrofit import registry
from mcretrofit.models._native import HOSTS as OPS
from mcretrofit.models._native import native_class

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 16}
COMMON |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
SHARED = {"shared_expert_intermediate_size": 8}
DELTA = {f"linear_{n}_head_dim": 16 for n in ("key", "value")}
DELTA |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
SSM |= {"mamba_expand": 2, "mamba_chunk_size": 8}
KIMI = {"num_attention_heads": 2, "num_key_value_heads": 2, **HYBRID, "v_head_dim": 16}
KIMI |= {"linear_head_dim": 16, "linear_num_heads": 2, "kv_lora_rank": 8, "q_lora_rank": None}
KIMI |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
HOSTS = {
    "qwen3_next": {**HEADS, **HYBRID, **DELTA, **EXPERTS, **SHARED},
    "qwen3_5_text": {**HEADS, **HYBRID, **DELTA},
    "qwen3_5_moe_text": {**HEADS, **HYBRID, **DELTA, **EXPERTS, **SHARED},
    "olmo_hybrid": {**HEADS, **HYBRID, **DELTA},
    "kimi_linear": {**KIMI, "mlp_layer_types": ["dense", "dense"]},
    "bailing_hybrid": {**KIMI, **EXPERTS},
    "mamba2": {
        **{"head_dim": 16, "num_heads": 4, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    },
    "bamba": {**HEADS, **SSM, "attn_layer_indices": [1]},
    "falcon_h1": {**HEADS, **SSM, "mamba_d_ssm": 64},
    "zamba2": {
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "n_mamba_heads": 4},
        **{"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 16, "mamba_ngroups": 2},
        **{"chunk_size": 8, "adapter_rank": 4},
    },
    "granitemoehybrid": {
        **{**HEADS, **SSM, "layer_types": ["mamba", "attention"], "num_local_experts": 2},
        **{"num_experts_per_tok": 1, "shared_intermediate_size": 8},
    },
    "nemotron_h": {
        **{**HEADS, "layers_block_type": ["mamba", "attention"], "ssm_state_size": 16},
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8},
    },
}


assert set(HOSTS) == set(OPS), "list and test the same hosts"
MEMORY = {
    name: registry.load("ops", op).MEMORY.__name__.rsplit(".", 1)[1] for name, op in OPS.items()
}


def fields(host: str) -> dict:
    """The arguments of the host's configuration class."""
    return {**COMMON, **HOSTS[host]}


@cache
def host(name: str) -> nn.Module:
    """transformers' own class for a host, every parameter away from its special starting value."""
    torch.manual_seed(0)
    kind = native_class(name)
    model = kind(kind.config_class(**fields(name))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model


def kept(model: nn.Module) -> str:
    """What the host calls its cache."""
    names = inspect.signature(model.forward).parameters
    return next(n for n in ("past_key_values", "cache_params") if n in names)


def placed(model: nn.Module, mask: Tensor, length: int) -> dict[str, Tensor]:
    """Positions of the last `length` tokens, where the host takes them.

    A hybrid that asks its first layer how long the cache is starts over where that is recurrent.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, -length:]}
