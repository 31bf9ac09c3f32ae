"""Traps between the hosts, each in a process of its own with the repository root as its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(code: str, *arguments: str) -> str:
    """What `python -c` prints, run where `kernels/` is importable by accident."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_transformers_builds_models_beside_our_kernels_folder():
    code = """
import sys, torch
from importlib.util import find_spec
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
print(model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all().item())
spec = find_spec("kernels")
print(None if spec is None else spec.origin)
print(getattr(sys.modules.get("kernels"), "__file__", None))
"""
    finite, origin, imported = python(code).split("\n")[:3]
    assert finite == "True"
    assert not origin.startswith(str(ROOT)) and not imported.startswith(str(ROOT))


def test_transformers_own_models_load_and_run_without_a_gpu(tmp_path):
    # with fla and triton installed, importing this modeling file as it is would bind it to the GPU
    code = """
import sys, torch
from transformers import Qwen3NextConfig
from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.loading import load_model
from mcretrofit.models._native import native_class
torch.manual_seed(0)
linear = {f"linear_num_{n}_heads": 2 for n in ("key", "value")}
linear |= {f"linear_{n}_head_dim": 8 for n in ("key", "value")}
config = Qwen3NextConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=8, shared_expert_intermediate_size=8,
    layer_types=["linear_attention", "full_attention"], **linear)
model = native_class("qwen3_next")(config).eval()
model.save_pretrained(sys.argv[1])
loaded = load_model(open_checkpoint(sys.argv[1]))
ids = torch.arange(12)[None]
print(type(loaded) is type(model), torch.equal(loaded(ids).logits, model(ids).logits))
"""
    assert python(code, str(tmp_path)) == "True True\n"
