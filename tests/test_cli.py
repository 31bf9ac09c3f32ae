"""The command line: the main path in its own processes, every command in this one."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from cli_helpers import pico, refused, runner, shell
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mcretrofit import compare, registry
from mcretrofit.config import VARIANTS
from mcretrofit.tasks import ALIASES


@pytest.fixture
def run(capsys):
    return runner(capsys)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, with a pico model in `base/` and a short text beside it."""
    monkeypatch.chdir(tmp_path)
    pico(tmp_path / "base", max_position_embeddings=128)
    (tmp_path / "some.txt").write_text("It was a bright cold day in April. " * 40)
    return tmp_path


def wrap(run, *words: object):
    """A quick wrap of `base/`: short segments, short text."""
    return run("wrap", "base", "--segment", 32, "--calibrate", "some.txt", *words)


def test_the_three_commands_in_one_folder_one_after_the_other(tmp_path):
    pico(tmp_path, num_hidden_layers=1, max_position_embeddings=128)
    wrapped = shell(
        tmp_path,
        *("-m", "mcretrofit", "wrap", "model.safetensors", "--variant", "ssc", "--segment", "256"),
    )
    assert wrapped.returncode == 0, wrapped.stderr
    assert "wrapped 1 of 1 layers" in wrapped.stdout and "slow: 16 of 16" in wrapped.stdout
    measured = shell(tmp_path, "-m", "mcretrofit", "eval", "--task", "niah")
    assert measured.returncode == 0, measured.stderr
    assert "niah_single_1 (compact dialect)" in measured.stdout and "no effect" in measured.stdout
    exported = shell(tmp_path, "-m", "mcretrofit", "export")
    assert exported.returncode == 0, exported.stderr
    card = (tmp_path / "export" / "README.md").read_text()
    assert "| niah_single_1 | 1024 |" in card


