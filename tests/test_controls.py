"""Laws of the controls: what each does to the weights, whatever the padding and the pieces."""

from __future__ import annotations

import pytest
import torch
from lawkit import SEGMENT, Case, cases, example, near, plan, read, tokens
from lawmodels import caching, pieces

from mcretrofit import controls
from mcretrofit.aggregators import Weights
from mcretrofit.compare import Request, draw, probes
from mcretrofit.config import CachingConfig
from mcretrofit.controls import NAMES, Row, controlled
from mcretrofit.memories._scan import init_state, scan
from mcretrofit.questions import targets
from mcretrofit.tokenizer import BytesTokenizer

ROWS = [Row(5, ((20, 1),)), Row(6, ((17, 0), (26, 2)))]
ROUTED = [c for c in cases(40, seed=31) if c.variant not in ("ma", "residual")][:10]
BYTES = BytesTokenizer()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def rerouted(
    case: Case, name: str, streams, sizes=(), rows=ROWS, weights: list | None = None, each=None
):
    """The output of a plan under a control; its weights are kept where a list is given."""
    some = plan(case)
    some.each = each
    module = torch.nn.Module()
    module.mc = some.gate
    some.gate.plan = some
    with controlled(module, name) as begin:
        begin(list(rows))
        inner = some.reroute

        def spy(weigh, reading, bank, opened) -> Weights:
            found = inner(weigh, reading, bank, opened)
            if weights is not None:
                weights.append((found, opened.places, bank))
            return found

        some.reroute = spy
        got = read(some, streams, sizes)[0]
    assert some.each == each
    return got


@pytest.mark.parametrize("case", ROUTED, ids=str)
@pytest.mark.parametrize("name", ["random", "recent"])
def test_one_visible_segment_leaves_nothing_to_choose(case, name):
    streams = example(case.memory, 2 * SEGMENT)
    near(rerouted(case, name, streams), read(plan(case), streams)[0])
    longer = example(case.memory, 6 * SEGMENT)
    apart = rerouted(case, name, longer) - read(plan(case), longer)[0]
    near(apart[:, : 2 * SEGMENT], 0 * apart[:, : 2 * SEGMENT])


def test_random_segments_take_the_logits_of_others_and_hang_on_key_and_place_alone():
    cached = torch.arange(2 * 3 * 2 * 5.0).view(2, 3, 2, 5)
    visible = (
        torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]).bool().expand(2, 3, 5)
    )
    keys, places, number = torch.tensor([1, 2]), torch.arange(3).expand(2, 3), torch.arange(5)
    noise = controls._noise(0, keys, places, number.expand(2, 5), 2)
    found = controls._shuffled(cached, visible, noise)
    hidden = ~visible[:, :, None].expand_as(cached)
    assert torch.equal(found == -torch.inf, hidden)
    for values in (found, cached):
        values.masked_fill_(hidden, -torch.inf)
    assert torch.equal(found.sort(-1).values, cached.sort(-1).values)
    assert torch.equal(found[:, 2], cached[:, 2])
    later = controls._noise(0, keys[1:], places[1:, 1:], number.expand(1, 5), 2)
    assert torch.equal(later, noise[1:, 1:])
    assert len(noise.unique()) == noise.numel() and int(noise.min()) >= 0


def test_every_segment_is_as_likely_to_be_taken_at_random():
    count, some = 4000, 5
    noise = controls._noise(
        1, torch.tensor([9]), torch.arange(count)[None], torch.arange(some)[None], 1
    )
    first = torch.arange(float(some)).expand(1, count, 1, some)
    visible = torch.ones(1, count, some, dtype=torch.bool)
    best = controls._shuffled(first, visible, noise).argmax(-1).flatten()
    shares = best.bincount(minlength=some) / count
    assert (shares - 1 / some).abs().max() < 0.03


def test_the_most_recent_segments_get_the_largest_logits():
    (case,) = cases(1, seed=3, memory="linear", variant="ssc", router="mean", rule="plain")
    weights: list = []
    rerouted(case, "recent", example("linear", 5 * SEGMENT), weights=weights)
    ((found, _, bank),) = weights
    seen = bank.visible.sum(-1)
    # of the two that are read the nearer one weighs more
    newest = found.indices[..., 0]
    late = seen >= 2
    assert torch.equal(newest[late], (seen[late] - 1)[:, None].expand_as(newest[late]))
    assert (found.cached[..., 0][late] >= found.cached[..., 1][late]).all()


@pytest.mark.parametrize("case", cases(9, seed=33), ids=str)
def test_no_history_reads_the_open_segment_alone(case):
    streams = example(case.memory, 5 * SEGMENT + 3)
    whole, _ = scan(plan(case).memory, streams, init_state(streams, plan(case).memory))
    gate, apart = plan(case).gate, []
    for start in range(0, streams.length, SEGMENT):
        part = streams.map(lambda s, a=start: s[:, a : a + SEGMENT])
        apart.append(scan(plan(case).memory, part, init_state(part, plan(case).memory))[0])
    want = torch.cat(apart, 1) if case.cover == "all" else whole.clone()
    if case.cover == "one":
        want[:, :, -1:] = torch.cat(apart, 1)[:, :, -1:]
    if case.cover == "part":
        # covered channels read the open segment, the others the running state
        q = streams.q.clone()
        q[:, :, -1] = q[:, :, -1] * (1 - gate.mask[0])
        rest, _ = scan(
            plan(case).memory, streams._replace(q=q), init_state(streams, plan(case).memory)
        )
        q = streams.q.clone()
        q[:, :, -1] = q[:, :, -1] * gate.mask[0]
        masked, own = streams._replace(q=q), []
        for start in range(0, streams.length, SEGMENT):
            part = masked.map(lambda s, a=start: s[:, a : a + SEGMENT])
            own.append(scan(plan(case).memory, part, init_state(part, plan(case).memory))[0])
        want[:, :, -1] = rest[:, :, -1] + torch.cat(own, 1)[:, :, -1]
    near(rerouted(case, "none", streams), want)
    near(rerouted(case, "none", streams, [1, 7, 9, 20, 6]), want)


