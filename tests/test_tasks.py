"""Tasks: what every one promises, over the folder; then what each one is."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path
from random import Random

import pytest

from mcretrofit import registry
from mcretrofit.errors import UsageError
from mcretrofit.tasks import ALIASES
from mcretrofit.tasks._recall import compact_keys, needle, pair_line, pair_stem, stem
from mcretrofit.tasks._words import ADJECTIVES, LONG_ADJECTIVES, LONG_NOUNS, NOUNS
from mcretrofit.tasks.mqar import mqar_ids
from mcretrofit.tokenizer import BytesTokenizer, load_tokenizer

BYTES = BytesTokenizer()
NAMES = registry.names("tasks")
NIAH = [name for name in NAMES if name.startswith("niah")]
# those that need no file of the user's; the others are in test_retrieval and test_longbench
MADE = [
    name
    for name in NAMES
    if "data" not in signature(registry.load("tasks", name).samples).parameters
]
# a haystack of needles grows by a whole one
COARSE = {"niah_multikey_3": 80}
SHARED = Path(__file__).parents[2] / "shared" / "tokenizers"


class Upper(BytesTokenizer):
    """Spells capitals only."""

    name = "upper"

    def encode(self, text: str) -> list[int]:
        return super().encode(text.upper())


def make(name, **changed):
    asked = {"length": 900, "count": 3, "seed": 42, "tokenizer": BYTES} | changed
    return registry.load("tasks", name).samples(**asked)


def test_the_folder_and_its_alias():
    assert {"niah_single_1", "passkey", "mqar", "perplexity"} <= set(NAMES)
    assert set(ALIASES.values()) <= set(NAMES)
    metrics = {registry.load("tasks", name).METRIC for name in NAMES}
    assert metrics == {"accuracy", "bits_per_byte"}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("length", [600, 1111, 4096])
def test_length_is_reached_and_never_exceeded(name, length):
    if name.startswith("niah_multi") and length < 1000:
        length += 600
    for sample in make(name, length=length):
        assert length - 100 - COARSE.get(name, 0) < sample.tokens <= length
        used = sum(len(BYTES.encode(text)) for text, _ in sample.pieces)
        used = used or len(sample.ids) or len(BYTES.encode(sample.prompt))
        assert used + sample.max_new_tokens == sample.tokens


@pytest.mark.parametrize("name", MADE)
def test_subword_lengths(name):
    path = SHARED / "torchtune_tiny_bpe_tokenizer.json"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout")
    tokenizer = load_tokenizer(path, 2048)
    for length in (512, 1000):
        for sample in make(name, length=length, tokenizer=tokenizer):
            assert length - 40 - COARSE.get(name, 0) < sample.tokens <= length


@pytest.mark.parametrize("name", MADE)
def test_same_request_same_samples(name):
    assert make(name) == make(name)
    assert make(name) != make(name, seed=43)


def test_no_hash_seed_enters_and_no_torch():
    code = (
        "import sys; from mcretrofit import registry; from mcretrofit.tokenizer import *;"
        "made = [registry.load('tasks', n).samples(length=1200, count=2, seed=3,"
        f" tokenizer=BytesTokenizer()) for n in {MADE}];"
        "print(hashlib.sha256(repr(made).encode()).hexdigest(),"
        " {'torch', 'numpy', 'tokenizers'} & set(sys.modules))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", f"import hashlib; {code}"],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] and runs[0].endswith("set()\n")


@pytest.mark.parametrize("name", [*NIAH, "passkey", "mqar"])
def test_too_short_names_the_length_that_works(name):
    with pytest.raises(UsageError, match="the smallest length that works is") as caught:
        make(name, length=40)
    smallest = int(str(caught.value).rsplit(" ", 1)[1])
    assert len(make(name, length=smallest)) == 3
    with pytest.raises(UsageError, match=f"works is {smallest}"):
        make(name, length=smallest - 1)


@pytest.mark.parametrize("name", [*NIAH, "passkey", "mqar"])
def test_a_tokenizer_that_cannot_spell_the_needle(name):
    with pytest.raises(UsageError, match="the tokenizer upper cannot spell '"):
        make(name, tokenizer=Upper())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [{"length": 0}, {"count": 0}, {"depth": 101}, {"depth": -1}])
def test_senseless_numbers_are_refused(name, wrong):
    with pytest.raises(UsageError, match=name):
        make(name, **wrong)


def test_words_are_distinct_and_plain():
    for words in (ADJECTIVES, NOUNS, LONG_ADJECTIVES, LONG_NOUNS):
        assert len(words) == len(set(words)) and all(w.isalpha() and w.islower() for w in words)
    assert len(ADJECTIVES) == len(NOUNS) == 40 and min(len(LONG_ADJECTIVES), len(LONG_NOUNS)) > 300
    keys = compact_keys(Random(0), 1600)
    assert len(set(keys)) == 1600 and "red apple" in keys
    with pytest.raises(UsageError, match="1601 facts in one text .--pairs."):
        compact_keys(Random(0), 1601)


def test_the_shared_sentences():
    assert needle("red apple", "824") == "The magic number for red apple is 824."
    assert stem("red apple") == "The magic number for red apple is"
    assert pair_line("red apple", "824") == "red apple: 824"
    assert pair_stem("red apple") == "red apple:"


@pytest.mark.parametrize("name", MADE)
def test_score(name):
    module = registry.load("tasks", name)
    sample = make(name)[0]
    if module.METRIC == "bits_per_byte":
        assert module.score(sample, 2.0794415416798357 * 899) == pytest.approx(3.0)
        return
    assert module.score(sample, f"It is {' and '.join(sample.answers).upper()}, I think") == 1
    assert module.score(sample, "no idea") == 0
    assert module.score(sample, sample.answers[0]) == pytest.approx(1 / len(sample.answers))


@pytest.mark.parametrize(
    "pairs, queries, asked", [(4, None, 4), (8, None, 8), (20, None, 8), (20, 3, 3)]
)
def test_mqar_lines(pairs, queries, asked):
    for sample in make("mqar", length=2500, pairs=pairs, queries=queries):
        assert "".join(text for text, _ in sample.pieces) == sample.prompt
        assert len(sample.queries) == len(sample.answers) == len(set(sample.answers)) == asked
        marked = [text for text, is_answer in sample.pieces if is_answer]
        assert marked == [f" {answer}" for answer in sample.answers]
        lines = sample.prompt.split("\n")
        for offset, answer in sample.queries:
            assert sample.prompt[offset : offset + 3] == answer
            line = sample.prompt[: offset + 3].rsplit("\n", 1)[1]
            assert line.endswith(f": {answer}") and lines.count(line) == 2
        places = [
            sample.prompt.index(line)
            for line in lines
            if line[-4:-3] == " " and line[-3:].isdigit()
        ]
        ends = sorted(set(places))
        assert len(ends) == pairs and ends[-1] < 0.87 * len(sample.prompt)
        assert sample.prompt[slice(*sample.needle_span)] in lines


def test_mqar_refuses():
    for wrong in ({"pairs": 0}, {"pairs": 2, "queries": 3}, {"queries": 0}, {"pairs": 901}):
        with pytest.raises(UsageError, match="queries <= pairs"):
            make("mqar", **wrong)
    with pytest.raises(UsageError, match="no single needle"):
        make("mqar", depth=50)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("length, pairs", [(64, 4), (256, 32), (256, 64), (1024, 256)])
def test_mqar_ids(length, pairs, passes):
    if 2 * pairs * (passes + 1) > length:
        with pytest.raises(UsageError, match=f"at least {2 * pairs * (passes + 1)}"):
            mqar_ids(
                vocab_size=8192, input_seq_len=length, num_kv_pairs=pairs, num_passes=passes, seed=0
            )
        return
    asked = {"input_seq_len": length, "num_kv_pairs": pairs, "num_passes": passes, "seed": 7}
    inputs, labels = mqar_ids(vocab_size=8192, **asked)
    assert (inputs, labels) == mqar_ids(vocab_size=8192, **asked)
    first = 2 * pairs * passes
    keys, values = inputs[: 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
    assert len(inputs) == len(labels) == length and inputs[:first] == inputs[: 2 * pairs] * passes
    assert len(set(keys)) == len(set(values)) == pairs
    assert all(0 < key < 4096 for key in keys) and all(4096 <= value < 8192 for value in values)
    asked_at = [i for i, label in enumerate(labels) if label != -100]
    facts = dict(zip(keys, values, strict=True))
    assert {inputs[i]: labels[i] for i in asked_at} == facts and len(asked_at) == pairs
    assert min(asked_at) >= first and all((i - first) % 2 == 0 for i in asked_at)
    # a key stands nowhere but in its pairs and at its query
    assert all(inputs.count(key) == passes + 1 for key in keys)


def test_mqar_ids_options():
    asked = {"vocab_size": 40, "input_seq_len": 200, "num_kv_pairs": 8, "seed": 1}
    bare, labels = mqar_ids(**asked, random_non_queries=False)
    assert all(
        (token == 0) == (label == -100) for token, label in zip(bare[16:], labels[16:], strict=True)
    )
    published, _ = mqar_ids(**asked, zoology_collisions=True)
    assert any(published.count(key) > 2 for key in published[:16:2])
    early = [
        i
        for seed in range(50)
        for i, x in enumerate(mqar_ids(**asked | {"seed": seed})[1])
        if x >= 0
    ]
    assert sum(i < 100 for i in early) > 0.8 * len(early)
    for wrong in ({"input_seq_len": 201}, {"vocab_size": 16}, {"num_kv_pairs": 0}, {"power_a": 0}):
        with pytest.raises(UsageError, match="mqar_ids"):
            mqar_ids(**asked | wrong)


def test_perplexity_windows():
    text = " ".join(f"caf\u00e9 {i}" for i in range(1000, 1091))
    assert len(text.encode("utf-8")) == 1000
    for count in (1, 9, 10, 25):
        samples = make("perplexity", length=100, count=count, haystack=text)
        assert [len(s.ids) for s in samples] == [s.bytes for s in samples] == [100] * count
        starts = [text.encode("utf-8").index(bytes(s.ids)) for s in samples]
        gaps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        # disjoint while they all fit; else spread evenly from the first token to the last
        assert min(gaps, default=100) >= 100 if count <= 10 else max(gaps) - min(gaps) <= 1
    assert starts[0] == 0 and starts[-1] == 900
    with pytest.raises(UsageError, match="1000 tokens, fewer than one window of 1001"):
        make("perplexity", length=1001, haystack=text)
    with pytest.raises(UsageError, match="predicts nothing"):
        make("perplexity", length=1)
