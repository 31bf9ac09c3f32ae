"""Training gates: identity at first, the base untouched, resuming, several processes, refusals."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import ROOT, refused, runner
from safetensors.torch import load_file
from tune_helpers import checkpoint, losses, process, working

from mcretrofit import frozen, tunelog
from mcretrofit.calibrate import shipped_text
from mcretrofit.config import CachingConfig
from mcretrofit.confirm import confirm
from mcretrofit.heldout import Check
from mcretrofit.model import load
from mcretrofit.ranks import World
from mcretrofit.retrofit import every_head, retrofit_, revert_
from mcretrofit.tokenizer import load_tokenizer
from mcretrofit.training import Trainer, _checkpointed, _loss, begin_, gates
from mcretrofit.tunedata import Feed
from mcretrofit.tunefolder import write_tuned
from mcretrofit.tuning import Tuning, read_tuning
from mcretrofit.wrapped import read


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("pico"))


@pytest.fixture
def place(base, tmp_path, monkeypatch) -> Path:
    return working(tmp_path, base, monkeypatch)


@pytest.fixture
def run(capsys):
    return runner(capsys)


def test_facts_are_stated_before_they_are_asked():
    tokenizer = load_tokenizer(None, 256)
    feed = Feed(tokenizer, shipped_text(), 20.0, 0)
    for number, mix in enumerate([{"needles": 1}, {"pairs": 1}, {"needles": 1, "pairs": 1}] * 4):
        row = feed.row(number, 600, mix)
        assert len(row.ids) == len(row.weights) == 601 and row.answers
        assert row == feed.row(number, 600, mix)
        for start, stop in row.answers:
            value = tokenizer.decode(row.ids[start:stop])
            assert value in tokenizer.decode(row.ids[:start]) and len(value) == 4
            assert row.weights[start:stop] == [20.0] * (stop - start)
    assert not feed.row(0, 600, {"prose": 1}).answers


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("rule", ["z", "plain"])
@torch.no_grad()
def test_a_gate_is_the_identity_at_first(base, rule, rank):
    model = load(base).model
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    config = CachingConfig(segment=16, rule=rule)
    said = []
    for gate in (False, True):
        retrofit_(model, config.replace(gate=gate, rank=rank if gate else 0), every_head(model))
        begin_(gates(model), 0)
        said.append(model(input_ids=ids).logits)
        revert_(model)
    assert torch.equal(*said)


def trained(base: Path, **fields: object) -> tuple[torch.nn.Module, Tuning]:
    """A wrapped model whose gates have moved."""
    model = load(base).model
    config = CachingConfig(segment=16, margin=0.0, gate=True, rank=4)
    retrofit_(model, config, every_head(model))
    begin_(gates(model), 0)
    with torch.no_grad():
        for name, parameter in gates(model).items():
            if not name.endswith(".down"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    return model, Tuning(**fields)


def test_gradients_reach_every_gate_under_the_default_rule_and_through_checkpoints(base):
    model, _ = trained(base)
    feed = Feed(load_tokenizer(None, 256), shipped_text(), 20.0, 0)
    grads = []
    for again in (False, True):
        model.zero_grad()
        loss = _loss(model, feed.row(0, 200, {"pairs": 1}))[0]
        if again:
            with _checkpointed(model):
                loss = _loss(model, feed.row(0, 200, {"pairs": 1}))[0]
                loss.backward()
        else:
            loss.backward()
        grads.append({name: p.grad.clone() for name, p in gates(model).items()})
    assert all(g.any() for g in grads[0].values()) and len(grads[0]) == 8
    for name, one in grads[0].items():
        torch.testing.assert_close(grads[1][name], one)
    assert all(p.grad is None for name, p in model.named_parameters() if ".mc." not in name)


class Scripted:
    """Checks that were written down: answers and prose of the base, the start, step 1, ..."""

    def __init__(self, *losses: tuple[float, float]) -> None:
        self.losses = list(losses)

    def check(self, model: torch.nn.Module, step: int, world: World) -> Check:
        answers, prose = self.losses.pop(0)
        return Check(step, answers, 1.0, prose, 1.0, 1.0)


SCRIPTS = {
    "prose ends it": (
        [(2.0, 1.0), (1.5, 1.0), (1.2, 1.004), (1.0, 1.006)],
        2,
        1,
        "prose at step 2",
    ),
    "steps end it": ([(2.0, 1.0), (1.5, 1.0), (1.4, 1.0), (1.3, 1.0), (1.6, 1.0)], 3, 2, "steps"),
    "never better": ([(2.0, 1.0), (1.5, 1.0), (1.6, 1.0), (1.7, 1.0), (1.5, 1.0)], 3, 0, "steps"),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_the_best_allowed_gates_are_kept(base, tmp_path, script):
    told, steps, best, why = script
    model, tuning = trained(base, steps=3, check_every=1)
    trainer = Trainer(model, tuning, tmp_path, {}, World())
    feed = Feed(load_tokenizer(None, 256), shipped_text(), 20.0, 0)
    done = trainer.train(feed, Scripted(*told), 300, lambda *_: None)
    assert (done.steps, done.best.step) == (steps, best) and why in done.stopped
    moved = any(p.any() for name, p in done.gates.items() if name.endswith(".weight"))
    assert moved == bool(best)


def test_a_run_leaves_base_state_losses_and_picture(run, place, base):
    before = (base / "model.safetensors").read_bytes()
    done = run("tune", "small.yaml")
    assert done.status == 0, done
    assert done.out.startswith("trainable ") and " parameters (" in done.out.splitlines()[0]
    assert "more than 1 % is trained" in done.out and "base untouched: sha256 " in done.out
    assert (base / "model.safetensors").read_bytes() == before
    folder = place / "runs" / "tune-retrofit"
    assert len(losses(folder)) == 12 and (folder / "losses.png").stat().st_size > 1000
    assert read("retrofit").config.segment == 32
    again = run("tune", "small.yaml", "--out", "other", "--run", folder)
    assert again.status == 0 and len(losses(folder)) == 12


def test_without_matplotlib_only_the_picture_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is not installed" in tunelog.draw(tmp_path)


def test_a_killed_run_goes_on_to_the_same_losses(run, place):
    whole = run("tune", "small.yaml", "--run", "whole")
    assert whole.status == 0, whole
    words = ("-m", "mcretrofit", "tune", "small.yaml", "--run", "cut", "--force")
    child, end = process(*words), time.monotonic() + 60
    while child.poll() is None and len(losses(place / "cut")) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert 5 <= len(losses(place / "cut")) < 12
    done = run("tune", "small.yaml", "--run", "cut", "--force")
    assert done.status == 0, done
    assert losses(place / "cut") == losses(place / "whole")
    said = [load_file(place / name / "state.safetensors") for name in ("cut", "whole")]
    assert said[0].keys() == said[1].keys()
    assert all(torch.equal(value, said[1][name]) for name, value in said[0].items())


def launcher() -> tuple[str, ...]:
    """What starts two processes: accelerate, which calls torch's, or torch's own where it is absent."""
    if find_spec("accelerate") is None:
        return ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # its --cpu starts one process alone, whatever their number; --multi_gpu needs no GPU
    plain = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    port = ("--main_process_port", "0")
    return ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *plain, *port)


def test_two_processes_see_what_one_does_that_accumulates(run, place):
    more = ("--accumulate", "2", "--steps", "3")
    alone = run("tune", "small.yaml", "--run", "alone", *more)
    assert alone.status == 0, alone
    child = process(
        *("-m", *launcher()),
        *("-m", "mcretrofit", "tune", "small.yaml", "--run-folder", "both", "--out", "two"),
        *("--steps", "3"),
    )
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    assert out.count("trainable") == 1 and out.count("base untouched") == 1
    assert losses(place / "both") == pytest.approx(losses(place / "alone"), rel=1e-4)


def test_half_precision(run, place):
    done = run("tune", "small.yaml", "--dtype", "bf16", "--steps", 2, "--checkpointing")
    assert done.status == 0, done
    assert all(map(math.isfinite, losses(place / "runs" / "tune-retrofit")))


@pytest.mark.parametrize("rank", [0, 4])
def test_every_command_takes_the_trained_gates(run, place, base, rank):
    # a router whose reads tell in a model that knows nothing
    words = ("--router", "moment", "--heads", "all", "--margin", 0, "--out", "plain")
    assert run("wrap", base, "--segment", 16, *words).status == 0
    kept, loaded = read("plain"), load("plain")
    revert_(loaded.model)
    caching = kept.config.replace(gate=True, rank=rank)
    retrofit_(loaded.model, caching, loaded.covers)
    with torch.no_grad():
        for parameter in gates(loaded.model).values():
            parameter.normal_()
    write_tuned(Path("tuned"), kept, loaded._replace(config=caching), "", gates(loaded.model))
    ids = torch.randint(0, 256, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = loaded.model(input_ids=ids).logits
        assert torch.equal(load("tuned").model(input_ids=ids).logits, want)
        assert not torch.allclose(load("plain").model(input_ids=ids).logits, want)
        assert run("export", "tuned", "--out", "exported").status == 0
        torch.testing.assert_close(load("exported").model(input_ids=ids).logits, want)
    prompt = (
        "--prompt",
        "It was a bright cold day in April. " * 3,
        "--max-new-tokens",
        5,
        "--json",
    )
    said = [run("generate", name, *prompt).rows[0]["text"] for name in ("tuned", "exported")]
    assert said[0] == said[1]
    task = ("--task", "perplexity", "--lengths", 256, "--samples", 1, "--json")
    scores = [run("eval", name, *task).rows[0]["score"] for name in ("tuned", "exported", "plain")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5) != scores[2]
    refused(run("tune", "tuned", "--data", "text.txt"), 1, "holds trained gates already", "--force")
    other = run("eval", "tuned", *task, "--top-k", 2)
    assert "trained gates are left out" in other.err
    assert other.rows[0]["score"] == pytest.approx(scores[2], rel=1e-5)


def test_gates_that_are_not_confirmed_leave_the_folder_as_it_was(run, place):
    assert run("tune", "small.yaml", "--steps", 1).status == 0
    stored = json.loads((place / "retrofit" / "caching.json").read_text())
    assert not stored["caching"]["gate"] and not (place / "retrofit/gates.safetensors").exists()
    done = run("tune", "retrofit", "--recipe", "again.yaml")
    refused(done, 1, "again.yaml cannot be read: no such file")


@pytest.mark.parametrize(("gain", "kept"), [(0.05, True), (0.001, False), (-0.05, False)])
def test_what_is_surely_gained_but_worth_nothing_is_declined(gain, kept):
    def losses(answers: float) -> tuple:
        return torch.full((4,), answers), torch.ones(2), torch.ones(6), 2.0

    told = iter([losses(1.0), losses(0.5), losses(0.5 - gain)])
    held = SimpleNamespace(losses=lambda _: next(told))
    trained = SimpleNamespace(best=SimpleNamespace(step=1), gates={})
    trainer = SimpleNamespace(put_=lambda _: None)
    found = confirm(torch.nn.Module(), trainer, trained, held, 0.005)
    assert (not found.harm) is kept and found.low == pytest.approx(gain, abs=1e-6)


def test_gates_under_which_the_base_answers_better_are_declined():
    told = iter(
        [(torch.full((4,), nats), torch.ones(2), torch.ones(6), 2.0) for nats in (1.0, 3.0, 2.0)]
    )
    held = SimpleNamespace(losses=lambda _: next(told))
    trained = SimpleNamespace(best=SimpleNamespace(step=1), gates={})
    found = confirm(torch.nn.Module(), SimpleNamespace(put_=lambda _: None), trained, held, 0.005)
    assert found.low > 0 and found.harm == "the base answers better"


def test_a_share_above_a_hundredth_suggests_a_rank(base):
    model, _ = trained(base)
    first, second = frozen.parameters(model, 4)
    assert first.startswith("trainable ") and "more than 1 %" in second


def test_shipped_recipes_name_their_command():
    for path in sorted((ROOT / "recipes").glob("tune_*.yaml")):
        assert path.read_text().startswith(f"# mcretrofit tune recipes/{path.name}\n")
        assert read_tuning(path, {}).caching["variant"] in path.name
