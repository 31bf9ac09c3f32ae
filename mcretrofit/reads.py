"""Weigh and read: from what tokens ask to what they get of the segments that they see.

The online memory runs on through segments: it holds what the open segment wrote and what is left of
the past. Where the plan takes the two apart (`Plan.own`), the open segment's own writes are one more
candidate: with weight p of the two together the online read loses p times what is left of the past.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from mcretrofit_kernels.cached_read import cached_read
from torch import Tensor

from mcretrofit import rules
from mcretrofit.aggregators import Reading
from mcretrofit.memories._networks import blended, separate
from mcretrofit.plan import Plan
from mcretrofit.routers import Asked, Opened
from mcretrofit.segments import Bank


def read(
    plan: Plan,
    bank: Bank,
    asked: Asked,
    opened: Opened,
    closing: Tensor | None = None,
    left: Tensor | None = None,
) -> Tensor:
    """`[B, T, H', V]`; in rows `closing [B]` the newest block is the online memory.

    `left [B, T, H', V]` is the read of what the open segment did not write itself, where that counts.
    """
    if closing is not None:
        asked, opened = _merged(plan, bank, asked, opened, closing)
    if plan.watch is not None:
        plan.watch(_surprise(plan, bank, asked), bank.visible & opened.valid[..., None])
        return asked.online
    logits = partial(_logits, plan, bank, asked, opened)
    if left is not None:
        asked, logits = _apart(plan, bank, asked, opened, left)
    reading = Reading(bank.visible, asked.q.shape[2], logits)
    weigh = partial(plan.aggregator.weigh, **plan.options)
    weights = weigh(reading) if plan.reroute is None else plan.reroute(weigh, reading, bank, opened)
    mix, online = (blended, asked.layer) if plan.blends else (separate, asked.online)
    return mix(bank.states, online, weights.online, asked.q, weights.cached, weights.indices)


def _apart(
    plan: Plan, bank: Bank, asked: Asked, opened: Opened, left: Tensor
) -> tuple[Asked, Callable[[], tuple[Tensor, Tensor]]]:
    """The online read with less of the past where the open segment surprises, and all logits."""
    gate, config = plan.gate, plan.config
    scores, _ = plan.router.score(asked, bank, None)
    own = plan.router.settled(asked.u, opened)
    adds, missing = plan.adds(own.device), (1 - opened.share)[..., None]
    if config.relative and plan.router.POSITIVE:
        usual = rules.usual(scores, bank.visible)
        among = rules.among(own, usual, bank.visible)
        own = torch.where(adds, own / usual + missing, among)
        scores = scores / usual[..., None]
    else:
        own = own + adds * missing * gate.mean
    heat = plan.heat(rules.Z_TEMPERATURE)
    rule = partial(rules.z, mean=gate.mean, std=gate.std, temperature=heat, shared=config.shared)
    # one candidate, whatever the number of the others
    loud = rule(own[..., None], margin=config.margin)[0][..., 0]
    takes = bank.visible.any(-1, keepdim=True) & plan.begins("carry_delta")
    loud = loud.masked_fill(~takes, -torch.inf)
    online = asked.online - loud.sigmoid()[..., None] * left
    return asked._replace(online=online), lambda: (
        rule(scores, margin=_margin(plan, bank, scores))[0],
        gate.biased(F.softplus(loud)),
    )


def _merged(
    plan: Plan, bank: Bank, asked: Asked, opened: Opened, closing: Tensor
) -> tuple[Asked, Opened]:
    """The newest closed block taken for the open segment: its summary, and under reset its state."""
    rows = torch.arange(len(closing), device=closing.device)
    newest = bank.newest
    here = closing[:, None, None, None]
    reset = plan.begins("reset", 1)
    if reset is not False:
        alone = asked.q.new_ones(*asked.q.shape[:3], 1)
        merged = cached_read(bank.states[rows, newest][:, None], asked.q, alone)
        asked = asked._replace(online=torch.where(here & reset, merged, asked.online))
    before = torch.where(here, bank.summaries[rows, newest][:, None], opened.before)
    keys = opened.keys.masked_fill(here, 0)
    valid = opened.valid & ~closing[:, None]
    return asked, Opened(keys, valid, before, 1, opened.places, part=opened.part)


def _logits(plan: Plan, bank: Bank, asked: Asked, opened: Opened) -> tuple[Tensor, Tensor]:
    config, gate = plan.config, plan.gate
    heat = plan.heat(rules.Z_TEMPERATURE if config.rule == "z" else plan.router.TEMPERATURE)
    if config.rule == "z":
        scores = _surprise(plan, bank, asked)
        margin = _margin(plan, bank, scores)
        cached, online = rules.z(scores, gate.mean, gate.std, margin, heat, config.shared)
    else:
        cached, online = rules.plain(*plan.router.score(asked, bank, opened), heat)
    return cached, gate.biased(online)


def _margin(plan: Plan, bank: Bank, scores: Tensor) -> Tensor:
    """What a segment has to exceed `[B, T, 1, 1]`, in spreads."""
    heads = scores.shape[2] if plan.config.shared else 1
    return plan.config.margin + rules.rise(bank.visible, heads)[..., None, None].to(scores.dtype)


def _surprise(plan: Plan, bank: Bank, asked: Asked) -> Tensor:
    """The scores that the z rule looks at `[B, T, H', N]`."""
    scores, _ = plan.router.score(asked, bank, None)
    compared = plan.config.relative and plan.router.POSITIVE
    return rules.relative(scores, bank.visible) if compared else scores
