"""Lengths, rows and the recommendation of a comparison, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcretrofit.compare import Cell, Request, check, lengths, recommendation, row
from mcretrofit.config import CachingConfig
from mcretrofit.errors import UsageError
from mcretrofit.evaluate import Outcome
from mcretrofit.tasks import Sample


def test_lengths_are_tokens_or_times_the_trained_length():
    assert lengths(["1k", "512", "0.5x", "2x"], 512) == [256, 512, 1024]
    assert lengths([], 512) == [512, 1024, 2048, 4096]
    assert lengths([], 8192) == [1024, 2048, 4096, 8192, 16384]
    assert lengths([], None) == [512, 1024, 2048, 4096]
    with pytest.raises(UsageError, match="does not say its trained length"):
        lengths(["2x"], None)


@pytest.mark.parametrize("word", ["", "x", "-1k", "nan", "inf", "1e400", "0.1"])
def test_lengths_that_mean_nothing_are_refused(word):
    with pytest.raises(UsageError, match="expected tokens"):
        lengths([word], 512)


def test_requests_take_names_and_aliases():
    assert check(Request(("niah", "mqar"), pairs=9)) == ["niah_single_1", "mqar"]
    with pytest.raises(UsageError, match="did you mean 'perplexity'"):
        check(Request(("perplexty",)))


def cell(task: str, base: list[float], done: list[float]) -> dict:
    sample = Sample("", (), 10, 0, None, 7, "compact")
    loaded = SimpleNamespace(name="m", config=CachingConfig())
    outcomes = (Outcome(base, 0, 1.0), Outcome(done, 64, 2.0))
    return row(loaded, Cell(task, 512, None, None, [sample] * len(base)), *outcomes)


def test_rows_hold_the_paired_interval_and_a_verdict():
    better = cell("mqar", [0.0] * 8, [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    assert better["score"] == 0.875 and better["verdict"] == "helps"
    assert better["low"] < 0.875 < better["high"] and better["seed"] == 7
    assert better["cache_bytes"] == 64 and better["n"] == 8
    assert cell("mqar", [0.0], [1.0])["low"] is None


def test_the_recommendation_keeps_the_base_unless_recall_rises_and_nothing_is_hurt():
    helps = cell("mqar", [0.0] * 4, [1.0] * 4)
    same, text = cell("mqar", [1.0] * 4, [1.0] * 4), cell("perplexity", [2.0] * 4, [2.001] * 4)
    worse = cell("perplexity", [2.0] * 4, [2.1] * 4)
    assert recommendation([]) is None
    assert recommendation([helps, text]).startswith("helps: recall rises (mqar at 512)")
    assert "text was not measured" in recommendation([helps])
    assert recommendation([same, text]) == "keep the base: recall does not rise"
    assert recommendation([helps, worse]) == "keep the base: caching hurts perplexity at 512"
