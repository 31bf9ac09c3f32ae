"""How evaluation reads the newer kinds of samples: labels, whole completions, files, options."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import pico, refused, runner
from torch import nn

from mcretrofit.compare import Request, check
from mcretrofit.errors import UsageError
from mcretrofit.evaluate import run
from mcretrofit.tasks import Sample, longbench, mqar_ids
from mcretrofit.tokenizer import BytesTokenizer

BYTES = BytesTokenizer()


class Parrot(nn.Module):
    """Says what `follow` maps the ids so far to, whatever else there is."""

    def __init__(self, follow):
        super().__init__()
        self.follow, self.device = follow, torch.device("cpu")
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())

    def forward(self, input_ids, past_key_values=None, logits_to_keep=0, **_):
        # as a real cache: it grows in place
        seen = [[] for _ in input_ids] if past_key_values is None else past_key_values
        logits = torch.zeros(*input_ids.shape, 256)
        for b, row in enumerate(input_ids.tolist()):
            for t, token in enumerate(row):
                seen[b] = [*seen[b], token]
                logits[b, t, self.follow(seen[b])] = 1
        out = {"logits": logits[:, -logits_to_keep:], "past_key_values": seen}
        return Answer(out)


class Answer(dict):
    __getattr__ = dict.__getitem__


def recall(seen):
    """The id after the first place of the last one: perfect recall of pairs."""
    first = seen.index(seen[-1])
    return seen[first + 1] if first + 1 < len(seen) else 0


def test_labels_are_scored_where_they_stand():
    samples = mqar_ids.samples(length=65, count=3, seed=1, tokenizer=BYTES)
    assert all(sample.tokens == 64 for sample in samples)
    assert run(Parrot(recall), BYTES, "mqar_ids", samples).scores == [1, 1, 1]
    assert run(Parrot(lambda seen: 0), BYTES, "mqar_ids", samples).scores == [0, 0, 0]
    half = {sample.labels[i] for sample in samples for i in range(64) if sample.labels[i] >= 0}
    half = set(sorted(half)[::2])
    scores = run(
        Parrot(lambda s: recall(s) if recall(s) in half else 0), BYTES, "mqar_ids", samples
    ).scores
    for sample, score in zip(samples, scores, strict=True):
        values = [label for label in sample.labels if label >= 0]
        assert score == pytest.approx(sum(value in half for value in values) / len(values))


def test_published_collisions_are_a_dialect_of_their_own():
    asked = {"length": 64, "count": 20, "seed": 1, "tokenizer": BYTES, "vocab_size": 32}
    ours, published = (
        mqar_ids.samples(**asked, zoology_collisions=collide) for collide in (False, True)
    )
    assert {s.dialect for s in ours} == {"ids"} and {s.dialect for s in published} == {"zoology"}

    def repeats(sample):
        return any(sample.ids.count(key) > 2 for key in sample.ids[:8:2])

    assert not any(map(repeats, ours)) and all(map(repeats, published))
    assert len({s.ids for s in ours}) == 20
    with pytest.raises(UsageError, match="vocab_size 300 is beyond the 256 ids"):
        mqar_ids.samples(**asked | {"vocab_size": 300})


def spell(text, end=32):
    """Says a text once the prompt `?` is over, then `end`."""
    said = text.encode()

    def follow(seen):
        at = len(seen) - 1 - seen.index(ord("?"))
        return said[at] if at < len(said) else end

    return follow


def test_a_score_that_can_fall_is_taken_at_the_end():
    sample = Sample("?", ("Anne",), 33, 32, None, 0, "longbench", dataset="hotpotqa")
    assert longbench.WHOLE
    (score,) = run(Parrot(spell("Anne and many others came")), BYTES, "longbench", [sample]).scores
    assert score == pytest.approx(longbench.score(sample, "Anne and many others came"))
    assert 0 < score < 1
    # the end of text ends the completion, and a sample's own limit does
    ended = BytesTokenizer()
    ended.eos_id = ord("|")
    assert run(Parrot(spell("Anne| others")), ended, "longbench", [sample]).scores == [1]
    few = Sample("?", ("Anne",), 5, 4, None, 0, "longbench", dataset="hotpotqa")
    both = run(Parrot(spell("Anne others")), BYTES, "longbench", [sample, few]).scores
    assert both[1] == 1 and both[0] < 1


def test_options_and_files_are_checked_before_any_model():
    for asked, message in (
        (Request(("squad",)), "squad reads a file of yours: give --data FILE"),
        (Request(("mqar",), data="x.json"), "--data: mqar reads no file"),
        (Request(("mqar_ids",), options=(("num_pases", 2),)), "did you mean 'num_passes'"),
        (Request(("mqar_ids",), options=(("num_passes", "a"),)), "'a' is not a whole number"),
        (Request(("niah_single_1",), options=(("x", 1),)), "unknown --option of niah_single_1"),
    ):
        with pytest.raises(UsageError) as caught:
            check(asked)
        assert message in str(caught.value)
    options = (("num_passes", 2), ("zoology_collisions", True), ("power_a", 1))
    assert check(Request(("mqar_ids", "mqar"), options=options)) == ["mqar_ids", "mqar"]


def test_the_command_line(tmp_path, capsys):
    shell, place = runner(capsys), pico(tmp_path / "pico")
    data = tmp_path / "mine.jsonl"
    one = {
        "context": "Anne walked to Lyme. " * 9,
        "question": "Anne walked to",
        "answers": ["Lyme"],
    }
    data.write_text(json.dumps(one) + "\n", encoding="utf-8")
    flags = ("--lengths", "160", "--samples", "2", "--json")
    words = ("eval", place, "--task", "squad,mqar_ids", "--data", data, *flags)
    done = shell(*words, "--option", "zoology_collisions=true")
    assert done.status == 0, done
    squad, ids = done.rows
    assert squad["dataset"] == "squad" and squad["n"] == 1 and squad["options"] == {}
    assert ids["options"] == {"zoology_collisions": True} and ids["dialect"] == "zoology"
    data.write_text('{"context": "a"}\n', encoding="utf-8")
    refused(shell(*words), 1, "mine.jsonl, line 1: field 'question' is missing")
    refused(shell(*words, "--option", "x"), 2, "--option x: expected key=value")
