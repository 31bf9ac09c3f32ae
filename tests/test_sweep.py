"""A sweep's plan: axes, ids, shards, what a cell needs, and the recipes that ship."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from cli_helpers import ROOT, pico, refused, runner
from mamba2hosts import state_spaces
from nativehosts import host

from mcretrofit import needs
from mcretrofit.compare import draw
from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.rows import identity
from mcretrofit.sweep import (
    Plan,
    Traits,
    assigned,
    axes,
    command,
    configs,
    plan,
    read_recipe,
    words,
)
from mcretrofit.tokenizer import BytesTokenizer

TRAITS = Traits("m", "hash", 256, 64)
GRID = {"variant": ["ma", "ssc"], "segment": [16, 32], "task": ["niah"], "length": ["2x", "4x"]}
RECIPES = sorted(p for p in (ROOT / "recipes").rglob("*.yaml") if "grid:" in p.read_text())
FAMILIES = {"gla-1.3b": "gla", "delta_net-1.3b": "delta_net", "rwkv7-world": "rwkv7"}
FAMILIES |= {"gated_deltanet-1.3b": "gated_deltanet"}
HOSTS = {"qwen3_next", "mamba2-1.3b"}


def planned(controls: bool = True, **more: object) -> Plan:
    return plan(axes({**GRID, **more}, "here"), TRAITS, controls)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pico(tmp_path / "base", num_hidden_layers=1)
    return runner(capsys)


def test_a_grid_is_the_product_of_its_axes_and_ids_tell_all_apart():
    made = planned(depth=[0, 50], seed=[1, 2])
    assert len(made.jobs) == 4 * 2 * 2 * 2 and len(made.bases) == 8
    every = [job.id for job in made.jobs] + list(made.bases)
    assert len(set(every)) == len(every)
    assert {job.id for job in planned(False).jobs} & {job.id for job in planned().jobs} == set()
    assert [job.id for job in planned().jobs] == [job.id for job in planned().jobs]
    assert made.jobs[0].probe.depth == 0.0 and made.jobs[0].probe.length == 128


def test_what_decides_a_row_decides_its_id(tmp_path):
    probe = planned().jobs[0].probe
    config = CachingConfig()
    names = {identity("h", probe, config, True), identity("g", probe, config, True)}
    names |= {identity("h", probe, None), identity("h", probe, config.replace(tau=9.0), True)}
    for field, other in {"length": 9, "depth": 5.0, "seed": 1, "count": 3, "task": "x"}.items():
        names.add(identity("h", probe._replace(**{field: other}), config, True))
    text = tmp_path / "text.txt"
    for words_ in ("one", "two"):
        text.write_text(words_)
        names.add(identity("h", probe._replace(haystack=str(text)), config, True))
    assert len(names) == 11


def test_settings_that_compute_the_same_are_one():
    made = configs(
        axes({"variant": ["ma", "grm", "ssc"], "top_k": [1, 2], "margin": [1, 2]}, ""), None
    )
    said = [(c.variant, c.top_k, c.margin) for c in made]
    assert len(said) == len(set(said)) == 1 + 2 + 4


def test_shards_are_a_partition():
    made = planned(depth=[0, 50, 100])
    parts = [made.shard(i, 4) for i in (1, 2, 3, 4)]
    ids = [job.id for part in parts for job in part.jobs]
    assert sorted(ids) == sorted(job.id for job in made.jobs)
    assert {len(part.jobs) for part in parts} == {6}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"segmnt": 3}, "did you mean 'segment'"),
        ({"grid": {"varaint": "ma"}}, "did you mean 'variant'"),
        ({"grid": {"lenghts": "1k"}}, "did you mean 'length'"),
        ({"grid": [1]}, "expected keys and values"),
        ({"controls": "maybe"}, "not true or false"),
        ({"grid": {"segment": []}}, "has no values"),
        ({"grid": {"segment": ["big"]}}, "not a whole number"),
        ({"samples": "many"}, "not a whole number"),
        ({"depth": ["deep"]}, "not a number of percent"),
    ],
)
def test_recipes_are_read_strictly(tmp_path, given, parts):
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(given))
    with pytest.raises(UsageError, match="r.yaml|segment") as error:
        read_recipe(file)
    assert parts in str(error.value)


def test_values_come_by_commas():
    assert words("64,128") == [64, 128] and words("1k,2x") == ["1k", "2x"]
    assert assigned(["top-k=2,4", "seed=1"]) == {"top_k": [2, 4], "seed": [1]}
    with pytest.raises(UsageError, match="key=v1,v2"):
        assigned(["top_k"])
    with pytest.raises(UsageError, match="did you mean 'top_k'"):
        assigned(["topk=2"])


def test_the_command_of_a_row_measures_that_row(run):
    made = planned(relative=[False], router=["mean"], depth=[12.5])
    job = made.jobs[-1]
    line = command("base", job.caching, job.probe, True)
    done = run(*shlex.split(line)[1:], "--json")
    assert done.status == 0, done.err
    row, hashed = done.rows[0], done.rows[0]["model_hash"]
    assert row["id"] == identity(hashed, job.probe, job.caching, True)
    assert row["caching"]["relative"] is False and row["depth"] == 12.5


def test_a_cell_that_cannot_fit_is_refused_with_the_numbers(run, monkeypatch):
    monkeypatch.setattr(needs, "available", lambda device: 50_000_000)
    refused(
        run("sweep", "base", "--lengths", "64,1m"), 1, "1048576 tokens", "GB", "0.05 GB are free"
    )
    assert not Path("runs").exists()
    assert run("sweep", "base", "--lengths", "1m", "--dry-run").status == 0


def test_memory_is_what_the_system_says():
    assert 1 << 20 < needs.available("cpu") < 1 << 50


WORDS = {
    "key": ("sweep base --set segmnt=3", "unknown grid key 'segmnt'", "did you mean 'segment'"),
    "variant": ("sweep base --variant ma,scc", "did you mean 'ssc'"),
    "shard": ("sweep base --shard 3/2", "--shard 3/2", "1/4"),
    "executor": ("sweep base --executor slurm", "unknown executor 'slurm'"),
    "task": ("sweep base --task naih", "did you mean 'niah'"),
    "harness": ("sweep base --task lm-eval:arc", "mcretrofit eval --task lm-eval:arc"),
    "two": ("sweep base --model other", "two models"),
    "none": ("sweep r.yaml", "names no model"),
    "depth": ("sweep base --depth deep", "not a number of percent"),
    "deeper": ("sweep base --depth 0,150", "depth 150 is not a number of percent, 0 to 100"),
}


@pytest.mark.parametrize(("line", "parts"), [(w[0], w[1:]) for w in WORDS.values()], ids=WORDS)
def test_wrong_requests_exit_2_and_leave_nothing(run, tmp_path, line, parts):
    (tmp_path / "r.yaml").write_text("grid: {segment: 16}\n")
    refused(run(*line.split()), 2, *parts)
    assert not Path("runs").exists()


FILES = {
    "kind": ("grid: {segment: wide}", 2, "r.yaml: grid: segment: 'wide' is not a whole number"),
    "size": ("segment: 0", 2, "r.yaml: --segment 0: has to be a whole number"),
    "name": ("grid: {variant: [ssc, gmr]}", 2, "r.yaml: grid: unknown variant 'gmr'", "'grm'"),
    "list": ("- 1", 2, "r.yaml: expected keys and values, found list"),
    "deep": ("[" * 20_000, 1, "r.yaml is not readable YAML: nested too deeply"),
    "date": ("segment: 2026-02-31", 1, "r.yaml is not readable YAML", "day"),
    "code": ("segment: !!python/name:os.system", 1, "r.yaml is not readable YAML", "python"),
}


@pytest.mark.parametrize("case", FILES.values(), ids=FILES)
def test_a_wrong_recipe_is_named_itself(run, tmp_path, case):
    text, status, *parts = case
    (tmp_path / "r.yaml").write_text(text)
    refused(run("sweep", "r.yaml", "--model", "base"), status, *parts)


def test_a_recipe_that_is_not_there(run):
    refused(run("sweep", "nothere.yaml"), 1, "nothere.yaml cannot be read: no such file")


def test_a_length_too_short_ends_at_once(run):
    refused(run("sweep", "base", "--lengths", "20", "--no-controls"), 2, "the smallest length")


def test_there_are_recipes():
    assert {"laptop", "table2", "segments"} <= {path.stem for path in RECIPES}
    assert {*FAMILIES, *HOSTS} == {p.stem for p in RECIPES if p.parent.name == "public"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_plan_on_a_model_of_their_layout(run, tmp_path, path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# mcretrofit sweep {path.relative_to(ROOT)}")
    stand_in = tmp_path / "stand-in"
    if path.stem == "qwen3_next":
        _qwen3_next(stand_in)
    elif path.stem == "mamba2-1.3b":
        stand_in.mkdir()
        state_spaces(stand_in, 1, vocab_size=256)
    else:
        pico(stand_in, FAMILIES.get(path.stem, "gla"), num_hidden_layers=1)
    done = run("sweep", path, "--model", stand_in, "--dry-run", "--device", "cpu", "--json")
    assert done.status == 0, done.err
    recipe = read_recipe(path)
    cells = len(recipe.axes["task"]) * len(recipe.axes["length"])
    settings = len(recipe.axes["variant"]) * len(recipe.axes["segment"])
    assert len(done.rows) == cells * (settings + 1)
    assert all(row["tokens"] and row["peak_bytes"] for row in done.rows)
    if path.stem == "laptop":
        assert settings == 9 and len(recipe.axes["length"]) == 3
    assert not Path("runs").exists()


def _qwen3_next(folder: Path) -> None:
    """A stand-in that transformers itself wrote, with a tokenizer of the vocabulary's size."""
    host("qwen3_next").save_pretrained(folder)


def test_draws_are_those_of_the_plan():
    (probe,) = {job.probe for job in planned(length=["256"], samples=[2]).jobs}
    cell = draw(probe, BytesTokenizer())
    assert cell.probe == probe and len(cell.samples) == 2
    assert json.dumps(probe._asdict()) and shutil
    with pytest.raises(RetrofitError):
        draw(probe._replace(length=20), BytesTokenizer())
