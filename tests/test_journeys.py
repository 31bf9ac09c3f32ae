"""Every family from a folder on disk to an exported one, by the commands a user types."""

from __future__ import annotations

import pytest
import torch
from cli_helpers import pico, runner
from lawmodels import NAMES
from nativehosts import HOSTS, fields

from mcretrofit.models._native import native_class

MEASURE = ("--task", "perplexity", "--lengths", 100, "--samples", 2, "--json")

# its tensors are fused on the way into the class; test_export_hosts.py reads all hosts
EXPORTED = ("qwen3_5_moe_text",)


@pytest.fixture
def run(capsys):
    return runner(capsys)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("It was a bright cold day in April. " * 40)
    return tmp_path


def wrapped(run) -> dict:
    """`base/` wrapped whatever its heads' time constants are, and measured."""
    words = ("--segment", 16, "--tau", 0, "--margin", 0, "--calibrate", "some.txt")
    (row,) = run("inspect", "base", "--lengths", "100", "--json").rows
    assert row["parameters"]
    done = run("wrap", "base", "--variant", "ssc", *words, "--json")
    assert done.status == 0 and done.rows[0]["wrapped"] > 0, done.err
    (measured,) = run("eval", *MEASURE).rows
    assert measured["score"] != measured["base_score"] and measured["cache_bytes"] > 0
    return measured


@pytest.mark.parametrize("family", NAMES)
def test_a_family_is_wrapped_measured_exported_and_measured_again(run, here, family):
    pico(here / "base", family, max_position_embeddings=128)
    exported(run, wrapped(run))


def exported(run, measured: dict) -> None:
    """The wrapped folder exported and measured again."""
    assert run("export").status == 0
    (again,) = run("eval", "export", *MEASURE).rows
    for name in ("score", "base_score", "cache_bytes"):
        assert again[name] == pytest.approx(measured[name], rel=1e-6), name


@pytest.mark.parametrize("host", HOSTS)
def test_a_model_of_transformers_is_wrapped_measured_and_exported(run, here, host):
    torch.manual_seed(0)
    kind = native_class(host)
    model = kind(kind.config_class(**{**fields(host), "vocab_size": 256}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(here / "base")
    measured = wrapped(run)
    if host in EXPORTED:
        exported(run, measured)
