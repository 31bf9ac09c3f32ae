"""Laws of the read path without a model, in float64, over every memory, router and variant."""

from __future__ import annotations

import pytest
import torch
from lawkit import KEYS, MEMORIES, SEGMENT, Case, cases, double, example, inputs, plan, read, sound
from read_oracle import Oracle
from torch import Tensor

from mcretrofit import registry
from mcretrofit.config import INITS, VARIANTS
from mcretrofit.dyadic import DyadicCache
from mcretrofit.errors import RetrofitError
from mcretrofit.memories._scan import leaves, naive, sizes

pytestmark = pytest.mark.filterwarnings("error")
VARIANT = pytest.mark.parametrize("variant", VARIANTS)
ROUTER = pytest.mark.parametrize("router", registry.names("routers"))
LENGTH = 37


def same(got: Tensor, want: Tensor, case: Case, slack: float = 1.0) -> None:
    # weights that no score decides are float32
    tolerance = 1e-6 if case.variant == "ma" else 1e-9 * slack
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance, msg=lambda m: f"{case}: {m}")


def check_oracle(case: Case, length: int = LENGTH, **changes: object) -> None:
    streams, x, some = example(case.memory, length), inputs(length), plan(case, **changes)
    x = x if case.gated else None
    same(read(some, streams, x=x)[0], Oracle(some, streams, x).out(), case)


def check_pieces(case: Case) -> None:
    streams, x = example(case.memory, 61), inputs(61)
    out, state, _ = read(plan(case), streams, x=x)
    for cuts in ([7, 1, 30, 1, 1, 21], [8, 8, 45], [13] + [1] * 12 + [36]):
        got, end, _ = read(plan(case), streams, cuts, x)
        same(got, out, case)
        for one, other in zip(leaves(end), leaves(state), strict=True):
            same(one, other, case)


def check_causality(case: Case) -> None:
    # float32, as models read: of float64 products BLAS rounds the last rows in another order
    streams, other = (double(example(case.memory, 45, seed=s), torch.float32) for s in (0, 9))
    other = other._replace(inner=streams.inner)
    x = inputs(45).float()
    out = read(plan(case), streams, x=x)[0]
    for cut in (3, 8, 21, 36, 44):
        parts = zip(streams[:-1], other[:-1], strict=True)
        joined = (None if s is None else torch.cat([s[:, :cut], o[:, cut:]], 1) for s, o in parts)
        mixed = type(streams)(*joined, streams.inner)
        y = torch.cat([x[:, :cut], -x[:, cut:]], 1)
        got = read(plan(case), mixed, x=y)[0]
        assert torch.equal(got[:, :cut], out[:, :cut]), f"{case}: token {cut} and later ones"


@VARIANT
@ROUTER
@torch.no_grad()
def test_read_equals_the_oracle(variant, router):
    for case in cases(3, seed=1, variant=variant, router=router):
        check_oracle(case)


@pytest.mark.parametrize("variant", ["ssc", "grm", "soup"])
@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_own_writes_equal_the_oracle(memory, variant):
    fixed = {"router": "moment", "rule": "z", "init": "carry_delta"}
    for case in cases(2, seed=6, memory=memory, variant=variant, **fixed):
        # a soup of networks reads no open segment apart
        assert plan(case).own != plan(case).blends and not plan(case, own=False).own
        check_oracle(case, segment=12)
        check_oracle(case, own=False)
        check_pieces(case)
        check_causality(case)


@pytest.mark.parametrize("router", ["mean", "moment", "rare", "energy"])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
@torch.no_grad()
def test_few_directions_equal_the_oracle(router, turned):
    for case in cases(2, seed=7, router=router):
        streams, x = example(case.memory, LENGTH), inputs(LENGTH) if case.gated else None
        some = plan(case, directions=3)
        if turned:
            some.gate.whiten = torch.randn(len(some.gate.heads), KEYS, KEYS)
        same(read(some, streams, x=x)[0], Oracle(some, streams, x).out(), case)


