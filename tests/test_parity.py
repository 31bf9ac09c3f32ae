"""Law 18: our decoder and ops against the implementations that they stand in for."""

from __future__ import annotations

from inspect import unwrap
from pathlib import Path

import pytest
import torch
from fla_reference import CASES
from safetensors.torch import load_file

from mcretrofit import stock
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.loading import load_model
from mcretrofit.models._native import torch_fallbacks
from mcretrofit.ops import gated_delta_rule
from mcretrofit.ops._call import call
from mcretrofit.parity import TOLERANCE, compared

shared = Path(__file__).parents[2] / "shared" / "checkpoints"
absent = stock.absent()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A folder a case with weights and results of stock fla, made once, in a process of its own."""
    if absent:
        pytest.skip(f"{' and '.join(absent)} not installed: nothing to compare with")
    folder = tmp_path_factory.mktemp("fla")
    asked = {**CASES, "nothing": stock.Case("Nothing", 1, {})}
    faults = {done.name: done.error for done in stock.results(folder, asked) if done.error}
    assert faults.keys() == {"nothing"} and "NothingConfig" in faults["nothing"], faults
    return folder


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decoder_equals_stock_fla(case, reference):
    model = load_model(open_checkpoint(reference / case))
    results = load_file(reference / case / "results.safetensors")
    ids = results["ids"]
    assert compared(reference / case) <= TOLERANCE
    near(model(ids).logits[:, -1:], results["step"])


@pytest.mark.skipif(not shared.is_dir(), reason="needs ../shared/checkpoints")
@torch.no_grad()
def test_rwkv7_gives_the_golden_logits():
    model = load_model(open_checkpoint(shared / "rwkv7-834k-bytes.safetensors"))
    raw = bytearray((shared / "rwkv7-834k-bytes.expected-logits.f32").read_bytes())
    expected = torch.frombuffer(raw, dtype=torch.float32)
    logits = model(torch.tensor([list(b'"in')])).logits[0, -1]
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.skipif(not shared.is_dir(), reason="needs ../shared/checkpoints")
@torch.no_grad()
def test_rwkv5_gives_the_golden_logits(tmp_path):
    # its maker norms a head's read with this epsilon, BlinkDL's code with 64 times as much
    (tmp_path / "config.json").write_text('{"group_norm_eps": 1e-5}')
    checkpoint = open_checkpoint(shared / "rwkv5.2-730k-bytes.pth", tmp_path / "config.json")
    raw = bytearray((shared / "rwkv5.2-730k-bytes.expected-logits.f32").read_bytes())
    expected = torch.frombuffer(raw, dtype=torch.float32)
    logits = load_model(checkpoint)(torch.tensor([list(b'"in')])).logits[0, -1]
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("grouped", [1, 2], ids=["equal", "grouped"])
@pytest.mark.parametrize(
    "body", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]
)
def test_gated_delta_rule_equals_transformers(body, grouped):
    with torch_fallbacks():
        from transformers.models.qwen3_next import modeling_qwen3_next as host
    theirs = unwrap(getattr(host, body))
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 70, 2, 16)
    v, state = torch.randn(2, 70, 2 * grouped, 8), torch.randn(2, 2 * grouped, 16, 8)
    arguments = {
        "g": -torch.rand(2, 70, 2 * grouped),
        "beta": torch.rand(2, 70, 2 * grouped),
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    out, end = call(gated_delta_rule, q, k, v, **arguments)
    q, k = (x.repeat_interleave(grouped, 2) for x in (q, k))
    their_out, their_end = theirs(q, k, v, **arguments)
    near(out, their_out)
    near(end, their_end)
