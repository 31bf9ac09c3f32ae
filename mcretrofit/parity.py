"""How far each family is from what it stands in for, measured on this machine where that can be."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from mcretrofit import registry, stock
from mcretrofit.catalogue import Family, entries
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.doctor import Finding
from mcretrofit.errors import RetrofitError
from mcretrofit.loading import load_model
from mcretrofit.memories import Streams
from mcretrofit.memories._scan import naive, scan
from mcretrofit.models._native import native_class
from mcretrofit.models._state import Context
from mcretrofit.retrofit import listening, mixers

TOLERANCE = 1e-5  # of the largest value: float32 sums in two orders
SECONDS = 300  # what one family of flash-linear-attention may take in Triton's interpreter
_SIZES = {"hidden_size": 32, "head_dim": 16, "num_heads": 4, "state_size": 8, "vocab_size": 64}
_SIZES |= {"num_hidden_layers": 2, "chunk_size": 16, "n_groups": 2}
_FLA, _TITANS = "flash-linear-attention", "titans-pytorch"


def findings() -> Iterator[Finding]:
    """A line for every family and reference as it is measured, the quick ones first.

    A reference that is not installed is named with what installs it.
    """
    families = entries("families")
    for family in families:
        if family.name == "mamba2":
            yield _apart(family.name, _mamba2(), "transformers' own class")
        if family.name == "neural_memory":
            yield _package(family.name, _TITANS, find_spec("titans_pytorch") is None)
        elif family.name not in stock.FAMILIES:
            yield _equations(family)
    yield from _stock([one.name for one in families if one.name in stock.FAMILIES])


def _apart(name: str, apart: float, reference: str) -> Finding:
    state = "ok" if apart <= TOLERANCE else "failed"
    return Finding(name, f"{apart:.1e} of the largest value apart", state, reference)


def _package(name: str, package: str, absent: bool) -> Finding:
    if absent:
        return Finding(name, f"{package} is not installed", "", f"pip install {package}")
    return _apart(name, _neural_memory(), package)


@torch.no_grad()
def _stock(names: list[str]) -> Iterator[Finding]:
    """Ours from the folders of stock flash-linear-attention: a prompt, then a decoded step."""
    lacks = stock.absent()
    if lacks:
        advice = f"pip install {' '.join(lacks)}"
        yield from (Finding(n, f"{' and '.join(lacks)} not installed", "", advice) for n in names)
        return
    with tempfile.TemporaryDirectory() as place:
        waiting = dict.fromkeys(names)
        try:
            for done in stock.results(Path(place), {n: stock.FAMILIES[n] for n in names}, SECONDS):
                waiting.pop(done.name)
                if done.error:
                    yield Finding(done.name, done.error, "failed", f"does not run in {_FLA}")
                else:
                    yield _apart(done.name, compared(Path(place) / done.name), _FLA)
        except RetrofitError as error:
            yield from (Finding(name, str(error), "warning", "not measured") for name in waiting)


@torch.no_grad()
def compared(folder: Path) -> float:
    """The largest difference of a `stock` case, relative: logits of the prompt and of one step."""
    from safetensors.torch import load_file

    model, want = load_model(open_checkpoint(folder)), load_file(folder / "results.safetensors")
    ids = want["ids"]
    first = model(ids[:, :-1], use_cache=True)
    step = model(ids[:, -1:], past_key_values=first.past_key_values).logits
    return max(_relative(first.logits, want["logits"]), _relative(step, want["step"]))


def _relative(got: Tensor, want: Tensor) -> float:
    apart = float((got - want).abs().max() / want.abs().max())
    return math.inf if math.isnan(apart) else apart


def _equations(family: Family) -> Finding:
    """A family that no package implements: its recurrence, one token after another."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "intermediate_size": 32}
    tiny = registry.load("models", family.name).tiny()
    model = DecoderForCausalLM(DecoderConfig(family.name, **{**sizes, **tiny})).start().eval()
    memories = {one.name: one.op.MEMORY for one in mixers(model)}
    if not memories:
        return Finding(family.name, "has no recurrence", "", family.parity)
    found: list[float] = []

    def hear(name: str, streams: Streams, valid: Tensor | None) -> None:
        got, want = (way(memories[name], streams)[0] for way in (scan, naive))
        found.append(_relative(got, want))

    with torch.no_grad(), listening(model, hear):
        model(torch.arange(75)[None] % 64, use_cache=False)
    return _apart(family.name, max(found), "no package has it: its equations, token by token")


@torch.no_grad()
def _mamba2() -> float:
    """transformers' own Mamba-2 on the processor, against ours that read its folder."""
    torch.manual_seed(0)
    kind = native_class("mamba2")
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    theirs = kind(kind.config_class(**_SIZES, **special)).eval()
    for parameter in theirs.parameters():
        parameter += torch.randn_like(parameter) * 0.1
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(open_checkpoint(folder))
    ids = torch.arange(75)[None] % 64
    return _relative(ours(ids).logits, theirs(ids).logits)


def titans_pair(**options: object) -> tuple[nn.Module, nn.Module]:
    """titans-pytorch's `NeuralMemory` and our mixer with its tensors."""
    from titans_pytorch import NeuralMemory

    torch.manual_seed(0)
    shared = {"heads": 2, "dim_head": 16, "batch_size": 4, "default_step_transform_max_lr": 0.3}
    shared |= options
    memory = NeuralMemory(dim=32, chunk_size=1, **shared)
    # the package's heads share their storage at first
    for parameter in memory.memory_model_parameters:
        parameter.data = parameter.data + torch.randn_like(parameter) * 0.1
    config = DecoderConfig("neural_memory", hidden_size=32, **shared)
    mixer = registry.load("models", "neural_memory").Mixer(config, 0)
    state = {n: t for n, t in memory.state_dict().items() if not n.startswith("memory_model.")}
    mixer.load_state_dict(state)
    return memory, mixer


@torch.no_grad()
def _neural_memory() -> float:
    """titans-pytorch's memory against ours, in float64: its network's steps are steep."""
    memory, mixer = (one.double() for one in titans_pair())
    x = torch.randn(2, 23, 32).double()
    return _relative(mixer(x, Context(None, torch.arange(23)[None], None)), memory(x)[0])
