"""Bad input on the command line: one line that says what, where and what to do; nothing written."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from cli_helpers import pico, refused, runner
from safetensors.torch import load_file, save_file

from mcretrofit import needs


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return pico(tmp_path_factory.mktemp("pico"), max_position_embeddings=128)


@pytest.fixture
def folder(base, tmp_path, monkeypatch) -> Path:
    """A copy of a pico model as the working folder."""
    for file in base.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys, folder):
    """Runs a command that must leave the folder as it was."""
    inner = runner(capsys)

    def run(*words: object):
        before = sorted(folder.rglob("*"))
        done = inner(*words)
        assert sorted(folder.rglob("*")) == before
        return done

    return run


WORDS = {
    "segment 0": ("wrap . --segment 0", "--segment 0", "at least 1"),
    "segment below 0": ("wrap . --segment -4", "--segment -4", "at least 1"),
    "segment no number": ("wrap . --segment abc", "--segment", "valid integer"),
    "top-k 0": ("wrap . --top-k 0", "--top-k 0", "at least 1"),
    "variant": ("wrap . --variant scc", "unknown variant 'scc'", "did you mean 'ssc'?"),
    "router": ("wrap . --router momnt", "unknown router 'momnt'", "did you mean 'moment'?"),
    "init": ("wrap . --init rest", "did you mean 'reset'?"),
    "task": ("eval . --task naih", "unknown task 'naih'", "did you mean 'niah'?"),
    "command": ("warp .", "No such command 'warp'", "'wrap'"),
    "option": ("wrap . --segmnt 3", "No such option: --segmnt", "--segment"),
    "no argument": ("wrap", "Missing argument 'MODEL'"),
    "too many": ("wrap . more", "unexpected extra argument"),
    "set key": ("wrap . --set topk=3", "--set", "'topk'", "did you mean 'top_k'?"),
    "set value": ("wrap . --set tau=soon", "'soon' is not a number"),
    "set form": ("wrap . --set tau", "expected key=value"),
    "both": ("wrap . --no-calibrate --calibrate config.json", "exclude each other"),
    "length": ("eval . --lengths 3y", "--lengths 3y", "2x"),
    "length 0": ("eval . --lengths 0", "at least 1"),
    "samples 0": ("eval . --samples 0", "--samples 0", "at least 1"),
    "depth": ("eval . --task mqar --depth 50", "leave the depth out"),
    "depth range": ("eval . --task niah --depth 150", "0 to 100"),
    "pairs": ("eval . --task niah --pairs 4", "--pairs", "mqar has"),
    "template": ("eval . --task niah --template rulr", "did you mean 'ruler'?"),
    "too short": ("eval . --task niah --lengths 20", "the smallest length that works"),
    "empty prompt": ("generate . --prompt=", "the prompt is empty"),
    "top-p": ("generate . --prompt x --top-p 0", "--top-p 0"),
    "two prompts": ("generate . --prompt x --prompt-file y", "exclude each other"),
    "device": ("eval . --device gpuu", "--device gpuu"),
    "shards": ("export . --shard-size big", "--shard-size big", "500MB"),
    "dtype": ("export . --dtype float8", "unknown dtype 'float8'"),
    "builtin": ("inspect builtin:glaa", "unknown builtin model 'glaa'"),
}


@pytest.mark.parametrize(
    ("line", "parts"), [(w[0], w[1:]) for w in WORDS.values()], ids=list(WORDS)
)
def test_wrong_requests_exit_2(run, line, parts):
    refused(run(*line.split()), 2, *parts)


def test_recipes_are_strict(run, folder):
    (folder / "r.yaml").write_text("segmnt: 64\n")
    refused(run("wrap", ".", "--recipe", "r.yaml"), 2, "r.yaml", "did you mean 'segment'?")
    (folder / "r.yaml").write_text("- 64\n")
    refused(run("wrap", ".", "--recipe", "r.yaml"), 2, "expected keys and values")
    (folder / "r.yaml").write_text("segment: {\n")
    refused(run("wrap", ".", "--recipe", "r.yaml"), 1, "r.yaml")


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _text(folder: Path) -> None:
    (folder / "model.safetensors").write_text("these are no weights")


def _config(**changes: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def _tensors(change):
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def _nan(tensors: dict) -> None:
    tensors["model.layers.1.attn.k_proj.weight"][0, 0] = torch.nan


def _wrong(tensors: dict) -> None:
    tensors["model.norm.weight"] = torch.ones(7)


def _alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    # with it the shapes would tell the rest
    _tensors(lambda t: t.pop("model.layers.0.attn.g_proj.weight"))(folder)


def _index(name: str):
    def write(folder: Path) -> None:
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


class _Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Bomb()}, folder / "model.pth", pickle_protocol=2)
    assert pickle  # what torch.save uses


FILES = {
    "truncated": (_truncate, "model.safetensors", "cut off"),
    "not safetensors": (_text, "model.safetensors", "not a safetensors file"),
    "unknown family": (_config(model_type="gllama"), "unknown model_type 'gllama'", "gla"),
    "no recurrent mixer": (_config(model_type="llama"), "no recurrent mixer"),
    "which config": (_alone, "--config"),
    "missing shard": (_index("model-00001.safetensors"), "model-00001.safetensors is missing"),
    "shard outside": (_index("../x.safetensors"), "as a shard"),
    "pickled code": (_pickled, "model.pth"),
    "missing tensor": (_tensors(lambda t: t.pop("model.norm.weight")), "1 tensor missing"),
    "surplus tensor": (_tensors(lambda t: t.update(x=torch.ones(1))), "1 tensor surplus (x)"),
    "wrong shape": (_tensors(_wrong), "model.norm.weight is [7], expected [32]"),
    "nan": (_tensors(_nan), "model.layers.1.attn.k_proj.weight", "NaN"),
}


@pytest.mark.parametrize(
    ("damage", "parts"), [(f[0], f[1:]) for f in FILES.values()], ids=list(FILES)
)
def test_damaged_models_exit_1(run, folder, damage, parts):
    damage(folder)
    if damage is not FILES["nan"][0]:
        refused(run("wrap", ".", "--no-calibrate"), 1, *parts)
        refused(run("inspect", "."), 1, *parts)
    refused(run("wrap", "."), 1, *parts)
    assert not (folder / "exploded").exists()


def test_outputs_and_inputs_that_are_not_there(run, folder):
    refused(run("wrap", "none.safetensors"), 1, "no such file or folder: none.safetensors")
    refused(run("wrap", ".", "--calibrate", "none.txt"), 1, "none.txt", "no such file")
    (folder / "short.txt").write_text("too short")
    refused(run("wrap", ".", "--calibrate", "short.txt"), 1, "fewer than two segments of 256")
    (folder / "taken").mkdir()
    refused(run("wrap", ".", "--out", "taken"), 1, "taken exists", "--force")
    # a folder that is nobody's is not replaced even with --force
    (folder / "taken" / "diary.txt").write_text("mine")
    refused(run("wrap", ".", "--out", "taken", "--force"), 1, "refusing to replace")
    refused(run("export", ".", "--out", "taken"), 1, "taken exists")
    refused(run("eval", ".", "--out", "no/rows.jsonl", "--lengths", 128), 1, "no/rows.jsonl")


def test_wrapped_folders_are_not_wrapped_again_and_must_fit(capsys, folder, run):
    wrap = runner(capsys)
    assert wrap("wrap", ".", "--no-calibrate", "--out", "w").status == 0
    refused(run("wrap", "w", "--out", "v"), 2, "w is a wrapped folder already")
    tensors = load_file("model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, "model.safetensors")
    refused(run("eval", "w"), 1, "not those that w was made from")
    refused(run("inspect", "w"), 1, "not those that w was made from")
    (folder / "w" / "caching.json").write_text("{")
    refused(run("generate", "w", "--prompt", "x"), 1, "caching.json")


def test_eval_refuses_what_does_not_fit_before_it_loads(run, tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "available", lambda device: 50_000_000)
    pico(tmp_path / "base")
    words = ("eval", str(tmp_path / "base"), "--task", "perplexity", "--lengths", "1m")
    refused(
        run(*words), 1, "perplexity at 1048576 tokens", "is predicted to need", "are free on cpu"
    )
