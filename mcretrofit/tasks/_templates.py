"""Dialects: the wording around a needle, built in or from a YAML file of the user's."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from string import Formatter

from mcretrofit.errors import UsageError, unknown
from mcretrofit.tasks._recall import needle, stem
from mcretrofit.yamlfile import mapping


@dataclass(frozen=True)
class Template:
    """One dialect. A YAML file may set every field but `name`, which is its stem.

    `needle` fills {type} {key} {value}; `prompt` and `answer_prefix` (the prompt's own end) fill
    {type} {context} {query}. `keys`: `long` (old-map, RULER-like) or `short` (red apple).
    `digits`: of a value; None = the task's own kind. `haystack`: None = the task's own.
    `start`: where in the prose a sample begins, `beginning` or `random`.
    `blank_sides`: a needle at either end of the prose keeps its outer space, as RULER's code does.
    """

    name: str
    needle: str
    prompt: str
    answer_prefix: str = ""
    keys: str = "long"
    digits: int | None = None
    haystack: str | None = None
    start: str = "beginning"
    blank_sides: bool = False
    max_new_tokens: int = 128


def singular(text: str) -> str:
    """RULER's rewording of its template for one needle."""
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


# the type stays plural in the needle even for one, as published
_NEEDLE = "One of the special magic {type} for {key} is: {value}."
_PROMPT = (
    "Some special magic {type} are hidden within the following text. "
    "Make sure to memorize it. I will quiz you about the {type} afterwards.\n{context}\n"
    "What are all the special magic {type} for {query} mentioned in the provided text?"
)
_PREFIX = " The special magic {type} for {query} mentioned in the provided text are"

RULER = Template(
    name="ruler",
    needle=_NEEDLE,
    prompt=singular(_PROMPT),
    answer_prefix=singular(_PREFIX),
    blank_sides=True,
)
RULER_PLURAL = replace(RULER, prompt=_PROMPT, answer_prefix=_PREFIX)

# for tiny models: the question is the needle's own stem. The dialect names its haystack, prose,
# because a model trained on prose alone has never met the noise unit
COMPACT = Template(
    name="compact",
    needle=needle("{key}", "{value}"),
    prompt="{context}",
    answer_prefix=f" {stem('{query}')}",
    keys="short",
    digits=3,
    haystack="essay",
    start="random",
    max_new_tokens=6,
)

COMPACT_PLURAL = replace(
    COMPACT, answer_prefix=" The magic numbers for {query} are", max_new_tokens=28
)

BUILT_IN = {template.name: template for template in (RULER, COMPACT)}
_PLURAL = {template.name: template for template in (RULER_PLURAL, COMPACT_PLURAL)}

_CHOICES = {
    "keys": ("long", "short"),
    "haystack": ("essay", "noise", None),
    "start": ("beginning", "random"),
    "blank_sides": (True, False),
}
_PLACES = {
    "needle": ({"type", "key", "value"}, {"key", "value"}),
    "prompt": ({"type", "context", "query"}, {"context"}),
    "answer_prefix": ({"type", "query"}, set()),
}


def load_template(name: str | Path, plural: bool = False) -> Template:
    """A built-in dialect by name, `plural` for several answers, or the YAML file at that path."""
    if name in BUILT_IN:
        return (_PLURAL if plural else BUILT_IN)[str(name)]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise unknown("template", str(name), [*BUILT_IN, "FILE.yaml"])
    return _from_yaml(path)


def fixed_wording(task: str, template: str | Path) -> None:
    """For tasks with one wording: the name of a dialect changes nothing, a file would be lost."""
    if template not in BUILT_IN:
        raise UsageError(f"{task} has one wording and takes no template file: leave {template} out")


def _from_yaml(path: Path) -> Template:
    data = mapping(path)
    known = {field.name: field for field in fields(Template) if field.name != "name"}
    for key in data:
        if key not in known:
            raise unknown(f"key in template {path.name}:", str(key), known)
    missing = [key for key in ("needle", "prompt") if key not in data]
    if missing:
        raise UsageError(f"template {path}: {' and '.join(missing)} must be given")
    template = Template(name=path.stem, **data)
    _check(template, path)
    return template


def _check(template: Template, path: Path) -> None:
    for key, choices in _CHOICES.items():
        if getattr(template, key) not in choices:
            given = ", ".join(str(choice or "null") for choice in choices)
            raise UsageError(f"template {path}: {key} is one of {given}")
    for key, (allowed, needed) in _PLACES.items():
        text = getattr(template, key)
        if not isinstance(text, str) or not needed <= _places(text, path) <= allowed:
            raise UsageError(
                f"template {path}: {key} is a text with {_braces(allowed)}"
                + (f", of which {_braces(needed)} must be there" if needed else "")
            )
    if "query" not in _places(template.prompt + template.answer_prefix, path):
        raise UsageError(f"template {path}: prompt or answer_prefix must ask for {{query}}")
    for key, lowest in (("digits", 1), ("max_new_tokens", 1)):
        value = getattr(template, key)
        if value is not None and (type(value) is not int or value < lowest):
            raise UsageError(f"template {path}: {key} is a whole number of at least {lowest}")


def _places(text: str, path: Path) -> set[str]:
    try:
        return {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError as error:
        raise UsageError(f"template {path}: {error} in {text!r}") from error


def _braces(names: set[str]) -> str:
    return " ".join(f"{{{name}}}" for name in sorted(names))
