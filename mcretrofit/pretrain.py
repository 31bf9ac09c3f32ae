"""Train a small recurrent language model from a recipe: tokenizer, data mix, weights, checkpoint folder.

A run folder holds everything to go on after a kill: `leg-N.pt` (weights and optimiser) and
`log.jsonl`. The data of step n depends on the seed and n alone, so a resumed run sees the same data.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.corpus import Corpus, corpus, read_text, sequence, train_tokenizer
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.errors import RetrofitError
from mcretrofit.recipe import Recipe
from mcretrofit.together import attach_, write_gates


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
    logits = model(ids[:, :-1], use_cache=False).logits
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(
        weights
    )
    loss = (each * weights).sum() / weights.sum()
    asked = weights > 1
    right = (
        (logits.argmax(-1) == ids[:, 1:])[asked].float().mean().item() if asked.any() else math.nan
    )
    return loss, {"loss": loss.item(), "prose": each[weights == 1].mean().item(), "answers": right}


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


def pretrain(
    recipe: Recipe, run: Path, tick: Callable[[int, dict], None] = lambda *_: None
) -> Path:
    """Train, resuming from `run` where it was stopped; returns the checkpoint folder `run/model`.

    With caching in the recipe, `run/model` is the base and the folder returned the wrapped one.
    """
    from tokenizers import Tokenizer

    run.mkdir(parents=True, exist_ok=True)
    texts = read_text(recipe.text)
    kept = run / "tokenizer.json"
    begun = None if recipe.start is None else open_checkpoint(recipe.start)
    if begun is not None:
        kept.write_bytes((begun.folder / "tokenizer.json").read_bytes())
    elif not kept.exists():
        train_tokenizer(texts, recipe.vocab_size, recipe.seed).save(str(kept))
    tokenizer = Tokenizer.from_file(str(kept))
    data = corpus(texts, lambda text: tokenizer.encode(text).ids)
    torch.manual_seed(recipe.seed)
    config = DecoderConfig(
        recipe.family, vocab_size=recipe.vocab_size, tie_word_embeddings=True, **recipe.model
    )
    model = DecoderForCausalLM(config).start()
    if begun is not None:
        begin_(model, begun)
    if recipe.cached is not None:
        attach_(model, recipe.cached)
    for number, leg in enumerate(recipe.legs()):
        _train(model, leg, data, run, run / f"leg-{number}.pt", tick)
    base = save(model, recipe, run)
    if recipe.cached is None:
        return base
    return write_gates(model, recipe.cached, base, run / "wrapped")


def begin_(model: DecoderForCausalLM, checkpoint: Checkpoint) -> list[str]:
    """Copy a checkpoint's tensors of the same name and shape; returns their names."""
    if "tokenizer.json" not in {p.name for p in checkpoint.folder.iterdir()}:
        raise RetrofitError(f"{checkpoint.path}: no tokenizer.json to train on with")
    have = set(checkpoint.names())
    homes = {
        name: home
        for name, home in model.state_dict().items()
        if name in have and checkpoint.shape(name) == tuple(home.shape)
    }
    if "model.embeddings.weight" not in homes:
        raise RetrofitError(f"{checkpoint.path}: its embeddings do not fit the recipe's model")
    for name, home in homes.items():
        home.copy_(checkpoint.read(name))
    return list(homes)


def _train(
    model: DecoderForCausalLM,
    recipe: Recipe,
    data: Corpus,
    run: Path,
    kept: Path,
    tick: Callable[[int, dict], None],
) -> None:
    """One leg, from where `kept` left it, every 50 steps."""
    adam = optimiser(model, recipe)
    step = _resume(kept, recipe, model, adam)
    started = time.monotonic()
    while step < recipe.last:
        for group in adam.param_groups:
            group["lr"] = rate(step, recipe)
        loss, row = losses(model, *batch(data, recipe, step))
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        step += 1
        row = {
            "leg": kept.stem,
            "step": step,
            **row,
            "seconds": round(time.monotonic() - started, 1),
        }
        with (run / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        tick(step, row)
        if step % 50 == 0 or step == recipe.last:
            _keep(kept, recipe, model, adam, step)


def save(model: DecoderForCausalLM, recipe: Recipe, run: Path) -> Path:
    """The checkpoint folder in the family's own format: config.json, bf16 weights, tokenizer."""
    from mcretrofit.tensorfile import write_atomic_folder, write_safetensors

    common = {**recipe.model, "vocab_size": recipe.vocab_size, "tie_word_embeddings": True}
    config = {
        "model_type": recipe.family,
        **common,
        "max_position_embeddings": recipe.length,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    tensors = {
        name: (t if name.endswith(("A_log", "dt_bias")) else t.bfloat16()).contiguous()
        for name, t in model.state_dict().items()
        if name != "lm_head.weight" and ".mc." not in name
    }
    with write_atomic_folder(run / "model", force=True) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        (folder / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
        special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(special, indent=2) + "\n")
    return run / "model"


def _keep(
    kept: Path, recipe: Recipe, model: torch.nn.Module, adam: torch.optim.Optimizer, step: int
) -> None:
    partial = kept.with_suffix(".part")
    state = {"step": step, "model": model.state_dict(), "adam": adam.state_dict()}
    torch.save({**state, "recipe": _written(recipe)}, partial)
    partial.replace(kept)


def _written(recipe: Recipe) -> str:
    """The recipe of a run, as it was written before there was caching where there is none."""
    fields = dict(vars(recipe))
    if recipe.caching is None:
        del fields["caching"]
    return json.dumps(fields, sort_keys=True)


def _resume(kept: Path, recipe: Recipe, model: torch.nn.Module, adam: torch.optim.Optimizer) -> int:
    if not kept.exists():
        return 0
    state = torch.load(kept, weights_only=True)
    if state["recipe"] != _written(recipe):
        raise RetrofitError(
            f"{kept.parent}: was started with another recipe; give another --out or delete it"
        )
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])
    return state["step"]
