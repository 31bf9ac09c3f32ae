"""Gated DeltaProduct: several writes by the delta rule a token (`fla.ops.gated_delta_product`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mcretrofit.errors import RetrofitError
from mcretrofit.memories import Streams, deltaproduct
from mcretrofit.ops._call import l2norm, scaled

NAMES = ("chunk_gated_delta_product",)
MEMORY = deltaproduct


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int = 1,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> Streams:
    """L2 norm (when asked) and scale inside; `k`, `v`, `beta` are `[B, T * n, H, ...]`."""
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    k, v, beta = (x.unflatten(1, (-1, num_householder)) for x in (k, v, beta))
    before = None
    if num_householder > 1:
        before = deltaproduct.packed(*(x[:, :, :-1].to(k.dtype) for x in (k, v, beta)))
    return Streams(scaled(q, scale), k[:, :, -1], v[:, :, -1], g, beta[:, :, -1], before)


def around(name: str, run: Callable) -> Callable:
    """The op as it is; a live layer of fla's also takes its writes for tokens, which no segment can."""
    if name not in NAMES:
        raise RetrofitError(
            "a live GatedDeltaProduct of flash-linear-attention cannot be wrapped: load its folder"
        )
    return run
