"""Where a sample's questions start, and which segment holds their answers (the oracle control)."""

from __future__ import annotations

from mcretrofit.tasks import Sample
from mcretrofit.tokenizer import Tokenizer


def targets(sample: Sample, tokenizer: Tokenizer, segment: int) -> list[tuple[int, int]] | None:
    """(first token, segment) of every question; None unless exactly one segment holds its answer."""
    if sample.pieces:
        return _paired(sample, tokenizer, segment)
    if sample.ids or not sample.answers:
        return None
    first = sample.question
    if first is None:
        last = sample.prompt.rstrip().rfind("\n") + 1
        first = last if last > (sample.needle_span or (0, 0))[1] else None
    if not first:
        return None
    ends = _ends(sample, first)
    holding = {(_count(tokenizer, sample.prompt[:end]) - 1) // segment for end in ends}
    if len(holding) != 1:
        return None
    return [(_count(tokenizer, sample.prompt[:first]), holding.pop())]


def _ends(sample: Sample, question: int) -> list[int]:
    """Where the answers end in the prompt, before the question."""
    if sample.needle_span and len(sample.answers) == 1:
        start, stop = sample.needle_span
        at = sample.prompt.find(sample.answers[0], start, stop)
        if at >= 0:
            return [at + len(sample.answers[0])]
    ends = []
    for answer in sample.answers:
        at = sample.prompt.find(answer, 0, question)
        if at < 0:
            return []
        while at >= 0:
            ends.append(at + len(answer))
            at = sample.prompt.find(answer, at + 1, question)
    return ends


def _paired(sample: Sample, tokenizer: Tokenizer, segment: int) -> list[tuple[int, int]] | None:
    """Of teacher-forced questions: the line of the context that a question and its answer repeat."""
    steps, seen, asked, start = [], 0, "", 0
    context = sample.pieces[0][0]
    for text, is_answer in sample.pieces:
        if is_answer:
            line = f"{asked.strip()}{text}"
            at = f"\n{context}\n".find(f"\n{line}\n")
            if at < 0:
                return None
            steps.append((start, (_count(tokenizer, context[: at + len(line)]) - 1) // segment))
        asked, start = text, seen
        seen += _count(tokenizer, text)
    return steps or None


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text))
