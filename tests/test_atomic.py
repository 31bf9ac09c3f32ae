"""A folder is written wholly or not at all, and nothing else is ever replaced."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch

from mcretrofit import atomic
from mcretrofit.atomic import sha256, write_atomic_folder, write_safetensors
from mcretrofit.errors import RetrofitError


def old_folder(tmp_path: Path) -> Path:
    """A folder that looks like one of ours."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "caching.json").write_text("old")
    return tmp_path / "out"


def full_disk(*_: object) -> None:
    """What a write on a full disk raises."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_writes_and_makes_parents(tmp_path):
    target = tmp_path / "a" / "b"
    with write_atomic_folder(target) as work:
        (work / "code").mkdir()
        (work / "code" / "x.py").write_text("1")
        assert work.parent == target.parent
        assert not target.exists()
    assert (target / "code" / "x.py").read_text() == "1"
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_tensor_file_is_as_readable_as_any_new_file(tmp_path):
    (tmp_path / "other").touch()
    write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(2)})
    modes = {(tmp_path / name).stat().st_mode for name in ("other", "x.safetensors")}
    assert len(modes) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after(tmp_path, error):
    with pytest.raises(error), write_atomic_folder(tmp_path / "a" / "b") as work:
        (work / "x").write_text("half")
        raise error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["body", "fsync", "rename", "mkdir"])
def test_full_disk_is_one_line(tmp_path, monkeypatch, where):
    if where == "fsync":
        monkeypatch.setattr(os, "fsync", full_disk)
    elif where == "rename":
        monkeypatch.setattr(os, "rename", full_disk)
    elif where == "mkdir":
        monkeypatch.setattr(Path, "mkdir", full_disk)
    with (
        pytest.raises(
            RetrofitError, match="No space left on device; nothing was changed"
        ) as caught,
        write_atomic_folder(tmp_path / "out") as work,
    ):
        (work / "x").write_text("1")
        if where == "body":
            full_disk()
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_existing_target_needs_force(tmp_path):
    target = old_folder(tmp_path)
    with pytest.raises(RetrofitError, match="--force"), write_atomic_folder(target):
        pass
    with write_atomic_folder(target, force=True) as work:
        (work / "caching.json").write_text("new")
        assert (target / "caching.json").read_text() == "old"
    assert (target / "caching.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("failure", ["body", "second rename"])
def test_forced_failure_keeps_the_old_folder(tmp_path, monkeypatch, failure):
    target, renames, rename = old_folder(tmp_path), [], os.rename

    def fail_second(source: object, destination: object) -> None:
        renames.append(source)
        if len(renames) == 2:
            raise KeyboardInterrupt
        rename(source, destination)

    if failure == "second rename":
        monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(KeyboardInterrupt), write_atomic_folder(target, force=True) as work:
        (work / "caching.json").write_text("new")
        if failure == "body":
            raise KeyboardInterrupt
    assert (target / "caching.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(RetrofitError, match="cannot write"), write_atomic_folder(tmp_path / "out"):
        old_folder(tmp_path)
    assert (tmp_path / "out" / "caching.json").read_text() == "old"


def test_force_refuses_what_is_not_ours(tmp_path, monkeypatch):
    inside = tmp_path / "project" / "src"
    inside.mkdir(parents=True)
    (tmp_path / "project" / "config.json").write_text("{}")
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(inside)
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    (tmp_path / "repository" / "config.json").write_text("{}")
    monkeypatch.chdir(inside)
    refused = [Path("/"), Path("."), Path(".."), Path.home(), Path.home().parent, tmp_path, file]
    for target in [*refused, link, tmp_path / "repository"]:
        with pytest.raises(RetrofitError), write_atomic_folder(target, force=True):
            pytest.fail("the block must not run")
    assert file.read_text() == "x"


def test_force_refuses_to_replace_a_source(tmp_path):
    target = old_folder(tmp_path)
    weights = target / "model.safetensors"
    for source in (target, weights, str(weights)):
        with (
            pytest.raises(RetrofitError, match="made from it"),
            write_atomic_folder(target, force=True, sources=[source]),
        ):
            pytest.fail("the block must not run")


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(RetrofitError, match="cannot write"),
        write_atomic_folder(tmp_path / "file/out"),
    ):
        pytest.fail("the block must not run")


def test_failed_tensor_file_keeps_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "gates.safetensors"
    write_safetensors(path, {"w": torch.ones(2)})
    before = sha256(path)
    monkeypatch.setattr(atomic, "_fsync", full_disk)
    with pytest.raises(RetrofitError, match="No space left"):
        write_safetensors(path, {"w": torch.zeros(2)})
    assert sha256(path) == before == hashlib.sha256(path.read_bytes()).hexdigest()
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(RetrofitError, match="cannot write"):
        write_safetensors(tmp_path / "absent" / "x.safetensors", {"w": torch.zeros(2)})
