"""Sizes as people write them."""

from __future__ import annotations

import re

from mcretrofit.errors import UsageError


def in_bytes(text: str, flag: str) -> int:
    """`500MB` or `5GB` as a number of bytes, at least one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text.strip(), re.IGNORECASE)
    count = int(float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " ")) if found else 0
    if count < 1:
        raise UsageError(f"{flag} {text}: expected a size such as 5GB or 500MB")
    return count
