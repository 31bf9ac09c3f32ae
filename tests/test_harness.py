"""lm-evaluation-harness: our model class against the model itself, and tasks as rows, offline."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points

import pytest
import torch
from cli_helpers import pico

from mcretrofit import evaluate
from mcretrofit.cli import _app, _lm_eval
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.generate import generate
from mcretrofit.model import load
from mcretrofit.settings import settings

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra eval)")

from mcretrofit.harness import HarnessLM  # noqa: E402
from mcretrofit.harness_tasks import Asked, harness_rows  # noqa: E402

CACHING = {"variant": "grm", "segment": 4, "heads": "all", "margin": 0.0}
TEXTS = (
    "Anne walked along the road to the house, and was very glad.",
    "He bowed.",
    "The sea was calm and grey; nobody spoke for a while, and they turned back to Lyme at last.",
)
DOCS = [
    {"ctx": "Anne walked along the road to the", "choices": ["house", "hxuse"], "gold": 0},
    {"ctx": "He was very much", "choices": ["plezqed", "pleased"], "gold": 1},
    {"ctx": "She could not", "choices": ["qzxqzx", "help it"], "gold": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
{rest}
"""
KINDS = {
    "tiny_choice": "output_type: multiple_choice\ndoc_to_text: '{{ctx}}'\ndoc_to_choice: choices\n"
    "doc_to_target: gold\nmetric_list: [{metric: acc}, {metric: acc_norm}]",
    "tiny_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{ctx}}'\n"
    "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]",
    "tiny_said": "output_type: generate_until\ndoc_to_text: '{{ctx}}'\n"
    "doc_to_target: '{{choices[gold]}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]",
}


class Instance:
    """What the harness hands to a model: arguments alone."""

    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return str(pico(tmp_path_factory.mktemp("pico")))


@pytest.fixture(scope="module")
def loaded(place):
    return load(place, caching=settings(None, None, CACHING))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tasks")
    docs = place / "docs.jsonl"
    docs.write_text("".join(f"{json.dumps(doc)}\n" for doc in DOCS), encoding="utf-8")
    for name, rest in KINDS.items():
        (place / f"{name}.yaml").write_text(TASK.format(name=name, file=docs, rest=rest))
    return place


def direct(loaded, ids):
    """Log-likelihood of each id but the first, in one pass of the model."""
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    chance = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return chance.double(), logits.argmax(-1) == torch.tensor(ids[1:])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("piece", [13, 1024])
def test_loglikelihood_is_the_models(loaded, batch, piece, monkeypatch):
    monkeypatch.setattr(evaluate, "PIECE", piece)
    model = HarnessLM(loaded, batch_size=batch)
    pairs = [(text[:at], text[at:]) for text in TEXTS for at in (3, len(text) - 4)]
    found = model.loglikelihood([Instance(*pair) for pair in pairs])
    for (context, rest), (score, greedy) in zip(pairs, found, strict=True):
        # a word split in two has ids of its own
        before, after = model._encode_pair(context, rest)
        count = len(after)
        chance, right = direct(loaded, before + after)
        assert score == pytest.approx(float(chance[-count:].sum()), abs=2e-3)
        assert greedy == bool(right[-count:].all())
    whole = model.loglikelihood_rolling([Instance(text) for text in TEXTS])
    for text, score in zip(TEXTS, whole, strict=True):
        ids = [model.eot_token_id, *loaded.tokenizer().encode(text)]
        assert score == pytest.approx(float(direct(loaded, ids)[0].sum()), abs=2e-3)
    assert model.held > 0 and model.longest > 80


def test_an_empty_context_has_the_end_of_text_before_it(loaded):
    model = HarnessLM(loaded)
    ((score, _),) = model.loglikelihood([Instance("", TEXTS[0])])
    assert score == pytest.approx(model.loglikelihood_rolling([Instance(TEXTS[0])])[0])


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_until_is_generate(loaded, batch):
    model = HarnessLM(loaded, batch_size=batch)
    asked = [Instance(text, {"max_gen_toks": 24, "until": ["\u2603"]}) for text in TEXTS]
    said = model.generate_until(asked)
    for text, one in zip(TEXTS, said, strict=True):
        assert one == "".join(step.text for step in generate(loaded, text, 24))
    mark = said[0][3:5]
    (cut,) = model.generate_until([Instance(TEXTS[0], {"max_gen_toks": 24, "until": mark})])
    assert cut == said[0].split(mark, 1)[0]


