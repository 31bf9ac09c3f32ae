"""lucidrains' `NeuralMemory` (titans-pytorch 0.5) as the mixer of our decoder (arXiv 2501.00663).

config.json has `model_type` neural_memory, the keys of `DEFAULTS` (the package's own arguments) and those
of every family; tensors are `model.layers.N.attn.` plus `NeuralMemory`'s own names, `memory_model.*`, a
template that its forward does not use, being optional. `batch_size` is our inner chunk. Whatever of the
package changes the rule is refused by the name of its argument or tensor: `UNMAPPED`, and whole
`MemoryAsContextTransformer`s, whose every layer joins the memory with attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import RetrofitError
from mcretrofit.models._blocks import heads
from mcretrofit.models._deep import gate
from mcretrofit.models._layout import Layout
from mcretrofit.models._state import Context
from mcretrofit.ops import neural_memory
from mcretrofit.ops._call import call

MODEL_TYPES = ("neural_memory",)
ABOUT = {
    "memory": "mlp",
    "layouts": ("titans-pytorch",),
    "parity": "titans-pytorch 0.5",
    "tested": "its NeuralMemory on the CPU: outputs and gradients in float64",
}
DEFAULTS = {
    "heads": 1,
    "dim_head": None,
    "chunk_size": 1,
    "batch_size": 16,
    "momentum": True,
    "expansion_factor": 4.0,
    "default_step_transform_max_lr": 1.0,
}
# arguments of the package and the one value of each that can be mapped
UNMAPPED = {
    "chunk_size": 1,
    "depth": 2,
    "activation": None,
    "per_parameter_lr_modulation": False,
    "per_head_learned_parameters": True,
    "attn_pool_chunks": False,
    "momentum_order": 1,
    "learned_momentum_combine": False,
    "num_kv_per_token": 1,
    "qkv_receives_diff_views": False,
    "pre_rmsnorm": True,
    "post_rmsnorm": False,
    "qk_rmsnorm": False,
    "max_grad_norm": None,
    "accept_weight_residual": False,
    "spectral_norm_surprises": False,
    "gated_transition": False,
    "mem_model_norm_add_residual": True,
    "store_with_lookahead_value": False,
}
chunk_neural_memory = partial(call, neural_memory)


class _Norm(nn.RMSNorm):
    """`nn.RMSNorm` as the package takes it, with the dtype's own epsilon."""

    def __init__(self, width: int) -> None:
        super().__init__(width)


class Mixer(nn.Module):
    """Norms, projections and gates of a `NeuralMemory` around the op."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        _check(config)
        self.layer, self.where = layer, f"model.layers.{layer}.attn"
        self.inner_chunk, self.heads = config.batch_size, config.heads
        self.max_step = config.default_step_transform_max_lr
        width, count = config.hidden_size, config.heads
        self.key = config.dim_head or width
        hidden, inner = int(self.key * config.expansion_factor), self.key * count
        self.retrieve_norm, self.store_norm = _Norm(width), _Norm(width)
        self.to_queries, self.to_keys, self.to_values = (
            nn.Linear(width, inner, bias=False) for _ in range(3)
        )
        self.to_adaptive_step = nn.Sequential(nn.Linear(width, count))
        if config.momentum:
            self.to_momentum = nn.Sequential(nn.Linear(width, count))
        self.to_decay_factor = nn.Sequential(nn.Linear(width, count))
        if count > 1:
            self.retrieve_gate = nn.Sequential(nn.Linear(width, count, bias=False))
            self.combine_heads = nn.Linear(inner, width, bias=False)
        self.memory_model_parameters = nn.ParameterList(
            [
                torch.zeros(count, self.key),
                torch.randn(count, self.key, hidden) * self.key**-0.5,
                torch.randn(count, hidden, self.key) * hidden**-0.5,
            ]
        )

    def start(self) -> None:
        """Fresh weights: small steps, kept for some 400 tokens: a network under a norm must not fade."""
        nn.init.constant_(self.to_adaptive_step[0].bias, -2.0)
        nn.init.constant_(self.to_decay_factor[0].bias, -6.0)

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        state = context.state(self.layer)
        asked, stored = self.retrieve_norm(hidden_states), self.store_norm(hidden_states)
        scale, up, down = self.memory_model_parameters
        moves = hasattr(self, "to_momentum")
        o, state["recurrent"] = chunk_neural_memory(
            q=heads(self.to_queries(asked), self.key),
            k=heads(self.to_keys(stored), self.key),
            v=heads(self.to_values(stored), self.key),
            g=F.logsigmoid(-gate(self.to_decay_factor, stored)),
            momentum=F.logsigmoid(gate(self.to_momentum, stored)) if moves else None,
            eta=gate(self.to_adaptive_step, stored).sigmoid() * self.max_step,
            start=(up, down, scale[:, None]),
            inner_chunk=self.inner_chunk,
            where=self.where,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        if self.heads == 1:
            return o.flatten(-2)
        return self.combine_heads((o * self.retrieve_gate(asked).sigmoid()[..., None]).flatten(-2))


def _check(config) -> None:  # noqa: ANN001
    for name, value in UNMAPPED.items():
        given = getattr(config, name, value)
        if given != value:
            raise RetrofitError(
                f"config: {name} is {given!r}; of titans-pytorch only {value!r} can be mapped"
            )
    size = config.batch_size
    if type(size) is not int or size < 1:
        raise RetrofitError(
            f"config: batch_size is {size!r}; without a number of tokens titans-pytorch takes every "
            "gradient at the first weights, which cannot be mapped"
        )
    if config.heads == 1 and config.dim_head not in (None, config.hidden_size):
        raise RetrofitError(f"config: one head of dim_head {config.dim_head} has to be hidden_size")


def from_layout(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Layout | None:
    """Never a layout of its own; raises for the package's checkpoints that are no such decoder."""
    mark = "to_adaptive_step.0.weight"
    found = [name for name in shapes if name.endswith(mark)]
    if not found or all(name.startswith("model.layers.") for name in found):
        return None
    if found == [mark]:
        raise RetrofitError(
            f"'{mark}': a bare NeuralMemory of titans-pytorch has no embeddings and no output; give "
            "a decoder whose tensors are model.layers.N.attn.* (models/neural_memory.py)"
        )
    other = next((n for n in shapes if "to_qkv" in n or "token_emb" in n), found[0])
    raise RetrofitError(
        f"'{other}': a MemoryAsContextTransformer of titans-pytorch joins memory and attention in "
        "every layer, which cannot be mapped; a decoder of NeuralMemory layers alone can"
    )


def tiny() -> dict:
    """The smallest configuration that the laws run on."""
    small = {"default_step_transform_max_lr": 0.1, "batch_size": 4, "expansion_factor": 2.0}
    return {"hidden_size": 32, "heads": 2, "dim_head": 16, **small}
