"""`doctor --parity` without the packages that it would hold us against, and its time limit."""

from __future__ import annotations

import pytest
from cli_helpers import runner

from mcretrofit import parity, stock
from mcretrofit.catalogue import entries
from mcretrofit.errors import RetrofitError


@pytest.fixture
def run(capsys):
    return runner(capsys)


def test_every_family_has_a_line_and_what_is_missing_is_named(run, monkeypatch):
    monkeypatch.setattr(stock, "absent", lambda: ["triton", "flash-linear-attention"])
    monkeypatch.setattr(parity, "find_spec", lambda name: None)
    done = run("doctor", "--parity", "--json")
    assert done.status == 0, done.out
    found = {row["name"]: row for row in done.rows}
    assert found.keys() == {one.name for one in entries("families")}
    told = "pip install triton flash-linear-attention"
    assert {found[name]["advice"] for name in stock.FAMILIES} == {told}
    assert found["neural_memory"]["advice"] == "pip install titans-pytorch"
    alone = found.keys() - stock.FAMILIES.keys() - {"neural_memory"}
    assert {"dla", "rwkv5", "swla", "titans"} <= alone
    assert all(found[name]["state"] == "ok" for name in alone if "apart" in found[name]["value"])
    measured = [row for row in done.rows if row["name"] == "mamba2" and row["state"] == "ok"]
    assert [row["advice"] for row in measured] == ["transformers' own class"]


def test_what_differs_fails(run, monkeypatch):
    monkeypatch.setattr(parity, "findings", lambda: iter([parity._apart("gla", 0.1, "stock")]))
    done = run("doctor", "--parity")
    assert done.status == 1 and done.out.split() == [
        *("gla", "1.0e-01", "of", "the", "largest", "value", "apart", "failed", "stock")
    ]


def test_a_family_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    with pytest.raises(RetrofitError, match="stopped: over 0 s for one family"):
        list(stock.results(tmp_path, stock.FAMILIES, seconds=0.01))
    monkeypatch.setattr(stock, "absent", lambda: [])
    monkeypatch.setattr(parity, "SECONDS", 0.01)
    (line,) = parity._stock(["gla"])
    assert (line.name, line.state, line.advice) == ("gla", "warning", "not measured")
