"""Laws of a retrofitted model, over every family: a caching model reads as it should, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from lawkit import SEGMENT, Case, build, cases, covers, near, stir_all, tokens
from torch import Tensor, nn

from mcretrofit import registry
from mcretrofit.config import VARIANTS
from mcretrofit.errors import RetrofitError
from mcretrofit.retrofit import every_head, mixers, paused, retrofit_, retrofitted, revert_
from mcretrofit.segments import SegmentCache

pytestmark = pytest.mark.filterwarnings("error")
NAMES = registry.names("models")
FAMILY = pytest.mark.parametrize("family", NAMES)
LENGTH = 45
ASKS_WITHOUT_GATE = ("energy",)  # it looks at reads, so that nothing trains `u`
_built: dict[str, nn.Module] = {}


def bare(family: str) -> nn.Module:
    """One tiny model a family for all laws, as every one of them leaves it."""
    if family not in _built:
        _built[family] = build(family, num_hidden_layers=1)
    return _built[family]


def some(family: str, count: int, seed: int, **fixed: object) -> list[Case]:
    memory = mixers(bare(family))[0].op.MEMORY.__name__.rsplit(".", 1)[1]
    return cases(count, seed + 10 * NAMES.index(family), memory=memory, **fixed)


class caching:
    """A family's model under a case, gates trained; the bare model again afterwards."""

    def __init__(self, family: str, case: Case, **changes: object) -> None:
        self.model, self.case = bare(family), case
        retrofit_(self.model, case.config.replace(**changes), covers(self.model, case))
        stir_all(self.model)

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        revert_(self.model)


def pieces(model: nn.Module, ids: Tensor, sizes: list[int], cache=None) -> tuple[Tensor, object]:
    logits = []
    for part in ids.split(sizes, 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


def segments(cache) -> SegmentCache:
    return cache.states[0]["segments"]


@FAMILY
@torch.no_grad()
def test_before_the_first_boundary_nothing_changes(family):
    ids = tokens(LENGTH, rows=2)
    base = bare(family)(ids).logits
    for variant in VARIANTS:
        for case in some(family, 2, 1, variant=variant):
            with caching(family, case, segment=LENGTH + 1) as model:
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
    for case in some(family, 4, 3):
        with caching(family, case) as model:
            want = model(ids, use_cache=False).logits
            for sizes in ([13] + [1] * 12 + [64], [1, 7, 64, 17], [8, 16, 1, 63, 1]):
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
            with projected(mixer, "k_proj", "v_proj") as seen:
                logits = model(tokens(40), use_cache=False).logits
            logits[:, 4 * SEGMENT + 1 :].square().sum().backward()
            for name, out in seen.items():
                assert out.grad[:, :SEGMENT].any(), (case, name)
                assert getattr(mixer, name).weight.grad.any()
            assert mixer.mc.bias.grad.any()
            if router in ASKS_WITHOUT_GATE:
                assert mixer.mc.weight.grad is None
            else:
                assert mixer.mc.weight.grad.any()
            model.zero_grad()


@FAMILY
@torch.no_grad()
def test_padded_and_packed_rows_equal_rows_alone(family):
    long, short, step = tokens(41), tokens(22, seed=2), tokens(9, seed=3)
    for case in some(family, 3, 6):
        with caching(family, case) as model:
            alone = [
                pieces(model, torch.cat([x, step], 1), [x.shape[1], 9])[0] for x in (long, short)
            ]
            for side in ("left", "right"):
                ids, mask = (
                    torch.zeros(2, 41, dtype=torch.long),
                    torch.zeros(2, 41, dtype=torch.long),
                )
                kept = slice(19, 41) if side == "left" else slice(0, 22)
                ids[0], ids[1, kept], mask[0], mask[1, kept] = long, short, 1, 1
                first = model(ids, attention_mask=mask, use_cache=True)
                near(first.logits[0], alone[0][0, :41])
                near(first.logits[1, kept], alone[1][0, :22])
                more = model(step.expand(2, 9), past_key_values=first.past_key_values).logits
                near(more, torch.cat([a[:, -9:] for a in alone]))
            bounds = torch.tensor([0, 41, 42, 64])
            packed = model(torch.cat([long, long[:, :1], short], 1), cu_seqlens=bounds).logits
            near(packed[:, :41], alone[0][:, :41])
            near(packed[:, 42:], alone[1][:, :22])


@FAMILY
@torch.no_grad()
def test_rows_of_different_length_go_on_decoding(family):
    long, short, steps = tokens(27), tokens(14, seed=2), tokens(20, rows=2, seed=3)
    ids = torch.cat([long, torch.cat([long[:, :13], short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    for case in some(family, 3, 7):
        with caching(family, case) as model:
            first = model(ids, attention_mask=mask, use_cache=True)
            got, cache = pieces(model, steps, [1] * 20, first.past_key_values)
            assert segments(cache).counts.tolist() == [47 // SEGMENT, 34 // SEGMENT]
            for row, prompt in enumerate((long, short)):
                near(got[row], model(torch.cat([prompt, steps[row : row + 1]], 1)).logits[0, -20:])


@FAMILY
@torch.no_grad()
def test_segments_follow_the_rows_of_their_cache(family):
    long, short, steps = tokens(21), tokens(14, seed=2), tokens(12, rows=3, seed=3)
    ids = torch.cat([long, torch.cat([long[:, :7], short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    (case,) = some(family, 1, 8)
    prompts = (long, short)
    with caching(family, case) as model:
        for change, argument, rows in (
            ("reorder_cache", torch.tensor([1, 0, 0]), [1, 0, 0]),
            ("batch_select_indices", torch.tensor([1]), [1]),
            ("batch_repeat_interleave", 2, [0, 0, 1, 1]),
        ):
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            getattr(cache, change)(argument)
            some_steps = steps[[i % 3 for i in range(len(rows))]]
            got, _ = pieces(model, some_steps, [1, 1, 10], cache)
            for i, row in enumerate(rows):
                whole = torch.cat([prompts[row], some_steps[i : i + 1]], 1)
                near(got[i], model(whole).logits[0, -12:])


@FAMILY
@torch.no_grad()
def test_generation_and_beams_equal_recompute(family):
    short, long = tokens(14, seed=2), tokens(19)
    ids = torch.cat([torch.cat([long[:, :5], short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for case in some(family, 2, 9):
        with caching(family, case) as model:
            greedy = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
            for row, prompt in enumerate((short, long)):
                want = prompt
                for _ in range(12):
                    best = model(want, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                    want = torch.cat([want, best], 1)
                assert torch.equal(greedy[row, 19:], want[0, -12:])
            more = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
            more |= {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
            beams = model.generate(long, output_scores=True, **more)
            again = model.generate(long, use_cache=False, **more)
            assert torch.equal(beams.sequences, again.sequences)
            logits = model(beams.sequences, use_cache=False).logits[:, 18:-1].log_softmax(-1)
            scored = logits.gather(-1, beams.sequences[:, 19:, None]).sum((1, 2))
            near(beams.sequences_scores, scored)


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
