"""A sweep as a plan: a grid over caching and evaluation keys -> cells, each with a stable id."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.compare import Request, probes
from mcretrofit.config import CachingConfig
from mcretrofit.errors import UsageError, unknown
from mcretrofit.rows import Probe, identity
from mcretrofit.settings import settings
from mcretrofit.yamlfile import mapping

CACHING = tuple(field.name for field in fields(CachingConfig))
# one name for each key of an evaluation, as a list of values
PROBING = ("task", "length", "depth", "samples", "seed", "template", "haystack", "pairs", "data")
MORE = ("template", "haystack", "pairs", "data")
PLURALS = {"tasks": "task", "lengths": "length", "depths": "depth", "seeds": "seed"}
OWN = ("model", "grid", "controls", "device", "config")
Axes = dict[str, list[Any]]


class Recipe(NamedTuple):
    """A sweep as a YAML file says it: axes, and what is not one."""

    axes: Axes
    model: str | None = None
    controls: bool = True
    device: str = "cpu"
    config: str | None = None


class Job(NamedTuple):
    """One setting on one probe; `base` is the id of the unmodified model's row on it."""

    id: str
    base: str
    caching: CachingConfig
    probe: Probe


class Traits(NamedTuple):
    """What planning has to know of a model."""

    name: str
    model_hash: str
    vocabulary: int
    trained: int | None
    caching: CachingConfig | None = None


class Plan(NamedTuple):
    """Every job of a sweep, in the order in which one process does them."""

    traits: Traits
    jobs: list[Job]
    controls: bool

    @property
    def bases(self) -> dict[str, Probe]:
        """The probes by the ids of their bases."""
        return {job.base: job.probe for job in self.jobs}

    def shard(self, number: int, count: int) -> Plan:
        """Every `count`-th job by id, the `number`-th of them first (from 1)."""
        mine = {job.id for job in sorted(self.jobs, key=lambda job: job.id)[number - 1 :: count]}
        return self._replace(jobs=[job for job in self.jobs if job.id in mine])


def read_recipe(path: Path) -> Recipe:
    """A recipe from YAML, read strictly: an unknown key names the nearest known one."""
    found = mapping(path)
    grid = found.pop("grid", None) or {}
    if not isinstance(grid, dict):
        raise UsageError(f"{path}: grid: expected keys and values, found {type(grid).__name__}")
    own = {name: found.pop(name) for name in OWN if name in found}
    if not isinstance(own.get("controls", True), bool):
        raise UsageError(f"{path}: controls: {own['controls']!r} is not true or false")
    made = axes(found, str(path), (*CACHING, *PROBING, *PLURALS, *OWN))
    return Recipe(made | axes(grid, f"{path}: grid"), **own)


def axes(given: Mapping[str, Any], where: str, known: Sequence[str] = ()) -> Axes:
    """Checked axes: each value a list, each name a caching or evaluation key."""
    made: Axes = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        name = PLURALS.get(name, name)
        if name not in (*CACHING, *PROBING):
            names = known or (*CACHING, *PROBING)
            raise UsageError(f"{where}: {unknown('grid key', str(key), names)}")
        values = value if isinstance(value, list) else [value]
        if not values:
            raise UsageError(f"{where}: {key} has no values")
        made[name] = [_checked(name, one, where) for one in values]
    return made


def words(text: str) -> list[Any]:
    """The values of `64,128,256`, each as YAML reads it."""
    import yaml

    try:
        return [yaml.safe_load(word) for word in text.split(",")]
    except yaml.YAMLError as error:
        raise UsageError(f"{text!r} is not a list of values such as 64,128") from error


def assigned(assignments: Sequence[str]) -> Axes:
    """The axes of `--set key=v1,v2`."""
    made: Axes = {}
    for text in assignments:
        name, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected key=v1,v2, such as --set top_k=2,4")
        made |= axes({name.strip(): words(values)}, "--set")
    return made


