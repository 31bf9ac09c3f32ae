"""A sweep that is stopped, shared, resumed or spread: every cell once, and always the same rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cli_helpers import ROOT, pico, refused, runner

from mcretrofit import worker
from mcretrofit.ledger import CLAIMS, ROWS, read
from mcretrofit.model import load
from mcretrofit.retrofit import plans
from mcretrofit.tensorfile import write_safetensors

GRID = ("--variant", "ma,ssc", "--segment", "16,32", "--lengths", "128,192")
GRID += ("--task", "niah,perplexity", "--samples", "2", "--run", "run")
JOBS, BASES = 16, 4
TIMES = ("seconds", "base_seconds", "prefill_ratio", "decode_ratio", "started", "threads")
TIMES += ("base_prefill_seconds", "base_step_seconds")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, and what an undisturbed sweep of it found in `whole/rows.jsonl`."""
    place = tmp_path_factory.mktemp("sweep")
    pico(place / "base", num_hidden_layers=1)
    return place


@pytest.fixture
def run(capsys, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return runner(capsys)


@pytest.fixture
def whole(run, folder) -> dict[str, dict]:
    if not (folder / "whole").exists():
        done = run("sweep", "base", *GRID[:-1], "whole")
        assert done.status == 0, done.err
        assert "keep the base" in done.out and done.out.count("ssc 16") == 4
    return plain(folder / "whole" / ROWS)


def plain(path: Path) -> dict[str, dict]:
    """The rows of a file that has no double and no torn line, without what differs by the clock."""
    found = read(path)
    assert not found.faults and len(path.read_text().splitlines()) == len(found.rows)
    return {
        name: {key: value for key, value in row.items() if key not in TIMES}
        for name, row in found.rows.items()
    }


def start(folder: Path, *words: str) -> subprocess.Popen:
    places = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mcretrofit", "sweep", "base", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def killed_at(least: int, process: subprocess.Popen, rows: Path) -> None:
    """Kill a process as soon as so many rows are there, or let it end."""
    deadline = time.monotonic() + 500
    while not rows.exists() or len(rows.read_bytes().splitlines()) < least:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert least <= len(read(rows).rows)


def test_rows_carry_what_a_report_needs(whole):
    assert len(whole) == JOBS + BASES
    settings = [row for row in whole.values() if row["variant"] != "base"]
    bases = [row for row in whole.values() if row["variant"] == "base"]
    assert len(bases) == BASES and all(row["verdict"] == "base" for row in bases)
    for row in whole.values():
        assert len(row["scores"]) == len(row["base_scores"]) == row["n"] == 2
        assert row["model_hash"] and row["version"] and row["command"].startswith("mcretrofit eval")
        text = row["task"] == "perplexity"
        spans = [(start, end) for start, end, *_ in row["by_position"]]
        assert spans == ([(0, 64), (64, 128), (128, 192)][: row["length"] // 64] if text else [])
    for row in settings:
        found = row["controls"]
        assert found["none"] is not None
        assert (found["random"] is None) == (row["variant"] == "ma")
        assert (found["oracle"] is None) == (row["task"] == "perplexity")
        assert set(row["control_intervals"]) == set(found)
        assert row["caching"]["segment"] == row["segment"]


def test_a_finished_sweep_is_not_run_again(run, folder, whole, monkeypatch):
    monkeypatch.setattr(worker.Worker, "measure", None)
    before = (folder / "whole" / ROWS).read_bytes()
    done = run("sweep", "base", *GRID[:-1], "whole")
    assert done.status == 0 and f"{JOBS} cells, {JOBS} of them finished before" in done.err
    assert (folder / "whole" / ROWS).read_bytes() == before


def test_killed_at_any_moment_and_shared_by_two_processes(run, folder, whole):
    rows = folder / "run" / ROWS
    killed_at(1, start(folder, *GRID), rows)
    both = [start(folder, *GRID) for _ in range(2)]
    killed_at(9, both[0], rows)
    assert both[1].wait(timeout=600) == 0, both[1].communicate()
    assert run("sweep", "base", *GRID).status == 0
    assert plain(rows) == whole
    assert not list((folder / "run" / CLAIMS).iterdir())


def test_torn_and_malformed_lines_are_named_and_measured_again(run, folder, whole):
    rows = folder / "torn" / ROWS
    rows.parent.mkdir()
    lines = (folder / "whole" / ROWS).read_text().splitlines()
    rows.write_text("\n".join([*lines[:3], "{", *lines[3:7], lines[7][:40]]))
    done = run("sweep", "base", *GRID[:-1], "torn")
    assert done.status == 0, done.err
    assert "line 4: not JSON; left out" in done.err and "line 9" in done.err
    found = read(rows)
    assert len(found.faults) == 2 and set(found.rows) == set(whole)
    assert len(rows.read_text().splitlines()) == len(whole) + 2


def test_ctrl_c_keeps_what_is_finished(run, folder, whole, monkeypatch):
    measure, count = worker.Worker.measure, [0]

    def stopped(self, *words):
        count[0] += 1
        if count[0] > 5:
            raise KeyboardInterrupt
        return measure(self, *words)

    monkeypatch.setattr(worker.Worker, "measure", stopped)
    done = run("sweep", "base", *GRID[:-1], "stopped")
    assert done.status == 130 and "the same command goes on" in done.err
    kept = plain(folder / "stopped" / ROWS)
    assert len(kept) == 5 and kept.items() <= whole.items()
    assert not list((folder / "stopped" / CLAIMS).iterdir())


def test_shards_together_are_the_sweep(run, folder, whole):
    for number in (1, 2):
        done = run("sweep", "base", *GRID[:-1], "parts", "--shard", f"{number}/2", "--json")
        assert done.status == 0, done.err
        assert sum(row["variant"] != "base" for row in done.rows) == JOBS // 2
    assert plain(folder / "parts" / ROWS) == whole


def test_a_recipe_in_a_file_of_its_own(run, folder):
    (folder / "small.yaml").write_text(
        "model: base\ngrid: {segment: 16, variant: grm}\ntasks: niah\nlengths: 128\n"
        "depths: [0, 100]\nsamples: {niah: 1}\ncontrols: false\n"
    )
    done = run("sweep", "small.yaml", "--seed", "1,2")
    assert done.status == 0, done.err
    rows = [json.loads(s) for s in Path("runs/sweep-small", ROWS).read_text().splitlines()]
    assert len(rows) == 8 and {row["depth"] for row in rows} == {0.0, 100.0}
    assert {row["seed"] for row in rows} == {1, 2} and all(row["controls"] is None for row in rows)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_executor_says_what_to_install(run):
    refused(run("sweep", "base", *GRID, "--executor", "ray"), 1, "pip install 'mcretrofit[ray]'")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra: ray)")
def test_two_ray_workers_make_the_same_rows(run, folder, whole):
    done = run("sweep", "base", *GRID[:-1], "ray", "--executor", "ray", "--workers", 2)
    assert done.status == 0, done.err
    assert plain(folder / "ray" / ROWS) == whole


def test_a_wrapped_folder_is_swept_as_it_was_calibrated_and_trained(run, folder, monkeypatch):
    made = run(
        "wrap", "base", "--segment", 16, "--set", "gate=true", "--out", "own", "--heads", "all"
    )
    assert made.status == 0, made.err
    gates = {
        f"{name}.mc.{own}": torch.randn_like(value)
        for name, plan in plans(load(folder / "own").model).items()
        for own, value in plan.gate.named_parameters()
    }
    write_safetensors(folder / "own" / "gates.safetensors", gates)
    monkeypatch.setattr(worker, "attach", lambda *_: pytest.fail("measured anew"))
    done = run(
        "sweep", "own", "--lengths", 128, "--task", "perplexity", "--samples", 2, "--run", "r"
    )
    assert done.status == 0, done.err
    (row,) = [row for row in plain(folder / "r" / ROWS).values() if row["variant"] == "ssc"]
    want = run("eval", "own", "--lengths", 128, "--task", "perplexity", "--samples", 2, "--json")
    assert row["score"] == json.loads(want.out.splitlines()[0])["score"] != row["base_score"]
