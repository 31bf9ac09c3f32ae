"""`mcretrofit-lm-eval`: lm-evaluation-harness's own command, with the model `mcretrofit` known to it."""

from __future__ import annotations

import sys

from mcretrofit.errors import RetrofitError


def main() -> None:
    """Run `lm_eval` with the arguments of this process."""
    try:
        _run()
    except RetrofitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)


def _run() -> None:
    # first: it says what to install where the harness is missing
    import mcretrofit.harness as harness

    harness.command()
