"""Mamba-2's state space duality as a linear memory with one decay a head (arXiv 2405.21060).

`S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)^T`, read `C_t S_t`; the skip `D x_t` goes past the memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.memories import Streams, linear
from mcretrofit.ops._call import grouped

NAMES = ("mamba2_chunk_scan", "mamba2_selective_state_update")
# one kernel around convolution, scan, norm and projection: hosts go on without it where it gives None
SHORTCUTS = ("mamba2_split_conv1d_scan_combined",)
MEMORY = linear


def streams(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - the hosts' names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: object,
) -> Streams:
    """Bias, softplus and limits of `dt [B, T, H]` inside; `B`, `C` are `[B, T, groups, N]`."""
    x, dt, A, B, C = (s.to(torch.promote_types(s.dtype, torch.float32)) for s in (x, dt, A, B, C))
    dt = dt if dt_bias is None else dt + dt_bias.to(dt)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    q, k = grouped(C, B, x)
    return Streams(q, k, x * dt[..., None], A * dt)


def around(name: str, run: Callable) -> Callable:
    """`name` as hosts call it: the skip added, the state `[B, H, P, N]`, a step's written in place."""
    return _scan(run) if name == "mamba2_chunk_scan" else _step(run)


def _scan(run: Callable) -> Callable:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int | None = None,
        D: Tensor | None = None,  # noqa: N803
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        **options: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        given = {"initial_state": initial_states, "state_v_first": True, **options}
        out, state = run(
            hidden_states, dt, A, B, C, output_final_state=return_final_states, **given
        )
        out = out if D is None else out + hidden_states * (D if D.dim() == 2 else D[:, None])
        out = out.contiguous()  # some hosts take views of it
        return (out, state) if return_final_states else out

    return mamba2_chunk_scan


def _step(run: Callable) -> Callable:
    def mamba2_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        # hosts repeat what is one number a head over its channels
        out, end = run(
            *(hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None]),
            dt_bias=None if dt_bias is None else dt_bias[:, 0],
            dt_softplus=dt_softplus,
            initial_state=state.clone(),
            output_final_state=True,
            state_v_first=True,
        )
        state.copy_(end)
        out = out[:, 0] if D is None else out[:, 0] + hidden_states * D
        return (out if z is None else out * F.silu(z)).to(hidden_states.dtype)

    return mamba2_selective_state_update
