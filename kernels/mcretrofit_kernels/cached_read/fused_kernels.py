"""Triton kernels of a cached read: plain pointers, masked edges, float32 arithmetic."""

import triton
import triton.language as tl


@triton.jit
def dense_read(
    states, x, weights, y, other, grad_weights, sb, sn, sh, sk, sv,
    T, H, N, S, K, V, SPLITS, PRECISION: tl.constexpr, BACKWARD: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """y = sum_n w_n x @ M_n for BT tokens; one program takes every SPLITS-th state."""
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    b, h = (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    t = block * BT + tl.arange(0, BT)
    v = (tl.program_id(1) * BV + tl.arange(0, BV)).to(tl.int64)
    in_t, in_v = t < T, v < V
    row = (b * T + t) * H + h
    total = tl.zeros((BT, BV), dtype=tl.float32)
    if BACKWARD:
        in_tv = in_t[:, None] & in_v[None, :]
        o = tl.load(other + row[:, None] * V + v[None, :], mask=in_tv, other=0).to(tl.float32)
    state = states + b * sb + h.to(tl.int64) * sh + split.to(tl.int64) * sn
    for n in range(split, N, SPLITS):
        w = tl.load(weights + row * S + n, mask=in_t, other=0).to(tl.float32)
        live = w != 0
        if tl.max(live.to(tl.int32), 0) > 0:
            read = tl.zeros((BT, BV), dtype=tl.float32)
            for first in range(0, K, BK):
                k = (first + tl.arange(0, BK)).to(tl.int64)
                in_tk, in_kv = in_t[:, None] & (k < K)[None, :], (k < K)[:, None] & in_v[None, :]
                xk = tl.load(x + row[:, None] * K + k[None, :], mask=in_tk, other=0)
                m = tl.load(state + k[:, None] * sk + v[None, :] * sv, mask=in_kv, other=0)
                read += tl.dot(xk.to(tl.float32), m, input_precision=PRECISION)
            # where, not a product: 0 * NaN would leak a state into tokens that did not select it
            total += tl.where(live[:, None], w[:, None] * read, 0)
            if BACKWARD:
                tl.atomic_add(grad_weights + row * S + n, tl.sum(read * o, 1), mask=live)
        state += SPLITS * sn
    rows = split.to(tl.int64) * (tl.num_programs(2) // H) * T * H + row
    tl.store(y + rows[:, None] * V + v[None, :], total, mask=in_t[:, None] & in_v[None, :])


@triton.jit
def sparse_read(
    states, x, weights, indices, y, other, grad_weights, sb, sn, sh, sk, sv,
    T, H, N, S, K, V, BACKWARD: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """y = sum_s w_s x @ M_{n_s} for one token and head; a state behind weight 0 is not loaded."""
    row = tl.program_id(0).to(tl.int64)
    b, h = row // H // T, row % H
    v = (tl.program_id(1) * BV + tl.arange(0, BV)).to(tl.int64)
    in_v = v < V
    total = tl.zeros((BV,), dtype=tl.float32)
    for s in range(0, S):
        w = tl.load(weights + row * S + s).to(tl.float32)
        if w != 0:
            n = tl.load(indices + row * S + s)
            known = (n >= 0) & (n < N)
            w, n = tl.where(known, w, float("nan")), tl.where(known, n, 0)
            read = tl.zeros((BV,), dtype=tl.float32)
            for first in range(0, K, BK):
                k = (first + tl.arange(0, BK)).to(tl.int64)
                xk = tl.load(x + row * K + k, mask=k < K, other=0).to(tl.float32)
                at = b * sb + n * sn + h * sh + k[:, None] * sk + v[None, :] * sv
                mask = (k < K)[:, None] & in_v[None, :]
                read += tl.sum(xk[:, None] * tl.load(states + at, mask=mask, other=0), 0)
            total += w * read
            if BACKWARD:
                o = tl.load(other + row * V + v, mask=in_v, other=0).to(tl.float32)
                tl.atomic_add(grad_weights + row * S + s, tl.sum(read * o, 0))
    tl.store(y + row * V + v, total, mask=in_v)


@triton.jit
def sum_outer(
    q, weights, indices, grad, out, T, H, N, S, K, V,
    PRECISION: tl.constexpr, SPARSE: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """out[b, n, h] = sum_t w_t q_t^T grad_t, one tile of one state a program."""
    tiles = tl.cdiv(K, BK)
    n, b, h = tl.program_id(0) // tiles, tl.program_id(2) // H, tl.program_id(2) % H
    k = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    total = tl.zeros((BK, BV), dtype=tl.float32)
    for first in range(0, T, BT):
        t = first + tl.arange(0, BT)
        row = (b.to(tl.int64) * T + t) * H + h
        w = tl.zeros((BT,), dtype=tl.float32)
        if SPARSE:
            for s in range(0, S):
                here = tl.load(indices + row * S + s, mask=t < T, other=-1) == n
                w += tl.load(weights + row * S + s, mask=here, other=0).to(tl.float32)
        else:
            w += tl.load(weights + row * S + n, mask=t < T, other=0).to(tl.float32)
        live = w != 0
        if tl.max(live.to(tl.int32), 0) > 0:
            in_kt, in_tv = (k < K)[:, None] & live[None, :], live[:, None] & (v < V)[None, :]
            qk = tl.load(q + row[None, :] * K + k[:, None], mask=in_kt, other=0).to(tl.float32)
            g = tl.load(grad + row[:, None] * V + v[None, :], mask=in_tv, other=0).to(tl.float32)
            total += tl.dot(qk * w[None, :], g, input_precision=PRECISION)
    at = ((b.to(tl.int64) * N + n) * H + h) * K + k
    tl.store(out + at[:, None] * V + v[None, :], total, mask=(k < K)[:, None] & (v < V)[None, :])
