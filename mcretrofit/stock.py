"""Stock flash-linear-attention on a CPU, in Triton's interpreter: `python -m mcretrofit.stock DIR`.

A process of its own, because the interpreter is chosen before triton is imported. It reads
DIR/cases.json, writes DIR/NAME/ for every case, and prints a line of JSON as each is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mcretrofit.errors import RetrofitError

NEEDS = {"triton": "triton", "fla": "flash-linear-attention"}


class Case(NamedTuple):
    """A stock configuration and the number of tokens that it reads before one step of decoding."""

    name: str
    length: int
    fields: dict[str, Any]


class Done(NamedTuple):
    """A case that lies in its folder, or why it does not."""

    name: str
    seconds: float
    error: str


LOW = {f"{gate}_low_rank_dim": 8 for gate in ("decay", "gate", "a", "v")}
LOW6 = {"proj_low_rank_dim": 8, "gate_low_rank_dim": 8}
_TWO, _GROUPED = {"num_heads": 2}, {"num_heads": 1, "num_v_heads": 2, "head_dim": 16}
# one a family: 72 tokens are two chunks; kernels of delta rules take no float32 or many seconds
FAMILIES = {
    "linear_attn": Case("LinearAttention", 72, {**_TWO, "expand_k": 0.5}),
    "retnet": Case("RetNet", 72, _TWO),
    "gla": Case("GLA", 72, _TWO),
    "mamba2": Case("Mamba2", 72, {"head_dim": 16, "state_size": 8, "dt_limit": (0.01, 0.5)}),
    "hgrn2": Case("HGRN2", 72, {"expand_ratio": 32}),
    "delta_net": Case("DeltaNet", 10, {**_TWO, "tie_word_embeddings": True}),
    "gated_deltanet": Case("GatedDeltaNet", 72, _GROUPED),
    "comba": Case("Comba", 72, _GROUPED),
    "kda": Case("KDA", 10, {**_GROUPED, "expand_v": 2.0}),
    "gated_deltaproduct": Case(
        "GatedDeltaProduct",
        10,
        {**_TWO, "head_dim": 16, "use_forget_gate": True, "num_householder": 3},
    ),
    "rwkv6": Case("RWKV6", 72, {**_TWO, **LOW6}),
    "rwkv7": Case("RWKV7", 10, {"head_dim": 16, **LOW}),
}
COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 64}
COMMON |= {"fuse_cross_entropy": False, "use_l2warp": False}


def absent() -> list[str]:
    """What would have to be installed, by the names that pip knows."""
    return [package for module, package in NEEDS.items() if find_spec(module) is None]


def results(folder: Path, cases: Mapping[str, Case], seconds: float = 600) -> Iterator[Done]:
    """Every case as it is done: `folder/NAME/` then has weights, ids, logits and a step's logits.

    Raises RetrofitError where the process fails, or a case takes longer than `seconds`.
    """
    (folder / "cases.json").write_text(json.dumps({n: list(c) for n, c in cases.items()}))
    places = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-W", "ignore", "-m", "mcretrofit.stock", str(folder)]
    with open(folder / "stderr", "w+") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield from _lines(process, seconds)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        last = next(iter(errors.read().strip().splitlines()[-1:]), "")
    if process.returncode:
        why = last if process.returncode > 0 else f"over {seconds:.0f} s for one family"
        raise RetrofitError(f"flash-linear-attention stopped: {why}")


def _lines(process: subprocess.Popen[str], seconds: float) -> Iterator[Done]:
    while True:
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        line = process.stdout.readline()
        alarm.cancel()
        if not line:
            # the stream ends a little before the process does
            process.wait()
            return
        if line.startswith('{"case"'):
            found = json.loads(line)
            yield Done(found["case"], found["seconds"], found["error"])


def main(folder: Path) -> None:
    """Build, perturb, run and save every case."""
    from mcretrofit import _interpreter

    _interpreter.without_benchmarks()
    import fla.models
    import torch

    torch.set_num_threads(1)
    _interpreter.adapt("fla")
    for name, given in json.loads((folder / "cases.json").read_text()).items():
        case, started, error = Case(*given), time.monotonic(), ""
        torch.manual_seed(0)
        try:
            config = getattr(fla.models, f"{case.name}Config")(**COMMON, **case.fields)
            model = getattr(fla.models, f"{case.name}ForCausalLM")(config).eval()
            _interpreter.adapt("fla")
            _save(model, case, folder / name)
        # one family of another version must not hide the others
        except Exception as fault:
            error = f"{type(fault).__name__}: {next(iter(str(fault).splitlines()), '')}"
        taken = round(time.monotonic() - started, 1)
        print(json.dumps({"case": name, "seconds": taken, "error": error}), flush=True)


def _save(model, case: Case, folder: Path) -> None:  # noqa: ANN001
    """config.json, model.safetensors, and results.safetensors: ids, logits, a decoded step's."""
    import torch
    from safetensors.torch import save_file

    ids = torch.randint(0, COMMON["vocab_size"], (1, case.length + 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.05
        first = model(ids[:, :-1], use_cache=True)
        step = model(ids[:, -1:], past_key_values=first.past_key_values, use_cache=True)
    folder.mkdir(parents=True)
    model.config.to_json_file(str(folder / "config.json"))
    tensors = dict(model.named_parameters())
    save_file({n: t.detach() for n, t in tensors.items()}, folder / "model.safetensors")
    results = {"ids": ids, "logits": first.logits, "step": step.logits}
    save_file({n: t.contiguous() for n, t in results.items()}, folder / "results.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
