"""Softmax attention in listed layers: a hybrid and a transformer obey the laws of the decoder."""

from __future__ import annotations

import pytest
import torch
from test_families import build, near, tokens

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.config import CachingConfig
from mcretrofit.errors import RetrofitError
from mcretrofit.loading import load_model
from mcretrofit.models._blocks import rotate
from mcretrofit.models._state import Context
from mcretrofit.retrofit import mixers, retrofitted

WINDOW = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 20}
KINDS = {
    "hybrid": WINDOW,
    "transformer": {
        "layers": [0, 1],
        "num_heads": 2,
        "qkv_bias": True,
        "qk_norm": True,
        "conv_size": 4,
    },
}
KIND = pytest.mark.parametrize("kind", KINDS)


def made(kind: str):
    return build("gla", attn=KINDS[kind])


@KIND
@torch.no_grad()
def test_uneven_pieces_equal_one_pass(kind):
    model, ids = made(kind), tokens(120, rows=2)
    cache, pieces = None, []
    for piece in ids.split([1, 7, 64, 1, 47], 1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    near(torch.cat(pieces, 1), model(ids, use_cache=False).logits)
    near(torch.cat(pieces, 1), model(ids).logits)
    kept = cache.states[1]["attention"][0].shape[1]
    assert kept == (19 if kind == "hybrid" else 120)


@KIND
@torch.no_grad()
def test_later_tokens_and_those_outside_the_window_change_nothing(kind):
    model, ids = made(kind), tokens(90)
    before = model(ids, use_cache=False).logits
    changed = torch.cat([ids[:, :50], tokens(40, seed=7)], 1)
    assert torch.equal(model(changed, use_cache=False).logits[:, :50], before[:, :50])
    model.model.layers[0].attn.forward = lambda x, context: torch.zeros_like(x)
    before = model(ids).logits
    first = torch.cat([tokens(1, seed=8), ids[:, 1:]], 1)
    same = (model(first).logits == before).all(-1)[0]
    assert not same[0] and bool(same[20:].all()) == (kind == "hybrid")


@KIND
@torch.no_grad()
def test_padding_and_packing_change_nothing(kind):
    model, long, short = made(kind), tokens(45), tokens(28, seed=2)
    for kept in (slice(17, 45), slice(0, 28)):
        ids, mask = torch.zeros(2, 45, dtype=torch.long), torch.zeros(2, 45, dtype=torch.long)
        ids[0], ids[1, kept], mask[0], mask[1, kept] = long, short, 1, 1
        for cached in (False, True):
            out = model(ids, attention_mask=mask, use_cache=cached)
            near(out.logits[1, kept], model(short).logits[0])
        step = tokens(1, rows=2, seed=3)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        more = model(step, attention_mask=mask, past_key_values=out.past_key_values).logits
        near(more[1], model(torch.cat([short, step[1:]], 1)).logits[0, -1:])
    packed = model(torch.cat([short, long], 1), cu_seqlens=torch.tensor([0, 28, 73])).logits
    near(packed, torch.cat([model(short).logits, model(long).logits], 1))


@KIND
@torch.no_grad()
def test_generate_equals_recompute_with_beams_too(kind):
    model, ids = made(kind), tokens(25, rows=2)
    for options in ({"do_sample": False}, {"num_beams": 3}):
        said = [
            model.generate(ids, max_new_tokens=6, use_cache=cached, **options)
            for cached in (True, False)
        ]
        assert torch.equal(*said)


@torch.no_grad()
def test_a_window_is_softmax_over_the_last_tokens_as_written_out():
    attention = build("gla", attn={**WINDOW, "window_size": 3}).model.layers[1].attn
    x, at = torch.randn(1, 9, 32), torch.arange(9)[None]
    q = rotate(attention.q_proj(x).view(1, 9, 4, 8), at)[0]
    k = rotate(attention.k_proj(x).view(1, 9, 2, 8), at)[0]
    v = attention.v_proj(x).view(9, 2, 8)
    reads = torch.zeros(9, 4, 8)
    for t in range(9):
        seen = slice(max(0, t - 2), t + 1)
        for head in range(4):
            scores = k[seen, head // 2] @ q[t, head] / 8**0.5
            reads[t, head] = scores.softmax(0) @ v[seen, head // 2]
    got = attention(x, Context(None, at, None))[0]
    torch.testing.assert_close(got, attention.o_proj(reads.flatten(1)))


@torch.no_grad()
def test_caching_leaves_attention_layers_alone(tmp_path):
    model, ids = made("hybrid"), tokens(60)
    assert [one.name for one in mixers(model)] == ["model.layers.0.attn"]
    plain = model(ids).logits
    config = CachingConfig(segment=8, heads="all", rule="plain", whiten=False, variant="grm")
    with retrofitted(model, config) as wrapped:
        assert not hasattr(model.model.layers[1].attn, "mc")
        assert not torch.allclose(wrapped(ids).logits, plain)
    assert torch.equal(model(ids).logits, plain)
    model.save_pretrained(tmp_path)
    assert torch.equal(load_model(open_checkpoint(tmp_path))(ids).logits, plain)
    with (
        pytest.raises(RetrofitError, match="no recurrent mixer"),
        retrofitted(made("transformer"), config),
    ):
        pass


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ({**WINDOW, "window": 3}, "unknown key 'window'; did you mean 'window_size'"),
        ({"layers": [0]}, "attn: missing num_heads"),
        ({**WINDOW, "layers": [2]}, "no layer 2 of 2"),
        ({**WINDOW, "num_heads": 5}, "5 heads fit neither"),
        ({**WINDOW, "window_size": 0}, "window_size is 0"),
    ],
)
def test_attention_that_does_not_fit_is_refused(attn, message):
    with pytest.raises(RetrofitError, match=message):
        build("gla", attn=attn)
