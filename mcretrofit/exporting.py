"""Write a live model as a complete Hugging Face folder, which loads with `trust_remote_code` alone.

It needs torch, transformers and safetensors: the modeling code lies beside the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mcretrofit._bundle import ENTRIES, bundle, native_bundle
from mcretrofit._shards import Stored, stored, write_weights
from mcretrofit.atomic import write_atomic_folder
from mcretrofit.beside import borrowed, carried
from mcretrofit.checkpoint import Checkpoint
from mcretrofit.decoder import DecoderForCausalLM
from mcretrofit.each import check_each
from mcretrofit.errors import RetrofitError, unknown
from mcretrofit.plan import Plan
from mcretrofit.rawfile import show
from mcretrofit.retrofit import Cover, mixers, plans
from mcretrofit.wrapped import sizes

DTYPE_NAMES = ("float32", "bfloat16", "float16")
_CACHING = ("caching", "covers")
_SIZES = {"heads": list, "total": int, "keys": int, "whiten": bool, "gate": bool}
_CARD = """---
library_name: transformers
tags: [memory-caching]
---
# {family} with {what}

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)

Made by mcretrofit (Memory Caching, arXiv 2602.24281).
"""


def export(
    model: nn.Module,
    target: Path,
    *,
    checkpoint: Checkpoint | None,
    force: bool = False,
    dtype: str | None = None,
    shard_size: int = 5_000_000_000,
    card: str = "",
    sources: Iterable[Path | str] = (),
    tensors: Mapping[str, Stored] | None = None,
) -> Path:
    """Write the folder atomically; `checkpoint` is where the model was read from.

    `tensors` take the place of the model's own, which then may be on the meta device. Weights keep
    the dtype that the checkpoint has them in, or take `dtype`; decays and `*.mc.*` are float32.
    `sources` are paths that `force` must not overwrite. Raises `RetrofitError`.
    """
    if not isinstance(model, PreTrainedModel):
        raise RetrofitError(
            f"{type(model).__name__} is no model of transformers: nothing to export"
        )
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise unknown("dtype", dtype, DTYPE_NAMES)
    if tensors is None:
        tensors = stored(model, checkpoint, None if dtype is None else getattr(torch, dtype))
    code, config = _code(model), _config(model, tensors, checkpoint)
    beside = carried(checkpoint) | borrowed(checkpoint, model)
    clash = sorted(code.keys() & beside.keys())
    if clash:
        raise RetrofitError(
            f"{beside[clash[0]]} has the name of a file of the exported code: rename it"
        )
    kept = [*sources, *([] if checkpoint is None else [checkpoint.path, *checkpoint.files()])]
    with write_atomic_folder(Path(target), force=force, sources=kept) as folder:
        for name, text in {
            **code,
            "README.md": card or _plain_card(model),
            "config.json": config,
        }.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, file in beside.items():
            shutil.copyfile(file, folder / name)
        if "generation_config.json" not in beside:
            model.generation_config.save_pretrained(folder)
        write_weights(folder, tensors, shard_size)
    return Path(target)


def described(model: nn.Module) -> dict[str, Any]:
    """`caching` and `covers` of a model's config.json: how it is wrapped, None where it is not."""
    found = plans(model)
    configs = {plan.config for plan in found.values()}
    if len(configs) > 1:
        raise RetrofitError("the model's mixers are wrapped in different ways: wrap it in one")
    covers = {name: _cover(plan) for name, plan in found.items()}
    caching = next((asdict(config) for config in configs), None)
    return {"caching": caching, "covers": covers if found else None}


