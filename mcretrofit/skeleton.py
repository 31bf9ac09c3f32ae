"""A checkpoint's model without its weights: on the meta device, headers checked against it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from mcretrofit import loading
from mcretrofit.checkpoint import Checkpoint
from mcretrofit.decoder import DecoderForCausalLM
from mcretrofit.errors import RetrofitError
from mcretrofit.hosted import host_skeleton
from mcretrofit.memories import Streams
from mcretrofit.memories._scan import sizes
from mcretrofit.retrofit import listening, mixers, shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADDED = "*.mc.*"


class Mixer(NamedTuple):
    """A recurrent mixer's place and size; of a head's state `cached` and `running` are numbers."""

    name: str
    heads: int
    keys: int
    values: int
    cached: int
    running: int

    @property
    def deep(self) -> bool:
        """Whether a state is a network."""
        return self.cached > self.keys * self.values


class Skeleton(NamedTuple):
    """What headers and configuration tell of a model."""

    family: str
    model: PreTrainedModel  # on the meta device: shapes, no memory
    mixers: list[Mixer]
    layers: int
    parameters: int
    dtype: str  # of most of the weights, as a safetensors code


def skeleton(checkpoint: Checkpoint) -> Skeleton:
    """Check names and shapes against the family, reading no tensor.

    Raises `RetrofitError` as loading would, but for values (NaN) and, in transformers' own classes,
    for tensors: their names change on the way into the class.
    """
    found = loading._family(checkpoint)
    if found is None:
        family, model = checkpoint.config["model_type"], host_skeleton(checkpoint)
    else:
        family, model = _ours(checkpoint, *found)
    if not mixers(model):
        raise RetrofitError(f"{checkpoint.path}: {family} has no recurrent mixer to retrofit")
    made = [Mixer(name, *size) for name, size in (shapes if found else _alone)(model).items()]
    base = [name for name in checkpoint.names() if ".mc." not in name]
    count = {name: prod(checkpoint.shape(name)) for name in base}
    kinds: dict[str, int] = {}
    for name in base:
        kind = checkpoint.dtype(name)
        kinds[kind] = kinds.get(kind, 0) + count[name]
    layers = model.config.get_text_config().num_hidden_layers
    return Skeleton(family, model, made, layers, sum(count.values()), max(kinds, key=kinds.get))


def _ours(
    checkpoint: Checkpoint, family: str, layout: loading.Layout
) -> tuple[str, DecoderForCausalLM]:
    model = loading.empty(checkpoint, family, layout).eval()
    loading.wanted(checkpoint, model, layout, (ADDED,))
    return family, model


def _alone(model: PreTrainedModel) -> dict[str, tuple[int, int, int, int, int]]:
    """As `shapes`, each mixer alone; what is around it may not run on meta."""
    seen: dict[str, tuple[int, int, int, int, int]] = {}
    memories = {one.name: one.op.MEMORY for one in mixers(model)}

    def hear(name: str, streams: Streams, valid: torch.Tensor | None) -> None:
        seen[name] = sizes(streams, memories[name])

    token = torch.zeros(1, 1, model.config.get_text_config().hidden_size, device="meta")
    with torch.no_grad(), listening(model, hear):
        for one in mixers(model):
            one.module(hidden_states=token.to(next(one.module.parameters()).dtype))
    return seen
