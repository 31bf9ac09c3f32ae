"""Exported folders: read by a fresh process without mcretrofit, and what the exporter refuses."""

from __future__ import annotations

import ast
import errno
import json
import sys
from pathlib import Path

import pytest
import torch
from exported_reader import answers
from lawmodels import NAMES
from safetensors.torch import load_file, save_file
from strangers import read_elsewhere
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from mcretrofit import _bundle, _shards, registry
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.config import CachingConfig
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.exporting import export, restore_
from mcretrofit.loading import load_model
from mcretrofit.retrofit import Cover, mixers, retrofit_, shapes

VOCABULARY = 64
SSC = {"variant": "ssc", "router": "moment", "init": "carry_delta", "segment": 16}
CASES = {
    **{f"{family}-ssc": (family, SSC, {}) for family in NAMES},
    **{f"{family}-plain": (family, None, {}) for family in registry.names("models")},
    "gla-grm": ("gla", {"variant": "grm", "router": "mean", "init": "reset", "rule": "plain"}, {}),
    "gla-loglinear": (
        "gla",
        {"variant": "loglinear", "whiten": True},
        {"tie_word_embeddings": True},
    ),
    "gla-gate": ("gla", {"variant": "ssc", "gate": True, "rule": "plain"}, {}),
    "titans-soup": (
        "titans",
        {"variant": "soup", "router": "mean", "init": "reset", "rule": "plain", "gate": True},
        {},
    ),
    "dla-loglinear": ("dla", {"variant": "loglinear", "init": "carry"}, {"memory": "linear"}),
    "gla-average": ("gla", {"variant": "ma", "init": "carry"}, {}),
    "gla-plain": ("gla", None, {"tie_word_embeddings": True}),
    "gated_deltanet-grm": (
        "gated_deltanet",
        {"variant": "grm", "router": "energy", "init": "reset"},
        {},
    ),
    "gla-byhead": (
        "gla",
        {
            "each": {"router": ["moment", "rare"], "init": ["carry", "reset"]},
            "variant": "loglinear",
        },
        {},
    ),
    "delta_net-byhead": (
        "delta_net",
        {"each": {"router": ["energy", "rare"], "top_k": [1, 3], "temperature": [None, 1.0]}},
        {},
    ),
    "gated_deltanet-loglinear": ("gated_deltanet", {"variant": "loglinear"}, {}),
    "gated_deltanet-shards": ("gated_deltanet", SSC, {"tie_word_embeddings": True}),
}

# saved again by the process that loaded them, and loaded in half precision
THOROUGH = ("gla-loglinear", "gated_deltanet-shards", "gla-plain", "linear_attn-ssc")


