"""What nobody vouches for opens or is refused in one line: no crash, no hang, no room by a lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc

import pytest
import torch
from cli_helpers import ROOT

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError

COUNT = 2000


def test_damaged_models_open_or_are_refused():
    places = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "fuzzer.py"), str(COUNT), "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    # the exit status tells of a crash, which leaves no line
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["faults"] == []
    assert told["cases"] == COUNT and told["megabytes"] < 150
    for kind in ("header", "bytes", "pickle", "index", "config"):
        assert told[f"{kind} refused"] > 0
    assert sum(told.get(f"{kind} opened", 0) for kind in ("bytes", "pickle", "index", "config")) > 9


def legacy(path, elements: int) -> None:
    """A legacy .pth whose one storage says that it has so many elements."""
    torch.save({"w": torch.ones(77)}, path, _use_new_zipfile_serialization=False)
    old, new = b"K\x4dNt", b"\x8a\x06" + elements.to_bytes(6, "little") + b"Nt"
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))


@pytest.mark.parametrize("elements", [10**6, 10**9, 10**12])
def test_a_storage_that_claims_too_much_gets_no_room(tmp_path, elements):
    path = tmp_path / "model.pth"
    legacy(path, 77)
    assert open_checkpoint(path).read("w").sum() == 77
    legacy(path, elements)
    tracemalloc.start()
    with pytest.raises(RetrofitError, match="claim more bytes than the file has"):
        open_checkpoint(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000


def test_a_text_that_claims_too_much_gets_no_room(tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes(b"\x80\x02X" + (2**31 - 1).to_bytes(4, "little") + b"short")
    tracemalloc.start()
    with pytest.raises(RetrofitError, match="not a readable torch.save file"):
        open_checkpoint(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000
