"""Heads with settings of their own: each reads as it does where all heads have its settings."""

from __future__ import annotations

import json

import lawkit
import pytest
import torch
from lawkit import HEADS, KEYS, Case, example, inputs, sound
from test_export import build, wrap
from torch import Tensor

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.config import INITS, VARIANTS
from mcretrofit.costs import cost, describe
from mcretrofit.errors import RetrofitError
from mcretrofit.exporting import described, export
from mcretrofit.gates import Gate
from mcretrofit.model import load
from mcretrofit.plan import Plan
from mcretrofit.registry import load as module
from mcretrofit.retrofit import Cover, plans
from mcretrofit.routers import rare
from mcretrofit.wrapped import read, write

TOKENS = 41
Each = dict[str, list]
MIXES = [
    {"router": ["rare", "moment"]},
    {"router": ["moment", "rare"], "init": ["carry_delta", "reset"]},
    {"router": ["rare", "energy"], "top_k": [1, 3]},
    {"router": ["energy", "moment"], "temperature": [None, 5.0]},
    {"init": ["reset", "carry"], "temperature": [0.5, 1.5]},
    {"init": ["carry", "carry_delta"], "top_k": [2, 1]},
]
EACH = {"router": ["energy", "rare"], "init": ["reset", "carry_delta"], "top_k": [1, 2]}
MEMORIES = ("linear", "delta", "swla", "mlp")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    # fewer than a segment's tokens: keys have to give way
    monkeypatch.setattr(rare, "KEPT", 3)


def cases() -> list[Case]:
    every = (
        Case(memory, variant, "rare", init, "z", "all", gated)
        for memory in MEMORIES
        for variant in VARIANTS
        for init in INITS
        for gated in (False, True)
    )
    return [case for case in every if sound(case) and case.config.routed][::3]


def made(case: Case, each: Each, own: bool, **fields: object) -> Plan:
    gate = Gate(list(range(HEADS)), KEYS, lawkit.WIDTH if case.gated else 0, whiten=True)
    cover = lawkit.covered(case)
    turn = torch.randn(HEADS, KEYS, KEYS, generator=torch.Generator().manual_seed(4))
    whiten = turn + turn.transpose(1, 2)
    for name, value in (("mean", cover.mean), ("std", cover.std), ("whiten", whiten)):
        getattr(gate, name).copy_(value)
    lawkit.stir(gate)
    config = case.config.replace(shared=False, own=own, **fields)
    return Plan(config, gate.double(), module("memories", case.memory), HEADS, each)


def fits(case: Case, each: Each) -> bool:
    """Whether every head's init has a way to merge its states where the case asks for it."""
    return all(sound(case._replace(init=init)) for init in each.get("init", []))


def out(plan: Plan, memory: str, sizes: tuple[int, ...] = ()) -> Tensor:
    return lawkit.read(plan, example(memory, TOKENS), sizes, inputs(TOKENS))[0]


def pairs(cases: list[Case]) -> list[tuple[Case, Each]]:
    return [(case, each) for each in MIXES for case in cases if fits(case, each)]


