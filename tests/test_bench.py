"""`bench`: what caching costs a wrapped model, and a slice of random weights; never how many seconds."""

from __future__ import annotations

import pytest
import torch
from cli_helpers import pico, refused, runner

from mcretrofit import bench as module
from mcretrofit.bench import bench_wrapped
from mcretrofit.config import CachingConfig
from mcretrofit.model import load
from mcretrofit.retrofit import every_head, plans, retrofit_

CASES = ["unmodified", "ssc, all heads", "ssc, half of the heads", "grm, all heads"]


@pytest.fixture
def run(capsys):
    return runner(capsys)


@pytest.fixture
def wrapped(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pico(tmp_path / "base")
    (tmp_path / "some.txt").write_text("It was a bright cold day in April. " * 40)
    found = run("wrap", "base", "--segment", 32, "--heads", "all", "--calibrate", "some.txt")
    assert found.status == 0, found.err
    return tmp_path


def test_wrapped_models_are_timed_beside_themselves(run, wrapped):
    found = run("bench", "retrofit", "base", "--length", 200, "--repeats", 1, "--json")
    assert found.status == 0, found.err
    names = [row["what"] for row in found.rows]
    assert names == ["retrofit, unmodified", "retrofit", "base, unmodified", "base"]
    bare, cached = found.rows[:2]
    assert bare["step_ratio"] == bare["prefill_ratio"] == 1 and bare["cache_bytes"] == 0
    assert cached["cache_bytes"] > 0 and cached["length"] == 200
    assert cached["step_ratio"] == pytest.approx(cached["step_seconds"] / bare["step_seconds"])
    table = run("bench", "retrofit", "--length", 64, "--repeats", 1)
    assert "behind 64 tokens of prose" in table.out and "unmodified" in table.out


def test_what_is_timed_is_shown_where_a_later_model_fails(run, wrapped):
    found = run("bench", "retrofit", "nothere", "--length", 64, "--repeats", 1)
    assert found.status == 1 and "error: no such file or folder: nothere" in found.err
    assert "retrofit, unmodified" in found.out


def test_the_base_of_a_wrapped_model_is_timed_without_its_caching(tmp_path, monkeypatch):
    live = load(pico(tmp_path)).model
    retrofit_(live, CachingConfig(segment=16, rule="plain"), every_head(live))
    seen, ids = [], torch.randint(0, 256, (1, 100))
    real = module._measure

    def heard(model, prompt, read):
        logits, cache = read(model, prompt)
        seen.append((logits, module.segment_bytes(cache)))
        return real(model, prompt, read)

    monkeypatch.setattr(module, "_measure", heard)
    with torch.no_grad():
        bench_wrapped("some", live, ids, 2, lambda _: None)
        bare = load(tmp_path).model(ids).logits[:, -1:]
    assert [held > 0 for _, held in seen] == [False, True] * 2
    assert torch.equal(seen[0][0], seen[2][0]) and torch.equal(seen[1][0], seen[3][0])
    torch.testing.assert_close(seen[0][0], bare)
    assert not torch.equal(seen[0][0], seen[1][0])
    assert plans(live)  # and it is wrapped still


def test_random_weights_have_a_row_a_case(run):
    words = ("--layers", 1, "--width", 48, "--length", 80, "--segment", 16, "--repeats", 1)
    found = run("bench", *words, "--json")
    assert found.status == 0, found.err
    assert [row["what"] for row in found.rows] == [*CASES, "softmax attention"]
    held = [row["cache_bytes"] for row in found.rows]
    assert held[0] == 0 and held[1] == held[3]
    assert held[2] == pytest.approx(held[1] / 2, rel=0.01)  # and which tokens a segment holds


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--repeats", 0), 2, "--repeats 0: has to be at least 1"),
        (("--width", 100), 2, "--width 100: has to be a multiple of 6 heads"),
        (("--family", "nothing"), 2, "nothing"),
        (
            ("builtin:gla", "--layers", 2),
            2,
            "--layers is of the random weights: a MODEL has its own",
        ),
        (("builtin:gla", "--length", 0), 2, "--length 0: has to be at least 1"),
        (("--device", "cuda"), 2, "only a MODEL"),
        (("nothere",), 1, "no such file or folder: nothere"),
    ],
)
def test_what_cannot_be_timed_is_said_in_a_line(run, words, status, said):
    refused(run("bench", *words), status, said)
