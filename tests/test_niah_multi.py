"""Needles among needles: RULER's prompts letter by letter, distinct keys, several answers."""

from __future__ import annotations

import re

import pytest

from mcretrofit import registry
from mcretrofit.errors import UsageError
from mcretrofit.tasks._niah import DEPTHS
from mcretrofit.tokenizer import BytesTokenizer

ONE = ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3")
MANY = ("niah_multivalue", "niah_multiquery")
NEEDLES = ("niah_multikey_2", "niah_multikey_3")  # whose haystack is nothing but needles
PROSE = (
    "Anne walked to Lyme. The sea was calm and grey. Mr. Elliot bowed. Nobody spoke for a while."
)
HEAD = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
SOME = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
TAIL = (
    "\nWhat is the special magic number for equal-summer mentioned in the provided text? "
    "The special magic number for equal-summer mentioned in the provided text is"
)
CALM = "The sea was calm and grey. Mr. Elliot bowed."
SPOKE = "Nobody spoke for a while. Anne walked to Lyme."


def needle(key, value, kind="numbers"):
    return f"One of the special magic {kind} for {key} is: {value}."


KEY = "298a7ac2-6f54-4194-8c8d-4286918f4a0c"
GOLDEN = {
    # two depths that meet in one place leave an empty part, and so two spaces, as published
    "niah_multikey_1": (
        f"{HEAD}Anne walked to Lyme. {needle('equal-summer', 6008569)}  "
        f"{needle('magic-pony', 7444456)} {CALM} {SPOKE} {CALM} "
        f"{needle('curious-falcon', 6835253)} {SPOKE} {CALM} {needle('ideal-coast', 1263878)} "
        f"{SPOKE} {CALM} Nobody spoke for a while. Anne walked{TAIL}",
        ("6008569",),
    ),
    "niah_multikey_2": (
        HEAD
        + "\n".join(
            needle(key, value)
            for key, value in (
                ("curved-boot", 4282177),
                ("harsh-roof", 8412619),
                ("equal-summer", 9358769),
                ("harsh-bone", 7057086),
                ("salty-peach", 9166151),
                ("stiff-dance", 8059915),
                ("dear-dress", 6237452),
                ("wealthy-captain", 6471703),
                ("even-library", 7776791),
                ("guilty-zebra", 7250330),
            )
        )
        + TAIL,
        ("9358769",),
    ),
    "niah_multikey_3": (
        HEAD.replace("number", "uuid")
        + "\n".join(
            needle(key, value, "uuids")
            for key, value in (
                (KEY, "1f993837-0026-492b-a854-16df8a9d1af9"),
                ("78fa6364-4917-4830-aac7-5f3853352a36", "78af1e56-7c91-4ceb-ace0-56c967fb94c4"),
                ("fed6e2e2-8e8f-4161-866b-b5663b38251b", "aaba50ef-688f-4c8e-a083-70697e1cfe9d"),
                ("172fec88-1c79-4dd3-8c1f-66457e51e3c0", "cc775caf-1944-478f-beeb-17d7479da014"),
                ("691b53fe-f3f6-441b-b063-52e5c0649838", "5200926c-8900-4c43-9939-99287a89e353"),
            )
        )
        + TAIL.replace("number", "uuid").replace("equal-summer", KEY),
        ("1f993837-0026-492b-a854-16df8a9d1af9",),
    ),
    "niah_multivalue": (
        f"{SOME} {needle('equal-summer', 9348029)} Anne walked to Lyme. The sea was calm and grey. "
        f"{needle('equal-summer', 3082844)}  {needle('equal-summer', 9919004)} Mr. Elliot bowed. "
        f"{SPOKE} {CALM} {SPOKE} {CALM} {SPOKE} The sea was calm and grey. "
        f"{needle('equal-summer', 8191410)} Mr. Elliot bowed. Nobody spoke for a\n"
        "What are all the special magic numbers for equal-summer mentioned in the provided text? "
        "The special magic numbers for equal-summer mentioned in the provided text are",
        ("9919004", "8191410", "9348029", "3082844"),
    ),
    "niah_multiquery": (
        f"{SOME}Anne walked to Lyme. {needle('general-pear', 9871947)} {CALM} {SPOKE} {CALM} "
        f"{needle('late-owl', 3013053)} {SPOKE} The sea was calm and grey. "
        f"{needle('shiny-teacher', 6020283)} Mr. Elliot bowed. Nobody spoke for a while. "
        f"{needle('equal-summer', 4853771)} Anne\n"
        "What are all the special magic numbers for shiny-teacher, general-pear, late-owl, and "
        "equal-summer mentioned in the provided text? The special magic numbers for "
        "shiny-teacher, general-pear, late-owl, and equal-summer mentioned in the provided text "
        "are",
        ("6020283", "9871947", "3013053", "4853771"),
    ),
}
COMPACT = {
    "niah_multikey_2": (
        "The magic number for white bread is 468.\nThe magic number for small tree is 610.\n"
        "The magic number for big apple is 497.\nThe magic number for blue road is 655.\n"
        "The magic number for thick river is 775. The magic number for small tree is",
        ("610",),
    ),
    "niah_multiquery": (
        "The magic number for cool horse is 630. Mr. Elliot bowed. Nobody spoke for a while. Anne "
        "walked to Lyme. The magic number for wide moon is 809. The sea was calm and grey. The "
        "magic number for small tree is 127. Mr. Elliot bowed. The magic number for slow coat is "
        "335. Nobody spoke for a while. The magic numbers for wide moon, slow coat, small tree, "
        "and cool horse are",
        ("809", "335", "127", "630"),
    ),
}


