"""Reads exported folders as a stranger would: test_export*.py run it without our packages.

Arguments: a folder with cases.json and inputs; a result goes beside each case's expectations.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ABSENT = ("mcretrofit", "mcretrofit_kernels", "fla", "triton", "typer", "rich")
if __name__ == "__main__":
    # None makes a leak an ImportError, however the package may be installed
    sys.modules.update(dict.fromkeys(ABSENT))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


def answers(
    model, ids: torch.Tensor, mask: torch.Tensor, steps: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Logits and generations; those who exported ask the live model the same."""
    prompt = {"input_ids": ids, "attention_mask": mask}
    more = {"max_new_tokens": 12 if steps is None else int(steps), "pad_token_id": 0}
    with torch.no_grad():
        found = {
            "logits": model(**prompt).logits,
            "greedy": model.generate(**prompt, **more, do_sample=False),
        }
        found["beams"] = model.generate(**prompt, **more, do_sample=False, num_beams=3)
        torch.manual_seed(7)
        found["sample"] = model.generate(**prompt, **more, do_sample=True, top_k=20)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def tied(model) -> bool:
    """Whether the head is the embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def load(folder: Path, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def main(root: Path) -> None:
    """Answer every case from its folder, then from what the loaded model saves again."""
    assert all(importlib.util.find_spec(name) is None for name in ABSENT)
    given = load_file(root / "inputs.safetensors")
    for case, thorough in json.loads((root / "cases.json").read_text()).items():
        model, report = load(root / case, dtype=torch.float32, output_loading_info=True)
        assert not any(report.values()), report
        found = answers(model.eval(), **given)
        found["tied"] = torch.tensor(tied(model))
        if thorough:
            model.save_pretrained(root / "again" / case)
            again = load(root / "again" / case).eval()
            found["again"] = again(given["ids"], attention_mask=given["mask"]).logits.detach()
            check_half(load(root / case, dtype=torch.bfloat16), given["ids"])
        save_file(found, root / f"{case}.found.safetensors")


def check_half(model, ids: torch.Tensor) -> None:
    """Decays and everything of the caching stay float32, whatever is asked for."""
    wide = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    named = {n for n in model.state_dict() if ".mc." in n or n.endswith(("A_log", "dt_bias"))}
    if model.config.model_type != "mcretrofit":
        # transformers' own classes have their own mind on decays
        named = {n for n in named if ".mc." in n} | {n for n in wide if ".mc." not in n}
    assert wide == named and model.lm_head.weight.dtype == torch.bfloat16, wide ^ named
    assert model(ids).logits.isfinite().all()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
