"""The router of rare keys against its definition, key by key; what it does that a second moment can't."""

from __future__ import annotations

import lawkit
import pytest
import torch
import torch.nn.functional as F
from lawkit import KEYS, SEGMENT, example, inputs
from torch import Tensor

from mcretrofit import rules
from mcretrofit.routers import Asked, Opened, moment, rare
from mcretrofit.segments import Bank


@pytest.fixture(autouse=True)
def few(monkeypatch):
    # fewer than a segment's tokens: keys have to give way
    monkeypatch.setattr(rare, "KEPT", 3)


def kept(keys: Tensor, stop: int) -> list[int]:
    """Places of the three longest of the first `stop` keys `[C, K]`, the earlier of equal ones."""
    lengths = keys[:stop].norm(dim=-1).tolist()
    return sorted(range(stop), key=lambda j: (-round(lengths[j], 4), j))[:3]


def best(u: Tensor, keys: Tensor, places: list[int]) -> float:
    return max((F.cosine_similarity(u, keys[j], dim=0).item() ** 2 for j in places), default=0.0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def bank(summaries: Tensor, tokens: int) -> Bank:
    rows, count = summaries.shape[:2]
    seen = torch.ones(rows, tokens, count, dtype=torch.bool)
    return Bank(
        summaries[..., None], summaries, seen, seen[..., 0].long(), torch.arange(count)[None]
    )


def asked(u: Tensor) -> Asked:
    return Asked(F.normalize(u, dim=-1), u, u)


def places(rows: int, segments: int, size: int) -> Tensor:
    return torch.arange(size).expand(rows, segments, size)


@pytest.mark.parametrize("tokens", [1, 5])
def test_scores_are_the_best_matches_of_the_longest_keys(tokens):
    keys, u = drawn(2, 4, 9, 2, KEYS), drawn(2, tokens, 2, KEYS, seed=1)
    valid = torch.ones(2, 4, 9, dtype=torch.bool)
    made = rare.summarise(keys, valid, places(2, 4, 9))
    assert made.shape[-1] == rare.width(KEYS)
    got, _ = rare.score(asked(u), bank(made, tokens), None)
    for b, t, h, n in torch.cartesian_prod(*map(torch.arange, got.shape)).tolist():
        own = keys[b, n, :, h]
        assert got[b, t, h, n].item() == pytest.approx(best(u[b, t, h], own, kept(own, 9)))


def test_summaries_of_pieces_merge_to_that_of_the_whole():
    keys, valid = drawn(2, 1, 12, 2, KEYS), drawn(2, 1, 12, seed=3) > -0.5
    keys[:, :, 4] = keys[:, :, 1]  # the earlier of equal ones stays
    where = places(2, 1, 12)
    whole = rare.summarise(keys, valid, where)
    made = torch.zeros_like(whole)
    for a, b in ((0, 1), (1, 6), (6, 7), (7, 12)):
        cut = slice(a, b)
        made = rare.merge(made, rare.summarise(keys[:, :, cut], valid[:, :, cut], where[:, :, cut]))
    assert torch.equal(made, whole)


@pytest.mark.parametrize("before", [0, 2, 5])
@pytest.mark.parametrize("lag", [0, 2])
def test_the_open_segment_is_seen_up_to_each_token(before, lag):
    keys, u = drawn(1, 9, 2, KEYS), drawn(1, 9, 2, KEYS, seed=1)
    valid, where = torch.ones(1, 9, dtype=torch.bool), torch.arange(9)[None]
    held = rare.summarise(keys[:, None, :before], valid[:, None, :before], where[:, None, :before])
    rest = slice(before, 9)
    opened = Opened(keys[:, rest], valid[:, rest], held, 9 - before, lag=lag, part=where[:, rest])
    unit = F.normalize(u[:, rest], dim=-1)
    got = rare.settled(unit, opened)
    for t, h in torch.cartesian_prod(torch.arange(9 - before), torch.arange(2)).tolist():
        own, now = keys[0, :, h], before + t
        far = [j for j in kept(own, now + 1) if j <= now - lag]
        assert got[0, t, h].item() == pytest.approx(best(u[0, now, h], own, far))
    if not lag:
        one = bank(torch.zeros_like(held), 9 - before)
        assert torch.equal(rare.score(asked(u[:, rest]), one, opened)[1], got)


@pytest.mark.parametrize("rule", ["z", "plain"])
@pytest.mark.parametrize("variant", ["ssc", "loglinear"])
def test_pieces_equal_one_pass_where_keys_give_way(variant, rule):
    streams = example("linear", 5 * SEGMENT + 3)
    more = {"variant": variant, "router": "rare", "init": "carry_delta", "rule": rule}
    for case in lawkit.cases(3, seed=4, memory="linear", **more):
        whole, state, _ = lawkit.read(lawkit.plan(case), streams, x=inputs(streams.length))
        sizes = [3, 1, 1, SEGMENT, 1, 11, 2, 5, streams.length - 32]
        parts, end, _ = lawkit.read(lawkit.plan(case), streams, sizes, inputs(streams.length))
        torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(end, state)


def test_gradients_are_finite_where_nothing_is_visible_yet():
    (case,) = lawkit.cases(
        1,
        seed=1,
        memory="linear",
        variant="ssc",
        router="rare",
        init="carry_delta",
        rule="z",
        gated=True,
    )
    some, streams = lawkit.plan(case), example("linear", 3 * SEGMENT)
    some.gate.double()
    out, *_ = lawkit.read(some, streams, x=inputs(streams.length))
    out.square().sum().backward()
    assert some.gate.weight.grad.isfinite().all() and some.gate.weight.grad.abs().sum() > 0


def test_one_match_outweighs_many_halves():
    half = F.normalize(torch.eye(KEYS)[0] + torch.eye(KEYS)[1], dim=0)
    alike, exact = half.expand(8, KEYS), torch.eye(KEYS)[[0, 2, 3, 4, 5, 6, 7, 8]]
    keys = torch.stack([alike, exact])[None, :, :, None].double()
    valid, u = torch.ones(1, 2, 8, dtype=torch.bool), torch.eye(KEYS)[:1][None, None].double()
    sums = moment.score(asked(u), bank(moment.summarise(keys, valid), 1), None)[0].flatten()
    made = rare.summarise(keys, valid, places(1, 2, 8))
    one = rare.score(asked(u), bank(made, 1), None)[0].flatten()
    assert sums[0] > sums[1] and one[1] > one[0]


def test_a_long_key_matches_no_more_than_others():
    keys = drawn(1, 1, 8, 1, KEYS)
    valid, where = torch.ones(1, 1, 8, dtype=torch.bool), places(1, 1, 8)
    longer = keys.clone()
    longer[:, :, kept(keys[0, 0, :, 0], 8)[0]] *= 100
    u = drawn(1, 4, 1, KEYS, seed=2)
    scores = [
        rare.score(asked(u), bank(rare.summarise(k, valid, where), 4), None)[0]
        for k in (keys, longer)
    ]
    torch.testing.assert_close(*scores)


def test_an_open_segment_is_one_of_those_that_it_is_compared_with():
    usual, own = torch.tensor([[[0.2]]]), torch.tensor([[[0.6]]])
    seen = torch.tensor([[[True, True, False]]])
    assert rules.among(own, usual, seen).item() == pytest.approx(0.6 / ((0.2 + 0.2 + 0.6) / 3))