def build(family: str, **fields: object) -> DecoderForCausalLM:
    """A tiny model, every parameter away from its special starting value."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    tiny = registry.load("models", family).tiny()
    model = DecoderForCausalLM(DecoderConfig(family, **{**sizes, **tiny, **fields})).start()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model.eval()


def wrap(
    model: DecoderForCausalLM, each: dict[str, list] | None = None, **fields: object
) -> DecoderForCausalLM:
    """Cache all heads of the first mixer and one of the last, some channels left out of both."""
    config = CachingConfig(**{"segment": 16, "margin": 0.1, **fields})
    covers = {}
    for name, (heads, keys, *_) in shapes(model).items():
        cached = list(range(heads)) if not covers else [heads - 1]
        # a network is cached whole
        some = not hasattr(mixers(model)[0].op.MEMORY, "read")
        mask = 1 - some * (torch.arange(keys) % 4 == 1).float().repeat(len(cached), 1)
        mean, std = torch.rand(len(cached)) * 0.1, 0.5 + torch.rand(len(cached))
        whiten = torch.randn(len(cached), keys, keys) if config.whiten else None
        own = each and {setting: column[-len(cached) :] for setting, column in each.items()}
        covers[name] = Cover(cached, heads, mask, mean, std, whiten, own)
    retrofit_(model, config, covers)
    for name, parameter in model.named_parameters():
        if ".mc." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs() -> dict[str, torch.Tensor]:
    """Two rows of 75 tokens, off every boundary, the first one padded on the left."""
    ids = torch.randint(1, VOCABULARY, (2, 75), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :22] = 0
    return {"ids": ids, "mask": mask}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """All cases exported, then read in one fresh process that knows nothing of us."""
    root = tmp_path_factory.mktemp("exported")
    for case, (family, caching, fields) in CASES.items():
        model = build(family, **fields)
        model = model if caching is None else wrap(model, **caching)
        expected = answers(model, **inputs())
        tied = torch.tensor(model.lm_head.weight is model.model.embeddings.weight)
        save_file({**expected, "tied": tied}, root / f"{case}.expected.safetensors")
        size = 20_000 if case.endswith("shards") else 5_000_000_000
        export(model, root / case, checkpoint=None, shard_size=size)
    save_file(inputs(), root / "inputs.safetensors")
    (root / "cases.json").write_text(json.dumps({case: case in THOROUGH for case in CASES}))
    read_elsewhere(root)
    return root


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_process_answers_alike(root, case):
    expected = load_file(root / f"{case}.expected.safetensors")
    found = load_file(root / f"{case}.found.safetensors")
    scale = float(expected["logits"].abs().max())
    for name in {"logits", "again"} & found.keys():
        torch.testing.assert_close(found[name], expected["logits"], rtol=0, atol=1e-6 * scale)
    for name in ("greedy", "sample", "beams", "tied"):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("case", CASES)
def test_folders_hold_what_they_should(root, case):
    _, caching, fields = CASES[case]
    config = json.loads((root / case / "config.json").read_text())
    assert config["model_type"] == "mcretrofit" and config["dtype"] == "float32"
    assert (config["caching"] is None) == (caching is None)
    names = set(open_checkpoint(root / case).names())
    assert ("lm_head.weight" in names) != bool(fields.get("tie_word_embeddings"))
    assert any(".mc." in name for name in names) == (caching is not None)
    assert (root / case / "README.md").is_file() and (
        root / case / "generation_config.json"
    ).is_file()
    assert len(list((root / case).glob("*.safetensors"))) > 1 or not case.endswith("shards")


@pytest.mark.parametrize("case", CASES)
def test_code_is_found_by_transformers_and_needs_nothing_else(root, case):
    code = {path.name for path in (root / case).glob("*.py")}
    for entry in ("configuration_mcretrofit.py", "modeling_mcretrofit.py"):
        reached = {Path(f).name for f in get_relative_import_files(root / case / entry)}
        assert reached <= code
        assert code - reached <= {entry, "modeling_mcretrofit.py"}
    for path in (root / case).glob("*.py"):
        first, second = path.read_text().split("\n")[:2]
        assert first.startswith("# generated by mcretrofit ") and second.startswith('"""')
        strangers = set(get_imports(path)) - set(sys.stdlib_module_names)
        assert strangers <= {"torch", "transformers"}


def test_only_what_the_model_needs_is_bundled(root):
    code = {path.stem for path in (root / "gated_deltanet-grm").glob("mc_*.py")}
    assert {"mc_models_gated_deltanet", "mc_ops_gated_delta_rule", "mc_routers_energy"} <= code
    assert not {"mc_models_gla", "mc_memories_linear", "mc_routers_moment", "mc_checkpoint"} & code


def test_imports_are_rewritten_and_nothing_else():
    source = '''"""Text: from mcretrofit import nothing."""
from mcretrofit.memories import (
    Streams,
    linear as kept,
)  # why
def late():
    x = "from mcretrofit.errors import unknown"; from mcretrofit import rules
    return x
'''
    text, needed = _bundle.flatten("mcretrofit.somewhere", source)
    assert needed == {"mcretrofit.memories", "mcretrofit.memories.linear", "mcretrofit.rules"}
    expected = source.replace("from mcretrofit import rules", "from . import mc_rules as rules")
    start, end = expected.index("from mcretrofit.memories"), expected.index("  # why")
    lines = "from .mc_memories import Streams\nfrom . import mc_memories_linear as kept"
    assert text == expected[:start] + lines + expected[end:]
    ast.parse(text)
    with pytest.raises(RetrofitError, match="line 1"):
        _bundle.flatten("mcretrofit.somewhere", "import mcretrofit.rules")


