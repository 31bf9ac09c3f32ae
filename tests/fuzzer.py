"""Damaged models by the thousand: `fuzzer.py COUNT SEED` opens them and prints what came of it.

It runs in a process of its own, under limits on memory and on the size of files that it may write.
Every case is made from its seed and number alone.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cli_helpers import pico
from nativehosts import fields
from safetensors.torch import save as save_safetensors

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError
from mcretrofit.exporting import export
from mcretrofit.loading import load_model
from mcretrofit.model import load
from mcretrofit.models._native import native_class
from mcretrofit.retrofit import every_head, retrofit_
from mcretrofit.skeleton import skeleton
from mcretrofit.wrapped import read, write

ROOM, LONGEST = (
    400_000_000,
    5.0,
)  # bytes beyond what is mapped at first; processor seconds of a case
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b.c": torch.ones(4, dtype=torch.bfloat16)}
SHARDS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
LIES = (0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63, 10**30, -(2**63))
ODD = (None, True, "", "8", "\n", "\u0000", "../../x", "/etc/passwd", [], {}, [[]], 1.5, 1e308)
TYPES = ("F32", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "F7", "", 3, None, "f32", "C64", "U16")
NAMES = ("../out.safetensors", "/out.safetensors", "a/../../b.safetensors", "..", "", "\n", 3)
NAMES += (None, [], "x\0.safetensors", "C:\\x.safetensors", "no.safetensors", "model.pth", *SHARDS)


def flipped(rng: random.Random, raw: bytes) -> bytes:
    """Some bytes changed, cut out, put in or repeated."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at, kind = rng.randrange(len(data) or 1), rng.randrange(6)
        if kind == 0 and data:
            data[at] = rng.randrange(256)
        elif kind == 1 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at : at + rng.randint(1, 64)]
        elif kind == 3:
            data[at:at] = rng.choice((b"[", b"{", b'"', b"9" * 40, b"\0" * 8, b"\xff" * 8, b"-"))
        elif kind == 4:
            data[at:at] = data[at : at + rng.randint(1, 64)]
        else:
            del data[at:]
    return bytes(data)


def odd(rng: random.Random) -> Any:
    return rng.choice((*LIES, *ODD))


