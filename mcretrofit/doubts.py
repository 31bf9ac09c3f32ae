"""What speaks against a choice of heads on facts that it was not made on."""

from __future__ import annotations

from mcretrofit.planted import Losses

LIMIT = 0.005  # of the base's prose loss
# of the base's loss of answers: what is surely gained, but less than that, is nothing
WORTH = 0.005
UNSURE = "but other facts do not confirm it"
SILENT = "but of other facts not one is answered"
HARMS = "but prose is harmed"
COSTS = "but answers inside the trained length are lost"


def doubt(before: Losses, after: Losses, low: float) -> str | None:
    """The first thing that speaks against it, None where nothing does.

    `low` is what an answer surely gains, in nats a token. Answers that become likelier, and are still
    wrong, are no recall.
    """
    if low <= WORTH * before.answers.mean().item():
        return UNSURE
    if not after.right.any():
        return SILENT
    if after.prose > before.prose * (1 + LIMIT):
        return HARMS
    return None
