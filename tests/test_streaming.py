"""Export from disk to disk: what it writes, the way back to the base, and what a hub is sent."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import pico, refused, runner, shell
from safetensors.torch import load_file, save_file

from mcretrofit import registry
from mcretrofit._shards import Stored, stored
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.exporting import export
from mcretrofit.model import load
from mcretrofit.pushing import files, push
from mcretrofit.streaming import stream

WRAP = ("--segment", 16, "--tau", 0, "--calibrate", "some.txt")


@pytest.fixture
def run(capsys):
    return runner(capsys)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").write_text("It was a bright cold day in April. " * 40)
    return tmp_path


def contents(folder) -> dict:
    """Every file of a folder, tensors by their values."""
    plain = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors"}
    tensors = {k: v for p in folder.glob("*.safetensors") for k, v in load_file(p).items()}
    return plain | {name: (str(t.dtype), t.shape, t.tolist()) for name, t in tensors.items()}


def values(tensors: dict[str, Stored]) -> dict[str, torch.Tensor]:
    """What would be written."""
    return {
        name: torch.cat([p.reshape(-1).to(one.dtype) for p in one.pieces()]).reshape(one.shape)
        for name, one in tensors.items()
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("family", registry.names("models"))
def test_a_streamed_model_is_the_live_one(here, family):
    pico(here / "base", family)
    half = load_file(here / "base" / "model.safetensors")
    half = {n: t if n.endswith(("A_log", "dt_bias")) else t.bfloat16() for n, t in half.items()}
    save_file(half, here / "base" / "model.safetensors")
    live, made = load("base"), stream("base")
    same(values(made.tensors), values(stored(live.model, live.checkpoint, None)))
    assert made.loaded.config is None and not made.loaded.wrapped


def test_a_streamed_export_is_that_of_the_live_model(run, here):
    pico(here / "base")
    assert run("wrap", "base", *WRAP, "--gate", "--whiten").status == 0
    live, made = load("retrofit"), stream("retrofit")
    export(live.model, here / "live", checkpoint=live.checkpoint, card="x")
    options = {"checkpoint": made.loaded.checkpoint, "card": "x"}
    export(made.loaded.model, here / "disk", tensors=made.tensors, **options)
    assert contents(here / "disk").keys() == contents(here / "live").keys()
    assert contents(here / "disk") == contents(here / "live")
    assert made.loaded.config == live.config and made.loaded.wrapped == live.wrapped
    again, live = stream("disk"), load("disk")
    same(values(again.tensors), values(stored(live.model, live.checkpoint, None)))
    assert again.loaded.config == live.config and again.loaded.wrapped == live.wrapped


def test_other_layouts_and_dtypes_are_streamed(here):
    from test_rwkv7_keys import blinkdl_shapes

    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in blinkdl_shapes().items()}
    torch.save(tensors, here / "blinkdl.pth")
    live, made = load("blinkdl.pth"), stream("blinkdl.pth", dtype="bfloat16")
    same(values(made.tensors), values(stored(live.model, live.checkpoint, torch.bfloat16)))
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        stream("blinkdl.pth", dtype="bfloat")


def test_values_that_are_not_finite_are_found_on_the_way(here):
    pico(here / "base")
    tensors = load_file(here / "base" / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, here / "base" / "model.safetensors")
    made = stream("base")
    with pytest.raises(RetrofitError, match="model.norm.weight.*NaN or infinite"):
        export(
            made.loaded.model, here / "out", checkpoint=made.loaded.checkpoint, tensors=made.tensors
        )
    assert not (here / "out").exists()


def test_the_base_comes_back(run, here):
    pico(here / "base")
    (here / "base" / "tokenizer_config.json").write_text("{}")
    assert run("wrap", "base", *WRAP).status == 0
    assert run("export", "--to", "base", "--out", "back").status == 0
    for name in ("model.safetensors", "config.json", "tokenizer_config.json"):
        assert (here / "back" / name).read_bytes() == (here / "base" / name).read_bytes()
    assert run("export").status == 0
    assert run("export", "export", "--to", "base", "--out", "back2", "--json").status == 0
    base = load_file(here / "base" / "model.safetensors")
    back = load_file(here / "back2" / "model.safetensors")
    assert base.keys() == back.keys() and all(torch.equal(base[n], back[n]) for n in base)
    ids = torch.arange(50)[None]
    assert torch.equal(load("back2").model(ids).logits, load("base").model(ids).logits)
    refused(run("export", "--to", "bas", "--out", "x"), 2, "did you mean 'base'?")
    refused(run("export", "--to", "base", "--dtype", "float16", "--out", "x"), 2, "--dtype")
    refused(run("export", "base", "--to", "base", "--out", "base", "--force"), 1, "made from it")


def test_a_base_of_shards_comes_back(run, here):
    base = pico(here / "plain")
    load("plain").model.save_pretrained(here / "base", max_shard_size="20KB")
    for name in ("config.json",):
        (here / "base" / name).write_bytes((base / name).read_bytes())
    assert len(open_checkpoint(here / "base").files()) > 1
    assert run("export", "base", "--to", "base", "--out", "back").status == 0
    for path in (here / "base").iterdir():
        assert (here / "back" / path.name).read_bytes() == path.read_bytes()


class Api:
    """Records what the hub's client would be asked."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault, self.asked = fault, []

    def create_repo(self, *words: object, **options: object) -> None:
        self.asked.append(("create", words, options))

    def upload_folder(self, **options: object) -> object:
        if self.fault:
            raise self.fault
        self.asked.append(("upload", options))
        return SimpleNamespace(commit_url="an/address")


