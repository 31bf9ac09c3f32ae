"""A pretraining recipe: what `mcretrofit pretrain` reads from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcretrofit.config import CachingConfig, from_mapping
from mcretrofit.corpus import KINDS
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.yamlfile import mapping

# what caching begins with where nothing was measured: the paper's own choices
SCRATCH = {"variant": "grm", "router": "mean", "init": "reset", "gate": True}
# settings that stand for measurements of a trained model
UNMEASURED = {"heads": "all", "rule": "plain", "whiten": False}
DTYPES = ("fp32", "bf16")
# what a recipe can say that runs begun before it could have not written down
LATER = {"caching": None, "dtype": "fp32", "rows": None, "checkpointing": False, "keep_every": 50}
LATER |= {"shifted": False}


@dataclass(frozen=True)
class Recipe:
    """A pretraining recipe (YAML). `mix` weighs the kinds of `corpus.KINDS`; lengths are in tokens.

    `stages` are `[steps, length]` pairs of shorter sequences to begin with, as many tokens a step:
    recall is found sooner where answers are dense and near. `then` is a second leg: what differs from
    the first, with a fresh optimiser and learning rate. `stop` ends a leg early on its schedule.
    `start` names a checkpoint with the same tokenizer: its tensors of the same name and shape are where
    training begins, the others are fresh. `caching` are settings of `CachingConfig` that the model is
    trained with from its first step on, by default with the paper's own choices (`SCRATCH`). `dtype` bf16
    computes under autocast, `rows` is how many sequences go through the model at once (all of them),
    `checkpointing` computes blocks twice to hold less, `keep_every` counts steps between states on disk.
    `shifted` begins with keys that are the queries of the token before, so that recall is found sooner,
    and with values so many times longer than they would be (`true`: as long).
    """

    family: str
    model: dict
    text: str
    vocab_size: int = 1024
    length: int = 512
    batch: int = 8
    stages: list = field(default_factory=list)
    steps: int = 2000
    stop: int | None = None
    lr: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1
    answer_weight: float = 5.0
    mix: dict = field(default_factory=lambda: {"needles": 5, "pairs": 3, "copy": 1, "prose": 1})
    seed: int = 0
    start: str | None = None
    caching: dict | None = None
    then: dict | None = None
    dtype: str = "fp32"
    rows: int | None = None
    checkpointing: bool = False
    keep_every: int = 50
    shifted: float = False

    def legs(self) -> list[Recipe]:
        """The recipe of each leg."""
        first = replace(self, then=None)
        second = {**vars(first), "stop": None, "seed": self.seed + 1, **(self.then or {})}
        return [first] if self.then is None else [first, from_mapping(Recipe, second, "then")]

    def __post_init__(self) -> None:
        strange = set(self.mix) - set(KINDS)
        if strange:
            raise RetrofitError(
                f"recipe: mix has {sorted(strange)}; known kinds are {sorted(KINDS)}"
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"recipe: dtype is {self.dtype!r} (known: {', '.join(DTYPES)})")
        # refused before anything is trained
        _ = self.cached

    @property
    def cached(self) -> CachingConfig | None:
        """The caching that is trained with; raises `UsageError` for what needs a trained model."""
        if self.caching is None:
            return None
        given = self.caching
        if isinstance(given, dict):
            given = {**SCRATCH, **UNMEASURED, **given}
        config = from_mapping(CachingConfig, given, "recipe: caching")
        for name, value in UNMEASURED.items():
            if getattr(config, name) != value:
                raise UsageError(
                    f"recipe: caching: {name} is {getattr(config, name)!r}, for which a trained model "
                    f"has to be measured: here it has to be {value!r}"
                )
        if self.length < 2 * config.segment:
            raise UsageError(
                f"recipe: length {self.length} is less than two segments of {config.segment}: "
                "nothing cached would ever be read"
            )
        return config

    @property
    def last(self) -> int:
        """Where the leg ends."""
        return self.steps if self.stop is None else min(self.steps, self.stop)

    def shape(self, step: int) -> tuple[int, int]:
        """Sequences and their length at a step."""
        for steps, length in self.stages:
            if step < steps:
                return self.batch * self.length // length, length
            step -= steps
        return self.batch, self.length


def read_recipe(path: Path, **given: object) -> Recipe:
    """The recipe of a YAML file, `given` winning over it."""
    return from_mapping(Recipe, read_mapping(path, given), str(path))


def read_mapping(path: Path, given: Mapping[str, object]) -> dict:
    """Keys and values of a YAML file, those `given` that are not None winning over it."""
    given = {name: value for name, value in given.items() if value is not None}
    return {**mapping(path), **given}
