"""Stock configurations of flash-linear-attention beyond the one a family of `mcretrofit.stock`."""

from __future__ import annotations

from mcretrofit.stock import FAMILIES, LOW, LOW6, Case

_CONV = {"use_short_conv": True}
CASES = {
    **FAMILIES,
    "linear_attn-hedgehog": Case(
        "LinearAttention",
        10,
        {
            "num_heads": 2,
            "num_kv_heads": 1,
            "feature_map": "hedgehog",
            "norm_q": True,
            "norm_k": True,
        },
    ),
    "linear_attn-t2r": Case("LinearAttention", 10, {"num_heads": 2, "feature_map": "t2r"}),
    "linear_attn-elu": Case("LinearAttention", 10, {"num_heads": 2, "feature_map": "elu"}),
    "linear_attn-tied": Case("LinearAttention", 10, {"num_heads": 2, "tie_feature_map_qk": True}),
    "linear_attn-dpfp": Case("LinearAttention", 10, {"num_heads": 2, "feature_map": "dpfp"}),
    "retnet-conv": Case(
        "RetNet",
        10,
        {"num_heads": 2, "num_kv_heads": 1, "feature_map": "relu", "fuse_norm": False, **_CONV},
    ),
    "gla-conv": Case(
        "GLA", 10, {"num_heads": 2, "num_kv_heads": 1, "feature_map": "silu", **_CONV}
    ),
    "delta_net-sum": Case(
        "DeltaNet",
        10,
        {"num_heads": 2, "qk_norm": "sum", "qk_activation": "elu", "use_gate": True}
        | {"allow_neg_eigval": True, "expand_v": 2.0},
    ),
    "gated_deltanet-plain": Case(
        "GatedDeltaNet",
        10,
        {
            "num_heads": 2,
            "head_dim": 16,
            "use_gate": False,
            "expand_v": 1.0,
            "allow_neg_eigval": True,
        },
    ),
    "mamba2-plain": Case(
        "Mamba2",
        10,
        {"head_dim": 32, "state_size": 16, "rmsnorm": False, "D_has_hdim": True, "use_bias": True}
        | {"use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "rwkv6-plain": Case(
        "RWKV6", 10, {"num_heads": 4, "expand_k": 1.0, "norm_first": False, **LOW6}
    ),
    "hgrn2-plain": Case(
        "HGRN2", 10, {"expand_ratio": 16, "use_lower_bound": False, "use_short_conv": True}
    ),
    "comba-plain": Case(
        "Comba",
        10,
        {"num_heads": 2, "head_dim": 16, "expand_v": 1.0}
        | {"use_output_gate": False, "use_short_conv": False},
    ),
    "gated_deltaproduct-plain": Case(
        "GatedDeltaProduct",
        10,
        {"num_heads": 2, "head_dim": 16, "use_output_gate": False, "use_short_conv": False}
        | {"allow_neg_eigval": True},
    ),
    "kda-chunk": Case("KDA", 72, {"num_heads": 2, "head_dim": 16, "lower_bound": -5.0}),
    "kda-plain": Case(
        "KDA",
        10,
        {"num_heads": 2, "head_dim": 16, "use_short_conv": False, "allow_neg_eigval": True},
    ),
    "rwkv7-plain": Case(
        "RWKV7",
        10,
        {"head_dim": 32, "norm_bias": False, "fuse_norm": False, "norm_first": False, **LOW},
    ),
}
