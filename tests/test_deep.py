"""Laws of deep and windowed memories: the dual form, what is learned, what is mixed, what is refused."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from test_families import build, tokens
from test_memories import cast, near
from torch import Tensor

from mcretrofit import registry
from mcretrofit.config import CachingConfig
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.errors import RetrofitError
from mcretrofit.memories import Streams, linear, mlp, swla
from mcretrofit.memories._inner import _Gelu, gradients, network
from mcretrofit.memories._scan import init_state, leaves, naive, refusal, scan, scan_segments, tree
from mcretrofit.retrofit import every_head, retrofit_

pytestmark = pytest.mark.filterwarnings("error")
RULE = pytest.mark.parametrize("rule", mlp.RULES)


def example(rule: str, length: int, chunk: int = 4, width: int = 5, rows: int = 2) -> Streams:
    torch.manual_seed(length)
    streams = cast(mlp.example(rows, length, 2, width, rule), torch.float64)
    # steps that change the memory visibly
    streams = streams._replace(beta=streams.beta * (1 if rule == "normed" else 5))
    return streams._replace(inner=streams.inner._replace(chunk=chunk))


def loss(weights: tuple[Tensor, ...], k: Tensor, v: Tensor, objective: str) -> Tensor:
    read = network(weights, k[None])[0]
    return -(read @ v) if objective == "dot" else (read - v).square().sum()


def recursion(streams: Streams, b: int, h: int) -> Tensor:
    """Eq 30-36 for one row and head, each gradient by autograd at the inner chunk's first weights."""
    inner = streams.inner
    memory = tuple(w[h] for w in inner.start)
    momenta = tuple(torch.zeros_like(w) for w in memory)
    outs = []
    for t in range(streams.length):
        if t % inner.chunk == 0:
            frozen = tuple(w.detach().requires_grad_() for w in memory)
        q, k, v = (s[b, t, h] for s in streams[:3])
        grads = torch.autograd.grad(loss(frozen, k, v, inner.objective), frozen)
        share = 0.0 if streams.momentum is None else streams.momentum[b, t, h].exp()
        keep = 1.0 if streams.decay is None else streams.decay[b, t, h].exp()
        eta = streams.beta[b, t, h]
        momenta = tuple(share * s - eta * g for s, g in zip(momenta, grads, strict=True))
        memory = tuple(keep * w + s for w, s in zip(memory, momenta, strict=True))
        outs.append(network(memory, q[None])[0])
    return torch.stack(outs)


@RULE
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_the_dual_form_is_the_recursion(rule, chunk):
    streams = example(rule, 37, chunk)
    for run in (scan, naive):
        out, _ = run(mlp, streams)
        near(out[1, :, 1], recursion(streams, 1, 1), 1e-12)
    assert (out - network(streams.inner.start, streams.q.transpose(1, 2)).transpose(1, 2)).any()


@RULE
@torch.no_grad()
def test_factors_are_the_gradient_of_the_loss(rule):
    streams = example(rule, 1)
    memory, (k, v) = tuple(w[0] for w in streams.inner.start), (s[0, 0, 0] for s in streams[1:3])
    factors = gradients(memory, k[None], v[None], streams.inner.objective)
    leaf = tuple(w.clone().requires_grad_() for w in memory)
    with torch.enable_grad():
        want = torch.autograd.grad(loss(leaf, k, v, streams.inner.objective), leaf)
    near(tuple(z.T @ r for z, r in factors), want)
    h = torch.randn(9).double().requires_grad_()
    with torch.enable_grad():
        assert torch.autograd.gradcheck(_Gelu.apply, h)
        near(_Gelu.apply(h)[1], torch.autograd.grad(F.gelu(h).sum(), h)[0])


