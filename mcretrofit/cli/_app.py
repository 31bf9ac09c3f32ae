"""The app, assembled by the folder, and what becomes of errors: one line, and the exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mcretrofit import __version__, registry
from mcretrofit.errors import RetrofitError

# Click's own exception, whose home differs between releases of Typer
_Refused = typer.BadParameter.__mro__[2]
# of the machine, not of the program: anything else keeps its traceback
_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


def app() -> typer.Typer:
    """Every module of this folder as a command."""
    made = typer.Typer(
        help="Give a pretrained recurrent language model a memory that grows.",
        epilog="Start with: mcretrofit demo",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    made.callback()(_options)
    for name in registry.names("cli"):
        made.command(name)(registry.load("cli", name).command)
    return made


def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line; only what nobody foresaw is raised."""
    # threads that spin while they wait make small products ten times slower on a busy machine
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # transformers would print its own progress and advice between ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app()(words or ["--help"], prog_name="mcretrofit", standalone_mode=False)
        sys.stdout.flush()
    except RetrofitError as error:
        return _refuse(str(error), error.status)
    except _Refused as error:
        return _refuse(_hinted(error.format_message()), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _refuse("interrupted", 1)
    except BrokenPipeError:
        # whoever read us has gone; what is left in the buffer must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _MACHINE:
            raise
        where = f": {error.filename}" if error.filename else ""
        return _refuse(f"{(error.strerror or str(error)).lower()}{where}", 1)
    # Typer makes 130 of Ctrl-C
    return _refuse("interrupted", 1) if status == 130 else int(status or 0)


def _refuse(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def _hinted(message: str) -> str:
    return f"{message.rstrip('.')} (see --help)" if "ossible option" not in message else message
