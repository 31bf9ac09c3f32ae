"""A checkpoint on disk, opened by its headers alone; tensors are read one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mcretrofit.atomic import sha256
from mcretrofit.errors import RetrofitError
from mcretrofit.rawfile import file_size, show
from mcretrofit.sources import Source, locate
from mcretrofit.tensorfile import TensorInfo, read_header, read_pieces, read_tensor

if TYPE_CHECKING:
    import torch

# what DataParallel and torch.compile put before every name
_SURPLUS = ("module.", "_orig_mod.")
_Value = TypeVar("_Value")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Names, shapes and files of a model's weights, and its config.json ({} when it has none)."""

    path: str
    folder: Path | None
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    mapped: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def revision(self) -> str | None:
        """The commit of a hub snapshot, None for anything else."""
        snapshot = self.folder is not None and self.folder.parent.name == "snapshots"
        return self.folder.name if snapshot else None

    def names(self) -> list[str]:
        """Every tensor's name, in file order."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape as its header states it."""
        return self._info(name).shape

    def dtype(self, name: str) -> str:
        """A tensor's dtype as a safetensors code, such as F32 or BF16."""
        return self._info(name).dtype

    def read(self, name: str) -> torch.Tensor:
        """A tensor of one's own on the CPU, in the dtype it is stored in."""
        info = self._info(name)
        if name in self.mapped:
            import torch

            return self.mapped[name].clone(memory_format=torch.contiguous_format)
        return read_tensor(info)

    def pieces(self, name: str, most: int = 1 << 22) -> Iterator[torch.Tensor]:
        """A tensor's values in flat tensors of up to `most` elements; none is held longer."""
        info = self._info(name)
        if name in self.mapped:
            yield from self.read(name).reshape(-1).split(most)
        else:
            yield from read_pieces(info, most)

    def files(self) -> list[Path]:
        """The weight files, each once, in the order of their tensors."""
        return list(dict.fromkeys(info.file for info in self.tensors.values()))

    def fingerprint(self) -> str:
        """SHA-256 over names, dtypes, shapes and file sizes: cheap, but two fine-tunes of one
        model share it; `sha256` tells them apart."""
        digest = hashlib.sha256()
        for name, info in sorted(self.tensors.items()):
            digest.update(repr((name, info.dtype, info.shape, info.start, info.end)).encode())
        for file in sorted(self.files()):
            digest.update(repr((file.name, file_size(file))).encode())
        return digest.hexdigest()

    def sha256(self) -> str:
        """SHA-256 of the weights: the file's own for one file, of the list of theirs for shards."""
        sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(self.files())]
        if len(sums) == 1:
            return sums[0].split()[0]
        return hashlib.sha256("".join(sums).encode()).hexdigest()

    def content(self) -> str:
        """What tells these weights from all others: a hub snapshot's commit pins them, so their
        names do; else `sha256`, which reads every file."""
        if self.revision is not None:
            return hashlib.sha256(f"{self.fingerprint()}@{self.revision}".encode()).hexdigest()
        return self.sha256()

    def check_finite(self, name: str, tensor: torch.Tensor) -> None:
        """Raise RetrofitError, naming tensor and file, if a value is NaN or infinite."""
        if not tensor.is_floating_point():
            return
        # eight-bit floats have no isfinite of their own
        wide = tensor.float() if tensor.element_size() == 1 else tensor
        # in pieces: the test makes several tensors of the size of its own
        pieces = wide.reshape(-1).split(1 << 22) if wide.numel() else ()
        bad = tensor.numel() - sum(int(piece.isfinite().sum()) for piece in pieces)
        if bad:
            file = show(self._info(name).file)
            raise RetrofitError(
                f"{file}: tensor '{show(name)}' has {bad} of {tensor.numel()} values NaN or infinite"
            )

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise RetrofitError(f"{show(self.path)} has no tensor '{show(name)}'")
        return self.tensors[name]


def open_checkpoint(model: str | Path, config: str | Path | None = None) -> Checkpoint:
    """Open a MODEL argument (folder, file, index, `builtin:NAME`, hub id) without its weights.

    `config` replaces the config.json beside them. Raises RetrofitError, one line, for anything
    missing, damaged or unsafe; a .pth or .bin file is mapped, never run.
    """
    source = locate(model, config)
    tensors: dict[str, TensorInfo] = {}
    mapped: dict[str, torch.Tensor] = {}
    for file in source.weights:
        found, loaded = _open_file(file)
        twice = next((name for name in found if name in tensors), None)
        if twice is not None:
            both = f"{tensors[twice].file.name} and {file.name}"
            raise RetrofitError(f"{show(file.parent)}: tensor '{show(twice)}' is in both {both}")
        tensors |= found
        mapped |= loaded
    _check_listed(source, tensors)
    if not tensors:
        raise RetrofitError(f"{show(model)} holds no tensors")
    tensors, mapped = _without_prefix(tensors), _without_prefix(mapped)
    return Checkpoint(str(model), source.folder, source.config, tensors, mapped)


def _open_file(file: Path) -> tuple[dict[str, TensorInfo], dict[str, torch.Tensor]]:
    if file.name.endswith(".safetensors"):
        return read_header(file), {}
    from mcretrofit.pickled import infos, load_pickled

    loaded = load_pickled(file)
    return infos(file, loaded), loaded


def _check_listed(source: Source, tensors: Mapping[str, TensorInfo]) -> None:
    for name, file_name in source.listed.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise RetrofitError(
                f"{show(source.folder)}: tensor '{show(name)}' is not in {file_name}, "
                "where the index lists it"
            )


def _without_prefix(named: dict[str, _Value]) -> dict[str, _Value]:
    for prefix in _SURPLUS:
        if named and all(name.startswith(prefix) for name in named):
            return _without_prefix({name[len(prefix) :]: value for name, value in named.items()})
    return named
