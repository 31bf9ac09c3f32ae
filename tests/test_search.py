"""The search for heads, scores and thresholds, on a model that gains and on one that cannot."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from cli_helpers import refused, runner

from mcretrofit import doubts, search
from mcretrofit.budget import Budget
from mcretrofit.calibrate import shipped_text, windows
from mcretrofit.config import CachingConfig
from mcretrofit.doubts import doubt
from mcretrofit.errors import RetrofitError
from mcretrofit.model import load
from mcretrofit.planted import Losses, losses, planted
from mcretrofit.retrofit import plans, retrofitted
from mcretrofit.search import Choice, Searcher

GAINS = "builtin:gated_deltanet"


@pytest.fixture(scope="module")
def gains():
    return load(GAINS)


@pytest.fixture(scope="module")
def searcher(gains):
    return Searcher(
        gains.model,
        gains.tokenizer(),
        shipped_text(),
        CachingConfig(),
        length=1536,
        count=3,
        pairs=20,
    )


def test_planted_facts_are_where_they_are_said_to_be(gains):
    tokenizer = gains.tokenizer()
    (one,) = planted(tokenizer, shipped_text(), length=500, count=1, pairs=3, seed=5)
    assert len(one.ids) <= 500 and len(one.answers) == len(one.facts) == 3
    for (i, j), (start, stop) in zip(one.answers, one.facts, strict=True):
        value = tokenizer.decode(one.ids[i:j])
        line = tokenizer.decode(one.ids[start:stop])
        assert line.endswith(value) and ":" in line and stop <= one.answers[0][0]


@pytest.mark.parametrize(("length", "sentences"), [(511, 0), (600, 1), (1600, 2)])
def test_sentences_are_hidden_beside_the_pairs(gains, length, sentences):
    tokenizer = gains.tokenizer()
    for seed in range(8):
        some = planted(tokenizer, shipped_text(), length=length, count=2, pairs=6, seed=seed)
        for one in some:
            assert len(one.ids) <= length and len(one.facts) == 6 + sentences
            said = []
            for (i, j), (start, stop) in zip(one.answers, one.facts, strict=True):
                line = tokenizer.decode(one.ids[start:stop])
                assert line.endswith(tokenizer.decode(one.ids[i:j]))
                # it is asked in the words that it was told in
                asked = tokenizer.decode(one.ids[:j])[-len(line.strip()) :]
                assert asked == line.strip() and stop < one.answers[0][0]
                said.append(line.strip().rpartition(" ")[0].rstrip(":").removesuffix(" is"))
            assert sum(line.startswith("The magic number for") for line in said) == sentences
            keys = [line.removeprefix("The magic number for ") for line in said]
            assert len(set(keys)) == len(keys)


def test_losses_equal_one_pass_over_the_whole(gains):
    some = planted(gains.tokenizer(), shipped_text(), length=1300, count=2, pairs=4, seed=5)
    prose = windows(gains.tokenizer().encode(shipped_text()), 256, 2048)
    got = losses(gains.model, some, prose)
    answers = []
    for one in some:
        ids = torch.tensor([one.ids])
        with torch.no_grad():
            logits = gains.model(ids).logits[0, :-1]
        each = F.cross_entropy(logits, ids[0, 1:], reduction="none")
        answers += [each[i - 1 : j - 1].mean() for i, j in one.answers]
    torch.testing.assert_close(got.answers, torch.stack(answers).double(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        logits = gains.model(prose).logits[:, :-1].flatten(0, 1)
    assert got.prose == pytest.approx(F.cross_entropy(logits, prose[:, 1:].flatten()).item(), 1e-4)


def kind_of(searcher, name):
    return next(kind for kind in searcher.made if kind.name == name)


@pytest.mark.parametrize("name", ["raw", "whitened", "moment", "energy"])
def test_a_threshold_is_where_the_online_read_and_the_segment_weigh_alike(searcher, name):
    (mixer, head), *_ = searcher.keys()
    kind = kind_of(searcher, name)
    choice = Choice(mixer, head, {}, True, "", kind, 0.1, 1.25)
    config = searcher.config.replace(whiten=kind.whiten)
    with retrofitted(searcher.model, config, searcher.covers([choice])):
        gate = plans(searcher.model)[mixer].gate
        assert plans(searcher.model)[mixer].router.__name__.endswith(kind.router)
        from mcretrofit import rules

        scores = torch.tensor([1.0, 1.25, 1.6]).view(1, 1, 1, 3)
        logits, online = rules.z(scores, gate.mean, gate.std, config.margin, rules.Z_TEMPERATURE)
    low, even, high = logits.flatten().tolist()
    assert online.item() == 0 and even == pytest.approx(0, abs=1e-4) and low < 0 < high
    assert (gate.whiten is None) == (name in ("raw", "energy"))


def test_the_search_finds_what_helps_and_confirms_it(searcher):
    before = {name: tensor.clone() for name, tensor in searcher.model.state_dict().items()}
    found = searcher.search()
    assert all(torch.equal(searcher.model.state_dict()[n], t) for n, t in before.items())
    assert not found.keeps_base and found.low > 0 and found.prose <= 0.005
    assert found.done.right.mean() > found.base.right.mean() + 0.1
    used = [c for c in found.choices if c.used]
    assert used and {(n, h) for n, c in found.covers.items() for h in c.heads} == {
        (c.mixer, c.head) for c in used
    }


def test_what_is_surely_gained_but_worth_nothing_keeps_the_base(gains, monkeypatch):
    small = {"length": 1100, "count": 1, "pairs": 12}
    monkeypatch.setattr(search, "interval", lambda gained: (1e-4, 2e-4))
    found = Searcher(
        gains.model, gains.tokenizer(), shipped_text(), CachingConfig(), **small
    ).search()
    assert found.keeps_base and found.low == 1e-4


def test_what_makes_answers_likelier_and_none_right_keeps_the_base():
    before, after = (Losses(torch.full((2,), nats), 2.0, torch.zeros(2)) for nats in (5.0, 4.0))
    some = after._replace(right=torch.tensor([0.0, 1.0]))
    assert doubt(before, after, 0.9) == doubts.SILENT
    assert doubt(before, some, 0.9) is None
    assert doubt(before, some, 0.02) == doubts.UNSURE
    assert doubt(before, some._replace(prose=2.02), 0.9) == doubts.HARMS


def test_a_model_that_recalls_nothing_keeps_its_base(gains):
    loaded = load(GAINS)
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if "k_proj" in name:
                weight.normal_(generator=torch.Generator().manual_seed(0))
    found = Searcher(
        loaded.model,
        loaded.tokenizer(),
        shipped_text(),
        CachingConfig(),
        length=1100,
        count=1,
        pairs=8,
    ).search()
    assert found.keeps_base and not any(c.used for c in found.choices)


def test_what_a_setting_takes_inside_the_trained_length_is_seen():
    loaded, config = load("builtin:swla"), CachingConfig()
    what = (loaded.model, loaded.tokenizer(), shipped_text(), config)
    searcher = Searcher(*what, length=1100, near=512, count=2, pairs=16)
    (name, head), *_ = searcher.keys()
    choice = Choice(name, head, {}, True, "", kind_of(searcher, "whitened"), 0.1, 4.0)
    assert not searcher.takes([choice])
    # one closed segment alone never surprises: begun afresh, the second one knows nothing of it
    assert searcher.takes([choice.having("init", "reset")])
    searcher.config = config
    kept, lost = searcher.within([choice]), searcher.within([choice.having("init", "reset")])
    assert lost.answers.mean() > kept.answers.mean()


@pytest.mark.parametrize("changes", [{"variant": "residual"}, {"rule": "plain"}])
def test_what_has_no_threshold_is_refused(gains, changes):
    config = CachingConfig().replace(**changes)
    with pytest.raises(RetrofitError, match="z rule"):
        Searcher(gains.model, gains.tokenizer(), shipped_text(), config, length=1100)


@pytest.fixture
def run(capsys):
    return runner(capsys)


def test_calibrate_rewrites_a_wrapped_folder(run, tmp_path):
    folder = tmp_path / "retrofit"
    assert run("wrap", GAINS, "--out", folder).status == 0
    small = ("--length", 1100, "--samples", 1, "--pairs", 12, "--json")
    done = run("calibrate", folder, *small)
    assert done.status == 0, done
    (row,) = done.rows
    assert row["folder"] == str(folder) and row["choices"]
    assert all(
        choice["hits"].keys() == {"raw", "whitened", "moment", "energy"}
        for choice in row["choices"]
    )
    assert {choice["kind"] for choice in row["choices"] if choice["used"]} <= {"whitened", "moment"}
    # heads that forget fast are measured, too
    slow = {(choice["mixer"], choice["head"]) for choice in row["choices"]}
    every = {(head["mixer"], head["head"]): head["tau"] for head in row["measured"]}
    assert slow < every.keys() and all((every[key] > 150) == (key in slow) for key in every)
    stored = json.loads((folder / "caching.json").read_text())
    heads = sum(len(layer["heads"]) for layer in stored["layers"].values())
    assert heads == sum(choice["used"] for choice in row["choices"])
    assert run("eval", folder, "--task", "niah", "--lengths", 512, "--samples", 2).status == 0


@pytest.mark.parametrize("flag", ["--length", "--samples", "--pairs"])
def test_impossible_numbers_are_refused(run, flag):
    refused(run("calibrate", GAINS, flag, 0), 2, flag, "at least 1")


@pytest.mark.parametrize("flags", [("--length", 100), ("--length", 600), ("--segment", 600)])
def test_sequences_of_two_segments_are_refused(run, tmp_path, flags):
    out = tmp_path / "x"
    flags = (*flags, "--length", 1100) if "--segment" in flags else flags
    done = run("calibrate", GAINS, *flags, "--samples", 1, "--pairs", 4, "--out", out)
    refused(done, 1, "have to hold 3 of")
    assert not out.exists()


def test_the_table_says_that_a_head_is_over_the_budget(gains, monkeypatch):
    found = Searcher(
        *(gains.model, gains.tokenizer(), shipped_text(), CachingConfig()),
        **{"length": 1100, "count": 1, "pairs": 20, "budget": Budget(1e-3)},
    ).search()
    assert found.keeps_base and any("over the budget" in c.why for c in found.choices)


@pytest.mark.parametrize("word", ["prosa", "\u4e00\u4e8c\u3002", "abc\0"])
def test_text_without_white_space_is_refused(run, tmp_path, word):
    (tmp_path / "one.txt").write_text(word * 4000, encoding="utf-8")
    done = run("calibrate", GAINS, "--text", tmp_path / "one.txt", "--length", 1100)
    assert done.status == 2 and "hardly any white space" in done.err.splitlines()[-1]


def test_a_target_that_cannot_be_replaced_is_refused_before_the_search(run, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/one.tex").touch()
    done = run("calibrate", GAINS, "--out", tmp_path / "thesis", "--force")
    refused(done, 1, "refusing to replace")


def test_what_helps_over_the_budget_is_said(run, tmp_path):
    small = ("--length", 1100, "--samples", 1, "--pairs", 12, "--budget-mb", 1e-4)
    done = run("calibrate", GAINS, "--out", tmp_path / "x", *small)
    assert "keep the base: what helps is over the budget" in done.out
