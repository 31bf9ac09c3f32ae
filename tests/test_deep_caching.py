"""Laws of caching networks: every inner rule against the oracle, blocks, bytes, what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lawkit import HEADS, KEYS, Case, build, cases, example, inputs, plan, read, tokens
from read_oracle import Oracle

from mcretrofit import caching
from mcretrofit.config import CachingConfig
from mcretrofit.costs import cost, describe, of_networks
from mcretrofit.errors import RetrofitError
from mcretrofit.loading import load_model
from mcretrofit.memories import mlp
from mcretrofit.memories._scan import sizes, tree
from mcretrofit.retrofit import every_head, mixers, retrofitted
from mcretrofit.segments import blocks

pytestmark = pytest.mark.filterwarnings("error")
RULE = pytest.mark.parametrize("rule", mlp.RULES)
LENGTH = 27


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def some(count: int, seed: int, **fixed: object) -> list[Case]:
    return cases(count, seed, memory="mlp", **fixed)


@RULE
@torch.no_grad()
def test_every_rule_reads_as_the_oracle(rule):
    streams = example("mlp", LENGTH, rule=rule)
    streams = streams._replace(beta=streams.beta * (1 if rule == "normed" else 10))
    for variant in ("residual", "grm", "soup", "ssc", "loglinear"):
        for case in some(2, 1, variant=variant):
            x = inputs(LENGTH) if case.gated else None
            want = Oracle(plan(case), streams, x).out()
            near(read(plan(case), streams, x=x)[0], want)
            near(read(plan(case), streams, [5, 1, 1, 1, 10, 9], x)[0], want)


@RULE
@torch.no_grad()
def test_soup_is_grm_of_matrices_alone(rule):
    streams = example("mlp", LENGTH, rule=rule)
    streams = streams._replace(beta=streams.beta * (1 if rule == "normed" else 10))
    for init in ("reset", "carry", "carry_delta"):
        (case,) = some(1, 2, variant="grm", init=init)
        grm, soup = (
            read(plan(case, variant=v, own=False), streams, x=inputs(LENGTH))[0]
            for v in ("grm", "soup")
        )
        gap = (grm - soup)[:, 16:, -1].abs().max()
        assert gap < 1e-9 if rule == "matrix" else gap > 1e-5, gap


@torch.no_grad()
def test_blocks_of_tokens_read_as_all_at_once(monkeypatch):
    for case in [*some(2, 3, variant="soup"), *some(2, 3, variant="grm")]:
        streams = example("mlp", 45)
        want = read(plan(case), streams, x=inputs(45))[0]
        monkeypatch.setattr(caching, "blocks", partial(blocks, tokens=16))
        near(read(plan(case), streams, x=inputs(45))[0], want)
        monkeypatch.undo()


@torch.no_grad()
def test_carry_delta_of_networks_reads_on_and_keeps_what_segments_wrote_alone():
    streams = example("mlp", LENGTH)
    case = Case("mlp", "grm", "moment", "carry_delta", "z", "all", False)
    kept = [read(plan(case, init=i), streams)[2].states[:, :3] for i in ("reset", "carry_delta")]
    near(*kept)
    # a score that nothing exceeds leaves the model's own read, which runs on through segments
    unmoved = read(plan(case, margin=1e6), streams)[0]
    near(unmoved, mlp.chunks(streams, mlp.init_state(streams), LENGTH)[0])


@torch.no_grad()
def test_closed_networks_hold_their_weights_alone():
    streams = example("mlp", 32)
    count, keys, values, cached, running = sizes(streams, mlp)
    assert (count, keys, values) == (HEADS, KEYS, KEYS)
    assert cached == 2 * KEYS * 3 * KEYS and running == 2 * cached + 1
    for init in ("reset", "carry", "carry_delta"):
        case = Case("mlp", "grm", "mean", init, "plain", "all", False)
        cache = read(plan(case), streams)[2]
        assert cache.states.shape == (2, 4, HEADS, cached) and cache.origin is None
        assert (cache.online is None) == (init == "carry")


@pytest.mark.parametrize("family", ["dla", "titans", "swla"])
@torch.no_grad()
def test_the_cost_table_counts_what_deep_caches_hold(family, tmp_path):
    build(family, num_hidden_layers=1).save_pretrained(tmp_path)
    described = describe(tmp_path)
    for variant in ("grm", "soup", "ssc"):
        config = CachingConfig(variant=variant, segment=8, init="reset", heads="all", whiten=False)
        with retrofitted(load_model(described.checkpoint), config) as model:
            cache = model(tokens(LENGTH), use_cache=True).past_key_values
        held = cache.states[0]["segments"]
        said = cost(described, config, LENGTH)
        assert said.cached_bytes == held.states.nbytes + held.summaries.nbytes
        warned = " ".join(of_networks(described.skeleton, config))
        times = said.ratio * LENGTH / (8 * said.segments)
        assert (f"take {times:.3g} times the memory of a KV cache" in warned) == (family != "swla")


def test_a_wrapped_network_that_runs_away_names_its_layer():
    model = build("titans", num_hidden_layers=1)
    (case,) = some(1, 4, variant="soup", init="reset", cover="all")
    with retrofitted(model, case.config, every_head(model)):
        mixers(model)[0].module.max_step = 1e30
        with pytest.raises(
            RetrofitError, match=r"^model\.layers\.0\.attn: .* at token \d+ .*max_step"
        ):
            model(tokens(30))


@RULE
def test_first_weights_learn_through_cached_segments_alone(rule):
    streams = example("mlp", 32, rule=rule)
    first = tuple(w.requires_grad_() for w in streams.inner.start)
    for variant in ("grm", "soup", "ssc"):
        some_plan = plan(Case("mlp", variant, "mean", "reset", "plain", "all", False))
        head, tail = (streams.map(lambda s, a=a: s[:, a : a + 16]) for a in (0, 16))
        cache = read(some_plan, head)[2]
        # the open segment and those after it know nothing of the first weights
        cache.online = tree(torch.Tensor.detach, cache.online)
        still = tail.inner._replace(start=tuple(w.detach() for w in first))
        out = read(some_plan, tail._replace(inner=still), cache=cache)[0]
        grads = torch.autograd.grad(out[:, :8].square().sum(), first)
        assert all(g.any() for g in grads)
