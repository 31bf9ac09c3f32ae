"""Needle in a haystack: the published prompts letter by letter, keys, depths, dialects."""

from __future__ import annotations

import pytest

from mcretrofit import registry
from mcretrofit.errors import RetrofitError, UsageError
from mcretrofit.tasks._haystack import essay, read_text
from mcretrofit.tasks._niah import DEPTHS
from mcretrofit.tokenizer import BytesTokenizer

NIAH = [name for name in registry.names("tasks") if name.startswith("niah")]
SEVERAL = ("niah_multivalue", "niah_multiquery")  # answers: no single needle to place
PROSE = (
    "Anne walked to Lyme. The sea was calm and grey. Mr. Elliot bowed. Nobody spoke for a while."
)
UNIT = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

GOLDEN = {
    "niah_single_1": (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
        f"{UNIT}\n"
        "One of the special magic numbers for equal-summer is: 6885095.\n"
        f"{UNIT}\n"
        "What is the special magic number for equal-summer mentioned in the provided text? "
        "The special magic number for equal-summer mentioned in the provided text is",
        "6885095",
    ),
    "niah_single_2": (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
        "Anne walked to Lyme. The sea was calm and grey. Mr. Elliot bowed. Nobody spoke for a "
        "while. Anne walked to Lyme. One of the special magic numbers for equal-summer is: "
        "4992637. The sea was calm and grey. Mr. Elliot bowed. Nobody spoke for a while. Anne "
        "walked to Lyme. The sea was\n"
        "What is the special magic number for equal-summer mentioned in the provided text? "
        "The special magic number for equal-summer mentioned in the provided text is",
        "4992637",
    ),
    "niah_single_3": (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards.\n"
        "Anne walked to Lyme. The sea was calm and grey. Mr. Elliot bowed. Nobody spoke for a "
        "while. One of the special magic uuids for equal-summer is: "
        "d0434bf7-d23e-4730-82e8-2ce1cd285ffb. Anne walked to Lyme. The sea was calm and grey. "
        "Mr. Elliot bowed. Nobody spoke for a while. Anne walked to\n"
        "What is the special magic uuid for equal-summer mentioned in the provided text? "
        "The special magic uuid for equal-summer mentioned in the provided text is",
        "d0434bf7-d23e-4730-82e8-2ce1cd285ffb",
    ),
}
COMPACT = (
    "There was no triumph, no pitiful triumph in his manner. He had, probably, never heard, and "
    "never thought of any claims of Charles Hayter. The magic number for dark ring is 248. He was "
    "only wrong in accepting the The magic number for dark ring is"
)


def make(name, **changed):
    asked = {"length": 900, "count": 1, "seed": 42, "tokenizer": BytesTokenizer()} | changed
    return registry.load("tasks", name).samples(**asked)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_published_prompt(name):
    haystack = None if name == "niah_single_1" else PROSE
    sample = make(name, length=700, depth=50, haystack=haystack)[0]
    prompt, value = GOLDEN[name]
    assert sample.prompt == prompt and sample.answers == (value,)
    assert sample.max_new_tokens == 128 and sample.tokens == len(prompt) + 128
    assert sample.dialect == "ruler" and sample.prompt[slice(*sample.needle_span)].endswith(
        f"{value}."
    )


def test_the_compact_prompt():
    sample = make("niah_single_1", length=256, count=2, template="compact")[1]
    assert (sample.prompt, sample.answers) == (COMPACT, ("248",))
    assert sample.max_new_tokens == 6 and sample.dialect == "compact"


@pytest.mark.parametrize("depth", [0, 10, 37.5, 99, 100])
def test_noise_depth(depth):
    prompt = make("niah_single_1", length=4096, depth=depth)[0].prompt
    lines = prompt.split("\n")[1:-1]
    place = next(i for i, line in enumerate(lines) if line.startswith("One of"))
    assert place == int((len(lines) - 1) * depth / 100)


@pytest.mark.parametrize("template", ["ruler", "compact"])
@pytest.mark.parametrize("depth", [0, 10, 37.5, 99, 100])
def test_essay_depth(depth, template):
    # sentences of one pattern, so that they can be counted without the splitter under test
    haystack = " ".join(f"Sentence number{i} is here." for i in range(500))
    asked = {"length": 4096, "depth": depth, "haystack": haystack, "template": template}
    sample = make("niah_single_2", **asked)[0]
    start, end = sample.needle_span
    before = sample.prompt[:start].count("Sentence")
    total = sample.prompt.count("Sentence")
    assert before == int(total * depth / 100) and sample.depth == depth
    if template == "ruler":
        # published: an empty side of the needle still brings its space
        assert sample.prompt[start - 1] == " " and sample.prompt[end] == " "
    else:
        assert "  " not in sample.prompt and sample.prompt == sample.prompt.strip()


