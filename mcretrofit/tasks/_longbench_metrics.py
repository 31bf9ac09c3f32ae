"""LongBench's metrics of one completion and one right answer, each in [0, 1] (2308.14508)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def qa_f1(said: str, right: str, classes: Sequence[str] = ()) -> float:
    """F1 of words without case, punctuation and articles, as SQuAD counts them."""
    a, b = _words(said), _words(right)
    same = sum((Counter(a) & Counter(b)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(a), same / len(b)
    return 2 * precision * recall / (precision + recall)


def rouge(said: str, right: str, classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L over sentences, as the package `rouge` counts it: different words only.

    A sentence ends at a full stop; a reference sentence is matched with every one that was said.
    """
    a, b = _sentences(said), _sentences(right)
    if not a or not b:
        return 0.0
    found: set[str] = set()
    for sentence in b:
        found.update(*(_common(sentence, other) for other in a))
    precision = len(found) / len({word for one in a for word in one})
    recall = len(found) / len({word for one in b for word in one})
    return 2 * precision * recall / (precision + recall + 1e-8)


def classification(said: str, right: str, classes: Sequence[str] = ()) -> float:
    """1 / the number of classes named, where the right one is among them.

    A name within the right one's does not count; as published, the one after a name that is
    dropped is not looked at.
    """
    named = [one for one in classes if one in said]
    at = 0
    while at < len(named):
        if named[at] in right and named[at] != right:
            named.remove(named[at])
        at += 1
    return 1 / len(named) if right in named else 0.0


def count(said: str, right: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers said that are the right one."""
    numbers = re.findall(r"\d+", said)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def retrieval(said: str, right: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers said that are the paragraph's, which the answer calls `Paragraph 7`."""
    found = re.search(r"Paragraph (\d+)", right)
    return count(said, found.group(1)) if found else 0.0


def code_sim(said: str, right: str, classes: Sequence[str] = ()) -> float:
    """Likeness in whole percent of the first line that is no comment or fence with the next line."""
    lines = said.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, right).ratio()) / 100


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _sentences(text: str) -> list[list[str]]:
    # a blank sentence is one empty word, as there
    return [part.split() or [""] for part in text.split(".") if part]


def _common(a: list[str], b: list[str]) -> set[str]:
    """The words of the longest common subsequence; of equal ones the last in `b` is cut first."""
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, word in enumerate(a, 1):
        for j, other in enumerate(b, 1):
            longer = max(best[i - 1][j], best[i][j - 1])
            best[i][j] = best[i - 1][j - 1] + 1 if word == other else longer
    words, i, j = set(), len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            words.add(a[i - 1])
            i, j = i - 1, j - 1
        elif best[i - 1][j] > best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


METRICS = {one.__name__: one for one in (qa_f1, rouge, classification, count, retrieval, code_sim)}
