"""Law 20 for the Triton cached read; test_kernels.py runs this file under TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from mcretrofit_kernels.cached_read import cached_read
from torch import Tensor

# B, T, H, N, K, V, S
SIZES = {
    "odd": (2, 11, 2, 5, 19, 23, 2),
    "decode": (1, 1, 2, 7, 16, 16, 3),
    "wide": (1, 5, 1, 3, 70, 65, 2),
    "long": (1, 70, 2, 4, 8, 12, 1),
    "no states": (2, 3, 2, 0, 8, 8, 0),
    "no tokens": (2, 0, 2, 3, 8, 8, 2),
}


class Case(NamedTuple):
    states: Tensor
    q: Tensor
    weights: Tensor
    indices: Tensor | None
    grad: Tensor


def case(sizes: tuple[int, ...], sparse: bool, dtype: torch.dtype = torch.float32) -> Case:
    """Random inputs; the states are a transposed slice of a larger bank of NaN."""
    B, T, H, N, K, V, S = sizes
    torch.manual_seed(0)
    bank = torch.full((B, 2 * N + 1, H, V, K + 1), float("nan"))
    states = bank[:, :N, :, :, :K].mT
    states.copy_(torch.randn(B, N, H, K, V))
    slots = S if sparse else N
    weights = torch.rand(B, T, H, slots) * (torch.rand(B, T, H, slots) < 0.6)
    indices = torch.randint(max(N, 1), (B, T, H, S)) if sparse else None
    q, grad = torch.randn(B, T, H, K).to(dtype), torch.randn(B, T, H, V).to(dtype)
    return Case(states, q, weights.to(dtype), indices, grad)


def results(case: Case, impl: str) -> list[Tensor]:
    """The output and the gradients of states, q and weights."""
    leaves = [x.detach().requires_grad_() for x in case[:3]]
    y = cached_read(*leaves, case.indices, impl=impl)
    return [y.detach(), *torch.autograd.grad(y, leaves, case.grad)]


def check(case: Case, impl: str) -> None:
    """Within float32's rounding bound, n eps sum|terms|, of the float64 oracle."""
    exact = case._replace(
        **{k: getattr(case, k).double() for k in ("states", "q", "weights", "grad")}
    )
    size = exact._replace(states=exact.states.abs(), q=exact.q.abs(), grad=exact.grad.abs())
    terms = max(16, *case.states.shape[1:], case.q.shape[1])
    names = ("y", "states.grad", "q.grad", "weights.grad")
    rows = [names, results(case, impl), results(exact, "naive"), results(size, "naive")]
    for name, got, want, scale in zip(*rows, strict=True):
        rounding = torch.finfo(got.dtype)
        allowed = terms * torch.finfo(torch.float32).eps * scale
        allowed += rounding.eps * (want.abs() + rounding.smallest_normal)
        assert got.shape == want.shape and not got.isnan().any(), name
        assert ((got - want).abs() <= allowed).all(), name


def poisoned(case: Case) -> tuple[Case, Tensor]:
    """State 0 is NaN for the tokens that select it; returns where [B, T, H] those are."""
    states = case.states.clone()
    states[:, 0] = float("nan")
    live = case.weights != 0
    hit = live[..., 0] if case.indices is None else (live & (case.indices == 0)).any(-1)
    return case._replace(states=states), hit


def check_poisoned(sparse: bool, impl: str) -> None:
    clean = case(SIZES["odd"], sparse)
    dirty, hit = poisoned(clean)
    y, _, grad_q, grad_weights = results(dirty, impl)
    expected = results(clean, impl)
    assert hit.any() and not hit.all()
    assert y[hit].isnan().all() and grad_q[hit].isnan().all()
    assert torch.equal(y[~hit], expected[0][~hit]) and torch.equal(grad_q[~hit], expected[2][~hit])
    assert (grad_weights[clean.weights == 0] == 0).all()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "top-k"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_fused_equals_naive(sizes, sparse, monkeypatch):
    empty = torch.empty

    def nan_filled(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", nan_filled)
    check(case(sizes, sparse), "triton")


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "top-k"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_fused_computes_half_precision_in_float32(dtype, sparse):
    check(case(SIZES["odd"], sparse, dtype), "triton")


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "top-k"])
def test_fused_leaks_nothing_through_a_zero_weight(sparse):
    check_poisoned(sparse, "triton")
