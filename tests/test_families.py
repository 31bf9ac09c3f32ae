"""Laws of the decoder over every family: pieces, padding, packing, generation, saving."""

from __future__ import annotations

import pytest
import torch

from mcretrofit import registry
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
from mcretrofit.loading import load_model
from mcretrofit.models._state import map_rows
from mcretrofit.retrofit import mixers

FAMILIES = pytest.mark.parametrize("family", registry.names("models"))
VOCABULARY = 64
pytestmark = pytest.mark.filterwarnings("error")


def build(family: str, **fields: object) -> DecoderForCausalLM:
    """A tiny model, every parameter away from its special starting value."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "intermediate_size": 32}
    tiny = registry.load("models", family).tiny()
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = DecoderForCausalLM(
        DecoderConfig(family, **{**sizes, **tiny, **special, **fields})
    ).start()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model.eval()


def tokens(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


@FAMILIES
@torch.no_grad()
def test_uneven_pieces_equal_one_pass(family):
    model, ids = build(family), tokens(184, rows=2)
    cache, pieces = None, []
    for piece in ids.split([1, 7, 64, 1, 100, 11], 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    near(torch.cat(pieces, 1), model(ids).logits)
    assert cache.get_seq_length() == 184


@FAMILIES
@torch.no_grad()
def test_padded_rows_equal_rows_alone(family):
    model, long, short, step = build(family), tokens(75), tokens(38, seed=2), tokens(1, seed=3)
    alone = [model(x, use_cache=True) for x in (long, short)]
    steps = [model(step, past_key_values=a.past_key_values).logits for a in alone]
    for side in ("left", "right"):
        ids, mask = torch.zeros(2, 75, dtype=torch.long), torch.zeros(2, 75, dtype=torch.long)
        kept = slice(37, 75) if side == "left" else slice(0, 38)
        ids[0], ids[1, kept], mask[0], mask[1, kept] = long, short, 1, 1
        first = model(ids, attention_mask=mask, use_cache=True)
        near(first.logits[0], alone[0].logits[0])
        near(first.logits[1, kept], alone[1].logits[0])
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        more = model(step.expand(2, 1), attention_mask=mask, past_key_values=first.past_key_values)
        near(more.logits, torch.cat(steps))


@FAMILIES
@torch.no_grad()
def test_left_padding_in_pieces_equals_the_row_alone(family):
    model, row = build(family), tokens(38)
    mask = torch.tensor([[0] * 37 + [1] * 38])
    ids = torch.cat([tokens(37, seed=4), row], 1)
    cache, seen, pieces = None, 0, []
    for piece in ids.split([20, 1, 19, 35], 1):
        seen += piece.shape[1]
        out = model(piece, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    near(torch.cat(pieces, 1)[:, 37:], model(row).logits)


@FAMILIES
@torch.no_grad()
def test_packed_documents_equal_documents_alone(family):
    model, documents = build(family), [tokens(n, seed=n) for n in (5, 1, 66, 40)]
    bounds = torch.tensor([0, 5, 6, 72, 112])
    packed = model(torch.cat(documents, 1), cu_seqlens=bounds).logits
    near(packed, torch.cat([model(d).logits for d in documents], 1))


@FAMILIES
@torch.no_grad()
def test_generate_equals_recompute(family):
    model, ids = build(family), tokens(9, rows=2)
    expected = ids
    for _ in range(6):
        best = model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, best], 1)
    read, forward = [], model.model.forward
    model.model.forward = lambda x, context: read.append(x.shape[1]) or forward(x, context)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert read == [9, 1, 1, 1, 1, 1]
    beams = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(
        model.generate(ids, **beams, use_cache=True), model.generate(ids, **beams, use_cache=False)
    )


@FAMILIES
@torch.no_grad()
def test_left_padded_generation_equals_rows_alone(family):
    model, short, long = build(family), tokens(4, seed=5), tokens(9, seed=6)
    ids = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"max_new_tokens": 5, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **options)
    for row, one in zip(together, (short, long), strict=True):
        assert torch.equal(row[9:], model.generate(one, **options)[0, one.shape[1] :])


@FAMILIES
@torch.no_grad()
def test_later_tokens_change_no_earlier_bit(family):
    model, ids = build(family), tokens(130)
    before = model(ids).logits
    for cut in (3, 64, 101):
        changed = torch.cat([ids[:, :cut], tokens(130 - cut, seed=7)], 1)
        assert torch.equal(model(changed).logits[:, :cut], before[:, :cut])


@FAMILIES
@torch.no_grad()
def test_half_precision_keeps_float32_states(family):
    model, ids = build(family), tokens(40)
    exact = model(ids).logits
    half = model.to(torch.bfloat16)
    out = half(ids, use_cache=True)
    assert out.logits.dtype == torch.bfloat16
    # on average: the norm of a first read divides by almost nothing
    assert (out.logits.float() - exact).abs().mean() < 0.02 * exact.abs().max()
    states = [s["recurrent"] for s in out.past_key_values.states.values()]
    assert len(states) == 2
    map_rows(
        tuple(states), lambda state: pytest.fail("narrow") if state.dtype != torch.float32 else 0
    )


@FAMILIES
def test_a_family_has_the_memory_that_it_is_listed_with(family):
    module = registry.load("models", family)
    if hasattr(module, "ABOUT"):
        (memory,) = {one.op.MEMORY.__name__.rsplit(".", 1)[1] for one in mixers(build(family))}
        assert memory == module.ABOUT["memory"]


@FAMILIES
def test_gradients_reach_every_parameter(family):
    model, ids = build(family), tokens(70)
    model(ids, labels=ids).loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


@FAMILIES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@torch.no_grad()
def test_saved_models_come_back(family, tied, tmp_path):
    model, ids = build(family, tie_word_embeddings=tied), tokens(70)
    model.save_pretrained(tmp_path)
    expected = model(ids).logits
    loaded = load_model(open_checkpoint(tmp_path))
    for again in (DecoderForCausalLM.from_pretrained(tmp_path).eval(), loaded):
        assert torch.equal(again(ids).logits, expected)
        assert (again.lm_head.weight is again.model.embeddings.weight) == tied
    assert set(loaded.state_dict()) == set(model.state_dict())
    half = DecoderForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    narrow = load_model(open_checkpoint(tmp_path), "bfloat16")
    for name, parameter in [*half.named_parameters(), *narrow.named_parameters()]:
        wide = name.endswith(("A_log", "dt_bias"))
        assert parameter.dtype == (torch.float32 if wide else torch.bfloat16)
