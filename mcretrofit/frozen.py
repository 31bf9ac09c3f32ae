"""What tuning must not touch: the share of trained parameters, and hashes of all others."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from mcretrofit.retrofit import plans


def parameters(model: nn.Module, rank: int) -> list[str]:
    """How much is trained of how much, and what to do where that is more than a hundredth."""
    found = [plan.gate for plan in plans(model).values()]
    own = sum(p.numel() for gate in found for p in gate.parameters())
    total = sum(p.numel() for p in model.parameters())
    lines = [f"trainable {own:,} of {total:,} parameters ({own / total:.2%})"]
    if own > total / 100:
        width = model.get_input_embeddings().embedding_dim
        each = sum(width + gate.mask.numel() for gate in found)
        best = max(1, int((total / 100 - sum(2 * len(g.heads) for g in found)) / each))
        lines.append(
            f"more than 1 % is trained: --rank {best} would train {best * each / total:.2%}"
            if best != rank
            else "more than 1 % is trained: the model is small, and a rank cannot be below 1"
        )
    return lines


def base_hash(model: nn.Module) -> str:
    """SHA-256 over every tensor of the model that is not a gate's."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if ".mc." not in name:
            digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
            flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(flat.numpy().tobytes())
    return digest.hexdigest()
