"""transformers' own class around a checkpoint's folder: its skeleton, and the model itself."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from mcretrofit.errors import RetrofitError
from mcretrofit.models._native import native_class
from mcretrofit.rawfile import show

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mcretrofit.checkpoint import Checkpoint


def check_layers(checkpoint: Checkpoint, fields: dict[str, Any]) -> None:
    """Refuse more layers than there are tensors, before any is built: each has one of its own."""
    layers, held = fields.get("num_hidden_layers"), len(checkpoint.names())
    if isinstance(layers, int) and not 0 < layers <= held:
        raise RetrofitError(
            f"{checkpoint.path}: config.json says {layers} layers, but there are {held} tensors"
        )


def misfit(checkpoint: Checkpoint, kind: str, error: Exception) -> RetrofitError:
    """One line in place of whatever a configuration made a class raise."""
    reason = show(next(iter(str(error).splitlines()), "") or type(error).__name__)
    return RetrofitError(f"{checkpoint.path}: its config.json describes no {kind} model: {reason}")


def host_skeleton(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model on the meta device.

    Raises RetrofitError where its config.json describes none, or one of another size than its
    tensors: transformers makes room for what is missing, and fills it, before it tells.
    """
    kind = checkpoint.config["model_type"]
    found = native_class(kind)
    if checkpoint.folder is None:
        raise RetrofitError(
            f"{checkpoint.path}: this model type is read from a folder with its config.json"
        )
    check_layers(checkpoint, checkpoint.config)
    try:
        # from its file: read by itself, infinity would be a dictionary
        config = found.config_class.from_pretrained(checkpoint.folder, local_files_only=True)
        with torch.device("meta"):
            model = found(config).eval()
    except Exception as error:
        raise misfit(checkpoint, kind, error) from error
    asked = sum(parameter.numel() for parameter in model.parameters())
    held = sum(prod(checkpoint.shape(name)) for name in checkpoint.names())
    # what little is missing, loading names; tensors are fused and split on the way into the class
    if asked > 2 * held:
        raise RetrofitError(
            f"{checkpoint.path} does not fit the model: its config.json asks for {asked} numbers, "
            f"its tensors hold {held}"
        )
    return model


def load_host(checkpoint: Checkpoint, dtype: torch.dtype | None, device: str) -> PreTrainedModel:
    """The model from the folder; a tensor that transformers would have made up is an error."""
    kind = type(host_skeleton(checkpoint))
    if dtype is None:
        half = any(checkpoint.dtype(name) in ("BF16", "F16") for name in checkpoint.names())
        dtype = torch.float32 if half and torch.device(device).type == "cpu" else "auto"
    try:
        model, report = kind.from_pretrained(
            checkpoint.folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise misfit(checkpoint, checkpoint.config["model_type"], error) from error
    for fault in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, report[fault]))
        if names:
            what = f"{len(names)} {fault.replace('_', ' ')} ({', '.join(names[:3])})"
            raise RetrofitError(f"{checkpoint.path} does not fit the model: {what}")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise RetrofitError(f"{checkpoint.path}: tensor '{name}' has values NaN or infinite")
    return model.to(device).eval()