def twisted(rng: random.Random, value: Any) -> Any:
    """A JSON value with one place changed, somewhere inside it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        changed = {**value, key: twisted(rng, value[key])}
        return {k: v for k, v in changed.items() if k != key or rng.random() < 0.9}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], twisted(rng, value[at]), *value[at + 1 :]]
    return odd(rng)


def text(rng: random.Random, value: Any) -> bytes:
    """JSON, sometimes with a key twice, sometimes damaged."""
    raw = json.dumps(value).encode()
    if rng.random() < 0.1 and raw[:2] == b'{"':
        raw = raw[:-1] + b"," + raw[1:]
    return flipped(rng, raw) if rng.random() < 0.2 else raw


def entry(rng: random.Random) -> Any:
    start = rng.choice((0, 0, 8, 24, *LIES))
    shape = [rng.choice((0, 1, 2, 3, *LIES)) for _ in range(rng.randrange(4))]
    good = {"dtype": rng.choice(TYPES), "shape": shape, "data_offsets": [start, start + 8]}
    good["data_offsets"][1] = rng.choice((start + 4, start + 8, start + 24, *LIES))
    return twisted(rng, good) if rng.random() < 0.3 else good


def header_case(rng: random.Random, folder: Path) -> None:
    """A safetensors file with a made-up header: offsets, overlaps, lengths, names."""
    names = [
        rng.choice(("a", "b.c", "w", "", "\n", "../x", "__metadata__", "x" * 500)) for _ in "123"
    ]
    raw = text(rng, {name: entry(rng) for name in names[: rng.randint(1, 3)]})
    size = rng.choice((len(raw), len(raw), len(raw), 0, 1, 2**62, 2**63, 99_999_999, len(raw) + 9))
    data = bytes(rng.choice((0, 8, 24, 32, 100)))
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + raw + data)


def bytes_case(rng: random.Random, folder: Path) -> None:
    """A good safetensors file with bytes flipped or its end cut off."""
    (folder / "model.safetensors").write_bytes(flipped(rng, GOOD["model.safetensors"]))


def pickle_case(rng: random.Random, folder: Path) -> None:
    """A good .pth file, zip or legacy, with bytes flipped or its end cut off."""
    kind = rng.choice(("zip.pth", "legacy.pth"))
    (folder / "model.pth").write_bytes(flipped(rng, GOOD[kind]))


def index_case(rng: random.Random, folder: Path) -> None:
    """An index whose entries are changed: names outside the folder, shards that lack."""
    for name in SHARDS:
        (folder / name).write_bytes(GOOD[name] if rng.random() < 0.9 else flipped(rng, GOOD[name]))
    places = dict(zip(TENSORS, SHARDS, strict=True))
    index = {"metadata": {"total_size": 32}, "weight_map": places}
    if rng.random() < 0.7:
        places[rng.choice((*TENSORS, "new"))] = rng.choice(NAMES)
    else:
        index = twisted(rng, index)
    (folder / "model.safetensors.index.json").write_bytes(text(rng, index))


def config_case(rng: random.Random, folder: Path) -> None:
    """A model whose config.json lies."""
    place = MODELS / rng.choice(sorted(p.name for p in MODELS.iterdir() if p.name != "base"))
    files = ("config.json", "caching.json", "calibration.safetensors")
    file = rng.choice([name for name in files if (place / name).is_file()])
    for one in place.iterdir():
        if one.name != file and one.suffix in (".json", ".safetensors"):
            os.link(one, folder / one.name)
    raw = (place / file).read_bytes()
    if file.endswith(".json"):
        value = json.loads(raw)
        for _ in range(rng.choice((1, 1, 2))):
            value = twisted(rng, value)
        raw = text(rng, value)
    else:
        raw = flipped(rng, raw)
    (folder / file).write_bytes(raw)


KINDS: dict[str, tuple[int, Callable[[random.Random, Path], None]]] = {
    "header": (30, header_case),
    "bytes": (20, bytes_case),
    "pickle": (25, pickle_case),
    "index": (15, index_case),
    "config": (4, config_case),
}
GOOD: dict[str, bytes] = {}
MODELS = Path()
ONLY = ""


def prepare(place: Path) -> None:
    """What is damaged later: good files, and models, plain, wrapped and exported."""
    global MODELS
    MODELS = place / "models"
    GOOD["model.safetensors"] = save_safetensors(TENSORS)
    for file, name in zip(SHARDS, TENSORS, strict=True):
        GOOD[file] = save_safetensors({name: TENSORS[name]})
    for name, zipped in (("zip.pth", True), ("legacy.pth", False)):
        buffer = io.BytesIO()
        torch.save(TENSORS, buffer, _use_new_zipfile_serialization=zipped)
        GOOD[name] = buffer.getvalue()
    for family in ("gla", "rwkv7", "gated_deltanet", "mamba2"):
        pico(MODELS / family, family, num_hidden_layers=1)
    kind = native_class("olmo_hybrid")
    own = kind(kind.config_class(**{**fields("olmo_hybrid"), "vocab_size": 256}))
    own.save_pretrained(MODELS / "native")
    pico(MODELS / "base", num_hidden_layers=1)
    checkpoint, caching = open_checkpoint(MODELS / "base"), CachingConfig(segment=16)
    model = load_model(checkpoint)
    covers = every_head(model)
    reasons = {name: ["slow"] * cover.total for name, cover in covers.items()}
    write(MODELS / "wrapped", caching, checkpoint, covers, reasons, "", full_hash=False)
    retrofit_(model, caching, covers)
    export(model, MODELS / "exported", checkpoint=checkpoint)


def opened(folder: Path, kind: str) -> None:
    """All that loading does with what somebody else wrote."""
    if kind == "config" and (folder / "caching.json").is_file():
        read(folder)
    if kind == "config":
        load(folder)
        return
    names = [p for p in folder.iterdir() if p.name != "config.json"]
    checkpoint = open_checkpoint(folder if len(names) > 1 else names[0])
    room = sum(file.stat().st_size for file in checkpoint.files())
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        assert tensor.numel() * tensor.element_size() <= room, "more bytes than the file has"
        assert tuple(tensor.shape) == checkpoint.shape(name)
    try:
        skeleton(checkpoint)
    except RetrofitError as error:
        assert str(error).isprintable()


def case(seed: int, number: int, folder: Path) -> tuple[str, str]:
    """One case: its kind and `opened`, `refused` or the fault."""
    rng = random.Random(f"{seed}-{number}")
    kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    if ONLY:
        kinds, weights = [ONLY], [1]
    kind = rng.choices(kinds, weights)[0]
    KINDS[kind][1](rng, folder)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    try:
        opened(folder, kind)
        return kind, "opened"
    except RetrofitError as error:
        line = str(error)
        good = line.isprintable() and 0 < len(line) < 2000
        return kind, "refused" if good else f"{kind} {number}: not one line: {line[:200]!r}"
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        last = f"{Path(where.filename).name}:{where.lineno}"
        return kind, f"{kind} {number}: {type(error).__name__}: {error!s:.200} ({last})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def mapped() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def late(*_: object) -> None:
    raise TimeoutError(f"longer than {LONGEST} s")


def main(count: int, seed: int) -> None:
    """Run the cases; one JSON object of counts on stdout."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        prepare(root)
        for place in ("gla", "native", "exported"):
            load(MODELS / place)  # what is imported late belongs to no case
        signal.signal(signal.SIGPROF, late)
        resource.setrlimit(resource.RLIMIT_AS, (mapped() + ROOM,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000,) * 2)
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            folder = root / "case"
            folder.mkdir()
            kind, result = case(seed, number, folder)
            counts[f"{kind} {result if result in ('opened', 'refused') else 'fault'}"] += 1
            if result not in ("opened", "refused"):
                faults.append(result)
            shutil.rmtree(folder)
            assert sorted(p.name for p in root.iterdir()) == ["models"], "written outside"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    told = {"cases": count, **counts, "faults": faults, "megabytes": round(grown / 1024, 1)}
    print(json.dumps({**told, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    ONLY = (sys.argv[3:] or [""])[0]
    main(int(sys.argv[1]), int(sys.argv[2]))
