"""`mcretrofit generate`: continue a prompt, the text streaming to stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._models import chosen, loaded, read_text
from mcretrofit.cli._options import Config, Device, Json, MaybeModel, Seed, Set, caching_flags
from mcretrofit.errors import UsageError

if TYPE_CHECKING:
    from mcretrofit.generate import Step
    from mcretrofit.model import Loaded


@caching_flags
def command(
    model: MaybeModel = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file to continue; stdin where neither is given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to make at most.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from this share of the mass.")] = 1.0,
    seed: Seed = 42,
    base_only: Annotated[
        bool, typer.Option("--base-only", help="Leave a plain checkpoint unwrapped.")
    ] = False,
    config: Config = None,
    device: Device = "cpu",
    set_: Set = None,
    json: Json = False,
    caching: dict[str, Any] | None = None,
) -> None:
    """Continue a prompt, text streaming to stdout.

    Says on stderr how fast it was and how much memory the cached segments take.
    """
    text = _prompt(prompt, prompt_file)
    place = chosen(model)
    from mcretrofit.generate import Sampling, check, generate

    sampling = Sampling(temperature, top_p, seed)
    check(text, max_new_tokens, sampling)
    found = loaded(place, caching, set_ or (), config=config, device=device, bare=base_only)
    last, said = None, []
    for step in generate(found, text, max_new_tokens, sampling):
        last = step
        said.append(step.text)
        if not json:
            print(step.text, end="", flush=True)
    if not json:
        print()
    _report(found, last, "".join(said), json)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UsageError("--prompt and --prompt-file exclude each other")
    if prompt is None and file is None:
        if sys.stdin.isatty():
            raise UsageError("nothing to continue: give --prompt, --prompt-file or text on stdin")
        return sys.stdin.read()
    return prompt if file is None else read_text(file, "--prompt-file")


def _report(found: Loaded, last: Step | None, text: str, json: bool) -> None:
    from mcretrofit.generate import growth

    position, made = (last.position, last.tokens) if last else (0, 0)
    speed = made / last.seconds if last and last.seconds else 0.0
    each, held = growth(found, position)
    bytes_held = last.cache_bytes if last else 0
    if json:
        told = {"tokens": made, "tokens_per_second": round(speed, 2), "segments": held}
        told |= {"cache_bytes": bytes_held, "bytes_per_segment": each}
        return render.json_row({"model": found.name, "text": text, **told})
    render.note(
        f"{made} tokens, {speed:.1f} a second; {held} closed segments and the open one hold "
        f"{render.size(bytes_held)}, memory grows by {render.size(each)} a segment"
    )
