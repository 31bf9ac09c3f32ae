"""Haystacks: RULER's noise unit and running prose, split into words and sentences offline."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from os.path import exists
from pathlib import Path
from typing import NamedTuple

from mcretrofit.errors import RetrofitError, UsageError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_END = re.compile(r"[.!?][\"'\u2019\u201d)\]]*$")
_INITIAL = re.compile(r"^[\"'\u201c(]*[A-Z]\.$")
LONG = 100  # characters to a word: more are no words
_TITLES = frozenset(
    "Mr. Mrs. Ms. Dr. St. Prof. Sr. Jr. Capt. Col. Gen. Rev. Hon. Mt. No. vs. e.g. i.e.".split()
)


class Essay(NamedTuple):
    """Running text as words: `ends[i]` says that word i ends a sentence; `starts` begin one."""

    words: tuple[str, ...]
    ends: tuple[bool, ...]
    starts: tuple[int, ...]

    def sentences(self, count: int, start: int = 0) -> list[str]:
        """The first `count` words from word `start` on, repeated when short, as sentences."""
        done: list[str] = []
        current: list[str] = []
        for at in range(start, start + count):
            place = at % len(self.words)
            current.append(self.words[place])
            if self.ends[place]:
                done.append(" ".join(current))
                current = []
        return [*done, " ".join(current)] if current else done


@lru_cache(maxsize=4)
def essay(text: str) -> Essay:
    """Split text at white space and at sentence ends; RULER does the latter with NLTK's punkt."""
    words = tuple(text.split())
    if not words:
        raise UsageError("the haystack holds no words")
    if len(text) > LONG * len(words):
        raise UsageError(
            f"the text to hide facts in has hardly any white space ({len(words)} words in {len(text)} "
            "characters): they are hidden between words"
        )
    following = (*words[1:], words[0])
    ends = tuple(_ends(a, b) for a, b in zip(words, following, strict=True))
    return Essay(words, ends, tuple(i for i in range(len(words)) if i == 0 or ends[i - 1]))


def _ends(word: str, following: str) -> bool:
    if not _END.search(word) or word in _TITLES or _INITIAL.match(word):
        return False
    return not following[:1].islower()


def read_text(haystack: str | Path | None) -> str:
    """The prose to hide needles in: None = what ships with the package; a text, file or folder.

    Raises `UsageError` where the name leads nowhere, `RetrofitError` where a file is unreadable.
    """
    if haystack is None:
        return (files("mcretrofit") / "text" / "held_out.txt").read_text(encoding="utf-8")
    # os.path.exists, not Path.exists: a long text is no file name, and the latter would raise
    if isinstance(haystack, str) and len(haystack.split()) > 1 and not exists(haystack):
        return haystack
    place = Path(haystack)
    paths = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    if not paths or not paths[0].exists():
        raise UsageError(
            f"haystack {str(haystack)!r}: no such file, and no folder with *.txt files"
        )
    return "\n".join(_read(path) for path in paths)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RetrofitError(f"haystack {path} cannot be read as UTF-8 text: {error}") from error
