"""Pico checkpoints on disk, and the command line run in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mcretrofit import registry
from mcretrofit.cli import main
from mcretrofit.decoder import DecoderConfig, DecoderForCausalLM

ROOT = Path(__file__).parents[1]


class Done(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


def pico(folder: Path, family: str = "gla", **fields: object) -> Path:
    """A fresh model of bytes in the family's own format: config.json and model.safetensors."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"max_position_embeddings": 64, **registry.load("models", family).tiny(), **fields}
    model = DecoderForCausalLM(DecoderConfig(family, **sizes)).start()
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, **sizes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def few_words(size: int, special: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of one sentence: training one of a recipe's own would take longer than all the rest."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["It was a bright cold day."], trainer)
    return tokenizer


def runner(capsys: pytest.CaptureFixture[str]):
    """`run("wrap", folder, ...) -> Done`."""

    def run(*words: object) -> Done:
        capsys.readouterr()
        threads = torch.get_num_threads()
        # two threads on two busy cores wait for each other most of the time
        torch.set_num_threads(1)
        try:
            status = main([str(word) for word in words])
        finally:
            torch.set_num_threads(threads)
        out, err = capsys.readouterr()
        return Done(status, out, err)

    return run


def shell(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    places = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def refused(done: Done, status: int, *parts: str) -> None:
    """Nothing on stdout, one line on stderr that starts with `error:` and holds every part."""
    assert done.status == status, done
    assert done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err, done.err