@pytest.mark.parametrize(("case", "each"), pairs(cases()[::2]), ids=str)
def test_a_head_reads_as_its_settings_alone(case, each):
    own = "energy" not in each.get("router", [])
    found = out(made(case, each, own), case.memory)
    for head in range(HEADS):
        settings = {name: column[head] for name, column in each.items()}
        alone = out(made(case, {}, own, **settings), case.memory)
        torch.testing.assert_close(found[:, :, head], alone[:, :, head], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("each", MIXES, ids=str)
@pytest.mark.parametrize("name", ["router", "init", "top_k", "temperature"])
def test_every_setting_of_a_head_counts(each, name):
    if name not in each:
        return
    case = Case("linear", "ssc", "rare", "carry_delta", "z", "all", False)
    other = {**each, name: each[name][::-1]}
    apart = out(made(case, each, True), "linear") - out(made(case, other, True), "linear")
    assert apart.abs().max() > 1e-6


@pytest.mark.parametrize(("case", "each"), pairs(cases()[::5]), ids=str)
def test_pieces_give_what_the_whole_gives(case, each):
    whole = out(made(case, each, True), case.memory)
    pieces = out(made(case, each, True), case.memory, (3, 1, 12, 1, 17, 7))
    torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", cases()[::5], ids=str)
def test_channels_left_alone_stay_so(case):
    """Half the channels of heads with inits of their own: as where all have that init."""
    each = {"init": ["carry_delta", "reset"]}
    if case.memory == "mlp" or not fits(case, each):
        return

    def part(each: Each, **fields: object) -> Tensor:
        plan = made(case, each, True, **fields)
        plan.gate.mask[:, 1::2] = 0
        return out(plan, case.memory)

    found = part(each)
    for head, init in enumerate(each["init"]):
        alone = part({}, init=init)[:, :, head]
        torch.testing.assert_close(found[:, :, head], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("routers", [("mean", "moment"), ("submean", "rare"), ("position", "mean")])
def test_routers_that_ask_otherwise_do_not_mix(routers):
    with pytest.raises(RetrofitError, match="cannot stand beside each other"):
        made(Case("linear", "ssc", "rare", "reset", "z", "all", False), {"router": routers}, False)


@pytest.fixture
def wrapped(tmp_path):
    """A wrapped folder of a tiny model, two of whose heads have routers of their own."""
    base = tmp_path / "base"
    export(build("gla"), base, checkpoint=None)
    live = load(base)
    model = wrap(live.model, each=EACH, whiten=False)
    config = next(iter(plans(model).values())).config
    covers = {
        n: Cover(p.gate.heads, p.total, p.gate.mask, p.gate.mean, p.gate.std, None, p.each)
        for n, p in plans(model).items()
    }
    reasons = {name: ["slow"] * cover.total for name, cover in covers.items()}
    write(tmp_path / "retrofit", config, open_checkpoint(base), covers, reasons, "")
    return tmp_path / "retrofit", model


def test_a_folder_keeps_the_routers(wrapped, tmp_path):
    folder, live = wrapped
    ids = torch.randint(64, (1, 70), generator=torch.Generator().manual_seed(2))
    loaded = load(folder)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, live(ids).logits)
    export(loaded.model, tmp_path / "export", checkpoint=None)
    again = load(tmp_path / "export")
    assert described(again.model) == described(live)
    assert [c.each for c in again.covers.values()] == [EACH, {k: v[1:] for k, v in EACH.items()}]
    with torch.no_grad():
        assert torch.equal(again.model(ids).logits, live(ids).logits)


@pytest.mark.parametrize(
    ("each", "line"),
    [
        ({"router": ["rare"]}, "router has to name one for each of 2 heads"),
        ({"router": "rr"}, "router has to name one for each of 2 heads"),
        ({"router": ["rare", "rrare"]}, "rrare"),
        ({"router": ["rare", 3]}, "3"),
        ({"router": ["rare", ["rare"]]}, "rare"),
        (
            {"router": ["mean", "moment"]},
            "layers.0.attn: routers mean and moment cannot stand beside",
        ),
        ({"top_k": [2, 0]}, "has to be a whole number of at least 1"),
        ({"top_k": [2, True]}, "is not a whole number"),
        ({"temperature": [2.0, -1.0]}, "has to be above 0"),
        ({"init": ["reset", "rest"]}, "did you mean 'reset'"),
        ({"initial": ["reset", "reset"]}, "did you mean 'init'"),
        (["rare"], "each has to map settings to lists"),
    ],
)
def test_settings_that_do_not_fit_are_refused(wrapped, each, line, tmp_path):
    folder, live = wrapped
    export(live, tmp_path / "export", checkpoint=None)
    for file, key in (
        (folder / "caching.json", "layers"),
        (tmp_path / "export/config.json", "covers"),
    ):
        stored = json.loads(file.read_text())
        next(iter(stored[key].values()))["each"] = each
        file.write_text(json.dumps(stored))
        with pytest.raises(RetrofitError, match=line):
            load(file.parent)


def test_it_takes_the_memory_that_is_told(wrapped):
    folder, live = wrapped
    described_ = describe(folder)
    said = cost(described_, described_.config, 64)
    with torch.no_grad():
        cache = live(torch.zeros(1, 64, dtype=torch.long), use_cache=True).past_key_values
    held = [state["segments"] for state in cache.states.values()]
    assert said.cached_bytes == sum(h.states.nbytes + h.summaries.nbytes for h in held)
    assert read(folder).covers["model.layers.0.attn"].each == EACH
