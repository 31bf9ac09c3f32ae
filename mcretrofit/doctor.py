"""Is this machine fit for it: versions, hardware, and a self test on a pico model."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

TESTED = ((5, 18), (5, 23))  # transformers


class Finding(NamedTuple):
    """One line of the report; `state` is `ok`, `warning`, `failed`, or empty for a mere fact."""

    name: str
    value: str
    state: str = ""
    advice: str = ""


def findings() -> list[Finding]:
    """Everything that is worth knowing before a run, the self test last."""
    import torch

    return [
        Finding("python", platform.python_version()),
        Finding("torch", torch.__version__),
        _transformers(),
        _optional("triton", "triton"),
        _optional("flash-linear-attention", "fla"),
        Finding("threads", str(torch.get_num_threads())),
        Finding("device", _device()),
        _kernels(),
        *self_test(),
    ]


def self_test() -> list[Finding]:
    """The two laws that a broken installation breaks first, on a model of 20,000 weights."""
    import torch

    from mcretrofit.config import CachingConfig
    from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM
    from mcretrofit.registry import load
    from mcretrofit.retrofit import every_head, retrofitted

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    model = DecoderForCausalLM(DecoderConfig("gla", **sizes, **load("models", "gla").tiny()))
    model, ids = model.start().eval(), torch.arange(70)[None] % 32
    caching, covers = CachingConfig(variant="grm", segment=16), every_head(model)
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        with retrofitted(model, caching.replace(segment=128), covers):
            long = model(ids, use_cache=False).logits
        with retrofitted(model, caching, covers):
            whole = model(ids, use_cache=False).logits
            first = model(ids[:, :37], use_cache=True)
            rest = model(ids[:, 37:], past_key_values=first.past_key_values).logits
    pieces = torch.cat([first.logits, rest], 1)
    return [
        _equal("one long segment is the base", long, base),
        _equal("prefill and decode are one pass", pieces, whole),
    ]


def _equal(name: str, got, want) -> Finding:  # noqa: ANN001
    apart = float((got - want).abs().max())
    ok = apart <= 1e-4 * float(want.abs().max())
    advice = "" if ok else "reinstall torch and transformers in the tested range"
    return Finding(name, f"{apart:.1e} apart", "ok" if ok else "failed", advice)


def _transformers() -> Finding:
    have = version("transformers")
    numbers = tuple(int(n) for n in have.split(".")[:2])
    low, high = (".".join(map(str, n)) for n in TESTED)
    if TESTED[0] <= numbers <= TESTED[1]:
        return Finding("transformers", have, "ok")
    return Finding("transformers", have, "warning", f"tested with {low} to {high}")


def _optional(name: str, module: str) -> Finding:
    if find_spec(module) is None:
        return Finding(name, "not installed", "", "only a GPU needs it")
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "installed, version unknown")


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} and {platform.machine()} CPU"
    return f"{platform.machine()} CPU"


def _kernels() -> Finding:
    """Our folder must not shadow the package of Hugging Face that is called `kernels`."""
    spec = find_spec("kernels")
    places = [] if spec is None else [*(spec.submodule_search_locations or [])]
    if spec is not None and spec.origin is None:
        # a mere folder on the path: transformers may take it for the package
        advice = (
            "run elsewhere"
            if any((Path(p) / "mcretrofit_kernels").is_dir() for p in places)
            else ""
        )
        return Finding(
            "kernels", f"a folder, {places[0]}", "warning", advice or "rename that folder"
        )
    return Finding("kernels", "not installed" if spec is None else str(spec.origin), "ok")
