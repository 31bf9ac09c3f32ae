"""From a MODEL argument and flags to a loaded model; what was decided is said on stderr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcretrofit.cli._render import note
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.settings import settings

if TYPE_CHECKING:
    from mcretrofit.model import Loaded

FOLDER = "retrofit"
BUILTIN = "builtin:gla"


def chosen(model: str | None) -> str:
    """The model that was named, else ./retrofit, else the embedded one."""
    if model is not None:
        return model
    if (Path(FOLDER) / "caching.json").is_file():
        return FOLDER
    note(f"no MODEL given and no ./{FOLDER} here: taking the embedded {BUILTIN}")
    return BUILTIN


def loaded(
    model: str,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
    *,
    config: Path | None = None,
    device: str = "cpu",
    bare: bool = False,
) -> Loaded:
    """Load a model, wrapped: as its folder says, or in memory where it is a plain checkpoint.

    `flags` and `assignments` override the folder's caching; a `bare` checkpoint is left as it is.
    """
    # before anything is loaded: a typo should not cost seconds
    asked = bool(flags or assignments)
    settings(None, None, flags, assignments)
    from mcretrofit import model as models
    from mcretrofit.retrofit import revert_
    from mcretrofit.wrapped import is_wrapped, read

    _check_device(device)
    if is_wrapped(model):
        caching = settings(read(model).config, None, flags, assignments) if asked else None
        found = models.load(model, caching=caching, device=device)
        if found.calibrated_now:
            why = "other settings" if asked else f"{model} holds no calibration"
            note(f"heads measured in memory ({why})")
    else:
        found = models.load(model, config=config, device=device)
        if bare and found.config is None:
            return found
        if found.config is None or asked:
            revert_(found.model)
            caching = settings(found.config, None, flags, assignments)
            found = models.attach(found, caching)
            note(f"wrapped in memory: {found.config.variant}, segment {found.config.segment}")
    note(summary(found))
    return found


def summary(found: Loaded) -> str:
    """`wrapped n of m layers`, with what follows from zero."""
    from mcretrofit.wrap import nothing

    layers = found.model.config.get_text_config().num_hidden_layers
    text = f"wrapped {len(found.wrapped)} of {layers} layers"
    return text if found.wrapped else f"{text}: {nothing(found.config)}"


def read_text(path: Path | None, what: str) -> str | None:
    """A UTF-8 file of the user's."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RetrofitError(f"{what} {path}: {reason.lower()}") from error


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"--device {device}: expected cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise RetrofitError(f"--device {device}: no CUDA device is available here")
