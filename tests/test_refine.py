"""Settings beyond heads and thresholds: chosen by planted facts, within prose and budget."""

from __future__ import annotations

import math

import pytest
import torch
from cli_helpers import refused, runner

from mcretrofit import budget
from mcretrofit.budget import Budget, Spent, spent
from mcretrofit.calibrate import shipped_text
from mcretrofit.config import CachingConfig
from mcretrofit.model import calibrated, load
from mcretrofit.planted import Losses
from mcretrofit.refine import refined
from mcretrofit.search import Searcher

GAINS = "builtin:gated_deltanet"
BASE = Losses(torch.tensor([3.0, 3.0]), 2.0, torch.zeros(2))


def losses(answers: float, prose: float = 2.0) -> Losses:
    return Losses(torch.tensor([answers, answers]), prose, torch.zeros(2))


def test_each_setting_takes_the_value_with_the_best_answers():
    def trial(config: CachingConfig) -> Losses:
        return losses(2.0 - 0.1 * (config.top_k == 4) - 0.3 * (config.init == "reset"))

    config, table = refined(CachingConfig(), trial, BASE, 0.01)
    assert (config.top_k, config.init, config.temperature) == (4, "reset", None)
    assert {(t.setting, t.value) for t in table if t.taken} == {("top_k", 4), ("init", "reset")}
    assert [t.answers for t in table if t.value == "reset"] == [pytest.approx(-1.4)]


def test_a_setting_that_harms_prose_or_does_not_fit_is_not_taken():
    def trial(config: CachingConfig) -> Losses:
        if config.top_k == 4:
            return losses(1.0, math.inf)
        return losses(1.5, 2.1) if config.init == "reset" else losses(2.0)

    config, _ = refined(CachingConfig(), trial, BASE, 0.01)
    assert config == CachingConfig()


def test_a_gain_that_may_be_chance_is_not_taken():
    def trial(config: CachingConfig) -> Losses:
        if config.top_k != 1:
            return losses(2.0)
        return Losses(torch.tensor([1.0, 2.9]), 2.0, torch.zeros(2))

    config, _ = refined(CachingConfig(), trial, BASE, 0.01)
    assert config.top_k == 2


def test_a_gain_that_is_sure_but_worth_nothing_is_not_taken():
    def trial(config: CachingConfig) -> Losses:
        return losses(2.0 - 1e-4 * (config.top_k == 4))

    assert refined(CachingConfig(), trial, BASE, 0.01, 1e-3)[0].top_k == 2
    assert refined(CachingConfig(), trial, BASE, 0.01, 1e-5)[0].top_k == 4


def test_grm_has_no_number_of_segments_to_choose():
    _, table = refined(CachingConfig(variant="grm"), lambda _: losses(2.0), BASE, 0.01)
    assert {t.setting for t in table} == {"temperature", "init"}


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
