"""Are trained gates better than untrained ones? Asked on facts that nothing was chosen on."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from mcretrofit.cards import markdown
from mcretrofit.doubts import WORTH
from mcretrofit.heldout import Judge
from mcretrofit.retrofit import paused
from mcretrofit.rows import interval
from mcretrofit.training import Trained, Trainer


class Confirmed(NamedTuple):
    """Tuned against untrained gates on facts that nothing was chosen on, and against the base."""

    low: float  # 95 % interval of what an answer gains over the untrained gates, nats a token
    high: float
    right: tuple[float, float, float]  # share answered: base, untrained, tuned
    near: tuple[float, float, float]  # the same inside the trained length
    prose: float  # against the base, relative
    harm: str  # what speaks against the gates; nothing where they are kept


def confirm(
    model: nn.Module, trainer: Trainer, trained: Trained, held: Judge, limit: float
) -> Confirmed | None:
    """The best gates against the untrained ones on other facts; they are in the model afterwards."""
    if not trained.best.step:
        return None
    with paused(model):
        base = held.losses(model)
    trainer.put_(None)
    start = held.losses(model)
    trainer.put_(trained.gates)
    done = held.losses(model)
    low, high = interval((start[0] - done[0]).tolist())
    lost = interval((done[1] - base[1]).tolist())[0]
    count, least = len(base[0]), WORTH * base[0].mean().item()
    fewer = interval((done[2] - start[2])[:count].tolist())[1]
    harms = [
        (done[3] > base[3] * (1 + limit), "they harm prose"),
        (lost > 0, "they harm answers inside the trained length"),
        (interval((done[0] - base[0]).tolist())[0] > 0, "the base answers better"),
        (low <= least or fewer < 0, "other facts do not confirm them"),
    ]
    right, near = (
        tuple(one[2][part].mean().item() for one in (base, start, done))
        for part in (slice(count), slice(count, None))
    )
    harm = next((said for bad, said in harms if bad), "")
    return Confirmed(low, high, right, near, done[3] / base[3] - 1, harm)


def card(found: Confirmed, step: int, sha256: str) -> str:
    """What the folder's card says of its gates."""
    rows = zip(("base", "untrained gates", "tuned"), found.right, found.near, strict=True)
    cells = [(name, f"{right:.3f}", f"{near:.3f}") for name, right, near in rows]
    table = markdown(("planted facts answered", "far", "inside the trained length"), cells)
    return (
        f"Gates of step {step}; prose {found.prose:+.2%} of the base's loss. "
        f"Base sha256 {sha256}.\n\n{table}\n"
    )
