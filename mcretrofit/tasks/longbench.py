"""LongBench: one of its English sets, its prompt and metric, --data FILE (2308.14508).

--data: JSON lines as published, {input, context, answers, length, dataset, language, all_classes,
_id}. `dataset` names the set, one a file: narrativeqa, qasper, multifieldqa_en, hotpotqa, 2wikimqa,
musique, gov_report, qmsum, multi_news, trec, triviaqa, samsum, lcc, repobench-p, and the synthetic
passage_count and passage_retrieval_en; a LongBench-E file (`qasper_e`) counts as its set.
Scores are the set's own metric as a share of 1; a prompt that is too long loses its middle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mcretrofit.errors import RetrofitError, UsageError, unknown
from mcretrofit.tasks import Sample
from mcretrofit.tasks._data import Record, read_records, some
from mcretrofit.tasks._fit import check_request, no_depth, stream
from mcretrofit.tasks._longbench import FIRST_LINE, SETS
from mcretrofit.tasks._longbench_metrics import METRICS
from mcretrofit.tasks._templates import fixed_wording
from mcretrofit.tokenizer import Tokenizer

METRIC = "accuracy"
WHOLE = True
SCHEMA = "objects with input, context, answers, dataset and all_classes"


def samples(
    *,
    length: int,
    depth: float | None = None,
    count: int,
    seed: int,
    tokenizer: Tokenizer,
    template: str | Path = "ruler",
    haystack: str | Path | None = None,
    data: str | Path | None = None,
) -> list[Sample]:
    """`count` prompts of at most `length` tokens, the set's new tokens included."""
    check_request("longbench", length=length, depth=None, count=count)
    no_depth("longbench", depth)
    fixed_wording("longbench", template)
    if haystack is not None:
        raise UsageError("longbench reads its contexts from --data and takes no haystack")
    records = read_records("longbench", data, SCHEMA)
    names = [_name(record) for record in records]
    for record, name in zip(records, names, strict=True):
        if name != names[0]:
            raise RetrofitError(
                f"{record.where}: field 'dataset' is {name!r}, but the file starts with "
                f"{names[0]!r}: give one set a file"
            )
    made = [_checked(record) for record in records]
    chosen = some(made, count, stream("longbench", seed, 0))
    return [_sample(names[0], one, length, seed, tokenizer) for one in chosen]


def metric(sample: Sample) -> str:
    """The name of the set's metric."""
    return SETS[sample.dataset].metric


def score(sample: Sample, completion: str) -> float:
    """The best of the set's metric over the right answers."""
    if sample.dataset in FIRST_LINE:
        completion = completion.lstrip("\n").split("\n")[0]
    measure = METRICS[metric(sample)]
    return max(measure(completion, answer, sample.classes) for answer in sample.answers)


def _name(record: Record) -> str:
    name = record.get("dataset").removesuffix("_e")
    if name not in SETS:
        raise unknown(f"LongBench set ({record.where})", name, SETS)
    return name


def _checked(record: Record) -> Sample:
    """A sample whose prompt is the context alone, and whose question is in its pieces."""
    name = _name(record)
    right = record.texts("answers")
    classes = record.fields.get("all_classes")
    if classes is not None or SETS[name].metric == "classification":
        classes = record.texts("all_classes")
    if SETS[name].metric == "retrieval" and not all("Paragraph " in one for one in right):
        raise RetrofitError(f"{record.where}: field 'answers' is not of the form 'Paragraph 7'")
    prompt = SETS[name].prompt.format(context=record.get("context"), input=record.get("input"))
    return Sample(
        prompt, right, 0, SETS[name].max_new_tokens, None, 0, "longbench", classes=classes or ()
    )


def _sample(name: str, one: Sample, length: int, seed: int, tokenizer: Tokenizer) -> Sample:
    room = length - one.max_new_tokens
    if room < 2:
        raise UsageError(
            f"longbench: {name} takes {one.max_new_tokens} new tokens, which a length of {length} "
            f"has no room for; the smallest length that works is {one.max_new_tokens + 2}"
        )
    prompt = _cut(one.prompt, room, tokenizer)
    tokens = len(tokenizer.encode(prompt)) + one.max_new_tokens
    return replace(one, prompt=prompt, tokens=tokens, seed=seed, dataset=name)


def _cut(prompt: str, room: int, tokenizer: Tokenizer) -> str:
    """The prompt without its middle where it has more than `room` tokens, as published."""
    ids = tokenizer.encode(prompt)
    if len(ids) <= room:
        return prompt
    half = room // 2
    while True:
        # two halves read apart may need a token or two more once they are joined
        cut = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])
        if len(tokenizer.encode(cut)) <= room or half == 1:
            return cut
        half -= 1
