"""What `tune` refuses: one line that says what, where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import refused, runner
from tune_helpers import checkpoint, working

from mcretrofit import tune
from mcretrofit.errors import RetrofitError
from mcretrofit.tuning import read_tuning


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("pico"))


@pytest.fixture
def place(base, tmp_path, monkeypatch) -> Path:
    return working(tmp_path, base, monkeypatch)


@pytest.fixture
def run(capsys):
    return runner(capsys)


REFUSED = {
    "length": (("--length", 63), 2, "--length 63", "fewer than two segments of 32"),
    "variant": (("--variant", "ma"), 2, "variant ma", "no gate to train"),
    "dtype": (("--dtype", "fp16"), 2, "unknown dtype 'fp16'", "bf16"),
    "steps": (("--steps", 0), 2, "--steps 0", "at least 1"),
    "data": (("--data", "none.txt"), 1, "none.txt", "no such file"),
    "target": (("--out", "notours", "--force"), 1, "refusing to replace notours"),
    "bytes": (("--data", "latin.txt"), 1, "latin.txt", "not utf-8 text"),
    "gate": (("--set", "gate=false"), 2, "gate false", "wrap"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_impossible_requests_are_one_line(run, place, case):
    words, status, *parts = case
    (place / "notours").mkdir()
    (place / "notours/thesis.txt").touch()
    (place / "latin.txt").write_bytes("Prosa, schön. ".encode("latin-1") * 999)
    done = run("tune", "small.yaml", *words)
    refused(done._replace(out=""), status, *parts)


RECIPES = {
    "key": ("stepz: 3", 2, "unknown key 'stepz'", "did you mean 'steps'?"),
    "caching": ("caching: {segmnt: 3}", 2, "unknown key 'segmnt'", "did you mean 'segment'?"),
    "kind": ("mix: {needle: 1}", 2, "unknown kind 'needle'", "did you mean 'needles'?"),
    "recall": ("mix: {prose: 1}", 1, "data without recall", "needles or pairs"),
    "no recall": ("least_recall: 0.05", 1, "data without recall", "keep the base"),
    "kept": ("lr: fast", 2, "--lr", "'fast' is not a number"),
    "list": ("- 1", 2, "expected keys and values"),
}


@pytest.mark.parametrize("case", RECIPES.values(), ids=RECIPES.keys())
def test_recipes_are_read_strictly(run, place, case):
    line, status, *parts = case
    name = line.partition(":")[0]
    kept = [] if line.startswith("-") else (place / "small.yaml").read_text().splitlines()
    kept = [one for one in kept if not one.startswith(f"{name}:")]
    (place / "wrong.yaml").write_text("\n".join([*kept, line]))
    done = run("tune", "wrong.yaml")
    if case[2] == "data without recall" and "least" in line:
        assert done.status == 1 and done.err.endswith("keep the base\n")
        assert parts[0] in done.err.splitlines()[-1]
    else:
        refused(done, status, *parts)


def test_another_configuration_a_changed_base_and_an_old_folder_are_refused(run, place, base):
    assert run("tune", "small.yaml", "--steps", 1).status == 0
    refused(run("tune", "small.yaml"), 1, "retrofit exists", "--force", "--out")
    other = run("tune", "small.yaml", "--steps", 1, "--lr", 0.1, "--force")
    assert other.status == 2 and "was started with lr 0.001, not 0.1" in other.err
    other = run("tune", "small.yaml", "--steps", 1, "--rank", 2, "--force")
    assert other.status == 2 and "was started with caching rank 4, not 2" in other.err
    (place / "more.txt").write_text((place / "text.txt").read_text() + "More.")
    other = run("tune", "small.yaml", "--steps", 1, "--data", "more.txt", "--force")
    assert other.status == 2 and "was started with a text whose sha256 begins" in other.err
    other = run("tune", "small.yaml", "--variant", "grm", "--force")
    refused(other, 2, "was started with caching variant 'ssc', not 'grm'")
    refused(run("tune", "retrofit", "--segment", 8), 2, "keeps the segment", "wrap its checkpoint")
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    try:
        weights.write_bytes(bytes(data[:-4]) + b"\0\0\0\0")
        done = run("tune", "retrofit", "--data", "text.txt")
        assert done.status == 1 and "the base changed since" in done.err
        refused(run("export", "retrofit", "--out", "x"), 1, "the base changed since")
    finally:
        weights.write_bytes(bytes(data))


def test_the_losses_of_a_run_without_its_state_are_not_gone_on_with(run, place):
    assert run("tune", "small.yaml", "--steps", 1, "--run", "state").status == 0
    (place / "state" / "state.safetensors").unlink()
    done = run("tune", "small.yaml", "--steps", 1, "--run", "state", "--force")
    assert done.status == 2 and "is of a run whose state is gone" in done.err


def test_a_base_that_changes_while_gates_train_is_an_error(place, monkeypatch):
    hashes = iter(["a", "b"])
    monkeypatch.setattr(tune, "base_hash", lambda _: next(hashes))
    tuning = read_tuning(Path("small.yaml"), {"steps": 1})
    with pytest.raises(RetrofitError, match="the base changed while its gates were trained"):
        tune.tune(tuning.model, tuning)
    assert not Path("retrofit").exists()
