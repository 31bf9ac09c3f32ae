"""Options that several commands share; those of the caching itself come from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from mcretrofit.config import TRAINED_RANK, CachingConfig

MODEL = (
    "A folder, a .safetensors, .pth or .bin file, an index, a hub id, a wrapped or exported "
    "folder, or builtin:NAME."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL, show_default=False)]
MaybeModel = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=f"{MODEL} By default ./retrofit.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a row, on stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output folder.")]
Config = Annotated[
    Path | None, typer.Option(help="The config.json that belongs to a single weight file.")
]
Recipe = Annotated[Path | None, typer.Option(help="A YAML file of caching settings.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, wins over all.")
]
Seed = Annotated[int, typer.Option(help="Seed of samples and sampling.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]

HELP = {
    "variant": "How the past is mixed in: mcretrofit list variants.",
    "segment": "Tokens of a segment.",
    "router": "How segments are scored: mcretrofit list routers.",
    "init": "What a segment starts from: reset, carry or carry_delta.",
    "heads": "Which heads are cached: slow or all.",
    "tau": "Time constant in tokens above which a head is slow.",
    "top_k": "Cached segments that a token reads (ssc).",
    "rule": "From scores to weights: z or plain.",
    "margin": "How much a score has to surprise; at 2 only loud tokens are (rule z).",
    "relative": "Compare a score with the token's own mean over segments first (rule z).",
    "shared": "One route for all cached heads of a layer (rule z).",
    "own": "Let what the open segment wrote itself win over the past too (rule z, carry_delta).",
    "temperature": "Of the softmax over scores; the rule's own by default.",
    "whiten": "Take the keys' own second moment out of every question.",
    "directions": "Directions of a question to score by, the most used ones; 0 is all of them.",
    "gate": "Add trainable gates.",
    "rank": "Rank of a gate's matrix, 0 is full.",
}


def caching_flags(command: Callable[..., None]) -> Callable[..., None]:
    """One flag for each field of `CachingConfig`; those given arrive in the parameter `caching`."""
    return _with_flags(command, _annotation)


def gate_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that always trains a gate, of a rank of its own by default."""

    def annotation(name: str, kind: type) -> Any:
        return _annotation(name, kind, TRAINED_RANK if name == "rank" else None)

    return _with_flags(command, annotation, {"gate"})


def grid_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The same flags, each for a list of values such as `64,128,256`, which arrives as text."""

    def annotation(name: str, kind: type) -> Any:
        option = typer.Option(
            help=f"{HELP[name]} [{_default(name)}]",
            metavar="V1,V2...",
            rich_help_panel="Caching, lists by commas",
        )
        return Annotated[str | None, option]

    return _with_flags(command, annotation)


def _with_flags(
    command: Callable[..., None],
    annotation: Callable[[str, type], Any],
    without: Collection[str] = (),
) -> Callable[..., None]:
    hints = get_type_hints(CachingConfig)
    names = [field.name for field in fields(CachingConfig) if field.name not in without]
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "caching"]
    flags = [
        inspect.Parameter(
            # a temperature of its own is what `generate` samples with
            _flag(name, own),
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=annotation(name, (get_args(hints[name]) or (hints[name],))[0]),
        )
        for name in names
    ]

    def run(**given: Any) -> None:
        caching = {n: given.pop(f.name) for n, f in zip(names, flags, strict=True)}
        command(**given, caching={n: v for n, v in caching.items() if v is not None})

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    run.__signature__ = signature.replace(parameters=[*keyword, *flags])
    run.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
    run.__doc__ = command.__doc__
    return run


def _default(name: str) -> Any:
    return {f.name: f.default for f in fields(CachingConfig)}[name]


def _annotation(name: str, kind: type, default: Any = None) -> Any:
    default = _default(name) if default is None else default
    option = typer.Option(help=f"{HELP[name]} [{default}]", rich_help_panel="Caching")
    return Annotated[kind | None, option]


def _flag(name: str, own: list[inspect.Parameter]) -> str:
    return f"score_{name}" if name in {p.name for p in own} else name
