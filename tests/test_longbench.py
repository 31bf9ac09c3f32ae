"""LongBench: published prompts, the metrics against hand-made and library numbers, truncation."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.tasks import Sample, longbench
from mcretrofit.tasks._longbench import SETS
from mcretrofit.tasks._longbench_metrics import (
    classification,
    code_sim,
    count,
    qa_f1,
    retrieval,
    rouge,
)
from mcretrofit.tokenizer import BytesTokenizer

# the fourteen English tasks of the published tables, and the two synthetic ones
FOURTEEN = (
    "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news "
    "trec triviaqa samsum lcc repobench-p"
).split()


def record(name, **changed):
    return {
        "input": "the question",
        "context": "the context",
        "answers": ["Paragraph 3"],
        "length": 3,
        "dataset": name,
        "language": "en",
        "all_classes": ["Person", "City"] if name == "trec" else None,
        "_id": "x",
    } | changed


def lines(path, *records):
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    return path


def make(data, **changed):
    asked = {"length": 2000, "count": 5, "seed": 42, "tokenizer": BytesTokenizer(), "data": data}
    return longbench.samples(**asked | changed)


@pytest.mark.parametrize("name", SETS)
def test_every_set_makes_a_prompt(name, tmp_path):
    (sample,) = make(lines(tmp_path / "a.jsonl", record(name, dataset=f"{name}_e")))
    assert sample.dataset == name and "the context" in sample.prompt
    no_input = name in ("gov_report", "multi_news", "passage_count", "lcc")
    assert ("the question" in sample.prompt) is not no_input and "{" not in sample.prompt
    assert sample.tokens == len(sample.prompt) + sample.max_new_tokens
    assert sample.classes == (("Person", "City") if name == "trec" else ())


def test_the_table_is_the_published_one():
    assert set(FOURTEEN) == set(SETS) - {"passage_count", "passage_retrieval_en"}
    limits = {"qasper": 128, "hotpotqa": 32, "qmsum": 512, "trec": 64, "samsum": 128, "lcc": 64}
    assert {name: SETS[name].max_new_tokens for name in limits} == limits
    assert SETS["lcc"].prompt == (
        "Please complete the code given below. \n{context}Next line of code:\n"
    )
    assert SETS["hotpotqa"].prompt == SETS["musique"].prompt == SETS["2wikimqa"].prompt
    assert SETS["qasper"].prompt.count('write "unanswerable". If the question is a yes/no') == 2
    assert SETS["qasper"].prompt.endswith(" explanation.\n\nQuestion: {input}\n\nAnswer:")
    assert SETS["passage_retrieval_en"].prompt.endswith("etc.\n\nThe answer is: ")


def test_qa_f1():
    assert qa_f1("The cat.", "a cat") == 1 and qa_f1("dog", "cat") == qa_f1("", "cat") == 0
    assert qa_f1("the big cat sat", "cat") == pytest.approx(2 * (1 / 3) / (4 / 3))


def test_classification_as_published():
    classes = ("City", "City or country", "Person", "Other")
    assert classification("It is a Person", "Person", classes) == 1
    assert classification("Person or Other", "Person", classes) == 0.5
    # a name inside the right one's is dropped, and the right one remains
    assert classification("City or country", "City or country", classes) == 1
    assert classification("Nothing", "Person", classes) == 0
    # published: what follows a dropped name is not looked at
    assert classification("a b c", "a b c", ("a", "b", "a b c")) == 0.5


def test_numbers():
    assert count("There are 12 or 13", "12") == 0.5 and count("none", "12") == 0
    assert retrieval("Paragraph 3.", "Paragraph 3") == 1 and retrieval("13", "Paragraph 3") == 0


def test_code_sim():
    assert code_sim("\n# a note\nx = 1\ny", "x = 1") == 1
    assert code_sim("```\nx = 2\n", "x = 1") == 0.8 and code_sim("", "x = 1") == 0


def test_rouge_by_hand():
    assert rouge("a b c", "a b c") == pytest.approx(1) and rouge("", "a") == rouge("...", "a") == 0
    # longest common subsequence a c: 2 of 3 words said, 2 of 2 of the reference
    assert rouge("a b c", "a c") == pytest.approx(2 * (2 / 3) / (5 / 3))


def test_rouge_is_the_package_that_the_benchmark_uses():
    package = pytest.importorskip("rouge", reason="the package rouge is not installed").Rouge()
    rng, words = Random(0), "a b c d e f. g. h i".split(" ")
    for _ in range(60):
        said, right = (" ".join(rng.choices(words, k=rng.randint(1, 40))) for _ in range(2))
        expected = package.get_scores([said], [right], avg=True)["rouge-l"]["f"]
        assert rouge(said, right) == pytest.approx(expected, abs=1e-12), (said, right)


def test_score_takes_the_best_answer_and_a_first_line():
    sample = Sample("", ("Anne", "Anne Elliot"), 0, 32, None, 0, "longbench", dataset="hotpotqa")
    assert longbench.score(sample, "Anne Elliot") == 1
    assert longbench.score(sample, "Anne\nor not") < 1
    assert longbench.score(replace(sample, dataset="triviaqa"), "\nAnne\nor not") == 1


def test_the_middle_is_cut(tmp_path):
    long = "".join(f"<{i}>" for i in range(3000))
    path = lines(tmp_path / "a.jsonl", record("hotpotqa", context=long))
    whole = make(path, length=40_000)[0].prompt
    for length in (500, 1001):
        (sample,) = make(path, length=length)
        half = (length - 32) // 2
        assert sample.prompt == whole[:half] + whole[-half:]
        assert length - 2 < sample.tokens <= length
    with pytest.raises(UsageError, match="the smallest length that works is 34"):
        make(path, length=33)
    assert make(path, length=34)[0].tokens == 34


def test_halves_that_need_more_tokens_once_joined(tmp_path):
    class Pairs(BytesTokenizer):
        """A token for each torn character is one for each of its bytes."""

        name = "pairs"

        def decode(self, ids):
            return super().decode(ids).replace("\ufffd", "????")

    path = lines(tmp_path / "a.jsonl", record("lcc", context="é" * 500))
    assert make(path, length=301, tokenizer=Pairs())[0].tokens <= 301


def test_wrong_files(tmp_path):
    path = tmp_path / "a.jsonl"
    for wrong, message in (
        ({"dataset": "qaspr"}, "did you mean 'qasper'"),
        ({"dataset": "lcc"}, "line 2: field 'dataset' is 'lcc', but the file starts with 'trec'"),
        ({"answers": "x"}, "line 2: field 'answers' is not a list"),
        ({"all_classes": None}, "line 2: field 'all_classes' is not a list"),
        ({"context": 1}, "line 2: field 'context' is not a text"),
    ):
        with pytest.raises(RetrofitError) as caught:
            make(lines(path, record("trec"), record("trec") | wrong))
        assert message in str(caught.value) and "line 2" in str(caught.value)
    bad = record("passage_retrieval_en", answers=["3"])
    with pytest.raises(RetrofitError, match="not of the form 'Paragraph 7'"):
        make(lines(path, bad))
    with pytest.raises(UsageError, match="longbench has no single needle"):
        make(lines(path, record("trec")), depth=50)
