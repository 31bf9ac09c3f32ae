"""Feature maps of linear attention, with the parameter names of FLA-format checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcretrofit.errors import unknown


class Hedgehog(nn.Module):
    """`softmax([2 W x, -2 W x])` (arXiv 2402.04347): twice as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * self.layer(x)
        return torch.cat([y, -y], -1).softmax(-1)


class T2R(nn.Module):
    """`relu(W x)` (arXiv 2103.13076)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class ElementwiseProduct(nn.Module):
    """`(W1 x) * (W2 x)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


def dpfp(x: Tensor, times: int = 4) -> Tensor:
    """Products of `relu([x, -x])` with its own rotations (arXiv 2102.11174): 2 `times` as wide."""
    x = torch.cat([x, -x], -1).relu()
    return torch.cat([x * x.roll(by, -1) for by in range(1, times + 1)], -1)


def elu_plus_one(x: Tensor) -> Tensor:
    """`elu(x) + 1`, positive."""
    return torch.where(x >= 0, x + 1, x.clamp_max(0).exp())


def identity(x: Tensor) -> Tensor:
    """`x`."""
    return x


TRAINED = {"hedgehog": Hedgehog, "t2r": T2R, "elementwise_product": ElementwiseProduct}
FIXED = {"dpfp": dpfp, "elu": elu_plus_one, "relu": F.relu, "identity": identity}
ACTIVATIONS = {
    **{
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    },
    **{"gelu": F.gelu, "linear": identity, "sqrelu": lambda x: F.relu(x).square()},
}


def feature_map(name: str, width: int) -> Callable[[Tensor], Tensor]:
    """The map that linear attention calls `name`; for heads of `width` where it has weights."""
    if name in FIXED:
        return FIXED[name]
    if name not in TRAINED:
        raise unknown("feature map", name, [*TRAINED, *FIXED])
    return TRAINED[name](width)


def activation(name: str | None) -> Callable[[Tensor], Tensor]:
    """The plain activation that gla and retnet take as a feature map; None changes nothing."""
    if name is not None and name not in ACTIVATIONS:
        raise unknown("feature map", name, ACTIVATIONS)
    return identity if name is None else ACTIVATIONS[name]
