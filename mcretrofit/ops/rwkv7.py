"""RWKV-7, prefill and decode calls (`fla.ops.rwkv7`, arXiv 2503.14456)."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Streams, rwkv7

NAMES = ("chunk_rwkv7", "fused_mul_recurrent_rwkv7")
MEMORY = rwkv7


def streams(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None = None,
    kk: Tensor | None = None,
    scale: float = 1.0,
    **_: object,
) -> Streams:
    """No norm inside; the recurrent call hands over `kk` and the rate `a` instead of `a = -kk`, `b`."""
    if kk is not None:
        a, b = -kk, kk * a
    return Streams(r * scale, k, v, w, None, a, b)
