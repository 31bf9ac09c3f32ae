"""Linear attention with a feature map, FLA format (arXiv 2006.16236)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from mcretrofit.models._blocks import RMSNorm, heads, whole
from mcretrofit.models._feature_maps import feature_map
from mcretrofit.models._state import Context
from mcretrofit.ops import linear_attn
from mcretrofit.ops._call import call

MODEL_TYPES = ("linear_attn",)
ABOUT = {
    "memory": "linear",
    "layouts": ("FLA",),
    "parity": "flash-linear-attention 0.6",
    "tested": "its kernels in Triton's interpreter: prefill and a decoded step",
}
DEFAULTS = {
    "expand_k": 1.0,
    "expand_v": 1.0,
    "num_heads": 4,
    "num_kv_heads": None,
    "feature_map": "elementwise_product",
    "tie_feature_map_qk": False,
    "norm_q": False,
    "norm_k": False,
    "norm_feature_map": False,
    "elementwise_affine": True,
}
chunk_linear_attn = partial(call, linear_attn)


class Mixer(nn.Module):
    """q, k through a feature map, v as it is, a norm on the read."""

    def __init__(self, config, layer: int) -> None:  # noqa: ANN001
        super().__init__()
        self.layer = layer
        self.groups = config.num_heads // (config.num_kv_heads or config.num_heads)
        self.norm_q, self.norm_k = config.norm_q, config.norm_k
        self.normalize = config.norm_feature_map
        width, wide_k = config.hidden_size, whole(config, config.expand_k, "expand_k")
        wide_v = whole(config, config.expand_v, "expand_v")
        self.key, self.value = wide_k // config.num_heads, wide_v // config.num_heads
        self.feature_map_q = feature_map(config.feature_map, self.key)
        self.feature_map_k = feature_map(config.feature_map, self.key)
        if config.tie_feature_map_qk:
            self._tie()
        self.q_proj = nn.Linear(width, wide_k, bias=False)
        self.k_proj = nn.Linear(width, wide_k // self.groups, bias=False)
        self.v_proj = nn.Linear(width, wide_v // self.groups, bias=False)
        self.norm = RMSNorm(self.value, config.norm_eps, config.elementwise_affine)
        self.o_proj = nn.Linear(wide_v, width, bias=False)

    def _tie(self) -> None:
        self.feature_map_k = self.feature_map_q
        if isinstance(self.feature_map_q, nn.Module):
            weights = [name for name, _ in self.feature_map_q.named_parameters()]
            # transformers saves shared weights only where they are declared
            self._tied_weights_keys = {f"feature_map_k.{w}": f"feature_map_q.{w}" for w in weights}

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """`[B, T, D]` -> `[B, T, D]`."""
        x, state = hidden_states, context.state(self.layer)
        q = self.feature_map_q(heads(self.q_proj(x), self.key))
        k = self.feature_map_k(heads(self.k_proj(x), self.key))
        q = q / (q.sum(-1, keepdim=True) + 1e-4) if self.norm_q else q
        k = k / (k.sum(-1, keepdim=True) + 1e-4) if self.norm_k else k
        v = heads(self.v_proj(x), self.value)
        k, v = (s.repeat_interleave(self.groups, 2) for s in (k, v))
        o, state["recurrent"] = chunk_linear_attn(
            q=q,
            k=k,
            v=v,
            normalize=self.normalize,
            initial_state=state.get("recurrent"),
            output_final_state=context.cache is not None,
            valid=context.valid,
        )
        return self.o_proj(self.norm(o).flatten(-2))


def tiny() -> dict:
    """The smallest configuration that the laws run on: grouped keys and values, one feature map."""
    maps = {"feature_map": "hedgehog", "tie_feature_map_qk": True}
    return {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, **maps}
