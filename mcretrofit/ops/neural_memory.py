"""The memory of titans-pytorch's `NeuralMemory`: eq 34-36 of arXiv 2602.24281 on a mean squared error."""

from __future__ import annotations

from torch import Tensor

from mcretrofit.memories import Inner, Streams, mlp

NAMES = ("chunk_neural_memory",)
MEMORY = mlp


def streams(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    eta: Tensor,
    start: tuple[Tensor, ...],
    momentum: Tensor | None = None,
    inner_chunk: int = 16,
    where: str = "neural memory",
    **_: object,
) -> Streams:
    """No norm inside; the loss is a mean, so that a step is shared by the channels."""
    inner = Inner(mlp.begun(start, where), "l2", inner_chunk, where)
    return Streams(q, k, v, g, eta / v.shape[-1], momentum=momentum, inner=inner)
