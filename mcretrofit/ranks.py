"""Several processes that train one thing: what `torchrun` and `accelerate launch` say in variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mcretrofit.errors import UsageError


class World(NamedTuple):
    """This process among all of them; alone it is 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def mean_(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor becomes its mean over all processes."""
        if self.size == 1:
            return
        tensors = list(tensors)
        place = tensors[0].device
        flat = torch.cat([t.detach().flatten().float().to(place) for t in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def agreed(self, values: list[float]) -> list[float]:
        """The first process's values, in all of them: they decide alike."""
        if self.size == 1:
            return values
        said = [values]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: str) -> Iterator[World]:
    """The world that a launcher set up, or this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise UsageError(f"WORLD_SIZE is {size}, but {missing[0]} is not set: start with torchrun")
    if device.startswith("cuda"):
        torch.cuda.set_device(own_device(device))
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def own_device(device: str) -> str:
    """`cuda` is the device of this process's number on its machine."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device
