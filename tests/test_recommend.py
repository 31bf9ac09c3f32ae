"""Rows of one setting as one measurement, settings by name, and the advice."""

from __future__ import annotations

import pytest
from result_rows import base, row, text

from mcretrofit.pooling import UNROUTED, controls, pooled
from mcretrofit.recommend import recommend
from mcretrofit.results import labels


def test_pooling_weighs_every_sample_the_same():
    one = row(score=1.0, base=0.0, n=2, scores=[1, 1], base_scores=[0, 0])
    other = row(score=0.5, base=0.5, n=6, scores=[1, 0] * 3, base_scores=[0, 1] * 3)
    both = pooled([one, other])
    assert (both.score, both.base, both.n) == (0.625, 0.375, 8)
    apart = [1.0, 1.0] + [1.0, -1.0] * 3
    mean = sum(apart) / 8
    half = 1.96 * (sum((x - mean) ** 2 for x in apart) / 7 / 8) ** 0.5
    assert both.low == pytest.approx(mean - half) and both.high == pytest.approx(mean + half)
    assert both.verdict == "no effect"
    # from the rows' own intervals where samples are not known
    halves = pooled([row(half=0.3), row(half=0.4)])
    assert halves.high - halves.low == pytest.approx(0.5) and halves.verdict == "helps"
    assert pooled([row(low=None, high=None)] * 2).verdict == "no effect"
    assert pooled([text(score=2.1, half=0.01)] * 2).verdict == "hurts"
    # less than half a percent of bits per byte is no effect
    assert pooled([text(score=2.001, half=0.0001)] * 2).verdict == "no effect"


def test_random_segments_that_do_as_well_take_the_credit():
    some = [row(controls={"random": 0.75, "oracle": None}, depth=d) for d in (0, 100)]
    assert pooled(some).verdict == UNROUTED
    assert list(controls(some)) == ["random"]
    one = recommend([*some, text()])
    assert one.line == "keep the base: random segments help as much (niah_single_1 at 512)"


def test_settings_are_named_by_what_tells_them_apart():
    assert list(labels([base(), row(), row(128)]).values()) == ["ssc 64", "ssc 128"]
    full = {"variant": "ssc", "segment": 64, "router": "mean", "whiten": True, "tau": 1.0}
    other = {**full, "router": "moment", "whiten": False}
    names = list(labels([row(caching=full), row(caching=other)]).values())
    assert names == ["ssc 64, router mean, whiten true", "ssc 64, router moment, whiten false"]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([base()], "keep the base: nothing was compared with it"),
        ([text()], "keep the base: recall was not measured"),
        ([row(score=0.55), text()], "keep the base: recall does not rise"),
        ([row(), text(score=2.2)], "keep the base: caching hurts perplexity at 512"),
        (
            [row(score=0.9, depth=0), row(score=0.3, depth=50), text()],
            "keep the base: caching hurts niah_single_1 at 512, depth 50",
        ),
        (
            [row(), text(score=2.2), row(128), text(128, 2.2)],
            "keep the base: every setting hurts something: ssc 64 perplexity at 512; "
            "ssc 128 perplexity at 512",
        ),
        (
            [row(), row(128, length=1024)],
            "keep the base: no setting was measured on every probe and length",
        ),
        (
            [row(), text()],
            "use ssc 64: recall rises (niah_single_1 at 512), nothing is hurt; "
            "mean recall 0.500 to 0.800 for 1.56 kB of cache",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_advice_in_words(rows, line):
    assert recommend(rows).line == line


def test_the_cheapest_within_one_interval_of_the_best():
    rows = [row(64, 0.9), row(128, 0.85), row(256, 0.7), *(text(s) for s in (64, 128, 256))]
    best = recommend(rows)
    assert best.setting == {"variant": "ssc", "segment": 128}
    assert "the cheapest of 2 settings within one interval of the best" in best.reason
    # what hurts is out, whatever it recalls; at one price the faster wins
    assert recommend([*rows[:4], text(128, 2.2), text(256)]).label == "ssc 64"
    same = [row(64, cache_bytes=9, prefill_ratio=2.0), row(128, cache_bytes=9, prefill_ratio=1.5)]
    assert recommend(same).label == "ssc 128"
    part = recommend([row(), row(length=1024), row(128)])
    assert part.label == "ssc 64" and "left out: 1 not measured on every" in part.reason
