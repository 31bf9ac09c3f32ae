"""Pickled weights are tensors or one clear line, and what they contain is never run."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from mcretrofit.checkpoint import open_checkpoint
from mcretrofit.errors import RetrofitError
from mcretrofit.pickled import load_pickled

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Code:
    """Pickles to a call that would create a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.file), "w")


def refusal(model: Path) -> str:
    """The one line that opening fails with."""
    with pytest.raises(RetrofitError) as caught:
        open_checkpoint(model)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_pickled_view_that_repeats_numbers_is_read_whole(tmp_path):
    row = torch.arange(4.0)
    torch.save({"w": row.expand(3, 4), "rest": torch.zeros(64)}, tmp_path / "model.pth")
    tensors = load_pickled(tmp_path / "model.pth")
    assert torch.equal(tensors["w"], row.repeat(3, 1)) and tensors["w"].is_contiguous()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_pickled_code_is_refused_and_not_run(tmp_path, zipped):
    path, mark = tmp_path / "model.pth", tmp_path / "mark"
    torch.save({"w": Code(mark)}, path, _use_new_zipfile_serialization=zipped)
    assert "contains pickled code (" in refusal(path)
    path.write_bytes(pickle.dumps({"w": Code(mark)}, protocol=2))
    assert "model.pth" in refusal(path)
    assert not mark.exists()


def test_torchscript_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pth", "w") as archive:
        for name in ("constants.pkl", "data.pkl", "version"):
            archive.writestr(f"model/{name}", pickle.dumps({}, protocol=2))
    assert "model.pth" in refusal(tmp_path / "model.pth")


def saved(value: object) -> bytes:
    """The bytes that torch.save makes of `value`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def compressed(raw: bytes) -> bytes:
    """The same zip with deflated records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(buffer, "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


GOOD = saved(TENSORS)
WRONG_PICKLES = {
    "text": (b"not weights", "neither zip nor pickle"),
    "empty": (b"", "neither zip nor pickle"),
    "lfs": (b"version https://git-lfs.example/spec/v1\n", "git lfs pull"),
    "cut": (GOOD[: len(GOOD) // 2], "cut off or damaged"),
    "compressed": (compressed(GOOD), "compressed zip"),
    "pickle": (pickle.dumps({"w": 1}, protocol=4), "not a readable"),
    "list": (saved([torch.ones(2)]), "holds a list"),
    "tensor": (saved(torch.ones(2)), "holds a Tensor"),
    "numbers": (saved({"step": 1, "loss": 2.0}), "it holds: step, loss"),
    "mixed": (saved({"w": torch.ones(2), "step": 1}), "'step' is a int"),
    "number-key": (saved({1: torch.ones(2)}), "'1' is not a tensor's name"),
    "nested-twice": (saved({"model": TENSORS, "state_dict": TENSORS}), "it holds: model"),
    "expanded": (saved({"w": torch.zeros(1).expand(10**6, 10**6)}), "more than the file holds"),
    "sparse": (saved({"w": torch.eye(3).to_sparse()}), "plain dense"),
    "meta": (saved({"w": torch.ones(2, device="meta")}), "plain dense"),
    "complex": (saved({"w": torch.ones(2, dtype=torch.complex128)}), "complex128"),
}


@pytest.mark.parametrize("case", WRONG_PICKLES, ids=str)
def test_refuses_wrong_pickle(tmp_path, case):
    content, expected = WRONG_PICKLES[case]
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    message = refusal(path)
    assert expected in message
    assert "model.pth" in message
