"""RWKV-5 and 6: a log decay a key channel, a bonus `u` for the current token (arXiv 2404.05892)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mcretrofit.memories import Streams, rwkv6
from mcretrofit.ops._call import scaled

NAMES = ("chunk_rwkv6", "fused_recurrent_rwkv6")
MEMORY = rwkv6


def streams(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, scale: float | None = None, **_: object
) -> Streams:
    """Scale inside; `w [B, T, H, K]` is in log space."""
    return Streams(scaled(r, scale), k, v, w)


def around(name: str, run: Callable) -> Callable:
    """The op with its bonus `(r_t u . k_t) v_t`, which no memory keeps; `u` is `[H, K]`."""

    def chunk_rwkv6(
        r: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        u: Tensor,
        scale: float | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        out, state = run(r, k, v, w, scale=scale, **options)
        return out + (scaled(r, scale) * u * k).sum(-1, keepdim=True).to(out) * v, state

    return chunk_rwkv6
