"""Train a small recurrent language model from a recipe: tokenizer, data mix, weights, checkpoint folder.

A run folder holds everything to go on after a kill: `leg-N.pt` (weights and optimiser) and
`log.jsonl`. The data of step n depends on the seed and n alone, so a resumed run sees the same data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from mcretrofit.checkpoint import Checkpoint, open_checkpoint
from mcretrofit.corpus import corpus, read_text, train_tokenizer
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.ranks import World, joined, own_device
from mcretrofit.recipe import Recipe
from mcretrofit.steps import train
from mcretrofit.together import attach_, write_gates


def pretrain(
    recipe: Recipe,
    run: Path,
    tick: Callable[[int, dict], None] = lambda *_: None,
    device: str = "cpu",
) -> Path:
    """Train, resuming from `run` where it was stopped; returns the checkpoint folder `run/model`.

    With caching in the recipe, `run/model` is the base and the folder returned the wrapped one. Under
    a launcher such as torchrun every process takes its share of each batch, and the first one writes.
    """
    from tokenizers import Tokenizer

    with joined(device) as world:
        if recipe.batch % world.size:
            raise UsageError(
                f"recipe: batch {recipe.batch} is not shared by {world.size} processes"
            )
        run.mkdir(parents=True, exist_ok=True)
        texts = read_text(recipe.text)
        begun = None if recipe.start is None else open_checkpoint(recipe.start)
        _tokenizer(recipe, texts, run, begun, world)
        tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
        data = corpus(texts, lambda text: tokenizer.encode(text).ids)
        model = fresh(recipe)
        if begun is not None:
            begin_(model, begun)
        model.to(own_device(device))
        if recipe.cached is not None:
            attach_(model, recipe.cached)
        for number, leg in enumerate(recipe.legs()):
            train(model, leg, data, run / f"leg-{number}.pt", tick, world)
        made = run / ("model" if recipe.cached is None else "wrapped")
        if world.first:
            base = save(model, recipe, run)
            if recipe.cached is not None:
                write_gates(model, recipe.cached, base, made)
        world.wait()
    return made


def _tokenizer(
    recipe: Recipe, texts: list[str], run: Path, begun: Checkpoint | None, world: World
) -> None:
    """`run/tokenizer.json`: that of the checkpoint to begin with, or one of the texts' own."""
    kept = run / "tokenizer.json"
    if world.first and begun is not None:
        kept.write_bytes((begun.folder / "tokenizer.json").read_bytes())
    elif world.first and not kept.exists():
        symbols = "symbols" in recipe.mix
        train_tokenizer(texts, recipe.vocab_size, recipe.seed, symbols).save(str(kept))
    world.wait()


def fresh(recipe: Recipe) -> DecoderForCausalLM:
    """The recipe's model with the weights that its seed gives."""
    torch.manual_seed(recipe.seed)
    config = DecoderConfig(
        recipe.family, vocab_size=recipe.vocab_size, tie_word_embeddings=True, **recipe.model
    )
    model = DecoderForCausalLM(config).start()
    for block in model.model.layers if recipe.shifted else ():
        shift_(block.attn, float(recipe.shifted))
    return model


@torch.no_grad()
def shift_(mixer: torch.nn.Module, longer: float = 1.0) -> None:
    """A token begins by asking for what came after itself: keys are queries of the token before.

    Nothing else is decided, but the search for this takes most of a short training.
    """
    asks, keeps = mixer.q_proj, mixer.k_proj
    if asks.weight.shape == keeps.weight.shape:
        asks.load_state_dict(keeps.state_dict())
    for name, late, weight in (("q_conv1d", 0, 1.0), ("k_conv1d", 1, 1.0), ("v_conv1d", 0, longer)):
        taps = getattr(mixer, name).weight.zero_()
        taps[..., -1 - late] = weight


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
