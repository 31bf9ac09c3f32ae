"""A model from a checkpoint: every tensor by its name, checked, none left to chance."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mcretrofit import registry
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.errors import RetrofitError, unknown
from mcretrofit.hosted import check_layers, load_host, misfit
from mcretrofit.models._infer import candidates, common, marked
from mcretrofit.models._layout import Layout, Part, unfused
from mcretrofit.models._match import match
from mcretrofit.rawfile import show

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mcretrofit.checkpoint import Checkpoint

_NOT_FIELDS = ("model_type", "family", "architectures", "auto_map", "transformers_version")
_NOT_FIELDS += ("dtype", "torch_dtype")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_HARMLESS = ("*.rotary.inv_freq", "*.attn.memory_model.*")
_GATES = ("*.mc.*",)  # an exported folder holds them too: `model.load` puts them in their place
_ALWAYS_WIDE = ("A_log", "dt_bias")


def load_model(
    checkpoint: Checkpoint, dtype: str | torch.dtype | None = None, device: str = "cpu"
) -> PreTrainedModel:
    """The checkpoint as a model in eval mode: our decoder, or transformers' own class.

    Without `dtype` the stored one is kept, except that a CPU computes half precision in float32;
    decays are float32 always. Raises RetrofitError for an unknown model type and for any tensor
    that is missing, surplus, of the wrong shape or not finite.
    """
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise unknown("dtype", dtype, _DTYPES)
        dtype = _DTYPES[dtype]
    found = _family(checkpoint)
    if found is None:
        return load_host(checkpoint, dtype, device)
    family, layout = found
    model = empty(checkpoint, family, layout)
    slots = _slots(model)
    tied = _tied(slots)
    for name in wanted(checkpoint, model, layout):
        tensor = _read(checkpoint, layout.parts[name])
        tensor = tensor.to(device, _dtype(name, tensor, dtype, device))
        _assign(model, slots.get(name) or slots[tied[name]], nn.Parameter(tensor))
    _check_whole(model)
    return _with_generation(model, checkpoint).eval()


def empty(checkpoint: Checkpoint, family: str, layout: Layout) -> DecoderForCausalLM:
    """The model on the meta device; RetrofitError where no model is as the configuration says."""
    fields = {k: v for k, v in layout.config.items() if k not in _NOT_FIELDS}
    check_layers(checkpoint, fields)
    try:
        with torch.device("meta"):
            return DecoderForCausalLM(DecoderConfig(family, **fields))
    except RetrofitError:
        raise
    # a field of a wrong type or size fails wherever it is first used, in any way
    except Exception as error:
        raise misfit(checkpoint, family, error) from error


def wanted(
    checkpoint: Checkpoint, model: nn.Module, layout: Layout, harmless: tuple[str, ...] = ()
) -> list[str]:
    """The model's names to load; RetrofitError for every tensor that is missing, surplus or wrong."""
    return match(
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        _Shapes(checkpoint.path, layout.parts),
        tied=_tied(_slots(model)),
        harmless=_HARMLESS + harmless + (_GATES if checkpoint.config.get("caching") else ()),
    )


def _tied(slots: dict[str, list[str]]) -> dict[str, str]:
    return {name: first for first, names in slots.items() for name in names if name != first}


def _family(checkpoint: Checkpoint) -> tuple[str, Layout] | None:
    """The family's name and where its tensors lie; None for a model type that is not ours."""
    config = checkpoint.config
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    modules = {name: registry.load("models", name) for name in registry.names("models")}
    kind = config.get("model_type")
    kind = config.get("family") if kind == DecoderConfig.model_type else kind
    if kind is not None and not isinstance(kind, str):
        raise RetrofitError(f"{checkpoint.path}: config.json's model_type is no text: {show(kind)}")
    fits = {n: m for n, m in modules.items() if kind is None or kind in (n, *m.MODEL_TYPES)}
    for name, module in fits.items():
        layout = module.from_layout(shapes, config) if hasattr(module, "from_layout") else None
        if layout is not None:
            return name, layout
    parts = unfused(shapes)
    if kind is None:
        family, inferred = _inferred(checkpoint, parts)
        return family, Layout({**inferred, **config}, parts)
    return next(((name, Layout(config, parts)) for name in fits), None)


def _inferred(checkpoint: Checkpoint, parts: dict[str, Part]) -> tuple[str, dict[str, Any]]:
    """Family and configuration of tensors in the FLA format; what they leave open is an error.

    Fields that a config.json without a model_type does name decide among what is open.
    """
    shapes = {name: part.shape for name, part in parts.items()}
    fields, families = common(shapes), marked(shapes)
    given = checkpoint.config
    fits: list[tuple[str, dict[str, Any]]] = []
    for family in families if fields is not None else ():
        for one in candidates(family, shapes, fields):
            if any(one.get(name, value) != value for name, value in given.items()):
                continue
            with suppress(RetrofitError):
                model = empty(checkpoint, family, Layout(one, {}))
                wanted(checkpoint, model, Layout(one, parts))
                fits.append((family, one))
    if len(fits) == 1:
        return fits[0]
    raise RetrofitError(
        f"{checkpoint.path}: no config.json names its model_type, and its tensors do not tell "
        f"{_open(fits)}; say which config: --config config.json"
    )


def _open(fits: list[tuple[str, dict[str, Any]]]) -> str:
    """The fields in which the configurations that fit differ."""
    if len({family for family, _ in fits}) != 1:
        return "its model_type and the fields of its family"
    first = fits[0][1]
    names = {n for _, one in fits for n in one.keys() | first if one.get(n) != first.get(n)}
    return f"{', '.join(sorted(names))} of a {fits[0][0]} model"


class _Shapes(NamedTuple):
    """What `match` asks of a checkpoint, by the model's names."""

    path: str
    parts: dict[str, Part]

    def names(self) -> list[str]:
        return list(self.parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.parts[name].shape


def _slots(model: nn.Module) -> dict[str, list[str]]:
    """Each parameter's first name -> all its names."""
    slots: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        slots.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in slots.values()}


def _assign(model: nn.Module, names: list[str], parameter: nn.Parameter) -> None:
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def _read(checkpoint: Checkpoint, part: Part) -> torch.Tensor:
    tensor = checkpoint.read(part.stored)
    if not tensor.is_floating_point():
        raise RetrofitError(
            f"{checkpoint.path}: tensor '{part.stored}' is {checkpoint.dtype(part.stored)}; "
            "quantised weights are not supported"
        )
    checkpoint.check_finite(part.stored, tensor)
    return part.convert(tensor).contiguous()


def _dtype(name: str, tensor: torch.Tensor, asked: torch.dtype | None, device: str) -> torch.dtype:
    widened = tensor.element_size() < 4 and torch.device(device).type == "cpu"
    chosen = asked or (torch.float32 if widened else tensor.dtype)
    narrow = chosen.itemsize < 4
    return torch.float32 if narrow and name.endswith(_ALWAYS_WIDE) else chosen


def _check_whole(model: nn.Module) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in named if tensor.is_meta]
    if empty:
        raise RetrofitError(f"{len(empty)} tensors were never loaded ({', '.join(empty[:3])})")


def _with_generation(model: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
    if checkpoint.folder is not None and (checkpoint.folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    return model
