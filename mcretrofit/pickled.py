"""Reading .pth and .bin files: tensors only, mapped where the format allows, code refused."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from mcretrofit._legacy import Clipped, check_claims
from mcretrofit.errors import RetrofitError
from mcretrofit.rawfile import file_size, read_bytes, refuse_pointer, show
from mcretrofit.tensorfile import DTYPES, TensorInfo

if TYPE_CHECKING:
    import torch

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
# how torch's restricted unpickler words the refusal of a class or a call
_CODE = re.compile(
    r"unsupported global: global (\S+)|unsupported global (\S+) whose|call reduce for|"
    r"can only (?:create|build)|torchscript",
    re.IGNORECASE,
)
_PICKLE_LIMIT = 100_000_000


def load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a torch.save file on the CPU, never running what it contains."""
    path = Path(path)
    zipped = _check_container(path)
    tensors = _unwrap(path, _restricted_load(path, zipped))
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor)
    _check_views(path, tensors)
    # a copy is made only of what names one number several times
    return {n: t.detach().contiguous() if _repeats(t) else t.detach() for n, t in tensors.items()}


def infos(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """The same description that safetensors headers give; a pickle does not tell byte ranges."""
    codes = {torch_name: code for code, (torch_name, _) in DTYPES.items()}
    return {
        name: TensorInfo(name, codes[_dtype(tensor)], tuple(tensor.shape), path, 0, 0)
        for name, tensor in tensors.items()
    }


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_container(path: Path) -> bool:
    size = file_size(path)
    head = read_bytes(path, 0, min(size, 32))
    refuse_pointer(path, head)
    if head.startswith(b"PK\x03\x04"):
        _check_zip(path, size)
        return True
    if not head.startswith(b"\x80"):
        raise RetrofitError(f"{show(path)} is not a torch.save file (neither zip nor pickle)")
    return False


def _check_zip(path: Path, size: int) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise RetrofitError(f"{show(path)} is a cut off or damaged zip: {show(error)}") from error
    # torch stores records as they are; a compressed one could unfold without bound
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise RetrofitError(f"{show(path)} is a compressed zip, not a torch.save file")
    if sum(record.file_size for record in records) > size:
        raise RetrofitError(f"{show(path)}: its records claim more bytes than the file has")
    programs = [record for record in records if record.filename.endswith(".pkl")]
    if any(record.file_size > _PICKLE_LIMIT for record in programs):
        raise RetrofitError(f"{show(path)}: its pickle is far too large for a list of tensors")


def _restricted_load(path: Path, zipped: bool) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            # what torch finds odd about the pickle does not matter once it is tensors or refused
            warnings.simplefilter("ignore")
            if zipped:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            with open(path, "rb") as opened:
                file = Clipped(opened)
                check_claims(file)
                return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # a hostile pickle can make the unpickler raise anything; all of it means the same
        text = str(error)
        found = _CODE.search(text)
        if found and isinstance(error, (UnpicklingError, RuntimeError)):
            what = found.group(1) or found.group(2)
            named = f" ({show(what)})" if what else ""
            raise RetrofitError(
                f"{show(path)} contains pickled code{named}, not only tensors, and was not run: "
                "convert it to safetensors where you trust it"
            ) from error
        # torch puts advice to load without protection before its reason
        reason = next(iter(text.split("WeightsUnpickler error:")[-1].strip().splitlines()), "")
        raise RetrofitError(
            f"{show(path)} is not a readable torch.save file "
            f"({type(error).__name__}: {show(reason)})"
        ) from error


def _unwrap(path: Path, loaded: Any) -> dict[str, Any]:
    import torch

    if not isinstance(loaded, dict):
        raise RetrofitError(f"{show(path)} holds a {type(loaded).__name__}, not named tensors")
    if not any(isinstance(value, torch.Tensor) for value in loaded.values()):
        inner = [key for key in _WRAPPERS if isinstance(loaded.get(key), dict)]
        if len(inner) != 1:
            keys = ", ".join(show(key) for key in list(loaded)[:8]) or "nothing"
            raise RetrofitError(f"{show(path)} holds no named tensors (it holds: {keys})")
        loaded = loaded[inner[0]]
    return loaded


def _check_tensor(path: Path, name: Any, tensor: Any) -> None:
    import torch

    where = f"{show(path)}: '{show(name)}'"
    if not isinstance(name, str) or not name.isprintable():
        raise RetrofitError(f"{where} is not a tensor's name")
    if not isinstance(tensor, torch.Tensor):
        raise RetrofitError(f"{where} is a {type(tensor).__name__}, not a tensor")
    known = {torch_name for torch_name, _ in DTYPES.values()}
    on_cpu = tensor.device.type == "cpu"
    if not on_cpu or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise RetrofitError(f"{where} is not a plain dense tensor")
    if _dtype(tensor) not in known:
        raise RetrofitError(f"{where} has the dtype {_dtype(tensor)}; known: {', '.join(known)}")


def _check_views(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Strides of zero could let a few bytes pose as tensors of any size: all such share a bound."""
    room = file_size(path)
    for name, tensor in tensors.items():
        room -= _claimed(tensor) if _repeats(tensor) else 0
        if room < 0:
            claimed = f"claims {list(tensor.shape)}, more than the file holds"
            raise RetrofitError(f"{show(path)}: '{show(name)}' {claimed}")


def _repeats(tensor: torch.Tensor) -> bool:
    return _claimed(tensor) > tensor.untyped_storage().nbytes()


def _claimed(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
