"""Lengths, rows and the recommendation of a comparison, without a model."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from mcretrofit.compare import Cell, Request, check, lengths, probes, recommendation, row
from mcretrofit.config import CachingConfig
from mcretrofit.errors import UsageError
from mcretrofit.evaluate import Outcome
from mcretrofit.positions import by_position
from mcretrofit.rows import UNROUTED, judged
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


def test_help_that_random_segments_give_too_is_no_merit_of_the_router():
    base, done, worse = [0.0] * 8, [1.0] * 8, [0.0] * 7 + [1.0]
    found = {
        name: judged(*pair)
        for name, pair in {
            "alone": (Outcome(base, 0, 1.0), Outcome(done, 0, 1.0), "accuracy"),
            "no better": (*2 * (Outcome(base, 0, 1.0),), "accuracy"),
        }.items()
    }
    assert found == {"alone": "helps", "no better": "no effect"}
    for random, said in ((done, UNROUTED), (worse, "helps"), (None, "helps")):
        control = None if random is None else Outcome(random, 0, 1.0)
        outcomes = Outcome(base, 0, 1.0), Outcome(done, 0, 1.0)
        assert judged(*outcomes, "accuracy", {"random": control}) == said
    text = Outcome([2.0] * 4, 0, 1.0), Outcome([1.9, 1.8, 1.9, 1.8], 0, 1.0)
    assert judged(*text, "bits_per_byte", {"random": text[1]}) == UNROUTED
    assert judged(*text, "bits_per_byte", {"random": text[0]}) == "helps"
    row_ = {**cell("mqar", base, done), "verdict": UNROUTED}
    assert recommendation([row_]) == "keep the base: random segments help as much (mqar at 512)"
    assert recommendation([row_, cell("mqar", base, done)]).startswith("helps")


def test_rows_hold_controls_with_their_intervals_to_the_base():
    sample = Sample("", (), 10, 0, None, 7, "compact")
    loaded = SimpleNamespace(name="m", config=CachingConfig())
    outcomes = (
        Outcome([0.0, 0.0], 0, 2.0, prefill=1.0, step=0.5),
        Outcome([1.0, 1.0], 0, 5.0, prefill=2.5, step=1.0),
    )
    controls = {"random": outcomes[0], "recent": None, "oracle": Outcome([1.0, 0.0], 0, 1.0)}
    cells = Cell("mqar", 512, None, None, [sample] * 2)
    found = row(loaded, cells, *outcomes, False, controls, model_hash="h", command="c")
    assert found["controls"] == {"random": 0.0, "recent": None, "oracle": 0.5}
    assert found["control_intervals"]["random"] == [0.0, 0.0]
    assert found["control_intervals"]["oracle"] == pytest.approx([-0.48, 1.48])
    assert found["control_intervals"]["recent"] is None and (
        found["prefill_ratio"],
        found["decode_ratio"],
    ) == (2.5, 2.0)
    assert found["scores"] == [1.0, 1.0] and found["base_scores"] == [0.0, 0.0]
    assert found["verdict"] == "helps" and found["command"] == "c"


def test_depths_are_cells_of_tasks_that_have_one():
    request = Request(("niah", "perplexity"), ("128", "256"), depths=(0.0, 50.0))
    found = [(p.task, p.length, p.depth) for p in probes(request, 256, None)]
    niah = [("niah_single_1", n, d) for n in (128, 256) for d in (0.0, 50.0)]
    assert found == [*niah, ("perplexity", 128, None), ("perplexity", 256, None)]
    some = Request(("niah", "perplexity"), ("64",), samples={"niah": 3, "perplexity": 2})
    assert [p.count for p in probes(some, 256, None)] == [3, 2]
    with pytest.raises(UsageError, match="did you mean"):
        probes(Request(("niah",), samples={"naih": 3}), 256, None)


def test_windows_of_text_add_up_to_the_whole():
    text = Sample("", (), 10, 0, None, 7, "text", ids=tuple(range(10)), token_bytes=(1, 2) * 5)
    nats = torch.arange(1.0, 19.0, dtype=torch.float64).view(2, 9)
    found = by_position([nats[:1], nats[1:]], [text, text], 3)
    assert [(start, end) for start, end, _ in found] == [(0, 3), (3, 6), (6, 10)]
    held = [2 * sum(text.token_bytes[max(a, 1) : b]) for a, b, _ in found]
    total = sum(bits * count for (_, _, bits), count in zip(found, held, strict=True))
    assert total == pytest.approx(float(nats.sum()) / math.log(2))
    assert found[0][2] == pytest.approx((1 + 2 + 10 + 11) / math.log(2) / held[0])
    assert by_position([], [text], 3) == ()