def test_arguments_are_those_of_the_caching(loaded, place):
    base = HarnessLM(place, base=True)
    ours = HarnessLM(place, device="cpu", **CACHING)
    asked = [Instance(TEXTS[2], " Then she said that she was")]
    assert base.loaded.config is None and ours.loaded.config.segment == 4
    assert base.loglikelihood(asked) != ours.loglikelihood(asked)
    assert ours.loglikelihood(asked) == HarnessLM(loaded).loglikelihood(asked)
    with pytest.raises(UsageError, match="did you mean 'segment'"):
        HarnessLM(place, segmnt=16)
    with pytest.raises(UsageError, match="base=True has no caching"):
        HarnessLM(place, base=True, segment=16)
    with pytest.raises(UsageError, match="batch_size none"):
        HarnessLM(loaded, batch_size="none")


def test_rows_of_local_tasks(loaded, folder):
    rows = list(harness_rows(loaded, Asked(tuple(KINDS), folder, limit=2), model_hash="h"))
    found = {(row["task"], row["metric"]): row for row in rows}
    assert set(found) == {
        ("lm-eval:tiny_choice", "acc"),
        ("lm-eval:tiny_choice", "acc_norm"),
        ("lm-eval:tiny_text", "bits_per_byte"),
        ("lm-eval:tiny_text", "word_perplexity"),
        ("lm-eval:tiny_said", "exact_match"),
    }
    for row in rows:
        assert row["n"] == len(row["scores"]) == len(row["base_scores"]) == 2
        assert row["variant"] == "grm" and row["dialect"] == "lm-eval" and row["length"] > 0
        assert row["low"] <= row["high"] and row["dataset"] in KINDS
    assert len({row["id"] for row in rows}) == len(rows)
    text = found["lm-eval:tiny_text", "bits_per_byte"]
    assert 1 < text["base_score"] < 9 and text["score"] != text["base_score"]
    alone = next(harness_rows(loaded, Asked(("tiny_choice",), folder), base_only=True))
    assert alone["verdict"] == alone["variant"] == "base" and alone["n"] == 3


def test_the_command_line(folder, place, capsys):
    words = f"eval {place} --task mqar,lm-eval:tiny_choice --lengths 300 --samples 2 --json"
    flags = [*"--segment 64 --include-path".split(), str(folder)]
    assert _app.run([*words.split(), *flags]) == 0
    printed = capsys.readouterr().out
    own, acc, _ = (json.loads(line) for line in printed.splitlines())
    assert set(own) == set(acc) and acc["task"] == "lm-eval:tiny_choice" and own["task"] == "mqar"
    assert own["model_hash"] == acc["model_hash"] and acc["segment"] == 64
    assert _app.run([*f"eval {place} --task lm-eval:tiny_choice --include-path x".split()])
    assert "no such folder" in capsys.readouterr().err


def test_a_verdict_where_less_is_better(loaded, folder):
    from mcretrofit.evaluate import Outcome
    from mcretrofit.harness_tasks import _verdict

    worse, better = Outcome([5.0, 6.0, 7.0], 0, 1.0), Outcome([4.0, 5.1, 6.0], 0, 1.0)
    assert _verdict(worse, better, "word_perplexity", False) == "helps"
    assert _verdict(worse, better, "acc", True) == "hurts"
    assert _verdict(worse, better, "bits_per_byte", False) == "helps"


def test_it_is_found_after_install():
    (ours,) = [e for e in entry_points(group="lm_eval.models") if e.name == "mcretrofit"]
    assert ours.load() is HarnessLM
    from lm_eval.api.registry import get_model

    assert get_model("mcretrofit") is HarnessLM


def test_without_the_harness(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "mcretrofit.harness")
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(SystemExit) as caught:
        _lm_eval.main()
    said = capsys.readouterr().err
    assert caught.value.code == RetrofitError.status and said.count("\n") == 1
    assert "pip install 'mcretrofit[eval]'" in said
