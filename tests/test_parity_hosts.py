"""Law 18 for families that transformers implements too: its own class on a CPU is the reference."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch
from mamba2hosts import mamba2, state_spaces
from safetensors.torch import save_file

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.decoder import DecoderForCausalLM
from mcretrofit.errors import RetrofitError
from mcretrofit.exporting import export
from mcretrofit.loading import load_model
from mcretrofit.model import load
from mcretrofit.tokenizer import has_tokenizer

GROUPS = pytest.mark.parametrize("groups", [1, 2])


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@GROUPS
@torch.no_grad()
def test_mamba2_equals_transformers(groups, tmp_path):
    theirs = mamba2(tmp_path, groups, time_step_limit=(0.001, 0.7))
    ours, ids = load_model(open_checkpoint(tmp_path)), torch.randint(0, 64, (2, 75))
    assert isinstance(ours, DecoderForCausalLM)
    near(ours(ids).logits, theirs(ids).logits)
    theirs, ours = (m(ids[:, :-1], use_cache=True) for m in (theirs, ours))
    near(ours.logits, theirs.logits)


@GROUPS
@torch.no_grad()
def test_mamba2_decodes_as_transformers_does(groups, tmp_path):
    # without limits of the time step: the host's step of decoding does not apply them
    theirs = mamba2(tmp_path, groups, tie_word_embeddings=True, use_bias=True)
    ours, ids = load_model(open_checkpoint(tmp_path)), torch.randint(0, 64, (2, 41))
    for model in (theirs, ours):
        kept = "cache_params" if model is theirs else "past_key_values"
        out = model(ids[:, :35], use_cache=True)
        logits = [out.logits]
        for token in ids[:, 35:].split(1, 1):
            logits.append(model(token, use_cache=True, **{kept: out[kept]}).logits)
        near(torch.cat(logits, 1), theirs(ids).logits)


@GROUPS
@torch.no_grad()
def test_mamba2_of_state_spaces_is_the_same_model(groups, tmp_path):
    (theirs, config), ids = state_spaces(tmp_path, groups), torch.randint(0, 64, (1, 40))
    near(load_model(open_checkpoint(tmp_path)).eval()(ids).logits, theirs(ids).logits)
    save_file(torch.load(tmp_path / "pytorch_model.bin"), tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").unlink()
    near(load_model(open_checkpoint(tmp_path)).eval()(ids).logits, theirs(ids).logits)
    for fault in ({"attn_layer_idx": [1]}, {"ssm_cfg": {}}, {"d_intermediate": 64}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **fault}))
        with pytest.raises(RetrofitError, match="Mamba"):
            load_model(open_checkpoint(tmp_path))


def test_mamba2_of_state_spaces_comes_from_a_hub_with_anothers_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    state_spaces(tmp_path / "weights", 1)
    words = {"a": 0, "b": 1}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "a"}
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text(json.dumps({"model": model}))
    asked = []

    def download(name: str, allow_patterns: list[str], **_: object) -> str:
        asked.append((name, any(p.endswith(".bin") for p in allow_patterns)))
        return str(tmp_path / ("weights" if name.startswith("state-spaces") else "words"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = load("state-spaces/mamba2-1.3b")
    assert loaded.tokenizer().encode("b") == [1]
    # pickled weights are fetched only where there are no others
    assert asked[:2] == [("state-spaces/mamba2-1.3b", False), ("state-spaces/mamba2-1.3b", True)]
    assert asked[2:] == [("EleutherAI/gpt-neox-20b", False)]
    # an export holds it too, and stands without it where it cannot be had
    export(loaded.model, tmp_path / "export", checkpoint=loaded.checkpoint)
    assert load(tmp_path / "export").tokenizer().encode("b") == [1] and len(asked) == 4
    (tmp_path / "words" / "tokenizer.json").unlink()
    export(loaded.model, tmp_path / "without", checkpoint=loaded.checkpoint)
    assert not has_tokenizer(tmp_path / "without") and len(asked) == 5
    (tmp_path / "weights" / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert load(tmp_path / "weights").tokenizer().encode("b") == [1] and len(asked) == 5