def test_help_of_everything_without_importing_torch(tmp_path):
    code = """
import sys
from mcretrofit import registry
from mcretrofit.cli import main
assert main(["--help"]) == main([]) == 0
assert all(main([name, "--help"]) == 0 for name in registry.names("cli"))
assert main(["list", "variants", "--json"]) == 0
print({"torch", "transformers", "numpy"} & set(sys.modules))
"""
    done = shell(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("set()\n")
    assert all(name in done.stdout for name in registry.names("cli"))


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    code = """
import os, sys
from mcretrofit.cli import main
read, write = os.pipe()
os.dup2(write, 1)
os.close(read)
sys.exit(main(["list", "tasks", "--json"]))
"""
    done = shell(tmp_path, "-c", code)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("kind", ["families", "routers", "tasks", "aggregators", "memories", "ops"])
def test_list_names_every_entry_with_its_doc(run, kind):
    folder = "models" if kind == "families" else kind
    rows = run("list", kind, "--json").rows
    names = [*registry.names(folder), *(ALIASES if kind == "tasks" else ())]
    assert [row["name"] for row in rows] == names
    assert all(row["doc"] for row in rows)


def test_list_families_says_what_each_was_held_against(run):
    from mcretrofit.models._native import HOSTS

    rows, shown = run("list", "families", "--json").rows, run("list", "families").out
    for row in rows:
        about = getattr(registry.load("models", row["name"]), "ABOUT", None)
        assert about is None or all(about.values()), row
        assert about is None or {n: row[n] for n in about} == {
            **about,
            "layouts": list(about["layouts"]),
        }
        assert row["name"] in shown and row["parity"] in shown
    assert [row["name"] for row in run("list", "hosts", "--json").rows] == list(HOSTS)


def test_list_variants_and_builtins(run):
    assert [row["name"] for row in run("list", "variants", "--json").rows] == list(VARIANTS)
    assert run("list", "builtins", "--json").status == 0
    refused(run("list", "router"), 2, "did you mean 'routers'?")


def test_wrap_writes_the_folder_and_says_why(run, here):
    done = wrap(run)
    assert done.status == 0
    assert "wrapped 2 of 2 layers" in done.out and "slow: 16 of 16 channels" in done.out
    assert "segment 32 exceeds d^2/32 = 8" in done.err
    stored = json.loads((here / "retrofit" / "caching.json").read_text())
    assert stored["calibrated"] and stored["caching"]["segment"] == 32
    assert (here / "retrofit" / "calibration.safetensors").exists()
    refused(wrap(run), 1, "retrofit exists", "--force", "--out")
    assert wrap(run, "--force", "--variant", "grm").status == 0
    stored = json.loads((here / "retrofit" / "caching.json").read_text())
    assert stored["caching"]["variant"] == "grm"


def test_wrap_settings_come_from_defaults_then_recipe_then_flags_then_set(run, here):
    (here / "caching.yaml").write_text("top_k: 3\nmargin: 0.5\ntau: 1e2\n")
    words = ("--recipe", "caching.yaml", "--margin", "0.7", "--set", "margin=0.9", "--json")
    (row,) = wrap(run, *words).rows
    assert (row["variant"], row["top_k"], row["margin"], row["tau"]) == ("ssc", 3, 0.9, 100.0)
    assert row["wrapped"] == 2 and len(row["measured"]) == 4


def test_wrap_without_calibration_reads_no_tensor(run, here, monkeypatch):
    def read(info):
        raise AssertionError(f"read {info.name}")

    monkeypatch.setattr("mcretrofit.checkpoint.read_tensor", read)
    done = run("wrap", "base", "--no-calibrate", "--segment", 32)
    assert done.status == 0 and "heads not chosen yet" in done.out
    assert "unknown" in done.err and "first load" in done.err
    monkeypatch.undo()
    monkeypatch.chdir(here)
    done = run("eval", "--task", "niah", "--lengths", 128, "--samples", 2, "--json")
    assert done.status == 0 and "heads measured in memory" in done.err
    assert done.rows[0]["cache_bytes"] > 0


def test_wrap_says_that_caching_would_do_nothing(run, here):
    done = wrap(run, "--tau", "1e9")
    assert done.status == 0 and "wrapped 0 of 2 layers" in done.out
    assert "caching would do nothing here" in done.err
    (row,) = run("eval", "--task", "perplexity", "--lengths", 100, "--samples", 2, "--json").rows
    assert row["score"] == row["base_score"] and row["cache_bytes"] == 0
    assert run("export").status == 0


def test_eval_rows_carry_their_coordinates(run, here):
    wrap(run)
    words = ("--task", "niah,mqar", "--task", "perplexity", "--lengths", "1x,256", "--samples", 3)
    done = run("eval", *words, "--json", "--out", "rows.jsonl")
    assert done.status == 0 and "keep the base" in done.err
    rows = done.rows
    assert [row["task"] for row in rows[::2]] == ["niah_single_1", "mqar", "perplexity"]
    assert {row["length"] for row in rows} == {128, 256}
    wanted = (
        "model variant segment router init task metric length score base_score low high verdict"
    )
    wanted += " n seed cache_bytes seconds dialect depth pairs"
    assert all(set(wanted.split()) <= row.keys() for row in rows)
    assert {row["metric"] for row in rows} == {"accuracy", "bits_per_byte"}
    assert rows[2]["pairs"] == 4 and rows[0]["pairs"] is None
    assert all(row["n"] == 3 and row["seed"] == 42 for row in rows)
    kept = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    assert kept == rows
    assert (here / "retrofit" / "rows.jsonl").exists()


def test_eval_overrides_rewrap_in_memory_and_leave_the_folder_alone(run, here):
    wrap(run)
    words = ("--task", "perplexity", "--lengths", 200, "--samples", 1, "--segment", 16, "--json")
    done = run("eval", *words)
    assert done.status == 0 and "wrapped in memory: ssc, segment 16" in done.err
    assert done.rows[0]["segment"] == 16 and done.rows[0]["low"] is None
    assert not (here / "retrofit" / "rows.jsonl").exists()


def test_eval_of_a_plain_checkpoint_wraps_it_in_memory_or_leaves_it(run, here):
    words = ("eval", "base", "--task", "perplexity", "--lengths", 600, "--samples", 2)
    done = run(*words)
    assert "wrapped in memory: ssc, segment 256" in done.err and "retrofit" in done.out
    (row,) = run(*words, "--base-only", "--json").rows
    assert row["verdict"] == "base" and row["score"] == row["base_score"]


def test_ctrl_c_keeps_finished_rows(run, here, monkeypatch):
    def two(loaded, todo, **options):
        cell = next(iter(todo))
        outcome = compare.Outcome([0.5, 0.75], 10, 1.0)
        yield compare.row(loaded, cell, outcome, outcome)
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "compare", two)
    done = run("eval", "base", "--task", "niah", "--lengths", "128,256", "--samples", 2)
    assert done.status == 1
    assert "0.625" in done.out and "keep the base" not in done.out
    assert done.err.endswith("error: interrupted\n")


def test_generate_streams_what_the_model_would_say(run, here):
    from mcretrofit.model import load

    wrap(run)
    words = ("generate", "--prompt", "It was a bright", "--max-new-tokens", 70, "--json")
    (row,) = run(*words).rows
    found = load("retrofit")
    ids = torch.tensor([found.tokenizer().encode("It was a bright")])
    wanted = found.model.generate(ids, max_new_tokens=70, do_sample=False)[0, ids.shape[1] :]
    assert row["text"] == found.tokenizer().decode(wanted.tolist())
    assert row["tokens"] == 70 and row["segments"] == 2
    # both slow heads: 16 x 16 states and 32 keys with their lengths and places
    assert row["bytes_per_segment"] == 2 * (16 * 16 + 32 * 18) * 4
    done = run("generate", "--prompt", "It", "--max-new-tokens", 5)
    assert done.status == 0 and "memory grows by 6.66 kB a segment" in done.err
    hot = ("--temperature", 1, "--top-p", 0.9)
    first, again, other = (run(*words, *hot, "--seed", s).rows[0]["text"] for s in (1, 1, 2))
    assert first == again != other


