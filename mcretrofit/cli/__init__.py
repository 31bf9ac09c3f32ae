"""The command line: one file = one command, named by its stem. The contract.

A command is a module with `command(...)`: its typed parameters are its options, its docstring is
its help. It parses, makes one library call and renders; torch is imported inside it.
Results go to stdout (with `--json` one JSON object a row), progress and messages to stderr.
Exit status: 0, 1 (failed or interrupted), 2 (usage).
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    from mcretrofit.cli._app import run

    return run(arguments)