def test_push_sends_what_it_lists(run, here, monkeypatch):
    pico(here / "base")
    assert run("export", "base").status == 0
    (here / "export" / ".hidden").write_text("not sent")
    done = run("push", "export", "me/model", "--dry-run", "--json")
    listed = done.rows[0]["files"]
    assert {"model.safetensors", "config.json", "README.md"} < listed.keys()
    assert ".hidden" not in listed and done.rows[0]["sent"] is None
    assert "would send" in run("push", "export", "me/model", "--dry-run").out
    api = Api()
    assert push(here / "export", "me/model", private=True, api=api) == "an/address"
    (_, words, made), (_, sent) = api.asked
    assert words == ("me/model",) and made == {
        "repo_type": "model",
        "private": True,
        "exist_ok": True,
    }
    assert set(sent["allow_patterns"]) == listed.keys() and sent["repo_id"] == "me/model"
    bad = Api(ConnectionError("401 for hf_secretkey\nand more"))
    with pytest.raises(RetrofitError, match=r"could not be sent: 401 for hf_\.\.\.$"):
        push(here / "export", "me/model", api=bad)


def test_push_refuses_what_is_no_export(run, here):
    base = pico(here / "base")
    refused(run("push", "base", "me/model", "--dry-run"), 1, "not an exported folder")
    refused(run("push", "none", "me/model", "--dry-run"), 1, "not an exported folder")
    assert run("export", "base").status == 0
    for name in ("model", "a/b/c", "../x", "me/", "me/a--b", "me/mo del"):
        with pytest.raises(UsageError, match="OWNER/NAME"):
            files(here / "export", name)
    (here / "export" / "sub").mkdir()
    refused(run("push", "export", "me/model", "--dry-run"), 1, "sub is no plain file")
    (here / "export" / "sub").rmdir()
    raw = (base / "model.safetensors").read_bytes()
    (here / "export" / "model.safetensors").write_bytes(raw[:-1])
    refused(run("push", "export", "me/model", "--dry-run"), 1, "cut off")


PEAK = """
import resource, sys
from mcretrofit.cli import main
assert main(["export", "base", "--out", "warm"]) == 0
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
assert main(["export", "large", "--out", "out"]) == 0
print((peak() - before) / 1024)
"""


def test_an_export_holds_pieces_only(here):
    pico(here / "base")
    sizes = {"vocab_size": 256, "hidden_size": 512, "num_heads": 4, "intermediate_size": 12_000}
    pico(here / "large", max_position_embeddings=64, **sizes)
    (here / "base" / "x.txt").write_text("x")
    megabytes = (here / "large" / "model.safetensors").stat().st_size / 1e6
    assert megabytes > 140
    done = shell(here, "-c", PEAK)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 80


def test_the_card_of_a_dry_run_names_sizes(run, here):
    pico(here / "base")
    assert run("export", "base").status == 0
    (row,) = run("push", "export", "me/model", "--dry-run", "--json").rows
    assert (
        row["bytes"]
        == sum(row["files"].values())
        == sum(p.stat().st_size for p in (here / "export").iterdir())
    )
    assert json.loads((here / "export" / "config.json").read_text())["auto_map"]
