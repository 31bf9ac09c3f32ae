"""Configuration: frozen dataclasses, read strictly; an unknown key names the nearest known one."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from mcretrofit.errors import UsageError, unknown

T = TypeVar("T")


def from_mapping(kind: type[T], given: Any, where: str) -> T:
    """`kind(**given)`, refusing unknown and missing keys; `where` begins the message."""
    if not isinstance(given, dict):
        raise UsageError(f"{where}: expected keys and values, found {type(given).__name__}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise UsageError(f"{where}: {unknown('key', str(name), known)}")
    missing = [
        f.name
        for f in known.values()
        if f.name not in given and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}")
    return kind(**given)


def checked(value: Any, hint: Any, where: str) -> Any:
    """The value as a type hint wants it; raises `UsageError` where it is of another kind."""
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        # YAML reads 1e3 as a text
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    elif type(value) is kind:
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    raise UsageError(f"{where}: {value!r} is not {words[kind]}")


TRAINED_RANK = 8  # of a gate's matrix that is trained, unless said
INITS = ("reset", "carry", "carry_delta")


class Variant(NamedTuple):
    """A named preset: how the past is cut and how its reads are mixed."""

    segmentation: str
    aggregator: str
    doc: str


VARIANTS = {
    "ma": Variant("constant", "moving_average", "plain average of all reads (section 4.3)"),
    "residual": Variant("constant", "residual", "sum of all reads (eq 7)"),
    "grm": Variant("constant", "grm", "gated residual: softmax over all segments (eq 9)"),
    "soup": Variant("constant", "soup", "mix the states, read once (eq 15)"),
    "ssc": Variant("constant", "ssc", "the best top-k segments and the online one (eq 17)"),
    "loglinear": Variant("logarithmic", "grm", "grm over O(log t) segments (Log-Linear++)"),
}


@dataclass(frozen=True)
class CachingConfig:
    """Everything that decides what a wrapped model computes; kept whole in caching.json.

    `segment` is in tokens; `heads` is `slow` (time constant above `tau` tokens) or `all`; `rule` and
    `margin` make logits of scores (`rules.py`), `relative` compares a score with the token's own mean
    first, `shared` routes all cached heads of a layer alike, `own` lets what the open segment wrote
    itself win over the past too (`reads.py`), `temperature` None takes the rule's own.
    `directions` of a question are looked at, those that questions use most; 0 takes all of them.
    `gate` adds what `tune` trains; a `rank` of 0 is a full matrix.
    """

    variant: str = "ssc"
    segment: int = 256
    router: str = "rare"
    init: str = "carry_delta"
    heads: str = "slow"
    tau: float = 150.0
    top_k: int = 2
    rule: str = "z"
    margin: float = 2.0
    relative: bool = True
    shared: bool = True
    own: bool = True
    temperature: float | None = None
    whiten: bool = True
    directions: int = 0
    gate: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        from mcretrofit import registry

        choices = {
            "variant": VARIANTS,
            "router": registry.names("routers"),
            "init": INITS,
            "heads": ("slow", "all"),
            "rule": ("z", "plain"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise unknown(name, str(getattr(self, name)), known)
        for name, least in (("segment", 1), ("top_k", 1), ("directions", 0), ("rank", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                flag = name.replace("_", "-")
                raise UsageError(
                    f"--{flag} {value!r}: has to be a whole number of at least {least}"
                )
        for name in ("tau", "margin"):
            if not math.isfinite(getattr(self, name)):
                raise UsageError(f"--{name} {getattr(self, name)}: has to be a finite number")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature}: has to be above 0, and finite")

    @property
    def preset(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def routed(self) -> bool:
        """Whether scores matter at all (an average or a sum takes every segment alike)."""
        return self.preset.aggregator not in ("moving_average", "residual")

    def replace(self, **changes: Any) -> CachingConfig:
        """A copy with some fields changed, checked anew."""
        return replace(self, **changes)


def stored_config(given: Any, where: str) -> CachingConfig:
    """The configuration that a file holds, as strictly as flags are read; `where` begins a message."""
    hints = get_type_hints(CachingConfig)
    if isinstance(given, dict):
        given = {
            name: checked(value, hints[name], f"{where}: {name}") if name in hints else value
            for name, value in given.items()
        }
    try:
        return from_mapping(CachingConfig, given, where)
    except UsageError as error:
        # values are named as flags are, which a file has none of
        said = str(error).removeprefix("--")
        raise UsageError(said if said.startswith(where) else f"{where}: {said}") from error
