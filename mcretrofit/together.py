"""Caching that is trained from scratch together with its base (arXiv 2602.24281, section 5).

Every head is cached from the first step on. What comes of it are two folders: the base in its family's
own format, and a wrapped one that names it and holds the gates.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mcretrofit.cards import wrapped_card
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.config import CachingConfig
from mcretrofit.decoder import DecoderForCausalLM
from mcretrofit.retrofit import Cover, every_head, plans, retrofit_
from mcretrofit.wrapped import write

SPREAD = 0.02  # of W_u at the start: a gate of zeros would be the identity, which is for retrofits


def attach_(model: DecoderForCausalLM, config: CachingConfig) -> None:
    """Cache all heads of a fresh model, with gates that begin at random."""
    retrofit_(model, config, every_head(model))
    for plan in plans(model).values():
        gate = plan.gate
        if gate.weight is not None:
            torch.nn.init.normal_(gate.weight, std=SPREAD)
        if gate.down is not None:
            torch.nn.init.normal_(gate.down, std=gate.down.shape[1] ** -0.5)


def write_gates(model: DecoderForCausalLM, config: CachingConfig, base: Path, target: Path) -> Path:
    """The wrapped folder of a model that was trained with its caching and saved to `base`."""
    found = plans(model)
    covers = {
        name: Cover(p.gate.heads, p.total, p.gate.mask, p.gate.mean, p.gate.std)
        for name, p in found.items()
    }
    reasons = {name: ["trained together with its base"] * p.total for name, p in found.items()}
    gates = {name: p.detach() for name, p in model.named_parameters() if ".mc." in name}
    summary = f"wrapped {len(found)} of {model.config.num_hidden_layers} layers, trained together"
    card = wrapped_card(base.resolve().name, model.config.family, config, summary, ())
    checkpoint = open_checkpoint(base)
    return write(target, config, checkpoint, covers, reasons, card, gates=gates, force=True)
