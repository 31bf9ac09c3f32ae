"""A model from a checkpoint: every tensor by its name, checked, none left to chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from mcretrofit import registry
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.errors import RetrofitError, unknown
from mcretrofit.models._layout import Layout, Part
from mcretrofit.models._match import match
from mcretrofit.models._native import native_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mcretrofit.checkpoint import Checkpoint

_NOT_FIELDS = ("model_type", "family", "architectures", "auto_map", "transformers_version")
_NOT_FIELDS += ("dtype", "torch_dtype")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_HARMLESS = ("*.rotary.inv_freq",)
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
        return _native(checkpoint, dtype, device)
    family, layout = found
    fields = {k: v for k, v in layout.config.items() if k not in _NOT_FIELDS}
    with torch.device("meta"):
        model = DecoderForCausalLM(DecoderConfig(family, **fields))
    slots = _slots(model)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tied = {name: first for first, names in slots.items() for name in names if name != first}
    for name in match(
        expected,
        _Shapes(checkpoint.path, layout.parts),
        tied=tied,
        harmless=_HARMLESS + (_GATES if checkpoint.config.get("caching") else ()),
    ):
        tensor = _read(checkpoint, layout.parts[name])
        tensor = tensor.to(device, _dtype(name, tensor, dtype, device))
        _assign(model, slots.get(name) or slots[tied[name]], nn.Parameter(tensor))
    _check_whole(model)
    return _with_generation(model, checkpoint).eval()


def _family(checkpoint: Checkpoint) -> tuple[str, Layout] | None:
    """The family's name and where its tensors lie; None for a model type that is not ours."""
    config = checkpoint.config
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    modules = {name: registry.load("models", name) for name in registry.names("models")}
    kind = config.get("model_type")
    kind = config.get("family") if kind == DecoderConfig.model_type else kind
    fits = {n: m for n, m in modules.items() if kind is None or kind in (n, *m.MODEL_TYPES)}
    for name, module in fits.items():
        layout = module.from_layout(shapes, config) if hasattr(module, "from_layout") else None
        if layout is not None:
            return name, layout
    if kind is None:
        raise RetrofitError(
            f"{checkpoint.path}: no config.json names its model_type; "
            "say which config: --config config.json"
        )
    parts = {name: Part(name, tuple(shape)) for name, shape in shapes.items()}
    return next(((name, Layout(config, parts)) for name in fits), None)


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


def _native(checkpoint: Checkpoint, dtype: torch.dtype | None, device: str) -> PreTrainedModel:
    """transformers' own class from the folder; a tensor it would have made up is an error."""
    found = native_class(checkpoint.config["model_type"])
    if checkpoint.folder is None:
        raise RetrofitError(
            f"{checkpoint.path}: this model type is loaded from a folder with its config.json"
        )
    if dtype is None:
        half = any(checkpoint.dtype(name) in ("BF16", "F16") for name in checkpoint.names())
        dtype = torch.float32 if half and torch.device(device).type == "cpu" else "auto"
    model, report = found.from_pretrained(
        checkpoint.folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    for fault in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, report[fault]))
        if names:
            what = f"{len(names)} {fault.replace('_', ' ')} ({', '.join(names[:3])})"
            raise RetrofitError(f"{checkpoint.path} does not fit the model: {what}")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise RetrofitError(f"{checkpoint.path}: tensor '{name}' has values NaN or infinite")
    return model.to(device).eval()