def test_drawn_depths():
    assert len(DEPTHS) == 40 and DEPTHS[:3] == (0, 3, 5) and DEPTHS[-1] == 100
    essays = {sample.depth for sample in make("niah_single_2", count=300)}
    assert essays <= set(DEPTHS) and len(essays) > 35
    noise = [sample.depth for sample in make("niah_single_1", count=300)]
    assert all(0 <= depth < 100 for depth in noise) and max(noise) - min(noise) > 95


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("template", ["ruler", "compact"])
def test_a_thousand_seeds_never_share_a_key(name, template):
    def question(sample):
        return sample.prompt[sample.prompt.rindex(" for ") :]

    seeds = [make(name, length=740, seed=seed, template=template)[0] for seed in range(1000)]
    assert len({question(sample) for sample in seeds}) == 1000
    one = make(name, length=740, count=1000, template=template)
    assert len({question(sample) for sample in one}) == 1000


@pytest.mark.parametrize("name", [n for n in NIAH if n not in SEVERAL])
def test_a_depth_changes_the_place_only(name):
    first, second = (make(name, depth=depth, count=5) for depth in (0, 80))
    assert [sample.answers for sample in first] == [sample.answers for sample in second]
    longer = make(name, depth=0, count=9, length=3000)
    assert [sample.answers for sample in longer][:5] == [sample.answers for sample in first]


def test_compact_hides_in_prose_unless_told_otherwise():
    assert "grass is green" not in make("niah_single_1", template="compact")[0].prompt
    assert "grass is green" in make("niah_single_3", template="compact", haystack="noise")[0].prompt
    starts = {s.prompt[:20] for s in make("niah_single_2", template="compact", count=20)}
    assert len(starts) > 15


def test_a_haystack_the_task_does_not_have():
    with pytest.raises(UsageError, match="ask for niah_single_2"):
        make("niah_single_1", haystack=PROSE)
    with pytest.raises(UsageError, match="ask for niah_single_1"):
        make("niah_single_2", haystack="noise")


def test_haystacks_come_from_text_file_and_folder(tmp_path):
    (tmp_path / "a.txt").write_text("First file.")
    (tmp_path / "b.txt").write_text("Second file.")
    assert read_text(PROSE) == PROSE and read_text(PROSE * 400) == PROSE * 400
    assert read_text(str(tmp_path / "a.txt")) == "First file."
    assert read_text(tmp_path) == "First file.\nSecond file."
    assert read_text(None).startswith("Chapter 5")
    with pytest.raises(UsageError, match="no such file"):
        read_text("absent.txt")
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(RetrofitError, match=r"c.txt cannot be read as UTF-8"):
        read_text(tmp_path)
    with pytest.raises(UsageError, match="holds no words"):
        essay(" \n ")


def test_sentences_repeat_and_keep_titles():
    text = essay(PROSE)
    assert text.sentences(12)[-1] == "Mr. Elliot" and len(text.starts) == 4
    assert text.sentences(6, start=13) == ["Nobody spoke for a while.", "Anne"]


YAML = """
needle: "{key} = {value};"
prompt: "Find {query}: {context}"
answer_prefix: " {query} ="
digits: 2
haystack: noise
max_new_tokens: 4
"""


def test_a_template_file(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(YAML)
    sample = make("niah_single_2", length=200, template=path)[0]
    assert sample.dialect == "short" and sample.max_new_tokens == 4 and len(sample.answers[0]) == 2
    assert sample.prompt.startswith("Find equal-summer: ") and sample.prompt.endswith(
        " equal-summer ="
    )
    assert make("niah_single_2", length=200, template=str(path))[0] == sample
    with pytest.raises(UsageError, match="passkey has one wording"):
        make("passkey", template=path)


@pytest.mark.parametrize(
    "change, message",
    [
        (("digits", "digit"), "did you mean 'digits'"),
        (("{value}", "{worth}"), "needle is a text with"),
        (("{query}", "it"), "must ask for {query}"),
        (("haystack: noise", "haystack: straw"), "haystack is one of essay, noise, null"),
        (("digits: 2", "digits: two"), "digits is a whole number"),
        (("needle", "# needle"), "needle must be given"),
        (("digits: 2", "digits: ["), "not readable YAML"),
        (("{key}", "{key"), "short.yaml: "),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_bad_template_file(tmp_path, change, message):
    path = tmp_path / "short.yaml"
    path.write_text(YAML.replace(*change))
    with pytest.raises(RetrofitError) as caught:
        make("niah_single_2", template=path)
    assert message in str(caught.value) and "short.yaml" in str(caught.value)


def test_an_unknown_template():
    with pytest.raises(UsageError, match="did you mean 'compact'"):
        make("niah_single_1", template="compcat")
    with pytest.raises(RetrofitError, match=r"absent.yaml cannot be read"):
        make("niah_single_1", template="absent.yaml")