def test_half_precision_checkpoints_stay_bit_equal(tmp_path):
    model = build("gated_deltanet")
    for name, parameter in model.named_parameters():
        parameter.data = (
            parameter.data if name.endswith(("A_log", "dt_bias")) else parameter.data.bfloat16()
        )
    model.save_pretrained(tmp_path / "base")
    before = load_file(tmp_path / "base" / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "base")
    live = wrap(load_model(checkpoint))
    assert live.lm_head.weight.dtype == torch.float32
    after = load_file(export(live, tmp_path / "out", checkpoint=checkpoint) / "model.safetensors")
    gates = {name for name in after if ".mc." in name}
    assert after.keys() - gates == before.keys() and gates
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
    assert {after[name].dtype for name in gates} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    half = load_file(
        export(live, tmp_path / "f16", checkpoint=checkpoint, dtype="float16") / "model.safetensors"
    )
    assert half["lm_head.weight"].dtype == torch.float16


def test_an_exported_folder_is_wrapped_again(root):
    case = "gla-loglinear"
    checkpoint = open_checkpoint(root / case)
    again = build("gla", tie_word_embeddings=True)
    restore_(again, checkpoint)
    expected = load_file(root / f"{case}.expected.safetensors")
    given = inputs()
    logits = again(given["ids"], attention_mask=given["mask"]).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-6)


def test_tokenizer_and_settings_travel(tmp_path):
    model = build("gla")
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"max_new_tokens": 3}')
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "rwkv_vocab_v20230424.txt").write_text("1 'a' 1\n")
    settings = {"auto_map": {"AutoTokenizer": ["own_tokenizer.Own", None]}}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "base" / "own_tokenizer.py").write_text("Own = None\n")
    (tmp_path / "base" / "notes.txt").write_text("private")
    export(
        model, tmp_path / "out", checkpoint=open_checkpoint(tmp_path / "base"), card="# Measured\n"
    )
    for name in (
        "tokenizer.json",
        "rwkv_vocab_v20230424.txt",
        "tokenizer_config.json",
        "own_tokenizer.py",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "max_new_tokens": 3
    }
    assert (tmp_path / "out" / "README.md").read_text() == "# Measured\n"
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_refusals_leave_everything_as_it_was(tmp_path, monkeypatch):
    model = build("gla")
    model.save_pretrained(tmp_path / "base")
    base = open_checkpoint(tmp_path / "base")
    before = {p.name: p.read_bytes() for p in (tmp_path / "base").iterdir()}
    export(model, tmp_path / "out", checkpoint=base)
    with pytest.raises(RetrofitError, match="--force"):
        export(model, tmp_path / "out", checkpoint=base)
    export(model, tmp_path / "out", checkpoint=base, force=True)
    with pytest.raises(RetrofitError, match="made from it"):
        export(model, tmp_path / "base", checkpoint=base, force=True)
    with pytest.raises(RetrofitError, match="made from it"):
        export(model, tmp_path / "out", checkpoint=None, force=True, sources=[tmp_path / "out"])
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        export(model, tmp_path / "new", checkpoint=base, dtype="bfloat")
    with pytest.raises(RetrofitError, match="no model of transformers"):
        export(torch.nn.Linear(2, 2), tmp_path / "new", checkpoint=None)

    def full(stored: _shards.Stored) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_shards, "_raw", full)
    with pytest.raises(RetrofitError, match="No space left"):
        export(model, tmp_path / "new" / "deep", checkpoint=base)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "base").iterdir()} == before
