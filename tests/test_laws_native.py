"""Laws of retrofitted transformers models that keep their own class, hybrids among them."""

from __future__ import annotations

import pytest
import torch
from lawkit import SEGMENT, Case, cases, covers, near, stir_all, tokens
from nativehosts import HOSTS, MEMORY, host, kept, placed
from test_hosts import python
from torch import Tensor, nn

from mcretrofit.retrofit import mixers, retrofit_, revert_
from mcretrofit.segments import SegmentCache

PAIRS = [
    (name, case)
    for seed, name in enumerate(HOSTS, 12)
    for case in cases(2 if seed > 12 else 4, seed=seed, memory=MEMORY[name])
]
CASES = pytest.mark.parametrize(
    ("model", "case"), PAIRS, ids=[f"{name}-{case}" for name, case in PAIRS], indirect=["model"]
)
EVERY = pytest.mark.parametrize("model", HOSTS, indirect=True)


@pytest.fixture
def model(request) -> nn.Module:
    return host(request.param)


@pytest.fixture
def caching(model):
    """A function that wraps the model; it is bare again after the test."""

    def wrap(case: Case, **changes: object) -> nn.Module:
        wrapped = retrofit_(model, case.config.replace(**changes), covers(model, case))
        assert wrapped == [found.name for found in mixers(model)]
        stir_all(model)
        return model

    yield wrap
    revert_(model)


def pieces(model: nn.Module, ids: Tensor, sizes: list[int], cache=None, before: int = 0) -> Tensor:
    logits, name, seen = [], kept(model), before
    for part in ids.split(sizes, 1):
        seen += part.shape[1]
        where = placed(model, torch.ones(len(ids), seen, dtype=torch.long), part.shape[1])
        out = model(part, use_cache=True, **{name: cache}, **where)
        cache = out[name]
        logits.append(out.logits)
    return torch.cat(logits, 1)


@CASES
@torch.no_grad()
def test_attaches_reads_like_the_base_and_reverts(model, caching, case):
    ids, before = tokens(45, rows=2), dict(model.state_dict())
    base, kind = model(ids).logits, type(model)
    caching(case, segment=46)
    near(model(ids).logits, base)
    revert_(model)
    caching(case)
    logits = model(ids).logits
    near(logits[:, :SEGMENT], base[:, :SEGMENT])
    assert (logits - base)[:, SEGMENT:].abs().max() > 1e-4 and type(model) is kind
    assert all(".mc." in name for name in set(model.state_dict()) - set(before))
    touched = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert touched == {found.name for found in mixers(model)}
    revert_(model)
    assert set(model.state_dict()) == set(before) and torch.equal(model(ids).logits, base)


@CASES
@torch.no_grad()
def test_decoding_and_pieces_equal_one_pass(model, caching, case):
    ids = tokens(45, rows=2)
    caching(case)
    want = model(ids, use_cache=False).logits
    near(pieces(model, ids, [13] + [1] * 32), want)
    near(pieces(model, ids, [7, 1, 16, 1, 20]), want)


@CASES
@torch.no_grad()
def test_later_tokens_change_no_earlier_bit(model, caching, case):
    ids = tokens(45)
    caching(case)
    before = model(ids).logits
    for cut in (3, 21, 37):
        changed = torch.cat([ids[:, :cut], tokens(45 - cut, seed=7)], 1)
        assert torch.equal(model(changed).logits[:, :cut], before[:, :cut])


@CASES
@torch.no_grad()
def test_left_padded_rows_equal_rows_alone_and_go_on(model, caching, case):
    long, short, steps = tokens(27), tokens(14, seed=2), tokens(12, rows=2, seed=3)
    ids = torch.cat([long, torch.cat([long[:, :13], short], 1)])
    mask, name = torch.ones_like(ids), kept(model)
    mask[1, :13] = 0
    caching(case)
    out = model(ids, attention_mask=mask, use_cache=True, **placed(model, mask, 27))
    got, cache = [out.logits], {name: out[name]}
    for step in steps.split(1, 1):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        where = placed(model, mask, 1)
        got.append(model(step, attention_mask=mask, use_cache=True, **cache, **where).logits)
    got = torch.cat(got, 1)
    near(got[0], model(torch.cat([long, steps[:1]], 1)).logits[0])
    near(got[1, 13:], model(torch.cat([short, steps[1:]], 1)).logits[0])


@CASES
@torch.no_grad()
def test_generation_and_beams_equal_recompute(model, caching, case):
    ids = tokens(19)
    caching(case)
    want = ids
    for _ in range(12):
        best = model(want, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        want = torch.cat([want, best], 1)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), want)
    more = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0, "do_sample": False}
    more |= {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    beams = model.generate(ids, **more)
    assert torch.equal(beams.sequences, model.generate(ids, use_cache=False, **more).sequences)
    logits = model(beams.sequences, use_cache=False).logits[:, 18:-1].log_softmax(-1)
    near(beams.sequences_scores, logits.gather(-1, beams.sequences[:, 19:, None]).sum((1, 2)))


@EVERY
@torch.no_grad()
def test_segments_follow_the_rows_of_the_hosts_cache(request, model, caching):
    memory = MEMORY[request.node.callspec.params["model"]]
    (case,) = cases(1, seed=13, memory=memory, variant="ssc", cover="all")
    ids, steps = tokens(21, rows=2), tokens(10, rows=2, seed=3)
    caching(case)
    # of the ways to pick rows, transformers' own layers of this kind know but this one
    for rows in ([1, 0], [1, 1]):
        cache = model(ids, use_cache=True)[kept(model)]
        assert isinstance(cache.layers[0].segments, SegmentCache)
        cache.reorder_cache(torch.tensor(rows))
        got = pieces(model, steps, [1] * 10, cache, before=21)
        near(got, model(torch.cat([ids[rows], steps], 1)).logits[:, -10:])
    cache.reset()
    near(pieces(model, ids, [20, 1], cache), model(ids).logits)


@EVERY
def test_gradients_reach_the_gate_through_cached_segments(request, model, caching):
    memory = MEMORY[request.node.callspec.params["model"]]
    (case,) = cases(
        1, seed=14, memory=memory, variant="grm", router="moment", init="reset", gated=True
    )
    caching(case, rule="plain")
    mixer = mixers(model)[0].module
    for train in (False, True):
        model.train(train)
        model(tokens(40), use_cache=False).logits[:, 33:].square().sum().backward()
        assert mixer.mc.weight.grad.any() and mixer.mc.bias.grad.any()
        model.zero_grad()
    model.eval()


def test_a_mixer_bound_to_a_gpu_package_reads_on_a_cpu():
    # imported as it is, with fla and triton installed, the bare mixer asks for a GPU
    code = """
import sys, torch
sys.path.insert(0, "tests")
from nativehosts import fields
from mcretrofit import CachingConfig, retrofitted
print("fla" not in sys.modules)
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
torch.manual_seed(0)
model = Qwen3NextForCausalLM(Qwen3NextConfig(**fields("qwen3_next"))).eval()
ids = torch.arange(40)[None]
with torch.no_grad():
    with retrofitted(model, CachingConfig(segment=64)):
        base = model(ids).logits
    with retrofitted(model, CachingConfig(segment=8, rule="plain", init="reset")):
        logits = model(ids).logits
print(logits.isfinite().all().item(), torch.allclose(logits[:, :8], base[:, :8], atol=1e-5))
print((logits - base)[:, 8:].abs().max().item() > 1e-5)
"""
    assert python(code).split() == ["True"] * 4
