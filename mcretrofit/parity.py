"""How far each family is from what it stands in for, as far as that can be measured here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec

import torch

from mcretrofit.catalogue import Family, entries
from mcretrofit.doctor import Finding

TOLERANCE = 1e-5  # of the largest logit: float32 sums in two orders
_SIZES = {"hidden_size": 32, "head_dim": 16, "num_heads": 4, "state_size": 8, "vocab_size": 64}
_SIZES |= {"num_hidden_layers": 2, "chunk_size": 16, "n_groups": 2}


def findings() -> list[Finding]:
    """A line a family: the difference, or what measuring it needs."""
    return [_finding(family) for family in entries("families")]


def _finding(family: Family) -> Finding:
    if family.name not in MEASURED:
        needs = [] if "flash" not in family.parity else _absent("triton", "fla")
        lacks = f" ({' and '.join(needs)} not installed)" if needs else ""
        advice = f"not measured here: pytest tests/test_parity.py does, against {family.parity}"
        return Finding(family.name, f"{family.parity or 'no reference'}{lacks}", "", advice)
    apart = MEASURED[family.name]()
    state = "ok" if apart <= TOLERANCE else "failed"
    return Finding(family.name, f"{apart:.1e} of the largest logit apart", state, family.parity)


def _absent(*modules: str) -> list[str]:
    return [name for name in modules if find_spec(name) is None]


@torch.no_grad()
def _mamba2() -> float:
    """transformers' own Mamba-2 on the processor, against ours that read its folder."""
    from mcretrofit.checkpoint import open_checkpoint
    from mcretrofit.loading import load_model
    from mcretrofit.models._native import native_class

    torch.manual_seed(0)
    kind = native_class("mamba2")
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    theirs = kind(kind.config_class(**_SIZES, **special)).eval()
    for parameter in theirs.parameters():
        parameter += torch.randn_like(parameter) * 0.1
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model(open_checkpoint(folder))
    ids = torch.arange(75)[None] % 64
    want = theirs(ids).logits
    return float((ours(ids).logits - want).abs().max() / want.abs().max())


# families that transformers has a class of its own for, which runs everywhere
MEASURED: dict[str, Callable[[], float]] = {"mamba2": _mamba2}