@RULE
def test_outer_gradients_are_finite_differences(rule):
    streams = example(rule, 5, chunk=2, width=3, rows=1)
    inputs = [s.requires_grad_() for s in (*streams[:-1], *streams.inner.start) if s is not None]

    def run(*given: Tensor) -> Tensor:
        rest = iter(given)
        made = streams.map(lambda _: next(rest))
        start = tuple(next(rest) for _ in streams.inner.start)
        out, state = scan(mlp, made._replace(inner=made.inner._replace(start=start)))
        return torch.cat([out.flatten(), *(w.flatten() for w in state[0])])

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("chunk", [1, 16])
@torch.no_grad()
def test_a_repeated_pair_is_learned(chunk):
    for rule, sign in (("titans", 1), ("matrix", 1), ("dla", -1)):
        one = example(rule, 1, chunk, width=8)
        streams = one.map(lambda s: s.expand(-1, 64 * chunk, *s.shape[2:]).clone())
        streams = streams._replace(q=streams.k, beta=torch.full_like(streams.beta, 0.02 / chunk))
        streams = streams._replace(decay=None)
        if streams.momentum is not None:
            streams = streams._replace(momentum=torch.full_like(streams.momentum, -1.0))
        out, _ = scan(mlp, streams)
        error = (out - streams.v).square().sum(-1)
        match = (out * streams.v).sum(-1)
        if sign > 0:
            assert (error[:, -1] < 0.05 * error[:, 0]).all(), rule
        else:
            assert (match[:, -1] > match[:, 0] + 1).all()
            assert (match.diff(dim=1) > 0).all()


@torch.no_grad()
def test_rows_of_any_phase_equal_rows_alone():
    streams, cuts = example("titans", 40), [(3, 9, 14, 14), (1, 1, 30, 8)]
    alone, _ = scan(mlp, streams)
    # row 0 lies behind 11 free places, both have holes, and pieces cut inner chunks anywhere
    places = torch.stack([torch.arange(40) + 11, torch.arange(40) + (torch.arange(40) > 20) * 7])
    rows = torch.arange(2)[:, None]
    laid = streams.map(lambda s: s.new_zeros(2, 60, *s.shape[2:]).index_put((rows, places), s))
    for sizes in cuts:
        state, outs, start = init_state(laid, mlp), [], 0
        for size in (*sizes, 20):
            out, state = scan(mlp, laid.map(lambda s, a=start, b=start + size: s[:, a:b]), state)
            outs.append(out)
            start += size
        near(torch.cat(outs, 1)[rows, places], alone)
    assert state[3].eq(0).all() and state[2][0] is state[0][0]


@pytest.mark.parametrize("window", [1, 2, 4])
@torch.no_grad()
def test_a_window_writes_its_tokens_again(window):
    torch.manual_seed(0)
    streams = cast(swla.example(2, 30, 2, 4), torch.float64)
    streams = streams._replace(beta=torch.rand(2, 30, 2, window).double())
    out, (memory, *past) = scan(swla, streams)
    assert [p.shape[2] for p in past] == [window - 1] * 2
    want = torch.zeros(2, 2, 4, 4).double()
    for t in range(30):
        want = want * streams.decay[:, t, :, None, None].exp()
        for i in range(min(window, t + 1)):
            pair = streams.k[:, t - i, :, :, None] * streams.v[:, t - i, :, None]
            want = want + streams.beta[:, t, :, i, None, None] * pair
        near(out[:, t], torch.einsum("bhk,bhkv->bhv", streams.q[:, t], want))
    near(memory, want)
    if window == 1:
        once = streams._replace(v=streams.v * streams.beta, beta=None)
        near(out, scan(linear, once)[0])
    first = streams.map(lambda s: s[:, 10:20])
    ends = scan_segments(swla, streams, 10, init_state(streams, swla), "reset")[2]
    near(ends[0][:, 1], scan(swla, first)[1][0])
    carried = scan_segments(swla, streams, 10, init_state(streams, swla), "carry")[2]
    assert (carried[0][:, 1] - ends[0][:, 1]).abs().max() > 1e-3