def make(name, **changed):
    asked = {"length": 1050, "count": 1, "seed": 42, "tokenizer": BytesTokenizer()} | changed
    return registry.load("tasks", name).samples(**asked)


def prose(name):
    return {} if name in NEEDLES else {"haystack": PROSE}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_published_prompt(name):
    sample = make(name, **prose(name))[0]
    assert (sample.prompt, sample.answers) == GOLDEN[name]
    assert sample.tokens == len(sample.prompt) + 128 and sample.dialect == "ruler"
    assert sample.prompt[sample.question :].startswith("\nWhat ")


@pytest.mark.parametrize("name", COMPACT)
def test_the_compact_prompt(name):
    length = 240 if name in NEEDLES else 400
    sample = make(name, length=length, template="compact", **prose(name))[0]
    assert (sample.prompt, sample.answers) == COMPACT[name]
    assert sample.max_new_tokens == (6 if name in NEEDLES else 28)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("template", ["ruler", "compact"])
def test_keys_are_distinct_and_answers_stand_once(name, template):
    for sample in make(name, length=3000, count=30, template=template):
        context = sample.prompt[: sample.question]
        hidden = re.findall(r"magic (?:number|uuid)s? for (\S+|\w+ \w+) is:? (\S+)\.", context)
        keys = [key for key, _ in hidden]
        expected = {"niah_multivalue": 1, "niah_multiquery": 4, "niah_multikey_1": 4}
        assert len(set(keys)) == expected.get(name, len(keys))
        assert len(hidden) == 4 if name not in NEEDLES else len(hidden) > 12
        values = [value for _, value in hidden]
        assert all(values.count(answer) == 1 for answer in sample.answers)
        # an answer belongs to a key that is asked for, in the question's order
        asked = sample.prompt[sample.question :]
        owners = [keys[values.index(answer)] for answer in sample.answers]
        assert sorted(set(owners), key=asked.index) == list(dict.fromkeys(owners))
        assert sample.prompt[slice(*sample.needle_span)] in context


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("depth", [0, 37.5, 100])
def test_a_depth_places_the_needle_asked_for(name, depth):
    haystack = " ".join(f"Sentence number{i} is here." for i in range(500))
    given = {} if name in NEEDLES else {"haystack": haystack}
    first, again = make(name, length=4096, depth=depth, **given)[0], make(name, length=4096)[0]
    assert first.depth == depth and first.answers == again.answers
    before = first.prompt[: first.needle_span[0]]
    unit = "One of the" if name in NEEDLES else "Sentence"
    total = first.prompt.count(unit) - (name in NEEDLES)
    assert before.count(unit) == int(total * depth / 100)


@pytest.mark.parametrize("name", MANY)
def test_several_answers_have_no_depth(name):
    with pytest.raises(UsageError, match=f"{name} has no single needle"):
        make(name, depth=50)
    assert make(name)[0].depth is None


def test_drawn_depths_are_rulers():
    haystack = " ".join(f"S{i} is." for i in range(4000))
    places = set()
    for sample in make("niah_multikey_1", length=9000, count=40, haystack=haystack):
        total = sample.prompt.count(" is. ")
        spots = [
            sample.prompt[: m.start()].count("is. ") for m in re.finditer("One of", sample.prompt)
        ]
        nearest = [min(DEPTHS, key=lambda d, s=s: abs(int(total * d / 100) - s)) for s in spots]
        assert len(set(nearest)) == 4 and nearest == sorted(nearest)
        places.update(nearest)
    assert len(places) > 35


def test_what_cannot_be():
    with pytest.raises(UsageError, match="among others and takes no haystack"):
        make("niah_multikey_2", haystack=PROSE)
    with pytest.raises(UsageError, match="more needles than the 1600 keys of the compact dialect"):
        make("niah_multikey_2", length=70_000, template="compact")
    with pytest.raises(UsageError, match="ask for niah_single_1"):
        make("niah_multivalue", haystack="noise")
    for sample in make("niah_multivalue", length=900, template="compact", haystack="noise"):
        assert "grass is green" in sample.prompt and len(sample.answers) == 4


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("template", ["ruler", "compact"])
def test_a_thousand_seeds_share_no_question(name, template):
    asked = {"length": 1100 if template == "ruler" else 400, "template": template, **prose(name)}
    seeds = [make(name, seed=seed, **asked)[0] for seed in range(1000)]
    assert len({sample.prompt[sample.question :] for sample in seeds}) == 1000
    one = make(name, count=1000, **asked)
    assert len({sample.prompt[sample.question :] for sample in one}) == 1000


def test_score_is_the_share_of_answers():
    module, sample = registry.load("tasks", "niah_multivalue"), make("niah_multivalue")[0]
    assert module.score(sample, " and ".join(sample.answers[:3])) == 0.75
