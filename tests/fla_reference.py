"""Stock flash-linear-attention on a CPU: `fla_reference.py DIR` writes weights and results there.

test_parity.py runs this in a process of its own under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """A stock configuration and the number of tokens that it reads before one step of decoding."""

    name: str
    length: int
    fields: dict


_CONV = {"use_short_conv": True}
_LOW = {f"{gate}_low_rank_dim": 8 for gate in ("decay", "gate", "a", "v")}
_LOW6 = {"proj_low_rank_dim": 8, "gate_low_rank_dim": 8}
CASES = {
    "linear_attn": Case("LinearAttention", 72, {"num_heads": 2, "expand_k": 0.5}),
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
    "retnet": Case("RetNet", 72, {"num_heads": 2}),
    "retnet-conv": Case(
        "RetNet",
        10,
        {"num_heads": 2, "num_kv_heads": 1, "feature_map": "relu", "fuse_norm": False, **_CONV},
    ),
    "gla": Case("GLA", 72, {"num_heads": 2}),
    "gla-conv": Case(
        "GLA", 10, {"num_heads": 2, "num_kv_heads": 1, "feature_map": "silu", **_CONV}
    ),
    "delta_net": Case("DeltaNet", 10, {"num_heads": 2, "tie_word_embeddings": True}),
    "delta_net-sum": Case(
        "DeltaNet",
        10,
        {"num_heads": 2, "qk_norm": "sum", "qk_activation": "elu", "use_gate": True}
        | {"allow_neg_eigval": True, "expand_v": 2.0},
    ),
    "gated_deltanet": Case("GatedDeltaNet", 72, {"num_heads": 1, "head_dim": 16, "num_v_heads": 2}),
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
    "mamba2": Case("Mamba2", 72, {"head_dim": 16, "state_size": 8, "dt_limit": (0.01, 0.5)}),
    "mamba2-plain": Case(
        "Mamba2",
        10,
        {"head_dim": 32, "state_size": 16, "rmsnorm": False, "D_has_hdim": True, "use_bias": True}
        | {"use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "rwkv6": Case("RWKV6", 72, {"num_heads": 2, **_LOW6}),
    "rwkv6-plain": Case(
        "RWKV6", 10, {"num_heads": 4, "expand_k": 1.0, "norm_first": False, **_LOW6}
    ),
    "hgrn2": Case("HGRN2", 72, {"expand_ratio": 32}),
    "hgrn2-plain": Case(
        "HGRN2", 10, {"expand_ratio": 16, "use_lower_bound": False, "use_short_conv": True}
    ),
    "comba": Case("Comba", 72, {"num_heads": 1, "num_v_heads": 2, "head_dim": 16}),
    "comba-plain": Case(
        "Comba",
        10,
        {"num_heads": 2, "head_dim": 16, "expand_v": 1.0}
        | {"use_output_gate": False, "use_short_conv": False},
    ),
    # its chunk kernels take no float32: short prompts only
    "gated_deltaproduct": Case(
        "GatedDeltaProduct",
        10,
        {"num_heads": 2, "head_dim": 16, "use_forget_gate": True, "num_householder": 3},
    ),
    "gated_deltaproduct-plain": Case(
        "GatedDeltaProduct",
        10,
        {"num_heads": 2, "head_dim": 16, "use_output_gate": False, "use_short_conv": False}
        | {"allow_neg_eigval": True},
    ),
    "kda": Case("KDA", 10, {"num_heads": 1, "num_v_heads": 2, "head_dim": 16, "expand_v": 2.0}),
    "kda-chunk": Case("KDA", 72, {"num_heads": 2, "head_dim": 16, "lower_bound": -5.0}),
    "kda-plain": Case(
        "KDA",
        10,
        {"num_heads": 2, "head_dim": 16, "use_short_conv": False, "allow_neg_eigval": True},
    ),
    "rwkv7": Case("RWKV7", 10, {"head_dim": 16, **_LOW}),
    "rwkv7-plain": Case(
        "RWKV7",
        10,
        {"head_dim": 32, "norm_bias": False, "fuse_norm": False, "norm_first": False, **_LOW},
    ),
}
COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 64}
COMMON |= {"fuse_cross_entropy": False, "use_l2warp": False}


def main(folder: Path) -> None:
    """Build, perturb, run and save every case."""
    import interpreter

    interpreter.without_benchmarks()
    import fla.models
    import torch

    torch.set_num_threads(1)
    interpreter.adapt("fla")
    for name, case in CASES.items():
        torch.manual_seed(0)
        started = time.monotonic()
        config = getattr(fla.models, f"{case.name}Config")(**COMMON, **case.fields)
        model = getattr(fla.models, f"{case.name}ForCausalLM")(config).eval()
        interpreter.adapt("fla")
        save(model, case, folder / name)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


def save(model, case: Case, folder: Path) -> None:  # noqa: ANN001
    """config.json, model.safetensors, and results.safetensors: ids, logits, a decoded step's."""
    import torch
    from safetensors.torch import save_file

    ids = torch.randint(0, COMMON["vocab_size"], (1, case.length + 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.05
        first = model(ids[:, :-1], use_cache=True)
        step = model(ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
    folder.mkdir(parents=True)
    model.config.to_json_file(str(folder / "config.json"))
    tensors = dict(model.named_parameters())
    save_file({n: t.detach() for n, t in tensors.items()}, folder / "model.safetensors")
    results = {"ids": ids, "logits": first.logits, "step": step.logits}
    save_file({n: t.contiguous() for n, t in results.items()}, folder / "results.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
