"""transformers' own classes exported: wrapped on disk, streamed, read by one process without us."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from exported_reader import answers
from nativehosts import HOSTS, host
from safetensors.torch import load_file, save_file
from strangers import read_elsewhere
from torch import nn

from mcretrofit import streaming, wrapped
from mcretrofit.baseback import write_base
from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.config import CachingConfig
from mcretrofit.exporting import export
from mcretrofit.model import load
from mcretrofit.retrofit import Cover, every_head, retrofit_
from mcretrofit.streaming import stream

CACHING = CachingConfig(segment=16, margin=0.1, rule="plain", gate=True, rank=2)
# saved again by the process that loaded them and read in half precision; also written in shards
THOROUGH = ("qwen3_5_moe_text", "nemotron_h")
# a folder of Mamba-2 is read by our own decoder: of transformers' class there are live ones only
STREAMED = [name for name in HOSTS if name != "mamba2"]


def inputs() -> dict[str, torch.Tensor]:
    """Two rows of 46 tokens, the first one padded on the left; what follows ends a segment."""
    ids = torch.randint(1, 64, (2, 46), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    return {"ids": ids, "mask": mask, "steps": torch.tensor(4)}


def wrap_(model: nn.Module) -> dict[str, Cover]:
    """Some heads and channels cached, the gates not where they start; the same ones every time."""
    torch.manual_seed(2)
    covers = {}
    for name, cover in every_head(model).items():
        kept = cover.heads[1:] or cover.heads
        mask = 1 - (torch.arange(cover.mask.shape[1]) % 4 == 1).float().repeat(len(kept), 1)
        whiten = torch.randn(len(kept), *[mask.shape[1]] * 2)
        covers[name] = Cover(kept, cover.total, mask, torch.rand(len(kept)), None, whiten)
    retrofit_(model, CACHING, covers)
    for name, parameter in model.named_parameters():
        if ".mc." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return covers


def put(root: Path, name: str) -> None:
    """Base, wrapped folder, export, and what the live model answers."""
    base, place = root / "base" / name, root / "wrapped" / name
    host(name).save_pretrained(base)
    live, size = load(base).model, 20_000 if name in THOROUGH else 5_000_000_000
    covers = wrap_(live)
    save_file(answers(live, **inputs()), root / f"{name}.expected.safetensors")
    gates = {n: p.detach() for n, p in live.named_parameters() if ".mc." in n}
    why = {name: ["slow"] * cover.total for name, cover in covers.items()}
    wrapped.write(place, CACHING, open_checkpoint(base), covers, why, "", gates=gates)
    bare, tensors = stream(place)
    checkpoint = bare.checkpoint
    export(bare.model, root / name, checkpoint=checkpoint, shard_size=size, tensors=tensors)


def put_live(root: Path, name: str) -> None:
    """A live model that no folder stands behind."""
    model = copy.deepcopy(host(name))
    wrap_(model)
    save_file(answers(model, **inputs()), root / f"{name}.expected.safetensors")
    export(model, root / name, checkpoint=None)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hosts")
    for name in HOSTS:
        (put if name in STREAMED else put_live)(root, name)
    save_file(inputs(), root / "inputs.safetensors")
    (root / "cases.json").write_text(json.dumps({name: name in THOROUGH for name in HOSTS}))
    read_elsewhere(root)
    return root


@pytest.mark.parametrize("name", HOSTS)
def test_a_fresh_process_answers_alike(root, name):
    expected = load_file(root / f"{name}.expected.safetensors")
    found = load_file(root / f"{name}.found.safetensors")
    scale = float(expected["logits"].abs().max())
    for which in {"logits", "again"} & found.keys():
        torch.testing.assert_close(found[which], expected["logits"], rtol=0, atol=1e-6 * scale)
    for which in ("greedy", "sample", "beams"):
        assert torch.equal(found[which], expected[which]), which
    ids, mask = inputs()["ids"], inputs()["mask"]
    with torch.no_grad():
        base = host(name)(input_ids=ids, attention_mask=mask).logits
    apart = (base - expected["logits"])[1].abs().amax(-1)
    assert apart[:16].max() <= 1e-5 * scale and apart[16:].max() > 1e-4 * scale


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.mark.parametrize("name", STREAMED)
def test_the_folder_is_the_base_and_its_gates(root, name, tmp_path):
    base, out = open_checkpoint(root / "base" / name), open_checkpoint(root / name)
    before, after = tensors(base), tensors(out)
    assert all(torch.equal(tensor, after[n]) for n, tensor in before.items())
    assert {n for n in after if n not in before} == {n for n in after if ".mc." in n} != set()
    added = {"auto_map", "caching", "covers"}
    assert {k: v for k, v in out.config.items() if k not in added} == base.config
    assert (len(list((root / name).glob("*.safetensors"))) > 1) == (name in THOROUGH)
    # the way back, and the way on: our own commands read the folder, too
    back = open_checkpoint(write_base(root / name, tmp_path / "back"))
    assert back.config == base.config
    assert before.keys() == set(back.names())
    assert all(torch.equal(tensor, back.read(n)) for n, tensor in before.items())


def test_our_own_commands_read_it_and_write_it_again(root, tmp_path):
    name = THOROUGH[0]
    loaded, given = load(root / name), inputs()
    expected = load_file(root / f"{name}.expected.safetensors")["logits"]
    with torch.no_grad():
        logits = loaded.model(input_ids=given["ids"], attention_mask=given["mask"]).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    # a reader that knows nothing of caching has the base
    with torch.no_grad():
        plain = type(host(name)).from_pretrained(root / name)(given["ids"]).logits
        assert torch.equal(plain, host(name)(given["ids"]).logits)
    again = stream(root / name)
    export(again.loaded.model, tmp_path / "x", checkpoint=None, tensors=again.tensors)
    before, after = (tensors(open_checkpoint(p)) for p in (root / name, tmp_path / "x"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[n]) for n, tensor in before.items())


def test_a_dtype_is_written_where_asked_and_not_into_gates(root, tmp_path):
    streamed = stream(root / "wrapped" / "qwen3_next", dtype="bfloat16")
    found = streamed.loaded
    export(found.model, tmp_path / "x", checkpoint=found.checkpoint, tensors=streamed.tensors)
    out = open_checkpoint(tmp_path / "x")
    assert out.config["dtype"] == "bfloat16"
    for name in out.names():
        wide = ".mc." in name or name.endswith(("A_log", "dt_bias"))
        assert out.dtype(name) == ("F32" if wide else "BF16"), name
    # what nobody asks to change stays, decays of half precision too
    half = copy.deepcopy(host("qwen3_next")).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    kept = streaming._native(open_checkpoint(tmp_path / "half"), None)[1]
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}


def test_a_bare_model_is_loaded_first_and_written_without_code(root, tmp_path):
    base = open_checkpoint(root / "base" / "bamba")
    assert stream(root / "base" / "bamba") is None
    export(load(root / "base" / "bamba").model, tmp_path / "x", checkpoint=base)
    assert not list((tmp_path / "x").glob("*.py"))
    assert open_checkpoint(tmp_path / "x").config == base.config
    ids = inputs()["ids"]
    with torch.no_grad():
        got, want = (load(place).model(ids).logits for place in (tmp_path / "x", base.path))
    assert torch.equal(got, want)
