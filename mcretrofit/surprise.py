"""How surprising is surprising: the mean and spread of every cached head's scores on plain text.

Scores have heavy tails, and the best of many segments always stands out a little: the spread is half
of what the best scores of the loudest tokens lie above the mean, so that at a margin of 2 all others are
read as they were. How many tokens are loud is measured: as many as do the text no harm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mcretrofit import rules
from mcretrofit.config import CachingConfig
from mcretrofit.evaluate import read_pieces
from mcretrofit.registry import load
from mcretrofit.retrofit import Cover, plans, retrofit_, revert_

# shares of the tokens of ordinary text that may find a segment surprising at a margin of 2, the
# first one whose reads leave the text alone is taken (a router may have its own)
MARGIN = 2  # spreads: what that share exceeds
LOUD = (0.5, 0.2, 0.05, 0.02)
HARM = 0.001  # of the text's loss


def with_scores(
    model: nn.Module, config: CachingConfig, covers: dict[str, Cover], batch: Tensor
) -> dict[str, Cover]:
    """Mean and spread of each cached head's scores, the model reading as without MC."""
    plain = config.replace(variant="grm", init="carry_delta", gate=False)
    heard: dict[str, Scores] = {}
    retrofit_(model, plain, covers)
    try:
        for name, plan in plans(model).items():
            plan.watch = heard.setdefault(name, Scores()).add
        with torch.no_grad():
            for row in batch:
                model(input_ids=row[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        revert_(model)
    shares = getattr(load("routers", config.router), "LOUD", LOUD)
    levels = (
        {n: heard[n].put(c, loud) if n in heard else c for n, c in covers.items()}
        for loud in shares
    )
    return _harmless(model, config, levels, batch) if config.rule == "z" else next(levels)


def _harmless(
    model: nn.Module, config: CachingConfig, levels: Iterator[dict[str, Cover]], batch: Tensor
) -> dict[str, Cover]:
    """The first level at which caching does not harm the text, or the last one."""
    most = text_loss(model, batch) * (1 + HARM)
    covers: dict[str, Cover] = {}
    for covers in levels:
        retrofit_(model, config.replace(gate=False), covers)
        try:
            if text_loss(model, batch) <= most:
                break
        finally:
            revert_(model)
    return covers


@torch.no_grad()
def text_loss(model: nn.Module, batch: Tensor) -> float:
    """Nats a token of windows `[B, T]`, read in pieces."""
    nats, count = 0.0, 0
    for row in batch.to(model.device):
        for start, logits, _ in read_pieces(model, row[None], None):
            target = row[start + 1 : start + 1 + logits.shape[1]]
            nats += nn.functional.cross_entropy(
                logits[0, : len(target)].float(), target, reduction="sum"
            ).item()
            count += len(target)
    return nats / count


class Scores:
    """Scores of every head of one mixer: their running mean, and the best one of each token."""

    def __init__(self) -> None:
        self.count, self.total = torch.zeros(()), torch.zeros(())
        self.best: list[Tensor] = []
        self.rises: list[Tensor] = []  # of the margin, of the same tokens

    def add(self, scores: Tensor, visible: Tensor) -> None:
        """Scores `[B, T, H, N]` of what is visible `[B, T, N]`."""
        seen = visible[:, :, None]
        self.count = self.count + visible.sum().cpu()
        self.total = self.total + (scores.double() * seen).sum((0, 1, 3)).cpu()
        # one segment alone cannot be the best of several
        several = visible.sum(-1) > 1
        if several.any():
            self.best.append(scores.masked_fill(~seen, -torch.inf).amax(-1)[several].cpu())
            self.rises.append(rules.rise(visible)[several].cpu())

    @property
    def mean(self) -> Tensor:
        """Of all scores `[H]`."""
        return (self.total / self.count.clamp_min(1)).float()

    def loudest(self) -> Tensor:
        """The best score of each token `[X, H]`, as if it saw few segments."""
        above = torch.cat(self.best).float() - self.mean
        return self.mean + above / (1 + torch.cat(self.rises) / MARGIN)[:, None]

    def put(self, cover: Cover, loud: float) -> Cover:
        """The cover with the mean, and the spread that a share `loud` of all tokens exceed twofold."""
        mean = self.mean
        if not self.best:
            return cover._replace(mean=mean, std=torch.ones_like(mean))
        best = self.loudest().quantile(1 - loud, dim=0)
        return cover._replace(mean=mean, std=(best - mean).clamp_min(0) / MARGIN)