@pytest.mark.parametrize("segment", [1, 2, 5, 16])
@torch.no_grad()
def test_read_equals_the_oracle_for_any_segment(segment):
    for case in [*cases(4, seed=segment), *cases(2, seed=segment, variant="loglinear")]:
        check_oracle(case, 23, segment=segment)


@VARIANT
@ROUTER
@torch.no_grad()
def test_pieces_equal_one_pass(variant, router):
    for case in cases(2, seed=2, variant=variant, router=router):
        check_pieces(case)


@VARIANT
@ROUTER
@torch.no_grad()
def test_later_tokens_change_no_earlier_bit(variant, router):
    for rule in ("plain", "z"):
        for case in cases(1, seed=3, variant=variant, router=router, rule=rule):
            check_causality(case)


@VARIANT
@torch.no_grad()
def test_first_segment_is_the_unmodified_read(variant):
    for case in cases(8, seed=4, variant=variant):
        streams = example(case.memory, LENGTH)
        base, end = naive(registry.load("memories", case.memory), streams)
        out, state, _ = read(plan(case), streams, x=inputs(LENGTH))
        same(out[:, :SEGMENT], base[:, :SEGMENT], case)
        assert (out - base)[:, SEGMENT:, -1].abs().max() > 1e-4
        out, longer, _ = read(plan(case, segment=LENGTH + 1), streams, x=inputs(LENGTH))
        same(out, base, case)
        for got in (state, longer):
            # under reset, fully cached heads keep no running state of their own
            rest = slice(None) if case.init != "reset" or case.cover == "part" else slice(0, 0)
            for one, other in zip(leaves(got), leaves(end), strict=True):
                same(one[:, rest], other[:, rest], case)


def test_gradients_equal_the_oracles():
    for case in cases(10, seed=5, gated=True):
        streams, some, x = example(case.memory, 20), plan(case, segment=4), inputs(20)
        given = [s for s in streams[:-1] if s is not None]
        first = () if streams.inner is None else streams.inner.start
        wanted = [*given, *first, *some.gate.parameters()]
        for leaf in wanted:
            leaf.requires_grad_()
        grads = []
        for out in (read(some, streams, x=x)[0], Oracle(some, streams, x).out()):
            late = out[:, 12:]
            loss = (late * torch.linspace(0, 1, late.numel()).view(late.shape)).sum()
            grads.append(torch.autograd.grad(loss, wanted, allow_unused=True))
        for got, want in zip(*grads, strict=True):
            assert (got is None) == (want is None), case
            if got is not None:
                same(got.double(), want.double(), case, 1e4)


@torch.no_grad()
def test_states_that_cannot_merge_are_refused():
    for name in MEMORIES:
        for init in INITS:
            case = Case(name, "loglinear", "mean", init, "plain", "all", False)
            if sound(case):
                assert isinstance(plan(case).start(1, torch.device("cpu")), DyadicCache)
                continue
            with pytest.raises(RetrofitError, match="no way to merge.*take --init carry"):
                plan(case)
    with pytest.raises(RetrofitError, match="of a mlp memory: a network is read whole"):
        read(plan(Case("mlp", "grm", "mean", "reset", "plain", "part", False)), example("mlp", 9))


@VARIANT
@torch.no_grad()
def test_bytes_are_those_really_held(variant):
    for case in cases(3, seed=6, variant=variant):
        streams = example(case.memory, 80)
        _, _, cache = read(plan(case), streams, [13] + [1] * 7 + [60], inputs(80))
        held = {}
        for value in cache.tensors().values():
            held[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        assert cache.nbytes() == sum(held.values()) > 0
        one = len(plan(case).gate.heads) * 2 * sizes(streams, plan(case).memory)[3] * 8
        kept = cache.states.untyped_storage().nbytes() / one
        if isinstance(cache, DyadicCache):
            assert kept == 4  # ten segments are 1010 in binary
        else:
            assert 10 <= kept < 20 and cache.counts.tolist() == [10, 10]


def test_every_aggregator_has_a_variant():
    used = {preset.aggregator for preset in VARIANTS.values()}
    assert used == set(registry.names("aggregators"))