def test_export_asks_for_a_wrap_first_and_says_what_it_wrote(run, here):
    refused(run("export"), 1, "mcretrofit wrap MODEL")
    done = run("export", "base")
    assert done.status == 0 and "exported without caching" in done.err
    refused(run("export", "base"), 1, "export exists", "--force")
    wrap(run)
    (row,) = run("export", "--force", "--name", "Lili", "--json").rows
    assert row["wrapped"] == 2 and "model.safetensors" in row["files"]
    assert "# Lili" in (here / "export" / "README.md").read_text()


def test_inspect_counts_what_the_cache_really_holds(run, here):
    from mcretrofit.evaluate import read_pieces
    from mcretrofit.model import load

    wrap(run)
    (row,) = run("inspect", "retrofit", "--lengths", "100", "--json").rows
    assert row["family"] == "gla" and row["wrapped"] == "2 of 2 layers, ssc"
    found = load("retrofit")
    *_, (_, _, cache) = read_pieces(found.model, torch.zeros(1, 100, dtype=torch.long), None)
    held = [state["segments"] for state in cache.states.values()]
    real = sum(t.nbytes for one in held for t in (one.states, one.summaries))
    cost = {c["variant"]: c for c in row["costs"]}
    assert cost["ssc"]["cached_bytes"] == real and cost["ssc"]["segments"] == 3
    assert cost["loglinear"]["segments"] == 2
    assert cost["ssc"]["kv_bytes"] == 100 * 2 * 2 * 32 * 4
    done = run("inspect", "base", "--segment", 64)
    assert "state_bytes" in done.out and "exceeds d^2/32" in done.err


def test_doctor_tests_itself(run, monkeypatch):
    done = run("doctor")
    assert done.status == 0 and "prefill and decode are one pass" in done.out
    from mcretrofit import doctor

    monkeypatch.setattr(doctor, "self_test", lambda: [doctor.Finding("law", "broken", "failed")])
    done = run("doctor", "--json")
    assert done.status == 1 and done.rows[-1]["state"] == "failed"


def test_demo_prints_recall_and_text(run, here):
    done = run("demo", "--model", "base", "--quick")
    assert done.status == 0
    assert "niah_single_1" in done.out and "perplexity" in done.out and "keep the base" in done.out


def test_pretrain_makes_a_folder_that_every_command_takes(run, here):
    (here / "tiny.yaml").write_text(
        "family: gla\ntext: some.txt\nvocab_size: 300\nlength: 64\nbatch: 1\nsteps: 9\n"
        "mix: {prose: 1}\nmodel: {hidden_size: 32, num_heads: 2, num_hidden_layers: 1}\n"
    )
    # training one of the recipe's own would take longer than all the rest
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["It was a bright cold day."], trainer)
    (here / "runs" / "tiny").mkdir(parents=True)
    tokenizer.save(str(here / "runs" / "tiny" / "tokenizer.json"))
    done = run("pretrain", "tiny.yaml", "--steps", 2, "--out", "runs/tiny")
    assert done.status == 0 and done.out == "runs/tiny/model\n"
    assert run("inspect", "runs/tiny/model").status == 0
    refused(run("pretrain", "none.yaml"), 1, "none.yaml")
    # from those weights on, and no step further than it says
    more = (here / "tiny.yaml").read_text() + "start: runs/tiny/model\nstop: 1\n"
    (here / "more.yaml").write_text(more)
    assert run("pretrain", "more.yaml", "--out", "runs/more").status == 0
    assert len((here / "runs" / "more" / "log.jsonl").read_text().splitlines()) == 1
    first, then = (
        load_file(here / "runs" / n / "model" / "model.safetensors") for n in ("tiny", "more")
    )
    name = "model.layers.0.attn.q_proj.weight"
    # a fresh matrix of this width would be .02 off, one step of a warming rate is not
    assert 0 < (first[name].float() - then[name].float()).abs().max() < 0.005
    (here / "wide.yaml").write_text(more.replace("hidden_size: 32", "hidden_size: 48"))
    refused(run("pretrain", "wide.yaml", "--out", "runs/wide"), 1, "embeddings do not fit")


def test_full_disks_are_one_line_and_surprises_are_raised(run, here, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mcretrofit.atomic._fsync", full)
    refused(wrap(run), 1, "No space left")
    assert not list(here.glob("*retrofit*"))

    def surprise(kind):
        raise ZeroDivisionError

    monkeypatch.setattr("mcretrofit.cli.list.entries", surprise)
    with pytest.raises(ZeroDivisionError):
        run("list", "tasks")
