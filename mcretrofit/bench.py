"""What caching costs: one pass and one decode step against the unmodified model, side by side.

Ratios of times taken in one run, never seconds across runs: of a wrapped model, or of random weights
in a slice of a real shape.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mcretrofit.config import CachingConfig
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.evaluate import read_pieces, segment_bytes
from mcretrofit.registry import load
from mcretrofit.retrofit import Cover, every_head, paused, retrofit_, revert_

STEPS = 16  # decode steps that one figure is the median of


class Shape(NamedTuple):
    """A slice of a model: the default is four layers of a 130M one."""

    family: str = "gated_deltanet"
    layers: int = 4
    width: int = 768
    heads: int = 6
    vocabulary: int = 32000


class Row(NamedTuple):
    """One line of the bench; ratios are to the unmodified model."""

    what: str
    prefill_seconds: float
    prefill_ratio: float
    step_seconds: float
    step_ratio: float
    cache_bytes: int


def model_of(shape: Shape) -> DecoderForCausalLM:
    """A decoder with random weights whose heads are `width / heads` wide."""
    head = shape.width // shape.heads
    fields = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "expand_v": 1.0,
        "expand_k": 1.0,
        "head_dim": head,
    }
    known = {**load("models", shape.family).DEFAULTS, "hidden_size": 0, "num_hidden_layers": 0}
    known["vocab_size"] = 0
    kept = {name: value for name, value in fields.items() if name in known}
    torch.manual_seed(0)
    return DecoderForCausalLM(DecoderConfig(shape.family, **kept)).eval().start()


def attention_of(shape: Shape) -> nn.Module:
    """Softmax attention of the same shape (a Llama of transformers)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=8 * shape.width // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=1 << 20,
    )
    return LlamaForCausalLM(config).eval()


def half(covers: dict[str, Cover]) -> dict[str, Cover]:
    """The first half of every mixer's heads."""
    return {
        name: c._replace(heads=c.heads[: c.total // 2], mask=c.mask[: c.total // 2])
        for name, c in covers.items()
    }


def bench(
    shape: Shape, length: int, segment: int, repeats: int = 3, tick: Callable[[str], None] = print
) -> Iterator[Row]:
    """Rows for the base, `ssc` with all and half of the heads, `grm`, and softmax attention."""
    model = model_of(shape)
    covers = every_head(model)
    cases = {
        "ssc, all heads": (CachingConfig(variant="ssc", segment=segment), covers),
        "ssc, half of the heads": (CachingConfig(variant="ssc", segment=segment), half(covers)),
        "grm, all heads": (CachingConfig(variant="grm", segment=segment), covers),
    }
    ids = torch.randint(
        0, shape.vocabulary, (1, length), generator=torch.Generator().manual_seed(0)
    )
    times: dict[str, list[tuple[float, float]]] = {"unmodified": [], **{c: [] for c in cases}}
    sizes = dict.fromkeys(times, 0)
    for _ in range(repeats):  # interleaved, so that a busy moment does not fall on one case alone
        for what in times:
            tick(what)
            if what != "unmodified":
                retrofit_(model, *cases[what])
            prefill, step, sizes[what] = _measure(model, ids, _whole)
            times[what].append((prefill, step))
            revert_(model)
    base = _best(times["unmodified"])
    for what, taken in times.items():
        yield _row(what, _best(taken), base, sizes[what])
    tick("softmax attention")
    prefill, step, _ = _measure(attention_of(shape), ids, _whole)
    held = 2 * shape.layers * length * shape.width * 4
    yield _row("softmax attention", (prefill, step), base, held)


def bench_wrapped(
    name: str, model: nn.Module, ids: torch.Tensor, repeats: int, tick: Callable[[str], None]
) -> list[Row]:
    """Rows for a wrapped model without its caching and with it, on a prompt `ids [1, T]`.

    The prompt is read in the pieces that `eval` reads; the steps go on greedily.
    """
    bare, cached = [], []
    for _ in range(repeats):  # one beside the other, so that a busy moment falls on both
        tick(name)
        with paused(model):
            bare.append(_measure(model, ids, _pieces))
        cached.append(_measure(model, ids, _pieces))
    base = _best(bare)
    return [
        _row(f"{name}, unmodified", base, base, bare[-1].held),
        _row(name, _best(cached), base, cached[-1].held),
    ]


class _Taken(NamedTuple):
    prefill: float
    step: float
    held: int  # bytes of segments behind the prompt


def _whole(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return out.logits, out.past_key_values


def _pieces(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    *_, (_, logits, cache) = read_pieces(model, ids, None, keep=1)
    return logits, cache


@torch.no_grad()
def _measure(model: nn.Module, ids: torch.Tensor, read: Callable) -> _Taken:
    started = time.perf_counter()
    logits, cache = read(model, ids)
    token = int(logits[0, -1].argmax())  # a device has to be done by then
    prefill = time.perf_counter() - started
    held, steps = segment_bytes(cache), []
    for _ in range(STEPS):
        started = time.perf_counter()
        out = model(input_ids=ids.new_tensor([[token]]), past_key_values=cache, use_cache=True)
        token = int(out.logits[0, -1].argmax())
        steps.append(time.perf_counter() - started)
    return _Taken(prefill, statistics.median(steps), held)


def _best(taken: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    return min(t[0] for t in taken), min(t[1] for t in taken)


def _row(what: str, taken: tuple[float, float], base: tuple[float, float], held: int) -> Row:
    return Row(what, taken[0], taken[0] / base[0], taken[1], taken[1] / base[1], held)
