"""Laws of a batch under caching, over every family: every row reads as it would alone."""

from __future__ import annotations

import pytest
import torch
from lawkit import SEGMENT, near, tokens
from lawmodels import FAMILY, caching, pieces, segments, some
from test_families import VOCABULARY

pytestmark = pytest.mark.filterwarnings("error")


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
    # no token twice: equal keys of two segments would be a tie, which rounding decides
    rows = torch.stack(
        [torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]
    )
    long, short, steps = rows[:1, :27], rows[1:, :14], rows[:, 27:47]
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