def restore_(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Wrap a model read from an exported folder as the folder says, gate tensors included."""
    from mcretrofit.exported.attaching import attach_

    covers = checkpoint.config.get("covers") or {}
    check_covers(covers, checkpoint)
    attach_(model, checkpoint.config["caching"], covers)
    homes = {name: t for name, t in model.state_dict().items() if ".mc." in name}
    found = {name for name in checkpoint.names() if ".mc." in name}
    for name in sorted(homes.keys() ^ found):
        raise RetrofitError(f"{checkpoint.path}: tensor '{name}' does not fit config.json's covers")
    for name, home in homes.items():
        if checkpoint.shape(name) != tuple(home.shape):
            raise RetrofitError(f"{checkpoint.path}: tensor '{name}' is not {list(home.shape)}")
        home.copy_(checkpoint.read(name))


def check_covers(covers: Any, checkpoint: Checkpoint) -> None:
    """Refuse, before anything is made by its sizes, a `covers` that its own tensors contradict."""
    where, held = f"{checkpoint.path}: config.json: covers", set(checkpoint.names())
    if not isinstance(covers, dict):
        raise RetrofitError(f"{where} does not map mixers to what is cached of them")
    for name, cover in covers.items():
        if not isinstance(cover, dict) or _SIZES.keys() != cover.keys() - {"each"}:
            raise RetrofitError(f"{where}: {show(name)} has to hold {', '.join(_SIZES)}")
        wrong = [field for field, kind in _SIZES.items() if type(cover[field]) is not kind]
        heads = [] if wrong else cover["heads"]
        most = 0 if wrong else cover["total"]
        distinct = all(type(h) is int and 0 <= h < most for h in heads) and len(set(heads)) == len(
            heads
        )
        mask = f"{name}.mc.mask"
        sized = not heads or (
            mask in held and checkpoint.shape(mask) == (len(heads), cover["keys"])
        )
        if wrong or not distinct or not sized:
            raise RetrofitError(f"{where}: {show(name)} does not fit its tensors")
        check_each(cover.get("each"), len(heads), f"{where}: {show(name)}")


def _cover(plan: Plan) -> dict[str, Any]:
    gate = plan.gate
    cover = Cover(gate.heads, plan.total, gate.mask, each=plan.each)
    return {**sizes(cover), "whiten": gate.whiten is not None, "gate": gate.weight is not None}


def _code(model: PreTrainedModel) -> dict[str, str]:
    """The modeling code, by file name; a bare model of transformers' own class needs none."""
    if isinstance(model, DecoderForCausalLM):
        return bundle(_plugs(model, model.config.family))
    if not plans(model):
        return {}
    return native_bundle(_plugs(model), type(model).__name__, model.config.model_type)


def _plugs(model: PreTrainedModel, *families: str) -> dict[str, tuple[str, ...]]:
    """The modules of each folder that this very model needs."""
    found = list(plans(model).values())
    return {
        "models": families,
        "ops": tuple(sorted({one.op.__name__.rpartition(".")[2] for one in mixers(model)})),
        "routers": tuple(
            sorted({n for p in found for n in (p.config.router, *p.by_head("router"))})
        ),
        "aggregators": tuple(sorted({plan.config.preset.aggregator for plan in found})),
    }


def _config(
    model: PreTrainedModel, tensors: Mapping[str, Stored], checkpoint: Checkpoint | None
) -> str:
    ours = isinstance(model, DecoderForCausalLM)
    fields = _fields(model, None if ours else checkpoint)
    configuration, modeling = (name.rpartition(".")[2] for name in ENTRIES)
    most = max({one.dtype for one in tensors.values()}, key=lambda d: _bytes(tensors, d))
    name = "DecoderForCausalLM" if ours else type(model).__name__
    auto = {"AutoModelForCausalLM": f"{modeling}.{name}"}
    if ours:
        auto["AutoConfig"] = f"{configuration}.DecoderConfig"
    fields |= {"architectures": [name], "dtype": str(most).removeprefix("torch.")}
    if ours or plans(model):
        fields |= {"auto_map": auto, **described(model)}
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def _fields(model: PreTrainedModel, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """The configuration, as the checkpoint's file has it where there is one."""
    if checkpoint is not None:
        known = checkpoint.config
        return {k: v for k, v in known.items() if k not in ("auto_map", "torch_dtype", *_CACHING)}
    fields = json.loads(model.config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return fields


def _bytes(tensors: Mapping[str, Stored], dtype: torch.dtype) -> int:
    return sum(one.nbytes for one in tensors.values() if one.dtype == dtype)


def _plain_card(model: PreTrainedModel) -> str:
    wrapped = next(iter(plans(model).values()), None)
    what = "no caching" if wrapped is None else f"Memory Caching ({wrapped.config.variant})"
    family = getattr(model.config, "family", model.config.model_type)
    return _CARD.format(family=family, what=what)
