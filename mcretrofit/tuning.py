"""A tuning recipe: what `mcretrofit tune` reads from YAML and from its flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from mcretrofit.config import CachingConfig, checked, from_mapping
from mcretrofit.errors import RetrofitError, UsageError, unknown
from mcretrofit.tunedata import FACTS, KINDS
from mcretrofit.yamlfile import mapping

LONGEST = 16384  # tokens of a sequence unless said
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# what may differ between a run and the command that goes on with it
FREE = ("model", "data", "out", "caching", "minutes", "keep_every", "least_recall")


@dataclass(frozen=True)
class Tuning:
    """How gates are trained. `length` is in tokens (None: eight segments or four trained lengths).

    A token of an answer weighs `answer_weight`, one of prose 1. At most `facts` are planted in a
    sequence: more than a state holds teach nothing. `mix` weighs the kinds of
    `tunedata.KINDS`. Held-out text is looked at every `check_every` steps: prose above the base's by
    `prose_limit` ends the training. A base that answers less than `least_recall` of the facts inside
    its trained length is refused: there is nothing that a gate could route.
    """

    model: str | None = None
    data: str | None = None
    out: str | None = None
    caching: dict = field(default_factory=dict)
    length: int | None = None
    steps: int = 100
    minutes: float = 10.0
    lr: float = 1e-3
    warmup: int = 10
    accumulate: int = 1
    checkpointing: bool = False
    dtype: str = "fp32"
    answer_weight: float = 50.0
    facts: int = FACTS
    mix: dict = field(default_factory=lambda: {"needles": 2, "pairs": 2, "prose": 0.5})
    held_out: int = 8
    check_every: int = 15
    keep_every: int = 10
    prose_limit: float = 0.005
    least_recall: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(Tuning)
        for one in fields(Tuning):
            value, flag = getattr(self, one.name), f"--{one.name.replace('_', '-')}"
            if hints[one.name] is dict:
                if not isinstance(value, dict):
                    raise UsageError(f"{one.name}: {value!r} is not keys and values")
                continue
            value = checked(value, hints[one.name], flag)
            object.__setattr__(self, one.name, value)
            least = LEAST.get(one.name)
            if least is not None and value is not None and not value >= least:
                raise UsageError(f"{flag} {value}: has to be at least {least}")
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        for kind, weight in self.mix.items():
            if kind not in KINDS:
                raise UsageError(f"mix: {unknown('kind', str(kind), KINDS)}")
            if type(weight) not in (int, float) or not weight >= 0:
                raise UsageError(f"mix: {kind}: {weight!r} is not a number of at least 0")
        if not any(self.mix.get(kind) for kind in ("needles", "pairs")):
            raise RetrofitError(
                "data without recall: nothing is asked in it, and a gate learns from answers; "
                "give needles or pairs a weight in mix"
            )

    def tokens(self, segment: int, trained: int | None) -> int:
        """Tokens of a sequence; raises where they are less than two segments."""
        length = self.length
        if length is None:
            length = min(max(8 * segment, 4 * (trained or 0)), max(LONGEST, 2 * segment))
        if length < 2 * segment:
            raise UsageError(
                f"--length {length}: fewer than two segments of {segment} tokens, so that nothing "
                f"cached is ever read; at least {2 * segment}"
            )
        return length

    def fixed(self) -> dict[str, Any]:
        """What a run that goes on has to share with its beginning."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


LEAST = {
    **dict.fromkeys(
        ("length", "steps", "facts", "accumulate", "held_out", "check_every", "keep_every"), 1
    ),
    **dict.fromkeys(("warmup", "prose_limit", "least_recall", "seed"), 0),
    **dict.fromkeys(("minutes", "lr", "answer_weight"), 1e-9),
}


def read_tuning(path: Path | None, given: Mapping[str, Any]) -> Tuning:
    """The recipe of a YAML file, what is `given` winning over it; raises naming the wrong key."""
    read = {} if path is None else mapping(path)
    given = {name: value for name, value in given.items() if value is not None}
    made = from_mapping(Tuning, {**read, **given}, str(path or "tune"))
    known = {f.name for f in fields(CachingConfig)}
    for name in made.caching:
        if name not in known:
            raise UsageError(f"{path}: caching: {unknown('key', str(name), known)}")
    return made
