"""Calibration: time constants of known decays, the choice of heads, statistics by brute force."""

from __future__ import annotations

import math

import pytest
import torch
from lawkit import build, tokens
from lawmodels import FAMILY
from torch import Tensor, nn

from mcretrofit import calibrate as module
from mcretrofit import surprise
from mcretrofit.calibrate import Calibration, calibrate, choose, covered, shipped_text, windows
from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError
from mcretrofit.gates import Gate
from mcretrofit.memories import Streams
from mcretrofit.retrofit import Cover, listening, retrofitted

pytestmark = pytest.mark.filterwarnings("error")
SEGMENT = 8
CONFIG = CachingConfig(segment=SEGMENT, tau=40.0)
IDS = tokens(100).flatten().tolist()


def made(family: str, **fields: object) -> nn.Module:
    return build(family, num_hidden_layers=1, **fields)


def constant_gla(biases: Tensor) -> nn.Module:
    """A GLA whose log decays are `logsigmoid(bias) / 16` whatever it reads, `biases [H, K]`."""
    heads, keys = biases.shape
    model = made("gla", hidden_size=heads * keys, num_heads=heads)
    with torch.no_grad():
        model.model.layers[0].attn.gk_proj[0].weight.zero_()
        model.model.layers[0].attn.gk_proj[1].bias.copy_(biases.flatten())
    return model


def only(found: Calibration) -> Cover:
    (cover,) = found.covers.values()
    return cover


def bias_for(tau: float) -> float:
    """The bias that gives a channel of `constant_gla` this time constant."""
    return -math.log(math.expm1(16 / tau))


def test_time_constants_of_retention_are_exact():
    found = calibrate(made("retnet"), IDS, CONFIG)
    for h, head in enumerate(found.heads):
        assert head.tau == pytest.approx(-1 / math.log1p(-(2.0 ** (-5 - h))), rel=1e-5)
        assert (head.mixer, head.head, head.keys) == ("model.layers.0.attn", h, 16)
    assert [h.cached for h in found.heads] == [False, True]
    assert only(found).heads == [1] and only(found).total == 2
    assert "forgets fast: 0 of 16" in found.heads[0].why
    assert "slow: 16 of 16 channels above 40 tokens" in found.heads[1].why


def test_time_constants_of_constant_gates_are_exact():
    wanted = torch.tensor([[2.0, 30.0], [39.0, 41.0], [300.0, 50000.0]]).repeat_interleave(8, 1)
    model = constant_gla(torch.tensor([[bias_for(t) for t in row] for row in wanted.tolist()]))
    heard = module.hear(model, windows(IDS, SEGMENT))
    (one,) = heard.values()
    torch.testing.assert_close(one.taus(), wanted, rtol=1e-3, atol=0)
    found = calibrate(model, IDS, CONFIG)
    assert [h.tau for h in found.heads] == pytest.approx([2.0, 39.0, 300.0], rel=1e-3)
    assert only(found).heads == [2]


def test_time_constants_of_a_gated_delta_rule_are_exact():
    model = made("gated_deltanet")
    mixer = model.model.layers[0].attn
    with torch.no_grad():
        mixer.a_proj.weight.zero_()
        mixer.A_log.copy_(torch.tensor([0.0, math.log(0.1)]))
        mixer.dt_bias.copy_(torch.tensor([-1.0, -2.0]))
    found = calibrate(model, IDS, CONFIG)
    want = [1 / math.log1p(math.exp(-1)), 10 / math.log1p(math.exp(-2))]
    assert [h.tau for h in found.heads] == pytest.approx(want, rel=1e-5)
    assert [h.cached for h in found.heads] == [False, True]


@pytest.mark.parametrize("family", ["linear_attn", "delta_net"])
def test_without_decay_every_head_is_slow(family):
    found = calibrate(made(family), IDS, CONFIG.replace(tau=1e9))
    assert all(math.isinf(h.tau) and h.tau > 0 and h.cached for h in found.heads)
    assert only(found).heads == [0, 1] and only(found).mask.all()


def test_a_gate_that_never_closes_counts_as_no_decay():
    found = calibrate(constant_gla(torch.full((2, 16), 500.0)), IDS, CONFIG)
    assert [h.tau for h in found.heads] == [math.inf, math.inf]
    assert only(found).heads == [0, 1]


def test_slow_channels_are_masked_one_by_one():
    biases = torch.full((2, 32), bias_for(10.0))
    biases[0, :20] = bias_for(100.0)
    biases[1, :15] = bias_for(100.0)
    found = calibrate(constant_gla(biases), IDS, CONFIG)
    cover = only(found)
    # a head needs a quarter of its channels, at least 16, to be worth caching
    assert cover.heads == [0] and cover.mask.shape == (1, 32)
    assert torch.equal(cover.mask[0], (torch.arange(32) < 20).float())
    assert [(h.slow, h.cached) for h in found.heads] == [(20, True), (0, False)]
    assert "20 of 32" in found.heads[0].why and "15 of 32" in found.heads[1].why
    everything = calibrate(constant_gla(biases), IDS, CONFIG.replace(heads="all"))
    assert only(everything).heads == [0, 1] and only(everything).mask.all()


