"""Parity with titans-pytorch's `NeuralMemory`, and what of that package is refused by name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from test_families import build, tokens
from test_memories import near

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.errors import RetrofitError
from mcretrofit.loading import load_model
from mcretrofit.models import neural_memory
from mcretrofit.models._state import Context, RecurrentCache
from mcretrofit.parity import titans_pair
from mcretrofit.tensorfile import write_safetensors

absent = pytest.mark.skipif(
    not find_spec("titans_pytorch"), reason="titans-pytorch not installed: nothing to compare with"
)


@absent
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"momentum": False}, {"heads": 1}])
def test_the_mixer_is_titans_pytorchs_memory(options):
    given = {**options, "dim_head": 32} if options.get("heads") == 1 else options
    memory, mixer = (one.double() for one in titans_pair(**given))
    x = torch.randn(2, 23, 32).double()
    want, _ = memory(x)
    near(mixer(x, Context(None, torch.arange(23)[None], None)), want, 1e-9)
    grads = [
        torch.autograd.grad(y.square().sum(), parameters)
        for y, parameters in (
            (want, list(memory.memory_model_parameters)),
            (
                mixer(x, Context(None, torch.arange(23)[None], None)),
                list(mixer.memory_model_parameters),
            ),
        )
    ]
    near(*grads, 1e-7)
    # their state and ours go on alike, call by call
    cache, state, start = RecurrentCache(), None, 0
    for size in (7, 1, 1, 8, 6):
        part, start = x[:, start : start + size], start + size
        got = mixer(part, Context(None, torch.arange(size)[None], cache))
        y, state = memory(part, state=state)
        near(got, y, 1e-9)


@absent
@torch.no_grad()
def test_checkpoints_with_the_packages_tensors_load(tmp_path):
    model = build("neural_memory", expansion_factor=4.0)
    model.save_pretrained(tmp_path)
    tensors = dict(model.state_dict())
    for i in range(2):
        memory, _ = titans_pair()
        tensors |= {f"model.layers.{i}.attn.{n}": t for n, t in memory.state_dict().items()}
        tensors[f"model.layers.{i}.attn.memory_model.model.weights.0"] = torch.zeros(3)
    (tmp_path / "model.safetensors").unlink()
    write_safetensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    loaded = load_model(open_checkpoint(tmp_path))
    name = "model.layers.1.attn.to_keys.weight"
    assert torch.equal(loaded.state_dict()[name], tensors[name])
    assert loaded(tokens(9)).logits.isfinite().all()
    tensors["model.layers.1.attn.transition_gate"] = torch.zeros(1)
    write_safetensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(RetrofitError, match=r"surplus \(model.layers.1.attn.transition_gate\)"):
        load_model(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_size", 4),
        ("depth", 3),
        ("momentum_order", 2),
        ("spectral_norm_surprises", True),
        ("batch_size", None),
    ],
)
def test_what_changes_the_rule_is_refused(name, value):
    config = DecoderConfig("neural_memory", **{**neural_memory.tiny(), name: value})
    with pytest.raises(RetrofitError, match=f"config: {name} is {value}.*mapped"):
        DecoderForCausalLM(config)


def test_other_layouts_are_refused_by_name(tmp_path):
    mark, place = "to_adaptive_step.0.weight", tmp_path / "model.safetensors"
    for names, message in (
        ([mark], "bare NeuralMemory"),
        ([f"layers.0.4.{mark}", "token_emb.weight"], "'token_emb.weight'.*MemoryAsContext"),
    ):
        write_safetensors(place, {n: torch.zeros(2, 2) for n in names}, {"format": "pt"})
        for config in ("{}", '{"model_type": "neural_memory"}'):
            (tmp_path / "config.json").write_text(config)
            with pytest.raises(RetrofitError, match=message):
                load_model(open_checkpoint(tmp_path))
        place.unlink()
