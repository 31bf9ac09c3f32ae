"""Identities of the method in float64: dense forms, what equals what, and what gammas are."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lawkit import HEADS, SEGMENT, Case, cases, example, inputs, plan, read
from torch import Tensor

from mcretrofit import registry
from mcretrofit.config import VARIANTS, CachingConfig
from mcretrofit.gates import Gate
from mcretrofit.memories import Streams, linear, swla
from mcretrofit.memories._scan import naive
from mcretrofit.plan import Plan
from mcretrofit.segments import logarithmic

pytestmark = pytest.mark.filterwarnings("error")
DECAY = pytest.mark.parametrize("decay", ["none", "head", "channel"])
ROUTED = pytest.mark.parametrize("router", ["mean", "moment"])
LENGTH = 37


def case(**fields: object) -> Case:
    given = {"memory": "linear", "variant": "grm", "router": "mean", "init": "reset"}
    given |= {"rule": "plain", "cover": "all", "gated": False}
    return Case(**{**given, **fields})


def near(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def gammas(some: Plan, streams: Streams) -> tuple[Tensor, Tensor]:
    """Weights `[B, T, H]` and `[B, T, H, N]` (of constant segments, all in one call)."""
    seen, weigh = [], some.aggregator.weigh

    def recording(reading, **options):
        seen.append((reading, weigh(reading, **options)))
        return seen[-1][1]

    some.aggregator = SimpleNamespace(weigh=recording)
    read(some, streams, x=inputs(streams.length))
    ((reading, weights),) = seen
    cached = weights.cached
    if weights.indices is not None:
        cached = reading.logits()[0].new_zeros(reading.logits()[0].shape)
        cached = cached.scatter(-1, weights.indices, weights.cached)
    assert not cached[~reading.visible[:, :, None].expand_as(cached)].any()
    return weights.online[:, : streams.length], cached[:, : streams.length]


def affinity(streams: Streams, router: str) -> Tensor:
    """What each token gives each earlier one's segment: `[B, H, T, T]`, from the definitions."""
    q, k = F.normalize(streams.q, dim=-1), F.normalize(streams.k, dim=-1)
    match = torch.einsum("bthk,bjhk->bhtj", q, k)
    return match if router == "mean" else match.square()


def dense(streams: Streams, sizes, router: str, heat: float) -> Tensor:
    """`sum_j gamma_seg(j) D(t, j) (q_t . k_j) v_j`; `sizes(t)` are the segments of a prefix."""
    match = affinity(streams, router)
    out = torch.zeros_like(streams.v)
    decay = torch.zeros_like(streams.k)
    if streams.decay is not None:
        decay = decay + (streams.decay if streams.decay.dim() == 4 else streams.decay[..., None])
    for t in range(streams.length):
        stops = list(accumulate(sizes(t + 1)))
        bounds = list(zip([0, *stops], stops, strict=False))
        some = [match[:, :, t, a:b] for a, b in bounds]
        logits = torch.stack([m.mean(-1) if router == "mean" else m.sum(-1) for m in some], -1)
        gamma = (heat * logits).softmax(-1)
        for i, (a, b) in enumerate(bounds):
            for j in range(a, b):
                key = streams.k[:, j] * decay[:, j + 1 : b].sum(1).exp()
                weight = gamma[..., i] * (streams.q[:, t] * key).sum(-1)
                out[:, t] += weight[..., None] * streams.v[:, j]
    return out


def constant(tokens: int, size: int = SEGMENT) -> list[int]:
    full, rest = divmod(tokens, size)
    return [size] * full + [rest] * bool(rest)


@DECAY
@ROUTED
def test_grm_equals_its_dense_form(router, decay):
    streams = example("linear", LENGTH, decay=decay)
    heat = registry.load("routers", router).TEMPERATURE
    near(read(plan(case(router=router)), streams)[0], dense(streams, constant, router, heat))


@DECAY
@ROUTED
@pytest.mark.parametrize("unit", [1, 3, 4])
def test_loglinear_equals_its_dense_form(router, decay, unit):
    streams = example("linear", LENGTH, decay=decay)
    some = plan(case(router=router, variant="loglinear"), segment=unit, temperature=3.0)
    want = dense(streams, lambda t: logarithmic(t, unit), router, 3.0)
    near(read(some, streams)[0], want)
    near(read(some, streams, [5, 1, 1, 2, 20, 8])[0], want)