def test_choice_at_the_threshold():
    taus = torch.full((3, 128), 10.0)
    taus[0, :31], taus[1, :32], taus[2] = 151.0, 151.0, 150.0
    chosen, mask, why = choose(CachingConfig(tau=150.0), taus)
    assert chosen == [1] and mask.sum() == 32 and len(why) == 3


def test_all_heads_fast_leaves_the_model_alone():
    model, ids = made("retnet"), tokens(40)
    found = calibrate(model, IDS, CONFIG.replace(tau=1e6))
    assert only(found).heads == [] and not any(h.cached for h in found.heads)
    with torch.no_grad():
        base = model(ids).logits
        with retrofitted(model, CONFIG, found.covers):
            assert covered(model) == 0
            assert torch.equal(model(ids).logits, base)


def test_text_of_less_than_two_segments_is_refused():
    with pytest.raises(RetrofitError, match="15 tokens, fewer than two segments of 8.*--segment"):
        calibrate(made("retnet"), IDS[:15], CONFIG)
    assert calibrate(made("retnet"), IDS[:16], CONFIG).heads[1].std is not None


def test_a_model_without_recurrence_is_refused():
    class Plain(nn.Module):
        device = torch.device("cpu")

        def forward(self, **_: object) -> None: ...

    with pytest.raises(RetrofitError, match="Plain has no recurrent mixer"):
        calibrate(Plain(), IDS, CONFIG)


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
def test_a_value_that_is_not_finite_names_its_layer(name):
    model = build("gla")
    with torch.no_grad():
        getattr(model.model.layers[1].attn, name).weight[0, 0] = math.nan
    with pytest.raises(RetrofitError, match=r"^model\.layers\.1\.attn: values are NaN or infinite"):
        calibrate(model, IDS, CONFIG)
    assert all("forward" not in vars(m) for m in model.modules())


def test_windows_are_whole_segments():
    assert windows(list(range(100)), 8).shape == (1, 96)
    assert windows(list(range(5000)), 256).shape == (2, 2048)
    assert windows(list(range(9000)), 1024).shape == (1, 4096)
    assert windows(list(range(7000)), 1024)[0, -1] == 4095
    assert len(shipped_text().encode()) > 16384


@FAMILY
def test_calibration_leaves_the_model_bit_equal(family):
    model, ids = made(family), tokens(40)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        base = model(ids).logits
        for changes in ({}, {"heads": "all", "whiten": True}, {"router": "energy"}):
            calibrate(model, IDS, CONFIG.replace(**changes))
            after = model.state_dict()
            assert set(after) == set(before) and covered(model) == 0
            assert all(torch.equal(after[n], t) for n, t in before.items())
            assert torch.equal(model(ids).logits, base)
            assert all("forward" not in vars(m) for m in model.modules())
            assert all(p.grad is None for p in model.parameters())


def streams_of(model: nn.Module, batch: Tensor) -> list[Streams]:
    heard: list[Streams] = []
    with torch.no_grad(), listening(model, lambda _, s, __: heard.append(s)):
        for row in batch:
            model(input_ids=row[None], use_cache=False)
    return [s.map(lambda x: x[0].double()) for s in heard]


