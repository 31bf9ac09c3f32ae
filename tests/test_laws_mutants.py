"""Laws that can fail: each is shown a read path with the fault that it is there for."""

from __future__ import annotations

import pytest
import torch
from lawkit import SEGMENT, build, cases, example, near, plan, read, tokens
from test_laws_identities import case as plain_case
from test_laws_identities import constant, dense, gammas
from test_laws_reads import check_causality, check_oracle, check_pieces
from torch import Tensor

from mcretrofit import caching
from mcretrofit.aggregators import Weights
from mcretrofit.config import CachingConfig
from mcretrofit.retrofit import every_head, retrofitted
from mcretrofit.routers import mean, moment
from mcretrofit.segments import Bank, SegmentCache

BROKEN = pytest.raises(AssertionError)


def whole_pool(u: Tensor, opened) -> Tensor:
    """The open segment's mean key with tokens that are yet to come."""
    total = opened.fold(opened.keys).sum(1, keepdim=True)
    count = opened.fold(opened.valid).sum(1)[:, None, None]
    return opened.unfold((opened.fold(u) * total).sum(-1) / count.clamp_min(1))


def whole_moment(u: Tensor, opened) -> Tensor:
    u = opened.fold(u).transpose(1, 2)
    return opened.unfold(
        (u @ opened.fold(opened.keys).permute(0, 2, 3, 1)).square().sum(-1).transpose(1, 2)
    )


@pytest.mark.parametrize(("router", "fault"), [(mean, whole_pool), (moment, whole_moment)])
@torch.no_grad()
def test_a_pool_that_sees_the_whole_segment_breaks_causality(router, fault, monkeypatch):
    name = router.__name__.rsplit(".", 1)[1]
    (case,) = cases(1, seed=1, variant="grm", router=name, rule="plain")
    check_causality(case)
    monkeypatch.setattr(router, "_online", fault)
    for check in (check_causality, check_oracle):
        with BROKEN:
            check(case)


@torch.no_grad()
def test_own_writes_that_forget_the_keys_before_a_call_break_pieces(monkeypatch):
    fixed = {"router": "moment", "rule": "z", "init": "carry_delta", "memory": "linear"}
    (case,) = cases(1, seed=7, variant="grm", **fixed)
    check_pieces(case)
    right = SegmentCache.remember
    monkeypatch.setattr(SegmentCache, "remember", lambda *a: torch.zeros_like(right(*a)))
    with BROKEN:
        check_pieces(case)


@pytest.mark.parametrize("off", [1, -1], ids=["own segment too", "last segment missing"])
@torch.no_grad()
def test_visibility_that_is_off_by_one_breaks_the_oracle(off, monkeypatch):
    (case,) = cases(1, seed=2, variant="grm", router="moment")
    right = SegmentCache.bank

    def bank(self, index: Tensor, last: int) -> Bank:
        given = right(self, index, last)
        return given._replace(visible=given.number[:, None] < index[..., None] + off)

    monkeypatch.setattr(SegmentCache, "bank", bank)
    with BROKEN:
        check_oracle(case)
    if off > 0:
        with BROKEN:
            check_causality(case)


@torch.no_grad()
def test_a_forgotten_open_summary_breaks_pieces(monkeypatch):
    (case,) = cases(1, seed=3, variant="grm", router="moment", rule="plain")
    settle = SegmentCache.settle

    def forgetful(self, laid) -> None:
        settle(self, laid)
        self.open_summary = None

    monkeypatch.setattr(SegmentCache, "settle", forgetful)
    check_oracle(case)
    with BROKEN:
        check_pieces(case)


@torch.no_grad()
def test_a_forgotten_decay_breaks_own_writes(monkeypatch):
    (case,) = cases(1, seed=4, memory="linear", variant="residual", init="carry_delta")
    monkeypatch.setattr(caching, "kept", lambda state, decay: state)
    with BROKEN:
        check_oracle(case)


def test_a_softmax_over_cached_segments_alone_breaks_gammas(monkeypatch):
    def apart(reading) -> Weights:
        cached, online = reading.logits()
        return Weights(torch.ones_like(online), cached.softmax(-1).nan_to_num())

    streams, some = example("linear", 21), plan(plain_case())
    monkeypatch.setattr(some.aggregator, "weigh", apart)
    with BROKEN:
        near(read(some, streams)[0], dense(streams, constant, "mean", 1.0))
    own, cached = gammas(some, streams)
    assert (own + cached.sum(-1))[:, SEGMENT:].gt(1.5).all()


@torch.no_grad()
def test_segments_that_do_not_follow_beams_break_reordering(monkeypatch):
    model, ids, step = build("gla", num_hidden_layers=1), tokens(21, rows=2), tokens(1, rows=2)
    config = CachingConfig(segment=SEGMENT, rule="plain", init="reset")

    def reordered() -> Tensor:
        cache = model(ids, use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        return model(step, past_key_values=cache).logits[:, -1]

    with retrofitted(model, config, every_head(model)):
        want = model(torch.cat([ids.flip(0), step], 1)).logits[:, -1]
        near(reordered(), want)
        monkeypatch.setattr(SegmentCache, "map_rows", lambda self, function: self)
        with BROKEN:
            near(reordered(), want)
