"""Choose, head by head and without gradients, what caching does: by planted facts and prose.

For each slow head: does a score find the segment that holds a fact (its hit rate), and at which
threshold does opening the head help answers and leave prose alone? A threshold is given as the share of
prose tokens that would open the head, so that heavy-tailed scores need no other treatment. The choice
is confirmed on facts that it was not made on; where it is not, the answer is: keep the base.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

from mcretrofit.budget import NO_LIMIT, Budget, Spent, spent
from mcretrofit.calibrate import calibrate, windows
from mcretrofit.choices import Choice, Kind, covers, kinds, told, turned
from mcretrofit.config import CachingConfig
from mcretrofit.doubts import COSTS, WORTH, doubt
from mcretrofit.errors import RetrofitError
from mcretrofit.hits import Key, Seen, watched
from mcretrofit.planted import Losses, Planted, losses, plain_windows, planted
from mcretrofit.refine import Tried, refined
from mcretrofit.registry import load
from mcretrofit.retrofit import Cover, retrofitted
from mcretrofit.rows import interval
from mcretrofit.tokenizer import Tokenizer

OPEN = (0.5, 0.1, 0.02)  # shares of prose tokens that may open a head (a router may have its own)
LEAST_HIT = 1.5  # times chance
FAR_LESS = 0.5  # of the best score's hits
APART = 32  # tokens of a near sequence to a pair, at least
WORSE = 0.0025  # of the base's prose loss, while searching


class Outcome(NamedTuple):
    """The covers to attach with, the table that explains them, and how they did on unseen facts."""

    config: CachingConfig
    covers: dict[str, Cover]
    choices: list[Choice]
    base: Losses
    done: Losses
    low: float  # 95 % interval of what an answer gains, nats a token
    high: float
    tried: list[Tried]  # settings of the chosen heads
    spent: Spent | None = None

    @property
    def prose(self) -> float:
        """Relative change of the prose loss."""
        return self.done.prose / self.base.prose - 1

    @property
    def keeps_base(self) -> bool:
        return not any(cover.heads for cover in self.covers.values())


class Searcher:
    """One model and the facts planted for it."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        text: str,
        config: CachingConfig,
        *,
        length: int,
        near: int | None = None,
        count: int = 4,
        pairs: int = 16,
        budget: Budget = NO_LIMIT,
        tick: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not config.routed or config.rule != "z":
            raise RetrofitError(
                f"calibrate searches thresholds of the z rule; {config.variant} with rule "
                f"{config.rule} has none (take grm, ssc, soup or loglinear with --rule z)"
            )
        self.model, self.config, self.tick = model, config, tick
        self.budget = budget
        self.dropped: dict[Key, str] = {}
        ids = tokenizer.encode(text)
        self.prose = plain_windows(windows(ids, config.segment), config.segment, length)
        plant = partial(planted, tokenizer, text, count=count)
        self.facts, self.unseen = (plant(length=length, pairs=pairs, seed=s) for s in (1, 2))
        # what helps far away must not take what the model holds by itself
        within = {"length": near or length, "pairs": max(1, min(pairs, (near or length) // APART))}
        self.near, self.near_unseen = (
            plant(seed=s, **within) if near and near < length else [] for s in (3, 4)
        )
        # the plain rule, because thresholds are searched here
        self.made = {
            kind: calibrate(model, ids, self.scored(kind).replace(rule="plain")).covers
            for kind in kinds(config)
        }

    def scored(self, kind: Kind) -> CachingConfig:
        """The setting in which every head scores in one way."""
        return self.config.replace(router=kind.router, whiten=kind.whiten)

    def search(self) -> Outcome:
        """Every step, from scores to the confirmed choice."""
        self.tick("base")
        base = losses(self.model, self.facts + self.near, self.prose)
        seen = {kind: self.watched(kind) for kind in self.made}
        found = [self.head(key, seen, base) for key in self.keys()]
        chosen = self.together([c for c in found if c.used], base)
        tried: list[Tried] = []
        if chosen:
            worth = WORTH * base.answers.mean().item()
            chosen, tried = refined(self.config, chosen, self.within, base, WORSE, worth)
        self.tick("confirming on other facts")
        before, after = losses(self.model, self.unseen, self.prose), self.trial(chosen, self.unseen)
        low, high = interval((before.answers - after.answers).tolist())
        against = doubt(before, after, low) or (COSTS if self.takes(chosen) else None)
        chosen = [] if against else chosen
        made, kept = self.covers(chosen), {c[:2]: c for c in chosen}
        table = [
            kept.get(c[:2], c)
            if not c.used or c[:2] in kept
            else c._replace(used=False, why=f"{c.why} alone, {self.dropped.get(c[:2], against)}")
            for c in found
        ]
        spent = self.spent(chosen) if chosen else None
        config = self.config.replace(whiten=turned(chosen))
        return Outcome(config, made, table, before, after, low, high, tried, spent)

    def takes(self, choices: list[Choice]) -> bool:
        """Whether these heads surely cost answers inside the trained length."""
        if not self.near_unseen:
            return False
        before = losses(self.model, self.near_unseen, self.prose)
        gains = before.answers - self.trial(choices, self.near_unseen).answers
        return interval(gains.tolist())[1] < 0

    def within(self, choices: list[Choice]) -> Losses:
        """Losses with these heads open; prose is lost where they are over the budget."""
        self.tick("; ".join(f"{c.mixer} head {c.head}: {told(c)}" for c in choices))
        done = self.trial(choices, self.facts + self.near)
        fits = not self.budget.bounded or self.budget.holds(self.spent(choices))
        return done if fits else done._replace(prose=math.inf)

    def spent(self, choices: list[Choice]) -> Spent:
        """What these heads cost at the length of the planted sequences."""
        config = self.config.replace(whiten=turned(choices))
        return spent(self.model, config, self.covers(choices), self.facts[0].ids)

    def keys(self) -> list[Key]:
        """The heads that may be cached."""
        covers = next(iter(self.made.values()))
        return [(name, head) for name, cover in covers.items() for head in cover.heads]

    def watched(self, kind: Kind) -> dict[Key, Seen]:
        """Hit rates and the loudest prose scores of every head."""
        self.tick(f"{kind.name} scores")
        return watched(self.model, self.scored(kind), self.made[kind], self.facts, self.prose)

    def head(self, key: Key, seen: dict[Kind, dict[Key, Seen]], base: Losses) -> Choice:
        """The best score and threshold of one head alone."""
        own = {kind: heads[key] for kind, heads in seen.items()}
        hits = {kind.name: one.hit for kind, one in own.items()}
        nothing = Choice(*key, hits, False, "its scores do not find planted facts")
        # a score that finds far less than another is not worth a trial
        least = max(hits.values()) * FAR_LESS
        tried = [
            self.alone(key, kind, share, one, hits, base)
            for kind, one in own.items()
            if one.hit >= max(LEAST_HIT * one.chance, least)
            for share in getattr(load("routers", kind.router), "LOUD", OPEN)[: len(OPEN)]
        ]
        if not tried:
            return nothing
        safe = [c for c in tried if c.prose <= WORSE]
        if not safe:
            least = min(tried, key=lambda c: c.prose)
            return least._replace(used=False, why=f"opening it harms prose by {least.prose:.2%}")
        best = min(safe, key=lambda c: c.answers)
        if best.answers >= -WORTH * base.answers.mean().item():
            return best._replace(used=False, why="opening it does not help answers")
        return best._replace(used=True, why="opening it helps answers")

    def alone(
        self,
        key: Key,
        kind: Kind,
        share: float,
        seen: Seen,
        hits: dict[str, float],
        base: Losses,
    ) -> Choice:
        """One head with one threshold."""
        threshold = seen.loudest.quantile(1 - share).item()
        choice = Choice(*key, hits, False, "", kind, share, threshold)
        self.tick(f"{key[0]} head {key[1]}: {told(choice)}")
        done = self.trial([choice], self.facts + self.near)
        return choice._replace(
            answers=(done.answers.mean() - base.answers.mean()).item(),
            prose=done.prose / base.prose - 1,
        )

    def together(self, found: list[Choice], base: Losses) -> list[Choice]:
        """Heads by what they gain, each kept where it helps beside those before it."""
        kept: list[Choice] = []
        best = base.answers.mean().item()
        least = WORTH * best
        for choice in sorted(found, key=lambda c: c.answers):
            self.tick(f"{choice.mixer} head {choice.head} beside {len(kept)} others")
            done = self.trial([*kept, choice], self.facts + self.near)
            harm = done.prose / base.prose - 1
            if done.answers.mean().item() >= best - least or harm > WORSE:
                self.dropped[choice[:2]] = "but not beside the others"
            elif self.budget.bounded and not self.budget.holds(self.spent([*kept, choice])):
                self.dropped[choice[:2]] = "but it is over the budget"
            else:
                kept.append(choice)
                best = done.answers.mean().item()
        return kept

    def trial(self, choices: list[Choice], some: list[Planted]) -> Losses:
        """Losses with these heads open."""
        config = self.config.replace(whiten=turned(choices))
        if not choices:
            return losses(self.model, some, self.prose)
        with retrofitted(self.model, config, self.covers(choices)):
            return losses(self.model, some, self.prose)

    def covers(self, choices: list[Choice]) -> dict[str, Cover]:
        """Covers of the chosen heads alone."""
        return covers(choices, self.made, self.config)