def _checked(name: str, value: Any, where: str) -> Any:
    if name in CACHING:
        return _caching(name, value, where)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name == "samples" and isinstance(value, dict) and value:
        return {str(task): _checked(name, count, where) for task, count in value.items()}
    if name in ("samples", "seed", "pairs") and not whole:
        raise UsageError(f"{where}: {name} {value!r} is not a whole number")
    if name == "task" and str(value).startswith("lm-eval:"):
        raise UsageError(
            f"{where}: a sweep draws its own samples; mcretrofit eval --task {value} asks the harness"
        )
    if name == "depth" and not ((whole or isinstance(value, float)) and 0 <= value <= 100):
        raise UsageError(f"{where}: depth {value!r} is not a number of percent, 0 to 100")
    return value if name in ("samples", "seed", "pairs") else _word(name, value)


def _caching(name: str, value: Any, where: str) -> Any:
    try:
        return getattr(settings(None, None, {name: value}, where=where), name)
    except UsageError as error:
        if where == "flags" or str(error).startswith(where):
            raise
        raise UsageError(f"{where}: {error}") from error


def _word(name: str, value: Any) -> Any:
    return float(value) if name == "depth" else str(value)


def plan(made: Axes, traits: Traits, controls: bool) -> Plan:
    """The jobs of a grid: settings one after the other, each on every probe."""
    wanted = requests(made)
    found = {p: None for one in wanted for p in probes(one, traits.vocabulary, traits.trained)}
    names = {p: identity(traits.model_hash, p) for p in found}
    jobs = [
        Job(identity(traits.model_hash, p, config, controls), names[p], config, p)
        for config in configs(made, traits.caching)
        for p in found
    ]
    return Plan(traits, jobs, controls)


def configs(made: Axes, base: CachingConfig | None) -> list[CachingConfig]:
    """Every caching setting of a grid once: what a variant does not look at tells none apart."""
    given = {name: values for name, values in made.items() if name in CACHING}
    combined = [dict(zip(given, one, strict=True)) for one in product(*given.values())]
    return list(dict.fromkeys(canonical(settings(base, None, one)) for one in combined))


def canonical(config: CachingConfig) -> CachingConfig:
    """The setting with what its variant and router do not look at set to the default."""
    idle = [] if config.preset.aggregator == "ssc" else ["top_k"]
    if not config.routed:
        idle += ["rule", "margin", "relative", "temperature", "whiten", "directions"]
    default = CachingConfig()
    return config.replace(**{name: getattr(default, name) for name in idle})


def requests(made: Axes) -> list[Request]:
    """The requests of a grid: one for each value of what a request holds one of."""
    single = {name: made.get(name, [None]) for name in ("samples", *MORE)}
    single["seed"] = made.get("seed", [Request.seed])
    return [
        Request(
            tuple(made.get("task", ("niah", "perplexity"))),
            tuple(made.get("length", ())),
            depths=tuple(made.get("depth", ())),
            **dict(zip(single, one, strict=True)),
        )
        for one in product(*single.values())
    ]


def command(model: str, config: CachingConfig | None, probe: Probe, controls: bool) -> str:
    """The command that measures one row again."""
    said = ["mcretrofit", "eval", model, "--task", probe.task, "--lengths", str(probe.length)]
    said += ["--samples", str(probe.count), "--seed", str(probe.seed)]
    more = {name: getattr(probe, name) for name in ("depth", *MORE)}
    default = asdict(CachingConfig())
    own = {} if config is None else asdict(config)
    more |= {n: v for n, v in own.items() if n in ("variant", "segment") or v != default[n]}
    for name, value in more.items():
        if value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            said.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            said += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    said += [word for k, v in probe.options for word in ("--option", f"{k}={v}")]
    said += ["--base-only"] if config is None else ["--controls"] if controls else []
    return shlex.join(said)
