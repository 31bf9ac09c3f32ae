"""Run an op as its hosts do: `(out, final state)` in the host's state layout."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from mcretrofit.memories import Streams
from mcretrofit.memories._scan import State, init_state, scan, tree


def l2norm(x: Tensor) -> Tensor:
    """L2 norm over the last dim as the kernels take it (epsilon 1e-6 under the root)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys repeated for grouped values (`v` has a multiple of their heads)."""
    times = v.shape[2] // q.shape[2]
    return (q, k) if times == 1 else tuple(x.repeat_interleave(times, 2) for x in (q, k))


def scaled(q: Tensor, scale: float | None) -> Tensor:
    """The query times `scale`, `K^-1/2` when a host leaves it out."""
    return q * (q.shape[-1] ** -0.5 if scale is None else scale)


def delta_streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **_: object,
) -> Streams:
    """A gated delta rule's streams: L2 norm, scale and sigmoid of beta, each when asked."""
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    q, k = (l2norm(q), l2norm(k)) if use_qk_l2norm_in_kernel else (q, k)
    q, k = grouped(q, k, v)
    return Streams(scaled(q, scale), k, v, g, beta)


def silence(streams: Streams, valid: Tensor | None) -> Streams:
    """Padding made inert: `valid` is `[B, T]`, nothing is written or decayed where it is false."""
    if valid is None:
        return streams
    return streams.map(lambda s: s.masked_fill(~valid.view(*valid.shape, *[1] * (s.dim() - 2)), 0))


def to_state(
    given: State | None, streams: Streams, v_first: bool, memory: ModuleType | None = None
) -> State:
    """A host's state as ours, `[B, H, K, V]` in at least float32; none given: the initial one."""
    if given is None:
        return init_state(streams, memory)
    given = given.transpose(-1, -2) if v_first else given
    return tree(lambda s: s.to(torch.promote_types(s.dtype, torch.float32)), given)


def from_state(state: State, v_first: bool) -> State:
    """Our state in a host's layout (`[B, H, V, K]` when `v_first`)."""
    return state.transpose(-1, -2) if v_first else state


def call(
    op: ModuleType,
    *args: Tensor,
    initial_state: State | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    valid: Tensor | None = None,
    **options,  # noqa: ANN003 - the op's own arguments
) -> tuple[Tensor, State | None]:
    """The unmodified op: `(out [B, T, H, V], final state or None)`; `valid [B, T]` marks padding."""
    streams = silence(op.streams(*args, **options), valid)
    state = to_state(initial_state, streams, state_v_first, op.MEMORY)
    out, state = scan(op.MEMORY, streams, state)
    out = out.to(streams.v.dtype)
    return out, from_state(state, state_v_first) if output_final_state else None


def entry(op: ModuleType, name: str, run: Callable) -> Callable:
    """`run`, which is called as `call` is, for hosts that call it `name`."""
    return op.around(name, run) if hasattr(op, "around") else run
