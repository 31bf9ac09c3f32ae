"""Errors that a user can act on: one line that says what, where and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class RetrofitError(ValueError):
    """The input cannot be used; the command line prints it as one line and exits with `status`."""

    status = 1


class UsageError(RetrofitError):
    """The request itself is wrong (an unknown name, a size that makes no sense)."""

    status = 2


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist: suggests the nearest, lists what there is."""
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")


@contextmanager
def named(what: str) -> Iterator[None]:
    """An error of ours from within begins with `what` it is about."""
    try:
        yield
    except RetrofitError as error:
        raise type(error)(f"{what}: {error}") from error
