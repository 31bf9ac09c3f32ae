"""Orders of trainings: resumed without doubles, tables; pretraining sized, in half precision, shared."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from cli_helpers import ROOT, few_words, refused, runner, shell
from safetensors.torch import load_file

from mcretrofit import order, steps
from mcretrofit.corpus import KEYS, VALUES
from mcretrofit.order import read_order
from mcretrofit.ordertable import agreement, markdown

SIZES = "hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16, num_heads: 2"
RECIPE = f"""text: some.txt
seeds: [0]
lengths: [32, 64]
samples: 4
train:
  vocab_size: 420
  length: 32
  batch: 2
  steps: 14
  mix: {{symbols: 1}}
  keep_every: 5
  caching: {{segment: 8}}
  model: {{{SIZES}}}
models:
  gla: {{family: gla, model: {{expand_k: 1.0, use_short_conv: true}}, shifted: true}}
  attention: {{family: gla, model: {{attn: {{layers: [0], num_heads: 2}}}}}}
variants:
  none:
  grm: {{variant: grm}}
rows:
  - {{models: [gla], variants: [none, grm]}}
  - {{models: [attention], variants: [none]}}
expected: [[grm, none]]
"""


@pytest.fixture
def run(capsys):
    return runner(capsys)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("It was a bright cold day in April. " * 400)
    tokenizer = few_words(420, ["<|endoftext|>", *KEYS, *VALUES])
    for name in ("whole", "cut", "alone", "parts", "both", "half"):
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    (tmp_path / "small.yaml").write_text(RECIPE)
    return tmp_path


def rows(folder: Path) -> list[dict]:
    path = folder / "rows.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


class Stopped(BaseException):
    """As good as a kill: nobody catches it."""


def stop(step: int, row: dict) -> None:
    if step == 13:
        raise Stopped


def test_a_stopped_order_goes_on_without_doubles_to_the_same_scores(run, here, monkeypatch):
    whole = run("order", "small.yaml", "--out", "whole")
    assert whole.status == 0, whole.err
    wanted = rows(here / "whole")
    assert len(wanted) == 3 * 4
    started = []

    def train(model, recipe, data, kept):
        started.append(kept)
        steps.train(model, recipe, data, kept, *([stop] if len(started) == 2 else []))

    monkeypatch.setattr(order, "train", train)
    with pytest.raises(Stopped):
        run("order", "small.yaml", "--out", "cut")
    assert started[-1].exists() and len(rows(here / "cut")) == 4
    kept = (here / "cut/rows.jsonl").read_text()
    # the row that was being written is torn, and one of the cell before is lost
    (here / "cut/rows.jsonl").write_text(kept[: kept.rindex('{"id"')] + '{"id": "')
    assert run("order", "small.yaml", "--out", "cut", "--picture", "curves.png").status == 0
    assert len(started) == 2 + 3 and not started[1].exists()
    text = (here / "cut/rows.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    assert {r["id"]: r["score"] for r in found} == {r["id"]: r["score"] for r in wanted}
    assert len(found) == len(wanted) and (here / "curves.png").stat().st_size > 1000
    again = run("order", "small.yaml", "--out", "cut", "--table")
    assert again.out == whole.out and len(started) == 5
    assert "| gla | grm | " in again.out and "| grm > none | gla | " in again.out


def test_the_table_pairs_seeds():
    made = [
        {"model": "m", "variant": v, "seed": s, "task": "symbols", "length": 64, "score": score}
        | {"parameters": 1234}
        for v, scores in (("none", (0.2, 0.4)), ("grm", (0.3, 0.6)))
        for s, score in enumerate(scores)
    ]
    text = markdown(made, [["grm", "none"], ["soup", "grm"]])
    assert "| m | none | 1,234 | 2 | 0.300 ± 0.141 |" in text
    assert "| grm > none | m | +0.100 +0.200 | yes |" in text and "soup" not in text
    assert agreement([-1, -2]) == "no" and agreement([1, -2]) == "unclear"
    assert agreement([0.0, 0.0]) == "same" and agreement([1.0]) == "one seed"


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("models: [gla]", "models: [gal]", "did you mean 'gla'"),
        ("variants: [none, grm]", "variants: [gmr]", "did you mean 'grm'"),
        ("models: [gla], variants", "model: [gla], variants", "models and variants"),
        ("segment: 8", "segmant: 8", "did you mean 'segment'"),
        ("seeds:", "sedes:", "did you mean 'seeds'"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(run, here, old, new, part):
    (here / "small.yaml").write_text(RECIPE.replace(old, new))
    refused(run("order", "small.yaml"), 2, part)
    assert not (here / "runs").exists()


def test_shipped_recipes_are_valid_and_name_their_command(run):
    path = ROOT / "recipes" / "order.yaml"
    assert path.read_text().startswith("# mcretrofit order recipes/order.yaml ")
    found = read_order(path)
    known = set(found.variants)
    assert found.expected and all(set(pair) <= known for pair in found.expected)


def test_a_dry_run_tells_the_sizes_of_the_papers_760m_shape(run):
    started = time.process_time()
    done = run(
        "pretrain", ROOT / "recipes/pretrain_760m.yaml", "--dry-run", "--processes", 8, "--json"
    )
    assert done.status == 0 and time.process_time() - started < 20, done
    (found,) = done.rows
    assert 700e6 < found["parameters"] < 1.2e9 and found["gates"] > 0
    assert found["tokens_a_step"] == 524_288 and 30e9 <= found["tokens"] < 30.001e9
    assert found["sequences_at_once"] == 1 and found["accumulated"] == 16
    assert found["bytes"]["weights, gradients, AdamW"] == 16 * found["parameters"]


SMALL = f"""family: gla
text: some.txt
vocab_size: 420
length: 32
batch: 4
steps: 3
warmup: 1
mix: {{symbols: 1, prose: 1}}
caching: {{segment: 8}}
model: {{{SIZES}, expand_k: 1.0}}
"""


def told(folder: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(folder, "log.jsonl").read_text().splitlines()]


def test_processes_parts_and_half_precision_train_what_one_process_does_at_once(run, here):
    (here / "train.yaml").write_text(SMALL)
    (here / "parts.yaml").write_text(SMALL + "rows: 1\ncheckpointing: true\n")
    (here / "half.yaml").write_text(SMALL + "dtype: bf16\n")
    for recipe, folder in (("train", "alone"), ("parts", "parts"), ("half", "half")):
        assert run("pretrain", f"{recipe}.yaml", "--out", folder).status == 0
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = shell(here, *words, "-m", "mcretrofit", "pretrain", "train.yaml", "--out", "both")
    assert done.returncode == 0 and done.stdout == "both/wrapped\n", done.stderr
    want = load_file("alone/model/model.safetensors")
    for other in ("both", "parts"):
        assert told(other) == pytest.approx(told("alone"), rel=1e-4)
        for name, tensor in load_file(f"{other}/model/model.safetensors").items():
            torch.testing.assert_close(tensor.float(), want[name].float(), atol=2e-3, rtol=2e-2)
    assert told("half") != told("alone") and told("half") == pytest.approx(told("alone"), rel=0.02)
    state = torch.load("half/leg-0.pt", weights_only=True)["model"]
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}


def test_a_batch_or_a_precision_that_does_not_fit_is_refused(run, here):
    (here / "bad.yaml").write_text(SMALL + "dtype: fp16\n")
    refused(run("pretrain", "bad.yaml"), 2, "dtype is 'fp16'")
    (here / "train.yaml").write_text(SMALL)
    refused(
        run("pretrain", "train.yaml", "--dry-run", "--processes", 3), 2, "batch 4 is not shared"
    )
