"""Every form of a MODEL argument opens; everything missing, damaged or unsafe is one line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch

from mcretrofit import sources
from mcretrofit.atomic import write_safetensors
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError, UsageError

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
SHARDS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
shared = Path(__file__).parents[2] / "shared" / "checkpoints"


def refusal(model: object, config: object = None) -> str:
    """The one line that opening fails with."""
    with pytest.raises(RetrofitError) as caught:
        open_checkpoint(model, config)
    assert str(caught.value).isprintable()
    return str(caught.value)


def check(checkpoint: object) -> None:
    """The checkpoint holds TENSORS and nothing else."""
    assert sorted(checkpoint.names()) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor)
    assert (checkpoint.dtype("a.weight"), checkpoint.dtype("b")) == ("F32", "BF16")
    assert len(checkpoint.fingerprint()) == len(checkpoint.sha256()) == 64
    assert all(file.is_file() for file in checkpoint.files())


def sharded(folder: Path, **changes: object) -> Path:
    """A folder of two shards; `changes` replace entries of its weight_map, None removes one."""
    folder.mkdir(exist_ok=True)
    for file, name in zip(SHARDS, TENSORS, strict=True):
        write_safetensors(folder / file, {name: TENSORS[name]})
    listed = {**dict(zip(TENSORS, SHARDS, strict=True)), **changes}
    index = {"weight_map": {name: file for name, file in listed.items() if file is not None}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "gla"}')
    return folder


SAVERS = {
    "model.safetensors": write_safetensors,
    "other.safetensors": write_safetensors,
    "pytorch_model.bin": lambda path, tensors: torch.save(tensors, path),
    "model.pth": lambda path, tensors: torch.save(tensors, path),
    "legacy.pth": lambda path, tensors: torch.save(
        tensors, path, _use_new_zipfile_serialization=False
    ),
}


@pytest.mark.parametrize("name", SAVERS, ids=str)
def test_folder_and_single_file(tmp_path, name):
    path = tmp_path / name
    SAVERS[name](path, TENSORS)
    alone = open_checkpoint(str(path))
    check(alone)
    assert (alone.folder, alone.config, alone.path) == (None, {}, str(path))
    assert alone.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "config.json").write_text('{"model_type": "gla"}')
    (tmp_path / "other.json").write_text('{"model_type": "retnet"}')
    for model in (path, tmp_path):
        found = open_checkpoint(model)
        check(found)
        assert (found.folder, found.config, found.revision) == (
            tmp_path,
            {"model_type": "gla"},
            None,
        )
        assert open_checkpoint(model, tmp_path / "other.json").config == {"model_type": "retnet"}
        assert open_checkpoint(model, tmp_path).config == {"model_type": "gla"}
        assert "no such file" in refusal(model, tmp_path / "absent.json")


def test_read_gives_a_copy(tmp_path):
    torch.save(TENSORS, tmp_path / "model.pth")
    found = open_checkpoint(tmp_path / "model.pth")
    found.read("b").zero_()
    assert torch.equal(found.read("b"), TENSORS["b"])
    with pytest.raises(RetrofitError, match="no tensor 'c'"):
        found.read("c")


def test_sharded(tmp_path):
    folder = sharded(tmp_path / "m")
    for model in (folder, folder / "model.safetensors.index.json"):
        found = open_checkpoint(model)
        check(found)
        assert found.folder == folder
        assert [file.name for file in found.files()] == list(SHARDS)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "a\n.safetensors", 3,
     "pytorch_model.bin", "a\\b.safetensors", ["x.safetensors"], "a\0.safetensors"],
    ids=repr,
)  # fmt: skip
def test_refuses_unsafe_shard_name(tmp_path, name):
    assert "as a shard" in refusal(sharded(tmp_path / "m", b=name))


def test_refuses_inconsistent_shards(tmp_path):
    assert "model-3.safetensors is missing" in refusal(
        sharded(tmp_path / "m", b="model-3.safetensors")
    )
    assert "'c' is not in model-1-of-2" in refusal(sharded(tmp_path / "m", c=SHARDS[0]))
    assert "'b' is not in model-1-of-2" in refusal(sharded(tmp_path / "m", b=SHARDS[0]))
    folder = sharded(tmp_path / "m")
    write_safetensors(folder / SHARDS[1], TENSORS)
    assert "'a.weight' is in both" in refusal(folder)
    (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes()[:-1])
    assert f"{SHARDS[1]}: tensor 'b' ends" in refusal(folder)


def test_refuses_link_that_leaves_the_folder(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / SHARDS[1]).rename(tmp_path / "outside.safetensors")
    (folder / SHARDS[1]).symlink_to(tmp_path / "outside.safetensors")
    assert "link that leaves" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_refuses_malformed_index(tmp_path, text):
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    assert "index.json" in refusal(folder)


def test_refuses_what_is_no_model(tmp_path):
    assert "holds no weights" in refusal(tmp_path)
    (tmp_path / "caching.json").write_text("{}")
    write_safetensors(tmp_path / "calibration.safetensors", TENSORS)
    assert "wrapped folder" in refusal(tmp_path)
    assert "not a model" in refusal(tmp_path / "caching.json")
    for name in ("x.pth", "y.pth"):
        torch.save(TENSORS, tmp_path / name)
    assert "2 weight files and no index (x.pth, y.pth)" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{'model_type': 1}")
    assert "config.json is not valid JSON" in refusal(tmp_path / "x.pth")
    write_safetensors(tmp_path / "empty.safetensors", {})
    assert "holds no tensors" in refusal(tmp_path / "empty.safetensors", tmp_path / "caching.json")
    assert "no such file" in refusal("")
    assert "no such file" in refusal("nul\0.pth")


def test_builtin(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "sources.py"))
    folder = tmp_path / "checkpoints" / "tiny-gla"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", TENSORS)
    check(open_checkpoint("builtin:tiny-gla"))
    for name in ("tiny-gal", "../tiny-gla", ""):
        with pytest.raises(UsageError, match="known: tiny-gla"):
            open_checkpoint(f"builtin:{name}")


def test_hub(tmp_path, monkeypatch):
    cache, asked = sharded(tmp_path / "models--org--name"), []
    snapshot = cache / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    for file in [p for p in cache.iterdir() if p.is_file()]:
        (snapshot / file.name).symlink_to(file)

    def download(name: str, revision: str | None, **_: object) -> str:
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = open_checkpoint("org/name@main")
    check(found)
    assert (found.revision, found.path) == ("c0ffee", "org/name@main")
    for path in ("org/name.pth", "./org/name", "org/a/b", "name", "/org/name", Path("org/name")):
        assert "no such file" in refusal(path)
    assert asked == [("org/name", "main")]


def test_hub_failure_is_one_line(monkeypatch):
    def download(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert refusal("org/name").endswith("nor could it be fetched as a hub id: no route")


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("key", ["", "state_dict", "model"])
def test_wrappers_and_prefixes(tmp_path, prefix, key):
    named = {prefix + name: torch.nn.Parameter(tensor) for name, tensor in TENSORS.items()}
    torch.save({key: named, "step": 3} if key else named, tmp_path / "model.pth")
    check(open_checkpoint(tmp_path / "model.pth"))
    torch.save({**named, "x": torch.ones(1)}, tmp_path / "model.pth")
    assert open_checkpoint(tmp_path / "model.pth").names() == [*named, "x"]


def test_fingerprint_and_finite(tmp_path):
    write_safetensors(tmp_path / "m.safetensors", {"w": torch.tensor([1.0, float("nan")])})
    one = open_checkpoint(tmp_path / "m.safetensors")
    with pytest.raises(RetrofitError, match=r"m.safetensors: tensor 'w' has 1 of 2 values NaN"):
        one.check_finite("w", one.read("w"))
    one.check_finite("w", torch.ones(2))
    one.check_finite("w", torch.ones(2).to(torch.float8_e4m3fn))
    write_safetensors(tmp_path / "m2.safetensors", {"w": torch.ones(2)})
    two = open_checkpoint(tmp_path / "m2.safetensors")
    assert one.fingerprint() != two.fingerprint()
    assert one.sha256() != two.sha256()


@pytest.mark.skipif(not shared.is_dir(), reason="needs ../shared/checkpoints")
def test_third_party_files():
    counts = {"rwkv7-834k-bytes.safetensors": 829_888, "rwkv7-digit-reverser.pth": 39_564}
    for name in (*counts, "rwkv5.2-730k-bytes.pth"):
        found = open_checkpoint(shared / name)
        total = sum(found.read(tensor).numel() for tensor in found.names())
        assert total == counts.get(name, total)
        assert all(tensor.device.type == "cpu" for tensor in map(found.read, found.names()))
