"""The run folder: whole lines, whatever stops a writer, and one owner a cell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import ROOT

from mcretrofit.errors import RetrofitError
from mcretrofit.ledger import CLAIMS, ROWS, Ledger, read


def row(name: str, **more: object) -> dict:
    return {
        "id": name,
        "task": "niah",
        "length": 1,
        "metric": "accuracy",
        "score": 0.5,
        "verdict": "helps",
        **more,
    }


def lines(folder: Path) -> list[str]:
    return (folder / ROWS).read_text().splitlines()


def python(code: str, *words: object) -> subprocess.Popen:
    places = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": places},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_a_row_is_kept_once_and_seen_by_others(tmp_path):
    one, other = Ledger(tmp_path / "run"), Ledger(tmp_path / "run")
    assert one.append(row("a", score=0.25)) and not other.append(row("a", score=0.75))
    assert other.rows["a"]["score"] == 0.25
    other.append(row("b"))
    one.refresh()
    assert list(one.rows) == ["a", "b"] and not one.faults
    assert len(lines(tmp_path / "run")) == 2


@pytest.mark.parametrize("cut", [1, 20, -1, -2])
def test_a_torn_last_line_is_named_ended_and_costs_no_other_row(tmp_path, cut):
    ledger = Ledger(tmp_path)
    ledger.append(row("a"))
    whole = (tmp_path / ROWS).read_bytes()
    (tmp_path / ROWS).write_bytes(whole + whole[:cut].replace(b'"a"', b'"t"'))
    again = Ledger(tmp_path)
    # all but its newline is a row
    torn = cut != -1
    assert set(again.rows) == ({"a"} if torn else {"a", "t"})
    assert len(again.faults) == torn
    if torn:
        assert "line 2" in again.faults[0] and "stopped while it wrote" in again.faults[0]
    again.append(row("b"))
    found = read(tmp_path / ROWS)
    assert set(found.rows) == set(again.rows) and "b" in found.rows
    assert len(found.faults) == torn and len(lines(tmp_path)) == 3


def test_malformed_lines_are_named_by_number_and_the_rest_kept(tmp_path):
    bad = ["{", "[1]", json.dumps({"id": "x", "task": "niah"}), '"\\ud800'[:4], "\x00"]
    good = [json.dumps(row(name)) for name in "abc"]
    text = "\n".join([good[0], bad[0], good[1], "", *bad[1:], json.dumps(row("a")), good[2]]) + "\n"
    (tmp_path / ROWS).write_text(text)
    found = read(tmp_path / ROWS)
    assert list(found.rows) == ["a", "b", "c"]
    numbers = [fault.split("line ")[1].split(":")[0] for fault in found.faults]
    assert numbers == ["2", "5", "6", "7", "8"]
    assert "not JSON" in found.faults[0] and "not a JSON object" in found.faults[1]
    assert "length is missing" in found.faults[2]


def test_a_claim_has_one_owner_and_goes_with_its_release(tmp_path):
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    claim = one.claim("a")
    assert claim is not None and other.claim("a") is None and one.claim("a") is None
    said = json.loads((tmp_path / CLAIMS / "a").read_text())
    assert said["pid"] == os.getpid() and said["host"]
    free = other.claim("b")
    assert free is not None
    claim.release()
    again = other.claim("a")
    assert again is not None
    one.append(row("a"))
    again.release()
    # finished: there is nothing to claim
    assert other.claim("a") is None
    free.release()
    assert not list((tmp_path / CLAIMS).iterdir())


def test_the_claim_of_a_killed_process_is_free(tmp_path):
    code = """
import sys, time
from mcretrofit.ledger import Ledger
from pathlib import Path
claim = Ledger(Path(sys.argv[1])).claim("a")
print(claim is not None, flush=True)
time.sleep(60)
"""
    process = python(code, tmp_path)
    assert process.stdout.readline() == "True\n"
    ledger = Ledger(tmp_path)
    assert ledger.claim("a") is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    claim = ledger.claim("a")
    assert claim is not None
    claim.release()


def test_many_writers_make_whole_lines_and_no_doubles(tmp_path):
    code = """
import sys
from mcretrofit.ledger import Ledger
from pathlib import Path
ledger, row = Ledger(Path(sys.argv[1])), dict(task="t", length=1, metric="m", score=1, verdict="v")
for i in range(60):
    claim = ledger.claim(str(i))
    if claim is not None:
        ledger.append({"id": str(i), **row, "pad": "x" * 3000, "by": sys.argv[2]})
        claim.release()
"""
    several = [python(code, tmp_path, number) for number in range(3)]
    assert all(process.wait() == 0 for process in several)
    found = read(tmp_path / ROWS)
    assert not found.faults and len(lines(tmp_path)) == len(found.rows) == 60
    for process in several:
        process.communicate()


def test_a_folder_that_cannot_be_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RetrofitError, match="file"):
        Ledger(tmp_path / "file")
    with pytest.raises(ValueError, match="JSON"):
        Ledger(tmp_path / "run").append(row("a", score=float("nan")))
    assert not read(tmp_path / "run" / ROWS).faults
