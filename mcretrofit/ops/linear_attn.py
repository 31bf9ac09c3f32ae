"""Linear attention without decay or normaliser (`fla.ops.linear_attn`)."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.errors import RetrofitError
from mcretrofit.memories import Streams, linear
from mcretrofit.ops._call import scaled

NAMES = ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn")
MEMORY = linear


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    normalize: bool = False,
    **_: object,
) -> Streams:
    """Scale inside. `normalize` divides by a running sum of keys, which no cached state carries."""
    if normalize:
        raise RetrofitError(
            "this checkpoint normalises its linear attention (norm_feature_map: true); "
            "only the unnormalised read is supported"
        )
    return Streams(scaled(q, scale), k, v)
