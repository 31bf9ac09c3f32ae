"""Laws of a retrofitted model, over every family: pieces, causality, gradients, bits, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from lawkit import SEGMENT, Case, build, covers, near, stir_all, tokens
from lawmodels import FAMILY, bare, caching, pieces, segments, some
from torch import Tensor, nn

from mcretrofit import registry
from mcretrofit.config import VARIANTS
from mcretrofit.errors import RetrofitError
from mcretrofit.retrofit import every_head, mixers, paused, retrofit_, retrofitted

pytestmark = pytest.mark.filterwarnings("error")
LENGTH = 45
ASKS_WITHOUT_GATE = ("energy",)  # it looks at reads, so that nothing trains `u`
# the projections that keys and values come from
WRITERS = ("k_proj", "v_proj", "in_proj", "f_proj", "i_proj", "to_keys", "to_values")


@FAMILY
@torch.no_grad()
def test_before_the_first_boundary_nothing_changes(family):
    ids = tokens(LENGTH, rows=2)
    base = bare(family)(ids).logits
    for variant in VARIANTS:
        # a plain sum of segments that begin afresh is the model itself where nothing decays
        fixed = {"init": "carry"} if variant == "residual" else {}
        for case in some(family, 1, 1, variant=variant, **fixed):
            with caching(family, case, segment=6 * SEGMENT) as model:
                near(model(ids).logits, base)
            with caching(family, case) as model:
                logits = model(ids).logits
                near(logits[:, :SEGMENT], base[:, :SEGMENT])
                assert (logits - base)[:, SEGMENT:].abs().max() > 1e-4, case
                with paused(model):
                    assert torch.equal(model(ids).logits, base)


@FAMILY
@torch.no_grad()
def test_revert_is_bit_equal(family):
    model, ids = bare(family), tokens(LENGTH, rows=2)
    before, base = dict(model.state_dict()), model(ids).logits
    modules = dict(model.named_modules())
    for case in some(family, 3, 2):
        with caching(family, case):
            inside = model.state_dict()
            extra = set(inside) - set(before)
            assert extra and all(".mc." in name for name in extra) and set(before) < set(inside)
            assert all(inside[n].data_ptr() == before[n].data_ptr() for n in before)
            with pytest.raises(RetrofitError, match="wrapped already"):
                retrofit_(model, case.config, every_head(model))
        assert set(model.state_dict()) == set(before) and dict(model.named_modules()) == modules
        assert torch.equal(model(ids).logits, base)
        assert all("forward" not in vars(m) for m in model.modules())
    with pytest.raises(ZeroDivisionError), retrofitted(model, case.config):
        raise ZeroDivisionError
    assert set(model.state_dict()) == set(before)


@FAMILY
@torch.no_grad()
def test_decoding_and_pieces_equal_one_pass(family):
    ids = tokens(89, rows=2)
    for case in some(family, 3, 3):
        with caching(family, case) as model:
            want = model(ids, use_cache=False).logits
            for sizes in ([1, 7, 64, 17], [8, 16] + [1] * 12 + [52, 1]):
                near(pieces(model, ids, sizes)[0], want)


@FAMILY
@torch.no_grad()
def test_later_tokens_change_no_earlier_bit(family):
    ids = tokens(LENGTH)
    for router in registry.names("routers"):
        for rule in ("plain", "z"):
            (case,) = some(family, 1, 4, router=router, rule=rule)
            with caching(family, case) as model:
                before = model(ids).logits
                for cut in (3, 21, 37):
                    changed = torch.cat([ids[:, :cut], tokens(LENGTH - cut, seed=7)], 1)
                    got = model(changed).logits
                    assert torch.equal(got[:, :cut], before[:, :cut]), case
                    assert not torch.equal(got, before)


@torch.no_grad()
def test_residual_without_decay_equals_the_unmodified_model():
    model, ids = build("linear_attn"), tokens(LENGTH, rows=2)
    case = Case("linear", "residual", "mean", "reset", "plain", "all", False)
    base = model(ids).logits
    for cover in ("all", "one", "part"):
        one = case._replace(cover=cover)
        with retrofitted(model, one.config, covers(model, one)):
            near(model(ids).logits, base)


@contextmanager
def projected(mixer: nn.Module, *names: str) -> Iterator[dict[str, Tensor]]:
    """What projections of a mixer give inside the block, with gradients."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, out: Tensor) -> None:
        out.retain_grad()
        seen[name] = out

    hooks = [
        getattr(mixer, name).register_forward_hook(lambda _, __, out, name=name: keep(name, out))
        for name in names
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@FAMILY
@pytest.mark.parametrize("router", registry.names("routers"))
def test_gradients_pass_through_cached_segments(family, router):
    # under reset nothing else joins the fifth segment to the first: convolutions see 3 tokens back
    for variant in ("grm", "ssc"):
        fixed = {"router": router, "init": "reset", "cover": "all", "gated": True, "rule": "plain"}
        (case,) = some(family, 1, 5, variant=variant, **fixed)
        with caching(family, case) as model:
            mixer = mixers(model)[0].module
            with projected(mixer, *(n for n in WRITERS if hasattr(mixer, n))) as seen:
                logits = model(tokens(40), use_cache=False).logits
            assert seen
            logits[:, 4 * SEGMENT + 1 :].square().sum().backward()
            for name, out in seen.items():
                assert out.grad[:, :SEGMENT].any(), (case, name)
                assert all(p.grad.any() for p in getattr(mixer, name).parameters())
            assert mixer.mc.bias.grad.any() and mixer.mc.heat.grad.any()
            if router in ASKS_WITHOUT_GATE:
                assert mixer.mc.weight.grad is None
            else:
                assert mixer.mc.weight.grad.any()
            model.zero_grad()


@FAMILY
@torch.no_grad()
def test_half_precision_keeps_float32_segments(family):
    ids = tokens(LENGTH, rows=2)
    for dtype in (torch.bfloat16, torch.float16):
        half = build(family, num_hidden_layers=1).to(dtype)
        for case in some(family, 2, 10):
            with caching(family, case) as model:
                exact = model(ids).logits
            with retrofitted(half, case.config, covers(half, case)) as model:
                stir_all(model)
                out = model(ids, use_cache=True)
                cache = segments(out.past_key_values)
                floats = [t for t in cache.tensors().values() if t.is_floating_point()]
                assert cache.states in floats and {t.dtype for t in floats} == {torch.float32}
                assert out.logits.dtype == dtype and out.logits.isfinite().all()
                # on average: a route may tip over where two segments score alike
                assert (out.logits.float() - exact).abs().mean() < 0.04 * exact.abs().max()


@FAMILY
@torch.no_grad()
def test_bytes_of_a_models_segments_grow_by_segments(family):
    (case,) = some(family, 1, 11, variant="grm", cover="all")
    with caching(family, case) as model:
        _, cache = pieces(model, tokens(4 * SEGMENT), [4 * SEGMENT])
        one, sizes = segments(cache), []
        for length in (SEGMENT, 4 * SEGMENT, 10 * SEGMENT):
            _, more = pieces(model, tokens(length), [length])
            sizes.append(segments(more).nbytes())
        each = (one.states[0, 0].numel() + one.summaries[0, 0].numel()) * 4
        assert sizes[1] - sizes[0] == 3 * each and sizes[2] - sizes[1] == 6 * each
        held = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in one.tensors().values()
        }
        assert one.nbytes() == sum(held.values())