def brute_force(
    model: nn.Module, batch: Tensor, cover: Cover, router: str, segment: int, relative: bool = False
):
    """Mean score of closed segments by later tokens, and half of what the loudest fifth exceed it."""
    every: list[list[float]] = [[] for _ in cover.heads]
    best: list[list[float]] = [[] for _ in cover.heads]
    rises: list[list[float]] = [[] for _ in cover.heads]
    for streams in streams_of(model, batch):
        for i, h in enumerate(cover.heads):
            q, k = (s[:, h] * cover.mask[i].double() for s in (streams.q, streams.k))
            q, k = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (q, k))
            if cover.whiten is not None:
                q = q @ cover.whiten[i].double()
                q = q / q.norm(dim=-1, keepdim=True) @ cover.whiten[i].double()
            match = q @ k.T
            for t in range(len(q)):
                cut = [match[t, n * segment : (n + 1) * segment] for n in range(t // segment)]
                scores = [float(c.square().sum() if router == "moment" else c.mean()) for c in cut]
                scale = sum(scores) / len(scores) if relative and scores else 1.0
                every[i] += [score / scale for score in scores]
                best[i] += [max(scores) / scale] if len(scores) > 1 else []
                more = 0.75 * math.log(max(4, len(scores)) / 4)
                rises[i] += [1 + more / 2] if len(scores) > 1 else []
    mean = torch.tensor(every).double().mean(1)
    # the best of more than four segments counts for less
    above = (torch.tensor(best).double() - mean[:, None]) / torch.tensor(rises).double()
    return mean, above.quantile(0.8, dim=1).clamp_min(0) / 2


@pytest.mark.parametrize("compared", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
@pytest.mark.parametrize("router", ["moment", "mean"])
@pytest.mark.parametrize("family", ["gated_deltanet", "linear_attn"])
def test_score_statistics_equal_brute_force(family, router, whiten, compared, monkeypatch):
    monkeypatch.setattr(surprise, "LOUD", (0.2,))
    model = made(family)
    config = CONFIG.replace(router=router, heads="all", whiten=whiten, relative=compared)
    cover = only(calibrate(model, IDS, config))
    assert (cover.whiten is not None) == whiten
    relative = router == "moment" and config.relative
    mean, std = brute_force(model, windows(IDS, SEGMENT), cover, router, SEGMENT, relative)
    torch.testing.assert_close(cover.mean.double(), mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cover.std.double(), std, rtol=1e-3, atol=1e-6)


def test_statistics_of_partial_heads_and_several_windows(monkeypatch):
    biases = torch.full((2, 32), bias_for(10.0))
    biases[1, 7:25] = bias_for(100.0)
    model = constant_gla(biases)
    monkeypatch.setattr(surprise, "LOUD", (0.2,))
    monkeypatch.setattr(module, "windows", lambda ids, segment: torch.tensor(ids).view(4, 24))
    found = calibrate(model, IDS[:96], CONFIG.replace(router="moment"))
    cover = only(found)
    assert cover.heads == [1] and cover.mask.sum() == 18
    mean, std = brute_force(
        model, torch.tensor(IDS[:96]).view(4, 24), cover, "moment", SEGMENT, relative=True
    )
    torch.testing.assert_close(cover.mean.double(), mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cover.std.double(), std, rtol=1e-3, atol=1e-6)
    row = found.heads[1]
    assert (row.mean, row.std) == (cover.mean[0].item(), cover.std[0].item())


def test_whitening_makes_keys_white():
    model = made("gated_deltanet")
    cover = only(calibrate(model, IDS, CONFIG.replace(heads="all", whiten=True)))
    (streams,) = streams_of(model, windows(IDS, SEGMENT))
    for h, matrix in enumerate(cover.whiten.double()):
        keys = streams.k[:, h] / streams.k[:, h].norm(dim=-1, keepdim=True)
        second = keys.T @ keys / len(keys)
        values, vectors = torch.linalg.eigh(second)
        ridge = module.RIDGE * second.trace() / len(second)
        got = vectors.T @ matrix @ second @ matrix @ vectors
        torch.testing.assert_close(got, torch.diag(values / (values + ridge)), rtol=0, atol=1e-4)


def test_whitened_questions_expect_the_same_of_any_segment():
    model = made("gated_deltanet")
    cover = only(calibrate(model, IDS, CONFIG.replace(heads="all", whiten=True)))
    (streams,) = streams_of(model, windows(IDS, SEGMENT))
    gate = Gate(cover.heads, streams.k.shape[-1], whiten=True)
    gate.whiten = cover.whiten
    raw, turned = gate.unit(streams.q.float()), gate.query(streams.q.float(), None, True, True)
    keys = gate.unit(streams.k.float())
    spread = {}
    for name, u in (("raw", raw), ("whitened", turned)):
        scores = torch.einsum("thk,shk->hts", u, keys).square().mean(-1)
        spread[name] = scores.std(1) / scores.mean(1)
    assert (spread["whitened"] < 0.1).all() and (spread["raw"] > 3 * spread["whitened"]).all()


@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
def test_few_directions_are_those_that_questions_use_most(whiten):
    model = made("gated_deltanet")
    config = CONFIG.replace(heads="all", whiten=whiten)
    cover, full = (only(calibrate(model, IDS, config.replace(directions=n))) for n in (3, 0))
    (streams,) = streams_of(model, windows(IDS, SEGMENT))
    width = streams.k.shape[-1]
    gate, plain = (Gate(cover.heads, width, whiten=c.whiten is not None) for c in (cover, full))
    gate.whiten, plain.whiten = cover.whiten, full.whiten
    q, k = streams.q.float(), streams.k.float()
    used = gate.along(gate.unit(q), width).square().sum(0)
    assert (used[:, :-1] >= used[:, 1:] * 0.999).all()
    scores = [
        torch.einsum("thk,shk->hts", one.query(q, None, True, True, n), one.key(k, True, n))
        for one, n in ((gate, width), (plain, 0))
    ]
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", ["ma", "residual"])
def test_nothing_is_scored_where_scores_do_not_matter(variant):
    found = calibrate(made("retnet"), IDS, CONFIG.replace(variant=variant))
    assert only(found).mean is None and found.heads[1].mean is None and found.heads[1].cached