@torch.no_grad()
def test_segments_of_one_token_are_what_the_paper_says():
    # eq 25: a token is a network, one step away from M_0
    streams = example("dla", 6, chunk=1)
    ends = scan_segments(mlp, streams, 1, init_state(streams, mlp), "reset")[2]
    for t in range(6):
        memory = tuple(w.expand(2, *w.shape) for w in streams.inner.start)
        k, v = (s[:, t, :, None] for s in streams[1:3])
        for i, (z, r) in enumerate(gradients(memory, k, v, "dot")):
            step = streams.beta[:, t, :, None, None] * (z.transpose(-1, -2) @ r)
            near(ends[0][i][:, t], memory[i] - step)
    # eq 20: without values, weighed by a softmax, gated softmax attention
    torch.manual_seed(0)
    keys, queries, values = torch.randn(3, 2, 9, 3, 1).double()
    ones = torch.ones_like(keys)
    alone = Streams(queries.sigmoid(), ones, values, None, ones)
    state = init_state(alone, swla)
    ends = scan_segments(swla, alone, 1, state, "reset")[2]
    scores = torch.einsum("bthk,bjhk->bhtj", queries, keys)
    seen = torch.ones(9, 9).tril().bool()
    gamma = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    reads = torch.einsum("bthk,bjhkv->bthjv", alone.q, swla.weights(ends))
    got = torch.einsum("bhtj,bthjv->bthv", gamma, reads)
    near(got, torch.einsum("bhtj,bjhv->bthv", gamma, values) * queries.sigmoid())


@RULE
def test_first_weights_get_gradients_through_segment_ends(rule):
    streams = example(rule, 24)
    start = tuple(w.requires_grad_() for w in streams.inner.start)
    ends = scan_segments(mlp, streams, 8, init_state(streams, mlp), "reset")[2]
    last = tuple(w[:, 2:] for w in mlp.weights(ends))
    mlp.read(last, streams.q).square().sum().backward()
    assert all(w.grad.any() for w in start)


def test_the_dual_form_is_fast():
    torch.manual_seed(0)
    streams = mlp.example(1, 2048, 2, 64)
    streams = streams._replace(inner=streams.inner._replace(chunk=16))
    some = streams.map(lambda s: s[:, :128])

    def seconds(run, given: Streams) -> float:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            run(mlp, given)
            times.append(time.perf_counter() - begun)
        return min(times)

    with torch.no_grad():
        assert 16 * seconds(naive, some) > 5 * seconds(scan, streams)


@pytest.mark.parametrize("family", ["dla", "titans"])
@pytest.mark.parametrize("memory", ["mlp", "linear"])
def test_models_train_and_name_what_runs_away(family, memory):
    model, ids = build(family, memory=memory, num_hidden_layers=1), tokens(40)
    model(ids, labels=ids).loss.backward()
    mixer = model.model.layers[0].attn
    assert all(w.grad.any() for w in mixer.start_weights)
    mixer.max_step = 1e30 if (family, memory) != ("dla", "linear") else float("inf")
    with pytest.raises(RetrofitError, match=r"^model\.layers\.0\.attn: .* at token \d+ .*max_step"):
        model(ids)
    mixer.max_step = 0.1
    with torch.no_grad():
        mixer.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(RetrofitError, match=r"^model\.layers\.0\.attn: .*values are not finite"):
        model(ids)


def test_memories_that_cannot_learn_or_segments_that_cut_a_chunk_are_refused():
    model, ids = build("titans", num_hidden_layers=1), tokens(9)
    with pytest.raises(RetrofitError, match=r"attn: .* inner chunks of 4: --segment 12 fits"):
        retrofit_(model, CachingConfig(segment=10), every_head(model))
    assert refusal(32, 16) is None
    for w in model.model.layers[0].attn.start_weights:
        torch.nn.init.zeros_(w)
    with pytest.raises(RetrofitError, match=r"^model\.layers\.0\.attn: M_0 .*all zeros"):
        model(ids)
    wrong = {"inner_chunk": 0, "memory": "lstm", "max_step": 0, "window": 1.5}
    for name, value in wrong.items():
        family = "swla" if name == "window" else "dla"
        tiny = registry.load("models", family).tiny()
        config = DecoderConfig(family, num_hidden_layers=1, **{**tiny, name: value})
        with pytest.raises(RetrofitError, match=f"config: {name} is"):
            DecoderForCausalLM(config)


def test_states_hold_no_second_copy_between_chunks():
    streams = example("titans", 8)
    _, state = scan(mlp, streams)
    held = {t.data_ptr() for t in leaves(state)}
    assert len(held) == 5
    assert all(s.shape[:2] == (2, 2) for s in leaves(tree(lambda s: s, state)))
