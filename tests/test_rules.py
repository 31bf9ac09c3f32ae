"""From scores to logits: what surprises, what saturates, what is shared."""

from __future__ import annotations

import math

import pytest
import torch

from mcretrofit import rules

MEAN, STD = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])


def test_saturation_keeps_the_order_and_what_is_below_zero():
    logits = torch.linspace(-50, 400, 9001, dtype=torch.float64).float()
    bent = rules.saturated(logits)
    assert torch.equal(bent[logits <= 0], logits[logits <= 0])
    assert (bent.diff() > 0).all() and bent.max() < rules.CERTAIN + 400 * rules.RISE + 1e-3


def test_two_certain_segments_share_the_read():
    scores = torch.tensor([6.0, 9.0, 1.0]).view(1, 1, 1, 3)
    cached, online = rules.z(scores, MEAN[:1], STD[:1], 2.0, 2.0)
    weights = torch.cat([cached[0, 0, 0], online[0, 0]]).softmax(0)
    assert weights[0] > 0.4 and weights[2:].sum() < 0.03


def test_a_token_without_surprise_reads_online():
    scores = MEAN.view(1, 1, 2, 1).expand(1, 5, 2, 7)
    for shared in (False, True):
        cached, online = rules.z(scores, MEAN, STD, 2.0, 2.0, shared)
        assert cached.shape == (1, 5, 2, 7) and online.shape == (1, 5, 2)
        torch.testing.assert_close(cached, torch.full_like(cached, -4.0))


def test_a_shared_route_is_the_mean_surprise_of_the_heads():
    torch.manual_seed(0)
    scores = torch.rand(2, 3, 2, 4)
    alone, _ = rules.z(scores, MEAN, STD, 2.0, 1.0)
    both, _ = rules.z(scores, MEAN, STD, 2.0, 1.0, shared=True)
    assert (scores < MEAN[:, None] + 2 * STD[:, None]).all()  # nothing saturates here
    torch.testing.assert_close(both, alone.mean(2, keepdim=True).expand_as(both))


@pytest.mark.parametrize("heads", [1, 2])
def test_one_head_is_routed_by_itself(heads):
    scores = torch.rand(1, 2, heads, 3)
    alone = rules.z(scores, MEAN[:heads], STD[:heads], 1.0, 2.0, False)[0]
    both = rules.z(scores, MEAN[:heads], STD[:heads], 1.0, 2.0, True)[0]
    assert torch.equal(alone, both) == (heads == 1)


def test_the_margin_rises_with_the_number_of_segments():
    counts = [0, 1, 4, 8, 32, 128]
    visible = torch.arange(128) < torch.tensor(counts)[:, None]
    one, two = (rules.rise(visible[None], heads)[0] for heads in (1, 2))
    want = torch.tensor([0.75 * max(0.0, math.log(max(n, 1) / 4)) for n in counts])
    torch.testing.assert_close(one, want)
    torch.testing.assert_close(two, want / 2**0.5)


def test_the_best_of_many_ordinary_segments_is_as_seldom_loud_as_that_of_few():
    # tails as scores have them: every spread makes a score e^2.5 times as rare
    scores = torch.empty(4000, 64).exponential_(2.5, generator=torch.Generator().manual_seed(0))

    def loud(count: int, risen: bool) -> float:
        visible = torch.ones(1, 1, count, dtype=torch.bool)
        margin = 2.0 + (rules.rise(visible).item() if risen else 0.0)
        return float((scores[:, :count].amax(1) > margin).float().mean())

    few = loud(4, True)
    assert few == loud(4, False) and 0.01 < few < 0.05
    assert loud(64, False) > 8 * few
    assert loud(64, True) < 3 * few
