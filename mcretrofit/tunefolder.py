"""The folder that `tune` leaves: the wrapped one with `gates.safetensors` and a card that says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mcretrofit.cards import wrapped_card
from mcretrofit.model import Loaded
from mcretrofit.rawfile import read_json
from mcretrofit.wrapped import NAME, Wrapped, write

HEADS = "| mixer | head |"  # how a card's table of heads begins


def write_tuned(
    target: Path, kept: Wrapped, loaded: Loaded, card: str, gates: Mapping[str, Tensor]
) -> Path:
    """Write `kept` with trained `gates` to `target`, which may be its own folder; without, as it was."""
    same = target.resolve() == kept.folder.resolve()
    if same and not gates:
        return target
    caching = loaded.config if gates else kept.config.replace(gate=False, rank=0)
    layers = read_json(kept.folder / NAME)["layers"]
    covers = loaded.covers or {}
    reasons = {
        name: layers.get(name, {}).get("why", ["measured"] * c.total) for name, c in covers.items()
    }
    write(
        target,
        caching,
        loaded.checkpoint,
        covers,
        reasons,
        _card(kept, loaded, card),
        model_config=kept.base.get("config"),
        gates={name: value.float() for name, value in gates.items()},
        force=True,
    )
    return target


def _card(kept: Wrapped, loaded: Loaded, said: str) -> str:
    """The wrapped folder's card with the settings of now, its table of heads and a section on gates."""
    config = loaded.model.config
    family = getattr(config, "family", config.model_type)
    layers = config.get_text_config().num_hidden_layers
    path = Path(loaded.checkpoint.path)
    name = path.resolve().name if path.exists() else loaded.checkpoint.path
    summary = f"wrapped {len(loaded.wrapped)} of {layers} layers"
    text = wrapped_card(name, family, loaded.config, summary, ())
    old = kept.folder / "README.md"
    before = old.read_text(encoding="utf-8") if old.is_file() else ""
    heads = before[before.index(HEADS) :] if HEADS in before else ""
    heads = heads.split("\n## Tuned")[0].rstrip()
    return (
        text + (f"\n{heads}\n" if heads else "") + (f"\n## Tuned gates\n\n{said}" if said else "")
    )
