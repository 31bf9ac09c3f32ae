"""Laws of reading many deep memories: outputs mixed, weights mixed, the running weights of any token."""

from __future__ import annotations

import pytest
import torch
from mcretrofit_kernels.network_read import network_read
from test_deep import RULE, example
from test_memories import near

from mcretrofit.memories import mlp
from mcretrofit.memories._inner import network
from mcretrofit.memories._networks import blended, packed, running, separate, unpacked
from mcretrofit.memories._scan import init_state, naive, scan, scan_segments

pytestmark = pytest.mark.filterwarnings("error")


def mixing(rule: str) -> tuple:
    """Cached networks of two segments, the open one, and weights that sum to one."""
    streams, opened = example(rule, 16), example(rule, 11)
    opened = opened._replace(inner=streams.inner)
    ends = mlp.weights(scan_segments(mlp, streams, 8, init_state(streams, mlp), "reset")[2])
    w = torch.rand(2, 11, 2, 3).double().softmax(-1)
    state = init_state(opened, mlp)
    steps = [state]
    for t in range(11):
        steps.append(naive(mlp, opened.map(lambda s, t=t: s[:, t : t + 1]), steps[-1])[1])
    return opened, ends, w[..., 0], w[..., 1:], [mlp.weights(s) for s in steps[1:]]


@RULE
def test_soup_mixes_weights_and_grm_outputs(rule):
    opened, ends, own, w, after = mixing(rule)
    q = opened.q
    tape, state = mlp.taped(opened, init_state(opened, mlp))
    online, end = scan(mlp, opened)
    near(state, end)
    soup = blended(ends, tape.read, own, q, w)
    grm = separate(ends, online, own, q, w)
    for t in range(11):
        one = q[:, t, :, None]
        runs = [network(tuple(e[:, i] for e in ends), one)[:, :, 0] for i in range(2)]
        want = own[:, t, :, None] * network(after[t], one)[:, :, 0]
        near(grm[:, t], want + sum(w[:, t, :, i, None] * r for i, r in enumerate(runs)))
        mixed = [
            own[:, t, :, None, None] * a
            + sum(w[:, t, :, i, None, None] * e[:, i] for i in range(2))
            for a, e in zip(after[t], ends, strict=True)
        ]
        near(soup[:, t], network(tuple(mixed), one)[:, :, 0])
        for layer, weights in enumerate(after[t]):
            x = torch.randn(2, 11, 2, weights.shape[2]).double()
            near(tape.read(layer, x)[:, t], running(after[t])(layer, x[:, t : t + 1])[:, 0])
    bank = packed(ends)
    views = unpacked(bank, ends)
    assert bank.shape[:3] == (2, 2, 2) and views[0].data_ptr() == bank.data_ptr()
    near(blended(views, tape.read, own, q, w), soup, 0)
    near(separate(views, online, own, q, w), grm)
    gap = (soup - grm).abs().max()
    assert gap < 1e-12 if rule == "matrix" else gap > 1e-6
    every = torch.arange(2).expand_as(w)
    near(blended(ends, tape.read, own, q, w.flip(-1), every.flip(-1)), soup)
    near(separate(ends, online, own, q, w.flip(-1), every.flip(-1)), grm)


@pytest.mark.parametrize("length", [3, 50])
@pytest.mark.parametrize("picked", [False, True], ids=["dense", "top"])
def test_networks_are_run_where_they_are_selected(length, picked):
    torch.manual_seed(0)
    up, down = torch.randn(2, 4, 3, 5, 7).double(), torch.randn(2, 4, 3, 7, 6).double()
    q, w = torch.randn(2, length, 3, 5).double(), torch.rand(2, length, 3, 4).double()
    indices = torch.rand(2, length, 3, 4).argsort(-1)[..., :2] if picked else None
    w = w[..., :2] if picked else w.clone()
    w[:, ::2, :, 0] = 0
    given = [x.requires_grad_() for x in (up, down, q, w)]
    results = []
    for impl in ("naive", "torch"):
        y = network_read(*given, indices, impl=impl)
        live = torch.autograd.grad(y.square().sum(), given)
        results.append([y, *live[:3], live[3] * (w != 0)])
    near(tuple(results[1]), tuple(results[0]))
    if not picked:
        with torch.no_grad():
            up[:, 0], w[..., 0] = torch.nan, 0
            assert network_read(up, down, q, w).isfinite().all()
    with pytest.raises(ValueError, match="does not fit"):
        network_read(up, down[:, :, :, :-1], q, w, indices)
