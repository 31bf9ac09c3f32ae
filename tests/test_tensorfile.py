"""A safetensors header is a claim: whatever it says, reading ends in success or one line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mcretrofit.atomic import write_safetensors
from mcretrofit.errors import RetrofitError
from mcretrofit.rawfile import read_json
from mcretrofit.tensorfile import read_header, read_metadata, read_tensor

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: object, data: bytes = bytes(8), length: int | None = None) -> Path:
    """A file with any header: bytes as they are, anything else as JSON."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def refusal(path: Path) -> str:
    """The one line that a broken file is refused with."""
    with pytest.raises(RetrofitError) as caught:
        read_header(path)
    message = str(caught.value)
    assert path.name in message
    assert message.isprintable()
    assert len(message) < 1000
    return message


def entry(**changes: object) -> dict[str, object]:
    """A good tensor with some fields replaced, None removing one."""
    return {"w": {key: value for key, value in {**GOOD, **changes}.items() if value is not None}}


WRONG_HEADERS = {
    "bad-utf8": (b'{"\xff": 1}', "UTF-8"),
    "bad-json": (b'{"w": ', "JSON"),
    "deep": (b'{"w":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "JSON"),
    "long-number": (b'{"w":' + b"9" * 10_000 + b"}", "JSON"),
    "duplicate": (b'{"w": 1, "w": 2}', "appears twice"),
    "list": (b"[1]", "not a safetensors"),
    "entry-list": ({"w": [1]}, "lacks"),
    "no-dtype": (entry(dtype=None), "lacks"),
    "no-shape": (entry(shape=None), "lacks"),
    "dtype": (entry(dtype="F7"), "'F7'"),
    "dtype-list": (entry(dtype=["F32"]), "dtype"),
    "negative": (entry(shape=[-2]), "impossible shape"),
    "negative-pair": (entry(shape=[-1, -2]), "impossible shape"),
    "float": (entry(shape=[2.0]), "impossible shape"),
    "bool": (entry(shape=[True, 2]), "impossible shape"),
    "huge": (entry(shape=[2**63]), "impossible shape"),
    "overflow": (entry(shape=[2**32, 2**32]), "impossible shape"),
    "empty-huge": (entry(shape=[0, 2**40, 2**40], data_offsets=[0, 0]), "impossible shape"),
    "infinite": (entry(shape=[float("inf")]), "impossible shape"),
    "many-dims": (entry(shape=[1] * 99), "list of up to"),
    "shape-text": (entry(shape="2"), "list of up to"),
    "offsets-one": (entry(data_offsets=[0]), "impossible data_offsets"),
    "offsets-negative": (entry(data_offsets=[-8, 0]), "impossible data_offsets"),
    "offsets-float": (entry(data_offsets=[0, 8.0]), "impossible data_offsets"),
    "offsets-swapped": (entry(data_offsets=[8, 0]), "needs 8 bytes"),
    "size": (entry(shape=[3]), "needs 12 bytes"),
    "beyond": (entry(data_offsets=[8, 16]), "cut off"),
    "billions": (entry(shape=[2**40], data_offsets=[0, 2**42]), "cut off"),
    "hole": (entry(shape=[1], data_offsets=[4, 8]), "hole"),
    "spare": (entry(shape=[1], data_offsets=[0, 4]), "belong to no tensor"),
    "overlap": ({"a": GOOD, "b": GOOD}, "overlaps"),
    "newline-name": ({"a\nb": GOOD}, "unprintable"),
    "surrogate-name": (b'{"\\ud800": {}}', "unprintable"),
    "nothing": ({}, "belong to no tensor"),
}


@pytest.mark.parametrize("case", WRONG_HEADERS, ids=str)
def test_refuses_wrong_header(tmp_path, case):
    header, expected = WRONG_HEADERS[case]
    assert expected in refusal(write(tmp_path / "model.safetensors", header))


WRONG_FILES = {
    "empty": (b"", "too short"),
    "short": (b"\x02\0\0\0\0\0\0\0{", "too short"),
    "length-lie": ((2**62).to_bytes(8, "little") + b'{"w": 1}', "not a safetensors"),
    "text": (b"Once upon a time there was a model.", "not a safetensors"),
    "lfs": (b"version https://git-lfs.example/spec/v1\noid sha256:00\n", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html>not found</html>", "web page"),
}


@pytest.mark.parametrize("case", WRONG_FILES, ids=str)
def test_refuses_wrong_file(tmp_path, case):
    content, expected = WRONG_FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert expected in refusal(path)


def test_refuses_what_is_no_file(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.safetensors")
    assert "not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refusal(tmp_path / "pipe.safetensors")


def test_a_long_header_is_refused_before_it_is_read(tmp_path):
    path = write(tmp_path / "model.safetensors", b"{", length=200_000_000)
    with open(path, "r+b") as file:
        file.truncate(300_000_000)
    assert "far too many" in refusal(path)


def test_round_trip(tmp_path):
    shared = torch.arange(6.0)
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(3, 4, dtype=torch.bfloat16).T,
        "c": torch.tensor(5),
        "d": torch.zeros(0, 7),
        "e": shared,
        "f": shared,
        "g": shared[2:4],
        "h": torch.tensor([True, False]),
    }
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors, {"format": "pt"})
    header = read_header(path)
    assert set(header) == set(tensors)
    assert read_metadata(path) == {"format": "pt"}
    for name, tensor in tensors.items():
        got = read_tensor(header[name])
        assert torch.equal(got, tensor)
        assert got.dtype == tensor.dtype
    assert os.listdir(tmp_path) == [path.name]


def test_metadata_must_map_text_to_text(tmp_path):
    path = write(tmp_path / "model.safetensors", {"__metadata__": {"a": 1}, "w": GOOD})
    assert list(read_header(path)) == ["w"]
    with pytest.raises(RetrofitError, match="__metadata__"):
        read_metadata(path)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    path = write(tmp_path / "model.safetensors", {"w": GOOD})
    info = read_header(path)["w"]
    with open(path, "r+b") as file:
        file.truncate(info.end - 3)
    with pytest.raises(RetrofitError, match="ended 3 bytes early"):
        read_tensor(info)


def test_json_may_hold_infinity_but_no_key_twice(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_json(path)["time_step_limit"][1] == float("inf")
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(RetrofitError, match="'a' appears twice"):
        read_json(path)


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """One to four random edits of a file: bytes, cuts, insertions, swapped numbers."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw))
        kind = rng.randrange(5)
        if kind == 0:
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        elif kind == 1:
            raw = raw[:at] + raw[at + rng.randint(1, 20) :] or b"\0"
        elif kind == 2:
            raw = raw[:at] + rng.choice([b"[", b"{", b"}", b'"', b"-", b"9" * 30, b"\n"]) + raw[at:]
        elif kind == 3:
            old, new = (
                rng.choice([b"8", b"16", b"F32", b"shape", b"w"]),
                rng.choice([b"0", b"-1", b"F16", b"a"]),
            )
            raw = raw.replace(old, new, 1)
        else:
            raw = raw[:at] + raw[at:][: rng.randint(1, 60)] * 2 + raw[at:]
    return raw


def test_fuzz(tmp_path):
    header = {name: {**GOOD, "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate("wxyz")}
    good = write(tmp_path / "model.safetensors", header, bytes(range(32))).read_bytes()
    rng, begin, opened = random.Random(0), time.monotonic(), 0
    path = tmp_path / "mutant.safetensors"
    for _ in range(500):
        # keep the length true half of the time, so that edits reach the checks behind it
        body = mutate(rng, good[8:])
        end = body.rfind(b"}}") + 2
        path.write_bytes((end.to_bytes(8, "little") if rng.random() < 0.5 else good[:8]) + body)
        try:
            infos = read_header(path)
        except RetrofitError as error:
            assert str(error).isprintable()
            continue
        opened += 1
        assert sum(read_tensor(info).numel() for info in infos.values()) <= len(body)
    assert opened < 250
    assert time.monotonic() - begin < 30


SPARSE = """
import resource, sys, time
from mcretrofit.checkpoint import open_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, begin = peak(), time.monotonic()
checkpoint = open_checkpoint(sys.argv[1])
assert checkpoint.shape("w0") == (1000, 26000) and len(checkpoint.fingerprint()) == 64
print(time.monotonic() - begin, (peak() - before) / 1024, "torch" in sys.modules)
"""


def test_opening_reads_headers_only(tmp_path):
    size = 4 * 1000 * 26000
    header = {
        f"w{i}": {
            "dtype": "F32",
            "shape": [1000, 26000],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(25)
    }
    path = write(tmp_path / "model.safetensors", header, b"")
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 25 * size)
    assert path.stat().st_size > 2.6e9
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", SPARSE, str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seconds, megabytes, torch_imported = run.stdout.split()
    assert float(seconds) < 1
    assert float(megabytes) < 50
    assert torch_imported == "False"
