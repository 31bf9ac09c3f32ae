"""A wrapped folder whose files do not fit each other, or the model, is refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from cli_helpers import pico, runner
from safetensors.torch import load_file, save_file

from mcretrofit.errors import RetrofitError
from mcretrofit.model import load
from mcretrofit.wrapped import read


@pytest.fixture
def wrapped(capsys, tmp_path, monkeypatch):
    """A folder that `wrap` wrote of a pico model and a folder of two texts."""
    monkeypatch.chdir(tmp_path)
    pico(tmp_path / "base")
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"texts/{name}.txt").write_text(f"It was a bright cold day {name}. " * 40)
    found = runner(capsys)(
        "wrap", "base", "--segment", 32, "--heads", "all", "--calibrate", "texts"
    )
    assert found.status == 0, found.err
    return tmp_path / "retrofit"


@pytest.mark.parametrize(
    ("field", "change", "line"),
    [
        ("mean", lambda x: torch.zeros(5), "does not fit caching.json"),
        ("std", lambda x: x[:, None], "does not fit caching.json"),
        ("mask", lambda x: x[:, :3], "does not fit caching.json"),
        ("mean", lambda x: x * torch.nan, "is not finite"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(wrapped, field, change, line):
    file = wrapped / "calibration.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(f".{field}"))
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, file)
    with pytest.raises(RetrofitError, match=line):
        load(wrapped)


@pytest.mark.parametrize("heads", ["1", [7, 0], [-1, 0], [True, 0], [0, 0], None])
def test_heads_that_there_are_not_are_refused(wrapped, heads):
    file = wrapped / "caching.json"
    stored = json.loads(file.read_text())
    next(iter(stored["layers"].values()))["heads"] = heads
    file.write_text(json.dumps(stored))
    with pytest.raises(RetrofitError, match="heads"):
        read(wrapped)


def test_heads_of_another_model_are_refused_where_they_are_used(wrapped):
    file = wrapped / "caching.json"
    stored = json.loads(file.read_text())
    layer = next(iter(stored["layers"].values()))
    heads, layer["total"] = layer["total"], 64
    file.write_text(json.dumps(stored))
    with pytest.raises(RetrofitError, match=f"from 64 of .*this model has {heads} of"):
        load(wrapped).model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("top_k", 0, "caching.json: top-k 0: has to be a whole number of at least 1"),
        ("shared", "no", "caching.json: shared: 'no' is not true or false"),
        ("tau", "many", "caching.json: tau: 'many' is not a number"),
        (
            "temperature",
            float("inf"),
            "caching.json: temperature inf: has to be above 0, and finite",
        ),
        ("temperature", None, None),
    ],
)
def test_settings_of_a_folder_are_read_as_strictly_as_flags(wrapped, name, value, line):
    file = wrapped / "caching.json"
    stored = json.loads(file.read_text())
    stored["caching"][name] = value
    file.write_text(json.dumps(stored))
    if line is None:
        assert getattr(load(wrapped).config, name) == value
        return
    with pytest.raises(RetrofitError, match=line):
        load(wrapped)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda stored: stored.pop("layers"), r"damaged \('layers' is missing\); wrap"),
        (lambda stored: stored["base"].pop("path"), r"damaged \('path' is missing\); wrap"),
        (lambda stored: stored["base"].update(sha256=3), "sha256 have to be texts"),
        (lambda stored: stored.update(calibrated="x"), "calibrated has to be true or false"),
    ],
)
def test_what_a_folder_lacks_is_named(wrapped, change, line):
    file = wrapped / "caching.json"
    stored = json.loads(file.read_text())
    change(stored)
    file.write_text(json.dumps(stored))
    with pytest.raises(RetrofitError, match=line):
        load(wrapped)


def test_a_base_of_other_values_is_refused(wrapped):
    file = wrapped.parent / "base/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(RetrofitError, match="the base changed since .* put the old file back"):
        load(wrapped)


def test_a_base_that_is_gone_is_named_with_the_folder_that_wants_it(wrapped):
    (wrapped.parent / "base").rename(wrapped.parent / "moved")
    with pytest.raises(RetrofitError, match="retrofit: its base .*base is not there: put it back"):
        load(wrapped)
