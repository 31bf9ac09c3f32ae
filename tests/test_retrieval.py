"""In-context retrieval and LAMBADA: the user's files, native formats, windows around answers."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from mcretrofit import registry
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.tasks import Sample
from mcretrofit.tokenizer import BytesTokenizer, load_tokenizer

QA = Path(__file__).parents[2] / "shared" / "qa"
SETS = ("squad", "fda", "swde", "triviaqa", "drop", "nq")
LONG = " ".join(f"Line number{i} says nothing." for i in range(400))
RECORDS = [
    {
        "context": f"{LONG} The keeper of the light was Mr. Harville{i}. {LONG}",
        "question": f"The keeper of the light was Mr.{'' if i % 2 else ' '}",
        "answers": [f"Harville{i}", f"Captain Harville{i}"],
    }
    for i in range(8)
]


def make(name, data, **changed):
    asked = {"length": 512, "count": 5, "seed": 42, "tokenizer": BytesTokenizer(), "data": data}
    return registry.load("tasks", name).samples(**asked | changed)


def lines(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path):
    return lines(tmp_path / "mine.jsonl", RECORDS)


def shared(name):
    if not (QA / name).exists():
        pytest.skip(f"{name} is not beside this checkout")
    return QA / name


@pytest.mark.parametrize("name", SETS)
def test_every_set_reads_the_documented_schema(name, file, tmp_path):
    whole = tmp_path / "mine.json"
    whole.write_text(json.dumps(RECORDS, indent=1), encoding="utf-8")
    made = make(name, file)
    assert made == make(name, file) == make(name, whole) != make(name, file, seed=43)
    for sample in made:
        assert sample.tokens <= 512 and len(sample.prompt) == sample.tokens - 48
        assert sample.tokens > 480 and sample.dataset == name and sample.dialect == "cloze"
        found = sample.prompt[slice(*sample.needle_span)]
        assert found == sample.answers[0] and sample.prompt.count(found) == 1
        assert sample.prompt.endswith(". The keeper of the light was Mr.")
        assert sample.prompt[sample.question :] == " The keeper of the light was Mr."
    # fewer records than samples: all of them, once each
    assert sorted(s.answers for s in make(name, file, count=99)) == sorted(
        tuple(record["answers"]) for record in RECORDS
    )


@pytest.mark.parametrize("name", SETS)
def test_score(name):
    score = registry.load("tasks", name).score
    sample = Sample("", ("Lyme Regis", "Bath"), 0, 48, None, 0, "cloze")
    assert score(sample, " It was LYME regis, she said") == score(sample, "bath") == 1
    assert score(sample, "Uppercross\nBath") == score(sample, "") == 0


@pytest.mark.parametrize("depth", [0, 50, 100])
def test_a_depth_places_the_answer_in_its_window(depth, file):
    for sample in make("squad", file, depth=depth, length=1024):
        place = sample.needle_span[0] / sample.question
        assert abs(place - depth / 100) < 0.1 and sample.depth == depth


def test_windows_keep_whole_words_and_reach_the_length(file):
    path = QA.parent / "tokenizers" / "torchtune_tiny_bpe_tokenizer.json"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout")
    tokenizer = load_tokenizer(path, 2048)
    for length in (128, 512, 2048):
        for sample in make("nq", file, length=length, tokenizer=tokenizer):
            assert length - 16 < sample.tokens <= length
            assert sample.prompt.split(" ")[0] in RECORDS[0]["context"].split(" ")


def test_a_question_mark_makes_it_a_question(tmp_path):
    record = {"context": "Anne walked to Lyme", "question": "Where did she walk?", "answer": "lyme"}
    sample = make("squad", lines(tmp_path / "a.jsonl", [record]))[0]
    assert sample.prompt == "Anne walked to Lyme\nQuestion: Where did she walk?\nAnswer:"
    assert sample.dialect == "question" and sample.answers == ("lyme",)
    assert sample.prompt[slice(*sample.needle_span)] == "Lyme"


@pytest.mark.parametrize("name", ["fda", "swde"])
def test_pages_with_a_key(name, tmp_path):
    text = "Purpose: none. Model: X1\nSummary of information above... or so\nmodel:"
    record = {"text": text, "key": "model", "value": " X1"}
    sample = make(name, lines(tmp_path / "a.jsonl", [record]))[0]
    kept = "\nSummary of information above... or so." if name == "fda" else "."
    assert sample.prompt == f"Purpose: none. Model: X1{kept} Model:"


def test_natural_questions(tmp_path):
    words = "<P> The port of <B> Lyme Regis </B> is old . </P>".split(" ")
    record = {
        "document_text": " ".join(words),
        "question_text": "which port is old",
        "annotations": [{"short_answers": [{"start_token": 4, "end_token": 7}]}],
    }
    none = record | {"annotations": [{"short_answers": []}]}
    (sample,) = make("nq", lines(tmp_path / "a.jsonl", [none, record]))
    assert sample.answers == ("Lyme Regis",) and "<" not in sample.prompt
    assert sample.prompt.endswith("Question: which port is old?\nAnswer:")


@pytest.mark.parametrize("name", ["xquad.en.json", "allennlp_squad.json"])
def test_squad_files(name):
    made = make("squad", shared(name), count=100)
    assert len(made) == (100 if name.startswith("x") else 5)
    for sample in made:
        assert sample.tokens <= 512 and sample.prompt.endswith("\nAnswer:")
        assert sample.prompt[slice(*sample.needle_span)].lower() == sample.answers[0].lower()
    assert len(make("squad", shared(name), count=9999, length=9999)) > len(made) - 1


def test_drop_file():
    made = make("drop", shared("allennlp_drop.json"), count=99)
    assert len(made) > 5
    for sample in made:
        at, end = sample.needle_span
        assert sample.prompt[at:end].lower() in [answer.lower() for answer in sample.answers]
        assert not (sample.prompt[at - 1] + sample.prompt[end]).isalnum()


def test_triviaqa_files(tmp_path):
    with tarfile.open(shared("allennlp_triviaqa-sample.tgz")) as packed:
        packed.extractall(tmp_path, filter="data")
    for name in ("web-dev.json", "wikipedia-train.json"):
        for sample in make("triviaqa", tmp_path / "qa" / name, length=1024):
            assert sample.prompt[slice(*sample.needle_span)].lower() in map(
                str.lower, sample.answers
            )
    lost = json.loads((tmp_path / "qa" / "web-dev.json").read_text(encoding="utf-8"))
    lost["Data"][0]["SearchResults"][1]["Filename"] = "absent.txt"
    (tmp_path / "qa" / "lost.json").write_text(json.dumps(lost), encoding="utf-8")
    with pytest.raises(RetrofitError, match=r"Data\[0\], SearchResults\[1\]: field 'Filename'"):
        make("triviaqa", tmp_path / "qa" / "lost.json")


def test_lambada_file():
    made = make("lambada", shared("lambada_test.jsonl"), count=50, length=200)
    for sample in made:
        assert 150 < sample.tokens <= 200 and sample.pieces[1] == (f" {sample.answers[0]}", True)
        assert sample.prompt == "".join(text for text, _ in sample.pieces)
        ((at, word),) = sample.queries
        assert sample.prompt[at:] == word and " " not in word
    assert max(s.tokens for s in make("lambada", shared("lambada_test.jsonl"), length=4096)) < 1200


WRONG = {
    "no field": ({"context": "a b", "question": "c"}, "line 2: field 'answers' is missing (there"),
    "no text": ({"context": 3, "question": "c", "answer": "a"}, "field 'context' is not a text"),
    "no list": ({"context": "a", "question": "c", "answers": "a"}, "'answers' is not a list"),
    "empty": ({"context": "a", "question": "c", "answers": []}, "'answers' is not a list of texts"),
    "no object": ([1], "line 2: expected an object with fields, found a list"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_schema_names_line_and_field(wrong, tmp_path):
    record, message = WRONG[wrong]
    path = lines(tmp_path / "mine.jsonl", [RECORDS[0], record])
    with pytest.raises(RetrofitError) as caught:
        make("squad", path)
    assert message in str(caught.value) and f"{path}, line 2" in str(caught.value)


def test_files_that_cannot_be_used(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "a b"}\n{"text": \n', encoding="utf-8")
    with pytest.raises(RetrofitError, match="line 2: not JSON"):
        make("lambada", path)
    path.write_text('{"text": "alone"}', encoding="utf-8")
    with pytest.raises(RetrofitError, match="line 1: field 'text' has no word before"):
        make("lambada", path)
    path.write_text("[" * 100_000, encoding="utf-8")
    for name in ("squad", "lambada"):
        with pytest.raises(RetrofitError, match="mine.jsonl.*nested too deep"):
            make(name, path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(RetrofitError, match="holds no records"):
        make("squad", path)
    with pytest.raises(RetrofitError, match="cannot be read: no such file"):
        make("squad", tmp_path / "absent.json")
    with pytest.raises(UsageError, match="drop reads a file of yours: give --data FILE"):
        make("drop", None)
    deep = {"data": [{"paragraphs": [{"context": "a", "qas": [{"answers": []}, {}]}]}]}
    (tmp_path / "deep.json").write_text(json.dumps(deep), encoding="utf-8")
    with pytest.raises(
        RetrofitError, match=r"data\[0\], paragraphs\[0\], qas\[1\]: field 'answers'"
    ):
        make("squad", tmp_path / "deep.json")
    lost = RECORDS[0] | {"answers": ["Wentworth"]}
    with pytest.raises(RetrofitError, match="no context that holds its answer"):
        make("squad", lines(path, [lost]))


def test_requests_that_cannot_be_met(file):
    with pytest.raises(UsageError, match="smallest length that works is") as caught:
        make("squad", file, length=60)
    smallest = int(str(caught.value).rsplit(" ", 1)[1])
    assert make("squad", file, length=smallest)
    with pytest.raises(UsageError, match="takes no haystack"):
        make("squad", file, haystack="noise")

    class Upper(BytesTokenizer):
        name = "upper"

        def encode(self, text):
            return super().encode(text.upper())

    with pytest.raises(UsageError, match="the tokenizer upper cannot spell 'Harville"):
        make("squad", file, tokenizer=Upper())