def test_logarithmic_segments_of_a_prefix():
    assert logarithmic(37) == [32, 4, 1]
    assert logarithmic(36) == [32, 4]
    assert logarithmic(37, 8) == [32, 5] and logarithmic(24, 8) == [16, 8]
    for unit in (1, 3, 8):
        for t in range(1, 70):
            sizes = logarithmic(t, unit)
            assert sum(sizes) == t and sizes == sorted(sizes, reverse=True)
            assert len(sizes) <= (t // unit).bit_length() + 1


@pytest.mark.parametrize("router", registry.names("routers"))
@torch.no_grad()
def test_soup_equals_grm_and_wide_ssc_equals_grm(router):
    # a soup of networks is something else: the oracle of the read path mixes states token by token
    for one in cases(4, seed=7, variant="grm", router=router):
        streams, x = example(one.memory, LENGTH), inputs(LENGTH)
        some = plan(one, own=False)
        want = read(some, streams, x=x)[0]
        soup = read(plan(one, variant="soup", own=False), streams, x=x)[0]
        if some.network:
            assert (soup - want)[:, 2 * SEGMENT :, -1].abs().max() > 1e-6
        else:
            near(soup, want)
        want = read(plan(one), streams, x=x)[0]
        for k in (4, 9):
            near(read(plan(one, variant="ssc", top_k=k), streams, x=x)[0], want)
        narrow = read(plan(one, variant="ssc", top_k=1), streams, x=x)[0]
        near(narrow[:, : 2 * SEGMENT], want[:, : 2 * SEGMENT])
        assert (narrow - want).abs().max() > 1e-4


def test_residual_without_decay_equals_the_unmodified_memory():
    streams = example("linear", LENGTH, decay="none")
    base, _ = naive(linear, streams)
    near(read(plan(case(variant="residual")), streams)[0], base)
    near(read(plan(case(variant="residual", cover="part")), streams)[0], base)
    faded = example("linear", LENGTH, decay="head")
    assert (
        read(plan(case(variant="residual")), faded)[0] - naive(linear, faded)[0]
    ).abs().max() > 0.1


@ROUTED
def test_carry_without_decay_weighs_segments_by_tail_sums(router):
    streams = example("linear", LENGTH, decay="none")
    own, cached = gammas(plan(case(router=router, init="carry")), streams)
    every = torch.cat([cached, own[..., None] * 0], -1)
    segment = torch.arange(LENGTH) // SEGMENT
    every.scatter_(-1, segment[None, :, None, None].expand(2, -1, HEADS, 1), own[..., None])
    tails = every.flip(-1).cumsum(-1).flip(-1)
    match = torch.einsum("bthk,bjhk->bthj", streams.q, streams.k)
    match = match * torch.ones(LENGTH, LENGTH).tril()[:, None]
    want = torch.einsum("bthj,bjhv->bthv", match * tails[..., segment], streams.v)
    near(read(plan(case(router=router, init="carry")), streams)[0], want)
    near(tails[..., 0], torch.ones_like(own))
    # the plain sum counts segment j of s segments s - j + 1 times
    times = (segment[:, None] - segment + 1)[:, None]
    want = torch.einsum("bthj,bjhv->bthv", match * times, streams.v)
    near(read(plan(case(variant="residual", init="carry")), streams)[0], want)


def test_own_writes_under_carry_are_the_states_of_reset():
    for decay in ("none", "head", "channel"):
        streams = example("linear", LENGTH, decay=decay)
        states = [
            read(plan(case(init=i)), streams)[2].states[:, :4] for i in ("reset", "carry_delta")
        ]
        near(*states)


@pytest.mark.parametrize("memory", [linear, swla])
def test_segments_of_one_token_are_gated_softmax_attention(memory):
    # eq 20 elementwise: a head a channel of width one, keys shared, and every state is v' alone
    # because the first key channel is 1 and the query reads nothing else; u_t comes from the gate
    torch.manual_seed(0)
    heads, keys, length, width = 5, 8, 19, 6
    x = torch.randn(2, length, width).double()
    routing = F.normalize(torch.randn(2, length, 1, keys - 1).double(), dim=-1)
    k = torch.cat([torch.ones(2, length, 1, 1).double(), routing], -1).expand(-1, -1, heads, -1)
    v = torch.randn(2, length, heads, 1).double()
    opened = torch.randn(2, length, heads, 1).double().sigmoid()
    q = F.pad(opened, (0, keys - 1))
    gate = Gate(list(range(heads)), keys, width)
    with torch.no_grad():
        gate.weight.copy_(torch.randn(keys, width).repeat(heads, 1))
    config = CachingConfig(variant="grm", segment=1, router="mean", init="reset", rule="plain")
    streams = Streams(q, k, v, beta=torch.ones(2, length, heads, 2).double())
    out, _, _ = read(Plan(config, gate, memory, heads), streams, x=x)
    first = F.one_hot(torch.tensor(0), keys).double()
    u = F.normalize(first + x @ gate.weight[:keys].T.double(), dim=-1)
    scores = u @ (k[:, :, 0] / 2**0.5).transpose(1, 2)
    attention = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(
        -1
    )
    near(out[..., 0], attention @ v[..., 0] * opened[..., 0])


@pytest.mark.parametrize("router", registry.names("routers"))
@pytest.mark.parametrize("variant", ["grm", "soup", "ssc"])
@torch.no_grad()
def test_gammas_sum_to_one(variant, router):
    for one in cases(3, seed=8, variant=variant, router=router):
        streams = example(one.memory, LENGTH)
        own, cached = gammas(plan(one), streams)
        near(own + cached.sum(-1), torch.ones_like(own))
        assert own.min() >= 0 and cached.min() >= 0
        assert own[:, :SEGMENT].eq(1).all()
        if variant == "ssc":
            assert cached.count_nonzero(dim=-1).max() <= plan(one).config.top_k
            _, every = gammas(plan(one, variant="grm"), streams)
            best = every.topk(2, -1)
            assert torch.equal(
                cached.topk(2, -1).indices[:, 2 * SEGMENT :], best.indices[:, 2 * SEGMENT :]
            )


@pytest.mark.parametrize(
    "variant", [n for n, v in VARIANTS.items() if v.segmentation == "constant"]
)
def test_sums_and_averages_take_all_alike(variant):
    streams = example("linear", LENGTH)
    own, cached = gammas(plan(case(variant=variant)), streams)
    past = torch.arange(LENGTH).div(SEGMENT, rounding_mode="floor")[:, None].expand(-1, HEADS)
    if variant == "residual":
        assert torch.equal(cached.sum(-1)[0], past.to(cached.dtype)) and own.eq(1).all()
    if variant == "ma":
        near(own[0], (1 / (past + 1)).to(own.dtype), 1e-6)
        near(cached.sum(-1)[0], (past / (past + 1)).to(own.dtype), 1e-6)


@torch.no_grad()
def test_scores_are_what_the_routers_define():
    streams = example("linear", LENGTH)
    q, states = streams.q, read(plan(case()), streams)[2].states
    segment = torch.arange(LENGTH) // SEGMENT
    reads = torch.einsum("bthk,bnhkv->bthnv", q, states[:, :4]).norm(dim=-1)
    online = naive_open(streams).norm(dim=-1)
    cached_scores = {
        "mean": affinity(streams, "mean").permute(0, 2, 1, 3),
        "moment": affinity(streams, "moment").permute(0, 2, 1, 3),
    }
    for router in ("mean", "moment", "energy", "position"):
        own, cached = gammas(plan(case(router=router), temperature=1.0), streams)
        ratio = cached[:, -1].log() - own[:, -1, :, None].log()  # logits against the online one
        t = LENGTH - 1
        if router == "position":
            want = torch.zeros_like(ratio)
        elif router == "energy":
            mean = (reads[:, t].sum(-1) + online[:, t]) / 5
            want = (reads[:, t] - online[:, t, :, None]) / mean[..., None]
        else:
            match = cached_scores[router][:, t]
            parts = [match[..., segment == i] for i in range(5)]
            sums = [p.mean(-1) if router == "mean" else p.sum(-1) for p in parts]
            want = torch.stack(sums[:4], -1) - sums[4][..., None]
        near(ratio, want, 1e-3 if router == "position" else 1e-9)


def naive_open(streams: Streams) -> Tensor:
    """The reads of the open segment alone, by the recurrence."""
    parts = [
        naive(linear, streams.map(lambda s, a=a: s[:, a : a + SEGMENT]))[0]
        for a in range(0, streams.length, SEGMENT)
    ]
    return torch.cat(parts, 1)
