"""The steps of a pretraining: batches, loss, learning rate, and what a leg keeps to go on after a kill.

Several processes share a step: each computes its rows of the batch, and their gradients add up to those
of one process that has all rows.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcretrofit.corpus import Corpus, sequence
from mcretrofit.decoder import DecoderForCausalLM
from mcretrofit.errors import RetrofitError
from mcretrofit.ranks import World
from mcretrofit.recipe import LATER, Recipe

ALONE = World()


class Losses(NamedTuple):
    """Weighted loss, prose loss and right answers as sums over tokens, and how many of each."""

    loss: Tensor
    prose: Tensor
    right: Tensor
    weight: Tensor
    plain: Tensor
    asked: Tensor


def batch(data: Corpus, recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
    """The ids `[B, length + 1]` and loss weights `[B, length]` of a step."""
    rng = random.Random(recipe.seed * 1_000_003 + step)
    count, length = recipe.shape(step)
    kinds = rng.choices(list(recipe.mix), list(recipe.mix.values()), k=count)
    rows = [sequence(data, k, length, recipe.answer_weight, rng) for k in kinds]
    return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


def losses(
    model: DecoderForCausalLM, ids: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The weighted loss, and prose loss and answer accuracy (share of answer tokens) for the log."""
    found = sums(model, ids, weights)
    return found.loss / found.weight, told(torch.stack(found).detach().tolist())


def sums(model: DecoderForCausalLM, ids: Tensor, weights: Tensor) -> Losses:
    """What `losses` divides, so that parts of a batch can be added."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(
        weights
    )
    plain, asked = weights == 1, weights > 1
    right = (logits.argmax(-1) == ids[:, 1:]) & asked
    parts = (each * weights, each.detach() * plain, right, weights, plain, asked)
    return Losses(*(part.float().sum() for part in parts))


def told(found: list[float]) -> dict[str, float]:
    """The means for the log; answers are no number where nothing was asked."""
    loss, prose, right, weight, plain, asked = found
    return {
        "loss": loss / weight,
        "prose": prose / plain if plain else math.nan,
        "answers": right / asked if asked else math.nan,
    }


def rate(step: int, recipe: Recipe) -> float:
    """Learning rate: linear warm-up, then a cosine to a twentieth."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def optimiser(model: DecoderForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; norms, biases, gates and convolutions are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95))


def train(
    model: DecoderForCausalLM,
    recipe: Recipe,
    data: Corpus,
    kept: Path,
    tick: Callable[[int, dict], None] = lambda *_: None,
    world: World = ALONE,
) -> None:
    """One leg, from where `kept` left it, every `keep_every` steps; `log.jsonl` lies beside it."""
    adam = optimiser(model, recipe)
    step = _resume(kept, recipe, model, adam)
    started = time.monotonic()
    with _checkpointed(model, recipe.checkpointing):
        while step < recipe.last:
            for group in adam.param_groups:
                group["lr"] = rate(step, recipe)
            row = _step(model, adam, recipe, batch(data, recipe, step), world)
            step += 1
            seconds = round(time.monotonic() - started, 1)
            row = {"leg": kept.stem, "step": step, **row, "seconds": seconds}
            if world.first:
                with (kept.parent / "log.jsonl").open("a", encoding="utf-8") as log:
                    log.write(json.dumps(row) + "\n")
                tick(step, row)
                if step % recipe.keep_every == 0 or step == recipe.last:
                    _keep(kept, recipe, model, adam, step)


def _step(
    model: DecoderForCausalLM,
    adam: torch.optim.Optimizer,
    recipe: Recipe,
    data: tuple[Tensor, Tensor],
    world: World,
) -> dict[str, float]:
    """One step of the optimiser on this process's rows, a few of them at a time."""
    device = next(model.parameters()).device
    whole = data[1].sum()
    ids, weights = (part[world.rank :: world.size].to(device) for part in data)
    adam.zero_grad(set_to_none=True)
    seen = torch.zeros(6, device=device)
    few = recipe.rows or len(ids)
    for some in zip(ids.split(few), weights.split(few), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.dtype == "bf16"):
            found = sums(model, *some)
        # the mean over processes that is taken below has to be a sum
        (found.loss / whole.to(device) * world.size).backward()
        seen += torch.stack(found).detach()
    world.mean_([*(p.grad for p in model.parameters() if p.grad is not None), seen])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        raise RetrofitError("the gradient is not finite: lower the recipe's lr")
    adam.step()
    return told(seen.tolist())


@contextmanager
def _checkpointed(model: DecoderForCausalLM, wanted: bool) -> Iterator[None]:
    """Blocks that forget what they computed, and compute it again going back."""
    blocks = model.model.layers if wanted else ()
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _keep(
    kept: Path, recipe: Recipe, model: torch.nn.Module, adam: torch.optim.Optimizer, step: int
) -> None:
    partial = kept.with_suffix(".part")
    state = {"step": step, "model": model.state_dict(), "adam": adam.state_dict()}
    torch.save({**state, "recipe": _written(recipe)}, partial)
    partial.replace(kept)


def _written(recipe: Recipe) -> str:
    """The recipe of a run; what later recipes can say is left out where it is not said."""
    fields = dict(vars(recipe))
    for name, default in LATER.items():
        if fields[name] == default:
            del fields[name]
    return json.dumps(fields, sort_keys=True)


def _resume(kept: Path, recipe: Recipe, model: torch.nn.Module, adam: torch.optim.Optimizer) -> int:
    if not kept.exists():
        return 0
    state = torch.load(kept, weights_only=True, map_location="cpu")
    if state["recipe"] != _written(recipe):
        raise RetrofitError(
            f"{kept.parent}: was started with another recipe; give another --out or delete it"
        )
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])
    return state["step"]
