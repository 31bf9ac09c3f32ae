"""A pretraining before it starts: parameters, tokens, steps, memory; no weight is allocated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from mcretrofit.errors import UsageError
from mcretrofit.pretrain import fresh
from mcretrofit.recipe import Recipe
from mcretrofit.retrofit import shapes
from mcretrofit.together import attach_

STATE = 16  # bytes of a parameter in float32: itself, its gradient and AdamW's two moments
LOGIT = {"fp32": 8, "bf16": 10}  # bytes of a logit and its gradient


def preview(recipe: Recipe, processes: int = 1) -> dict[str, Any]:
    """The numbers of a recipe; bytes are those of one of so many processes."""
    if recipe.batch % processes:
        raise UsageError(f"recipe: batch {recipe.batch} is not shared by {processes} processes")
    with torch.device("meta"):
        model = fresh(recipe)
        sizes = shapes(model)
        if recipe.cached is not None:
            attach_(model, recipe.cached)
    legs = recipe.legs()
    gates = sum(p.numel() for name, p in model.named_parameters() if ".mc." in name)
    total = sum(p.numel() for p in model.parameters())
    rows = min(recipe.rows or recipe.batch, recipe.batch // processes)
    tokens = rows * recipe.length
    parts = {"weights, gradients, AdamW": STATE * total}
    parts["logits"] = LOGIT[recipe.dtype] * tokens * recipe.vocab_size
    if recipe.cached is not None:
        ends = math.ceil(recipe.length / recipe.cached.segment)
        states = sum(heads * cached for heads, _, _, cached, _ in sizes.values())
        # every block's states are held until the way back, unless it is computed twice
        held = 1 / len(sizes) if recipe.checkpointing else 1
        parts["cached states"] = math.ceil(4 * states * ends * rows * held)
    width = 2 if recipe.dtype == "bf16" else 4
    parts["block inputs"] = width * tokens * model.config.hidden_size * len(model.model.layers)
    return {
        "family": recipe.family,
        "parameters": total,
        "gates": gates,
        "steps": sum(leg.last for leg in legs),
        "tokens_a_step": recipe.batch * recipe.length,
        "tokens": sum(_tokens(leg) for leg in legs),
        "sequences_at_once": rows,
        "accumulated": math.ceil(recipe.batch / processes / rows),
        "bytes": parts,
        "text": _text(recipe.text),
    }


def _tokens(leg: Recipe) -> int:
    """Of a leg, its shorter stages counted as they are."""
    left, found = leg.last, 0
    for steps, length in leg.stages:
        taken = min(steps, left)
        found, left = found + taken * (leg.batch * leg.length // length) * length, left - taken
    return found + left * leg.batch * leg.length


def _text(folder: str) -> str:
    place = Path(folder)
    files = sorted(place.rglob("*.txt")) if place.is_dir() else [place]
    files = [file for file in files if file.is_file()]
    if not files:
        return f"{folder}: no text here yet"
    return f"{folder}: {len(files)} files, {sum(f.stat().st_size for f in files):,} bytes"
