"""What trained gates are judged by: planted facts and plain windows of text that they never saw."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from mcretrofit.planted import Planted, losses
from mcretrofit.ranks import World
from mcretrofit.tunedata import Feed, Row

KINDS = ("pairs", "needles")


class Check(NamedTuple):
    """Held-out losses in nats: an answer far away and near, a token of prose; the share answered."""

    step: int
    answers: float
    right: float
    prose: float
    near: float
    near_right: float


class Judge(NamedTuple):
    """Held-out facts, at the length of training and inside the trained length, and plain windows."""

    far: list[Planted]
    near: list[Planted]
    prose: Tensor

    def losses(self, model: nn.Module) -> tuple[Tensor, Tensor, Tensor, float]:
        """Of the far and near answers, whether each is right (far first), and of the prose."""
        done = losses(model, [*self.far, *self.near], self.prose)
        count = sum(len(one.answers) for one in self.far)
        return done.answers[:count], done.answers[count:], done.right, done.prose

    def check(self, model: nn.Module, step: int, world: World) -> Check:
        """The means; the first process's, in all of them."""
        far, near, right, prose = self.losses(model)
        shares = right[: len(far)].mean().item(), right[len(far) :].mean().item()
        said = [far.mean().item(), shares[0], prose, near.mean().item(), shares[1]]
        return Check(step, *world.agreed(said))


def judge(feed: Feed, count: int, lengths: tuple[int, int], prose: Tensor, first: int) -> Judge:
    """`count` held-out sequences of each length from number `first` on, needles and pairs in turn."""
    far, near = (
        [_asked(feed.row(first + i, length, {KINDS[i % 2]: 1})) for i in range(count)]
        for length in lengths
    )
    return Judge(far, near, prose)


def _asked(row: Row) -> Planted:
    return Planted(row.ids, row.answers, [])
