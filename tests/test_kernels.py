"""The cached read: every impl against the float64 oracle, and how the package is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from interpreted_cached_read import SIZES, case, check, check_poisoned, results
from mcretrofit_kernels.cached_read import IMPLS, cached_read, grouped

ROOT = Path(__file__).parents[1]
KINDS = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "top-k"])


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_fused_equals_naive_under_the_interpreter():
    # triton reads TRITON_INTERPRET when it is imported, so these tests need their own process
    file = str(Path(__file__).with_name("interpreted_cached_read.py"))
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@KINDS
@pytest.mark.parametrize("few", [True, False], ids=["few", "grouped"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_torch_equals_naive(sizes, few, sparse, monkeypatch):
    monkeypatch.setattr(grouped, "FEW_DENSE", 999 if few else 0)
    monkeypatch.setattr(grouped, "FEW_SPARSE", 999 if few else 0)
    monkeypatch.setattr(grouped, "BLOCK", 8)
    check(case(sizes, sparse), "torch")


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_torch_computes_half_precision_in_float32(dtype, sparse):
    check(case(SIZES["odd"], sparse, dtype), "torch")


@KINDS
def test_torch_in_float64(sparse):
    double = case(SIZES["odd"], sparse, torch.float64)
    double = double._replace(states=double.states.double())
    for got, want in zip(results(double, "torch"), results(double, "naive"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@KINDS
@pytest.mark.parametrize("impl", ["naive", "torch"])
def test_a_zero_weight_leaks_nothing(impl, sparse):
    check_poisoned(sparse, impl)


@KINDS
@pytest.mark.parametrize("sizes", [SIZES["odd"], SIZES["decode"]], ids=["odd", "decode"])
def test_plain_banks_and_head_slices_read_alike(sizes, sparse):
    states, q, weights, indices, _ = case(sizes, sparse)
    plain = cached_read(states.contiguous(), q, weights, indices)
    wide = torch.cat([states, states], 2)[:, :, : states.shape[2]]
    assert torch.equal(cached_read(wide, q, weights, indices), plain)
    torch.testing.assert_close(cached_read(states, q, weights, indices), plain)


@KINDS
def test_later_tokens_change_no_earlier_bit(sparse):
    states, q, weights, indices, _ = case((1, 300, 2, 40, 32, 24, 2), sparse)
    before = cached_read(states, q, weights, indices)
    q[:, 150:], weights[:, 150:] = torch.randn_like(q[:, 150:]), weights[:, :150].flip(1)
    if sparse:
        indices[:, 150:] = indices[:, :150].flip(3)
    assert torch.equal(cached_read(states, q, weights, indices)[:, :150], before[:, :150])


def test_autocast_leaves_the_read_in_float32():
    inputs = case(SIZES["odd"], True)
    with torch.autocast("cpu", torch.bfloat16):
        within = results(inputs, "torch")
    assert all(map(torch.equal, within, results(inputs, "torch")))


def test_a_named_impl_is_never_replaced(monkeypatch):
    inputs = case(SIZES["odd"], False)[:3]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"cannot run on a cpu|needs triton"):
        cached_read(*inputs, impl="triton")
    with pytest.raises(ValueError, match="known: " + ", ".join(IMPLS)):
        cached_read(*inputs, impl="fused")


def test_inputs_that_do_not_fit_are_refused():
    states, q, weights, indices, _ = case(SIZES["odd"], True)
    refused = [
        (states, q[..., :-1], weights, indices),
        (states[0], q, weights, indices),
        (states.half(), q, weights, indices),
        (states, q, weights, None),
        (states, q, weights, indices.int()),
        (states, q, weights, indices + states.shape[1]),
        (states, q, weights, indices - 9),
    ]
    for inputs in refused:
        with pytest.raises(ValueError, match=r"states|weights|indices"):
            cached_read(*inputs)


def test_importing_and_reading_on_a_cpu_import_no_triton():
    done = python(
        "-c",
        "import sys, mcretrofit_kernels; assert 'torch' not in sys.modules\n"
        "import torch; from mcretrofit_kernels.cached_read import cached_read\n"
        "ones = lambda *s: torch.ones(s, requires_grad=True)\n"
        "cached_read(ones(1, 2, 1, 3, 3), ones(1, 4, 1, 3), ones(1, 4, 1, 2)).sum().backward()\n"
        "assert 'triton' not in sys.modules and 'mcretrofit' not in sys.modules",
    )
    assert done.returncode == 0, done.stderr


def test_the_folder_never_shadows_the_kernels_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    done = python(
        "-c",
        "from importlib.util import find_spec as f; print(getattr(f('kernels'), 'origin', None))",
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith(str(ROOT / "kernels"))
