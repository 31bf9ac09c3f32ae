"""Pretraining with caching on: gates and base learn together and leave two folders that go on."""

from __future__ import annotations

import pytest
import torch
from cli_helpers import few_words, refused, runner
from safetensors.torch import load_file

from mcretrofit.model import load
from mcretrofit.retrofit import plans

RECIPE = """family: {family}
text: some.txt
vocab_size: 300
length: 64
batch: 1
steps: 3
lr: 0.02
warmup: 1
mix: {{prose: 1}}
model: {{num_hidden_layers: 1, intermediate_size: 32, hidden_size: 32, {sizes}}}
"""
SIZES = {
    "gla": "num_heads: 2, expand_k: 1.0",
    "titans": "num_heads: 2, head_dim: 16, inner_chunk: 4",
}
MEASURE = ("--task", "perplexity", "--lengths", 100, "--samples", 1, "--json")


@pytest.fixture
def run(capsys):
    return runner(capsys)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("It was a bright cold day in April. " * 40)
    tokenizer = few_words(300)
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    return tmp_path


def recipe(here, family: str, caching: str = ""):
    text = RECIPE.format(family=family, sizes=SIZES[family])
    (here / "tiny.yaml").write_text(text + (f"caching: {caching}\n" if caching else ""))
    return "tiny.yaml"


@pytest.mark.parametrize(
    ("family", "variant"), [("gla", "ssc"), ("titans", "grm"), ("titans", "soup")]
)
def test_a_model_is_trained_with_its_caching(run, here, family, variant):
    done = run(
        "pretrain",
        recipe(here, family, f"{{variant: {variant}, segment: 16, rank: 4}}"),
        *("--out", "with"),
    )
    assert done.status == 0 and done.out == "with/wrapped\n", done.err
    gates = load_file("with/wrapped/gates.safetensors")
    assert set(gates) == {f"model.layers.0.attn.mc.{n}" for n in ("weight", "down", "bias", "heat")}
    assert all(g.any() for g in gates.values())
    base = load_file("with/model/model.safetensors")
    assert not [name for name in base if ".mc." in name]
    found = load("with/wrapped")
    (plan,) = plans(found.model).values()
    config = plan.config
    assert (config.variant, config.router, config.init) == (variant, "mean", "reset")
    assert (config.rule, config.heads, config.whiten) == ("plain", "all", False)
    # the base learned other weights than it does alone
    assert run("pretrain", recipe(here, family), "--out", "without").out == "without/model\n"
    alone = load_file("without/model/model.safetensors")
    assert alone.keys() == base.keys()
    assert any(not torch.equal(alone[name], base[name]) for name in base)
    assert run("inspect", "with/model").status == 0
    (measured,) = run("eval", "with/wrapped", *MEASURE).rows
    assert measured["score"] != measured["base_score"] and measured["cache_bytes"] > 0
    assert run("export", "with/wrapped").status == 0
    (again,) = run("eval", "export", *MEASURE).rows
    assert again["score"] == pytest.approx(measured["score"], rel=1e-6)


@pytest.mark.parametrize(
    ("caching", "status", "part"),
    [
        ("{segmant: 16}", 2, "did you mean 'segment'?"),
        ("{segment: 16, rule: z}", 2, "rule is 'z'"),
        ("{segment: 16, heads: slow}", 2, "heads is 'slow'"),
        ("{segment: 64}", 2, "less than two segments of 64"),
        ("grm", 2, "expected keys and values"),
        ("{segment: 18}", 1, "inner chunks of 4: --segment 20 fits"),
        ("{segment: 16, variant: loglinear}", 1, "take --init carry"),
    ],
)
def test_caching_that_cannot_be_trained_with_is_refused(run, here, caching, status, part):
    refused(run("pretrain", recipe(here, "titans", caching), "--out", "with"), status, part)