def test_no_history_is_none_of_heads_that_begin_in_their_own_way():
    case = Case("linear", "ssc", "rare", "carry_delta", "z", "all", False)
    streams, each = example("linear", 5 * SEGMENT + 3), {"init": ["carry_delta", "carry"]}
    near(rerouted(case, "none", streams, each=each), rerouted(case, "none", streams))


@pytest.mark.parametrize("case", cases(8, seed=35), ids=str)
def test_the_oracle_gives_all_weight_to_the_named_segment(case):
    weights: list = []
    rerouted(case, "oracle", example(case.memory, 5 * SEGMENT), [19, 21], weights=weights)
    wanted = [dict.fromkeys(range(20, 40), 1), {p: 0 if p < 26 else 2 for p in range(17, 40)}]
    seen = 0
    for found, places, bank in weights:
        numbers = bank.number.expand(2, -1)
        for row, want in enumerate(wanted):
            for t, place in enumerate(places[row].tolist()):
                online, cached = found.online[row, t], found.cached[row, t, :, 0]
                if place not in want or not bank.visible[row, t].any():
                    assert (online == 1).all() and (cached == 0).all()
                    continue
                slot = int(found.indices[row, t, 0, 0])
                if cached.all():
                    assert (online == 0).all() and bank.visible[row, t, slot]
                    assert numbers[row, slot] >= want[place]
                    seen += 1
                else:
                    # a block that closes now is the token's online memory, no past one
                    assert case.variant == "loglinear"
    assert seen > 30


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["gla", "delta_net"])
def test_padding_and_pieces_change_nothing_and_the_retrofit_comes_back(family, name):
    memory = {"gla": "linear", "delta_net": "delta"}[family]
    long, short, step = tokens(41), tokens(22, seed=2), tokens(9, seed=3)
    mask = torch.ones(2, 41, dtype=torch.long)
    mask[1, :19] = 0
    ids = torch.cat([long, torch.cat([long[:, :19], short], 1)])
    for case in cases(3, seed=37, memory=memory):
        with caching(family, case) as model:
            before = model(long).logits
            with controlled(model, name) as begin:
                alone = []
                for one, prompt in zip(ROWS, (long, short), strict=True):
                    begin([one])
                    whole = torch.cat([prompt, step], 1)
                    alone.append(model(whole).logits)
                    parts, _ = pieces(model, whole, [13, 1, 1, whole.shape[1] - 15])
                    near(parts, alone[-1])
                begin(ROWS)
                first = model(ids, attention_mask=mask, use_cache=True)
                more = model(step.expand(2, 9), past_key_values=first.past_key_values).logits
            near(first.logits[0], alone[0][0, :41])
            near(first.logits[1, 19:], alone[1][0, :22])
            near(more, torch.cat([a[:, -9:] for a in alone]))
            assert torch.equal(model(long).logits, before)


def sample(task: str, length: int, **how: object):
    (probe, *_) = probes(Request((task,), (str(length),), samples=1, **how), 256, 64)
    return draw(probe, BYTES).samples[0]


@pytest.mark.parametrize("task", ["niah_single_1", "passkey"])
@pytest.mark.parametrize("depth", [10.0, 60.0])
def test_the_question_and_the_segment_of_its_answer(task, depth):
    one = sample(task, 900, depths=(depth,))
    ((start, segment),) = targets(one, BYTES, 64)
    text, last = one.prompt.encode(), 64 * (segment + 1)
    assert one.answers[0][-1].encode() in text[64 * segment : last]
    assert text[:last].count(one.answers[0].encode()[-1:]) >= 1
    question = text[start:].decode()
    assert question.strip().endswith("is") and len(question) < 60


def test_pairs_have_a_segment_for_each_question_and_text_has_none():
    one = sample("mqar", 700)
    found = targets(one, BYTES, 32)
    assert len(found) == len(one.answers) == 4
    text = one.prompt.encode()
    for (start, segment), answer in zip(found, one.answers, strict=True):
        assert answer[-1:].encode() in text[32 * segment : 32 * (segment + 1)]
        assert text[start:].decode().strip().split("\n")[0].endswith(answer)
    assert targets(sample("perplexity", 300), BYTES, 32) is None


def test_controls_that_say_nothing_are_left_out():
    some = [sample("niah_single_1", 300)]
    ma, ssc = CachingConfig(variant="ma", segment=32), CachingConfig(segment=32)
    said = {n: controls.applies(n, ma, some, BYTES) for n in NAMES}
    assert said == {"random": False, "recent": False, "none": True, "oracle": True}
    assert all(controls.applies(n, ssc, some, BYTES) for n in NAMES)
    assert not controls.applies("oracle", ssc, [*some, sample("perplexity", 300)], BYTES)
