"""`mcretrofit export`: a complete Hugging Face folder that loads without mcretrofit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mcretrofit.cli import _render as render
from mcretrofit.cli._models import FOLDER, summary
from mcretrofit.cli._options import Config, Force, Json, MaybeModel
from mcretrofit.cli._sizes import in_bytes
from mcretrofit.errors import RetrofitError, UsageError, unknown

TARGETS = ("hf", "base")


def command(
    model: MaybeModel = None,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("export"),
    force: Force = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 [as the base has it].")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 500MB.")] = "5GB",
    name: Annotated[str | None, typer.Option(help="The model's name in its card.")] = None,
    to: Annotated[
        str, typer.Option(help="hf, or base: the unmodified checkpoint, written back.")
    ] = "hf",
    config: Config = None,
    json: Json = False,
) -> None:
    """Write a folder that loads without mcretrofit.

    It holds weights, modeling code, tokenizer and model card, for transformers'
    from_pretrained(FOLDER, trust_remote_code=True).
    """
    most = in_bytes(shard_size, "--shard-size")
    if to not in TARGETS:
        raise unknown("--to", to, TARGETS)
    if model is None and not (Path(FOLDER) / "caching.json").is_file():
        raise RetrofitError(f"no ./{FOLDER} here to export: make one with `mcretrofit wrap MODEL`")
    if os.path.lexists(out) and not force:
        raise RetrofitError(f"{out} exists: --force replaces it, --out writes to another folder")
    place = FOLDER if model is None else model
    sources = [place] if Path(place).exists() else []
    if to == "base":
        return _base(place, out, force, dtype, config, json)
    from mcretrofit.cards import exported_card, latest
    from mcretrofit.exporting import export
    from mcretrofit.model import load
    from mcretrofit.streaming import stream
    from mcretrofit.tokenizer import has_tokenizer, is_bytes

    streamed = stream(place, config, dtype)
    found = streamed.loaded if streamed else load(place, config=config)
    rows = latest(Path(place) / "rows.jsonl")
    family = getattr(found.model.config, "family", None)
    kind = family or found.model.config.model_type
    card = exported_card(name or out.resolve().name, kind, found.config, rows, family is None)
    folder = export(
        found.model,
        out,
        checkpoint=found.checkpoint,
        force=force,
        dtype=dtype,
        shard_size=most,
        card=card,
        sources=sources,
        tensors=streamed.tensors if streamed else None,
    )
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if json:
        wrapped = None if found.config is None else len(found.wrapped)
        told = {"folder": str(folder), "model": place, "family": kind, "wrapped": wrapped}
        return render.json_row({**told, "files": {p.name: p.stat().st_size for p in files}})
    if found.config is None:
        render.note(f"{place} is not wrapped: exported without caching (`mcretrofit wrap` adds it)")
    else:
        render.note(summary(found))
    print(
        f"wrote {folder}: {len(files)} files, {render.size(sum(p.stat().st_size for p in files))}"
    )
    if not (is_bytes(found.model.config) or has_tokenizer(folder)):
        render.note("no tokenizer was found beside the weights: the folder holds none")
    print(f'load it with AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)')


def _base(
    place: str, out: Path, force: bool, dtype: str | None, config: Path | None, json: bool
) -> None:
    if dtype is not None:
        raise UsageError("--to base changes nothing: leave --dtype out")
    from mcretrofit.baseback import write_base

    folder = write_base(place, out, config=config, force=force)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if json:
        told = {"folder": str(folder), "model": place}
        return render.json_row({**told, "files": {p.name: p.stat().st_size for p in files}})
    total = render.size(sum(p.stat().st_size for p in files))
    print(f"wrote {folder}: the unmodified base, {len(files)} files, {total}")
