"""Settings beyond heads and thresholds: chosen by planted facts, within prose and budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cli_helpers import refused, runner

from mcretrofit import budget
from mcretrofit.budget import Budget, Spent, spent
from mcretrofit.calibrate import shipped_text
from mcretrofit.choices import Choice, Kind, covers
from mcretrofit.config import CachingConfig
from mcretrofit.model import calibrated, load
from mcretrofit.planted import Losses
from mcretrofit.refine import refined
from mcretrofit.retrofit import Cover
from mcretrofit.search import Searcher

GAINS = "builtin:gated_deltanet"
BASE = Losses(torch.tensor([3.0, 3.0]), 2.0, torch.zeros(2))


def losses(answers: float, prose: float = 2.0) -> Losses:
    return Losses(torch.tensor([answers, answers]), prose, torch.zeros(2))


def one(head: int = 0, **settings: object) -> Choice:
    kind = Kind("whitened", "rare", True)
    return Choice("mixer", head, {}, True, "", kind, 0.1, 4.0, settings=settings)


def found(trial: Callable[[dict[str, Any]], Losses], worth: float = 0.0, **fields: object) -> tuple:
    """The settings that one head ends with, and all that was tried."""

    def of_all(choices: list[Choice]) -> Losses:
        return trial(dict(choices[0].settings))

    chosen, table = refined(CachingConfig(**fields), [one()], of_all, BASE, 0.01, worth)
    return chosen[0].settings, table


def test_each_setting_takes_the_value_with_the_best_answers():
    def trial(own: dict[str, Any]) -> Losses:
        return losses(2.0 - 0.1 * (own.get("top_k") == 4) - 0.3 * (own.get("init") == "reset"))

    settings, table = found(trial)
    assert settings == {"top_k": 4, "init": "reset"}
    taken = {(t.setting, t.value) for t in table if t.taken}
    assert taken == {("top_k", 4), ("temperature", 2.0), ("init", "reset")}
    assert [t.value for t in table] == [1, 2, 4, 1.0, 2.0, 4.0, "carry_delta", "reset"]
    assert [t.answers for t in table if t.value == "reset"] == [pytest.approx(-1.4)]


def test_a_setting_that_harms_prose_or_does_not_fit_is_not_taken():
    def trial(own: dict[str, Any]) -> Losses:
        if own.get("top_k") == 4:
            return losses(1.0, math.inf)
        return losses(1.5, 2.1) if own.get("init") == "reset" else losses(2.0)

    assert found(trial)[0] == {}


def test_a_gain_that_may_be_chance_is_not_taken():
    def trial(own: dict[str, Any]) -> Losses:
        if own.get("top_k") != 1:
            return losses(2.0)
        return Losses(torch.tensor([1.0, 2.9]), 2.0, torch.zeros(2))

    assert found(trial)[0] == {}


def test_a_gain_that_is_sure_but_worth_nothing_is_not_taken():
    def trial(own: dict[str, Any]) -> Losses:
        return losses(2.0 - 1e-4 * (own.get("top_k") == 4))

    assert found(trial, 1e-3)[0] == {}
    assert found(trial, 1e-5)[0] == {"top_k": 4}


def test_grm_has_no_number_of_segments_to_choose():
    _, table = found(lambda _: losses(2.0), variant="grm")
    assert {t.setting for t in table} == {"temperature", "init"}


def test_a_configured_value_is_where_the_search_begins():
    settings, table = found(lambda _: losses(2.0), top_k=8, temperature=3.0)
    assert settings == {}
    assert {(t.setting, t.value) for t in table if t.taken} == {
        ("top_k", 8),
        ("temperature", 3.0),
        ("init", "carry_delta"),
    }


def test_every_head_takes_its_own():
    def trial(choices: list[Choice]) -> Losses:
        first, second = (choice.settings for choice in choices)
        gain = 0.2 * (first.get("init") == "reset") + 0.1 * (second.get("top_k") == 1)
        return losses(2.0 - gain + 0.5 * (second.get("init") == "reset"))

    chosen, table = refined(CachingConfig(), [one(3), one(1)], trial, BASE, 0.01)
    assert [choice.settings for choice in chosen] == [{"init": "reset"}, {"top_k": 1}]
    assert len(table) == 16 and {t.head for t in table} == {1, 3}


def test_covers_keep_what_differs():
    every = Cover([0, 1], 2, torch.ones(2, 4), torch.zeros(2), torch.ones(2))
    chosen = [one(0, init="reset"), one(1, top_k=4)]
    made = covers(chosen, {chosen[0].kind: {"mixer": every}}, CachingConfig())["mixer"]
    assert made.each == {"init": ["reset", "carry_delta"], "top_k": [2, 4]}
    assert covers([one(0)], {one().kind: {"mixer": every}}, CachingConfig())["mixer"].each is None


def test_a_budget_holds_what_is_within_both_limits():
    assert Budget(1.0, None).holds(Spent(1.0, 99.0)) and not Budget(0.9).holds(Spent(1.0, 0.0))
    assert not Budget(None, 2.0).holds(Spent(0.0, 2.1)) and not Budget().bounded


def test_spent_is_what_the_cache_holds():
    loaded = load(GAINS)
    config = CachingConfig()
    covers = calibrated(loaded, config).covers
    ids = loaded.tokenizer().encode(shipped_text())[:1024]
    found = spent(loaded.model, config, covers, ids)
    heads = sum(len(c.heads) for c in covers.values())
    assert heads and found.megabytes > 3 * heads * 64 * 64 * 4 / 1e6 and found.milliseconds >= 0
    # the steps that are timed close a segment, which is not the prompt's
    fewer = spent(loaded.model, config, covers, ids[: 1024 - budget.STEPS // 2])
    assert fewer.megabytes < found.megabytes * 0.9


def test_a_search_keeps_its_budget(monkeypatch):
    loaded = load(GAINS)
    what = (loaded.model, loaded.tokenizer(), shipped_text(), CachingConfig())
    small = {"length": 1100, "count": 1, "pairs": 20}
    found = Searcher(*what, **small, budget=Budget(1e-3)).search()
    assert found.keeps_base and found.config == CachingConfig(whiten=False)
    assert budget.STEPS > 1


@pytest.mark.parametrize("flag", ["--budget-mb", "--budget-ms"])
def test_a_budget_has_to_be_above_zero(capsys, flag):
    refused(runner(capsys)("calibrate", GAINS, flag, 0), 2, flag, "above 0")
