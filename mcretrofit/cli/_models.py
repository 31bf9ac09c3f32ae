"""From a MODEL argument and flags to a loaded model; what was decided is said on stderr."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcretrofit.cli._render import note
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.settings import settings

if TYPE_CHECKING:
    from mcretrofit.compare import Request
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
    settings(None, None, flags, assignments)
    return covered(opened(model, config, device), flags, assignments, bare)


def opened(model: str, config: Path | None = None, device: str = "cpu") -> Loaded:
    """A model as its folder says, a plain checkpoint unwrapped."""
    from mcretrofit.model import load

    check_device(device)
    found = load(model, config=config, device=device)
    if found.calibrated_now:
        note(f"heads measured in memory: {model} holds no calibration")
    return found


def fitting(
    model: str,
    request: Request,
    flags: Mapping[str, Any] | None,
    assignments: Sequence[str],
    *,
    config: Path | None,
    device: str,
    bare: bool,
) -> None:
    """Refuse, from headers alone, what is predicted not to fit into memory."""
    from mcretrofit.compare import probes
    from mcretrofit.costs import describe
    from mcretrofit.needs import refuse

    check_device(device)
    found = describe(model, config)
    caching = None if bare else settings(found.config, None, flags, assignments)
    vocabulary = found.skeleton.model.config.get_text_config().vocab_size
    made = probes(request, vocabulary, found.trained_length)
    refuse(found, [(caching, probe) for probe in made], device)


def covered(
    found: Loaded, flags: Mapping[str, Any] | None, assignments: Sequence[str], bare: bool
) -> Loaded:
    """The model wrapped, anew in memory where it is not or where other settings are asked for."""
    from mcretrofit.model import attach
    from mcretrofit.retrofit import revert_

    asked = bool(flags or assignments)
    if bare and found.config is None:
        return found
    if asked or found.config is None:
        revert_(found.model)
        base = found.config
        if base is not None and base.gate:
            # they were trained for the folder's own settings
            note(f"other settings than those of {found.name}: its trained gates are left out")
            base = base.replace(gate=False, rank=0)
        found = attach(found, settings(base, None, flags, assignments))
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


def prose(path: Path | None, what: str) -> str | None:
    """A UTF-8 file of the user's, or every `.txt` of a folder one after the other."""
    if path is None or not path.is_dir():
        return read_text(path, what)
    from mcretrofit import corpus

    return "\n\n".join(corpus.read_text(path))


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"--device {device}: expected cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise RetrofitError(f"--device {device}: no CUDA device is available here")
