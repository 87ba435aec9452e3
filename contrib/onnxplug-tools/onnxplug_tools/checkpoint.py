"""Weights in files: safetensors, files of ``torch.save``, and the indices of weights in several files."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxplug.cli.archive import check_archive
from onnxplug.errors import OnnxplugError, SaveError, UsageError, WeightsError
from onnxplug.run.data_files import is_large
from onnxplug.run.weights import SOURCE
from onnxplug.text import shortened, type_with_article

#: Layouts of sparse tensors.
SPARSE = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))
#: The dtypes of safetensors.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
#: The files to look for in a checkpoint's folder; the first that is there is read.
_IN_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_INDEX, _SAFETENSORS, _PICKLED = ".index.json", ".safetensors", (".bin", ".pt", ".pth")
#: The most bytes of an index; the indices of the largest checkpoints have a few million.
_LARGEST_INDEX = 1 << 28
_KINDS = "a .safetensors file, a .bin, .pt or .pth file of torch.save, an .index.json, or a folder with one of them"


#: As many bytes are read from a file before it is opened anew.
_MOST_READ = 1 << 24


class FileVersion(NamedTuple):
    """The version of a file, which distinguishes it from another file at the same path."""

    device: int
    inode: int
    size: int
    changed: int


def version_of(path: Path) -> FileVersion:
    """The present version of a file."""
    status = path.stat()
    return FileVersion(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a file.

    Attributes:
        dtype: Its dtype; ``None`` where torch has none.
        place: Offset and number of its bytes in the file, where they are stored unchanged.
    """

    name: str
    path: Path
    version: FileVersion
    shape: torch.Size
    dtype: torch.dtype | None
    dtype_name: str
    read: Callable[[str], torch.Tensor]
    place: tuple[int, int] | None = None

    def load(self) -> torch.Tensor:
        """Reads the tensor."""
        self.check_unchanged()
        try:
            return self.read(self.name)
        except Exception as error:  # safetensors raises a class of its own, torch.load any
            raise WeightsError(f"can't read {self.name!r} from {self.path}: {error}", names=[self.name]) from error

    def check_unchanged(self) -> None:
        """Checks that the file is unchanged."""
        try:
            unchanged = version_of(self.path) == self.version
        except OSError as error:
            raise WeightsError(f"can't read {self.name!r} from {self.path}: {error}", names=[self.name]) from error
        if not unchanged:
            raise WeightsError(
                f"{self.path} has changed since the weights were applied", names=[self.name], hint="Apply them again."
            )


class _Mapped:
    """A file whose tensors are mapped to memory.

    It stays open, as opening it for each tensor takes time quadratic in the tensors; but not for ever, as what was read stays in
    memory while it is open.

    Args:
        opened: Opens the file; returns a function from a tensor's name to the tensor.
        get: Such a function, of the file as it was opened already.
        is_whole: Whether the file was read as a whole, so that there is no use in opening it anew.
    """

    def __init__(
        self,
        opened: Callable[[], Callable[[str], torch.Tensor]],
        get: Callable[[str], torch.Tensor],
        is_whole: bool = False,
    ) -> None:
        self._opened = opened
        self._get: Callable[[str], torch.Tensor] | None = get
        self._is_whole = is_whole
        self._read = 0

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its name."""
        get = self._get = self._get or self._opened()
        tensor = torch.Tensor.detach(get(name))
        self._read += tensor.nbytes
        if self._read > _MOST_READ and not self._is_whole:
            self._get, self._read = None, 0
        return tensor


def open_checkpoint(files: Any) -> dict[str, Stored]:
    """The tensors in files, by name; none is read yet.

    Args:
        files: A path or several: a file of safetensors or of ``torch.save``, an ``.index.json``, or a folder that has
            one of them.
    """
    if isinstance(files, str | os.PathLike):
        return _opened(_path(files))
    if not isinstance(files, list | tuple | set | frozenset) or not files:
        raise WeightsError(
            f"weights are a mapping from names to tensors, or files, got {type_with_article(files)}",
            hint=f"A file is {_KINDS}.",
        )
    tensors: dict[str, Stored] = {}
    for file in files:
        if not isinstance(file, str | os.PathLike):
            raise WeightsError(f"the files of weights are paths, got {type_with_article(file)}")
        for name, stored in _opened(_path(file)).items():
            if name in tensors:
                raise WeightsError(f"{tensors[name].path} and {stored.path} both have a tensor {name!r}", names=[name])
            tensors[name] = stored
    return tensors


def _path(file: str | os.PathLike[str]) -> Path:
    path = Path(os.fsdecode(file))
    if os.path.isdir(path):
        within = next((path / name for name in _IN_FOLDER if (path / name).is_file()), None)
        if within is None:
            raise WeightsError(f"the folder {path} has no weights: none of {', '.join(_IN_FOLDER)}")
        return within
    if not os.path.isfile(path):  # False too for a name that the system refuses
        there = os.path.exists(path)
        raise WeightsError(
            f"{path} is not a regular file" if there else f"there is no file {shortened(str(path), 300)}",
            hint=None if there else "The path of the weights is relative to the current folder.",
        )
    return path


def _opened(path: Path) -> dict[str, Stored]:
    name = path.name.lower()
    if name.endswith(_INDEX):
        return _from_index(path)
    if name.endswith(_SAFETENSORS):
        return _from_safetensors(path)
    if name.endswith(_PICKLED):
        return _from_torch(path)
    raise WeightsError(f"{path} is no file of weights that onnxplug knows", hint=f"It takes {_KINDS}.")


def _from_index(path: Path) -> dict[str, Stored]:
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = json.loads(path.read_bytes())
        places = content["weight_map"]
        if not all(isinstance(name, str) and isinstance(file, str) for name, file in places.items()):
            raise TypeError("names and files must be strings")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise WeightsError(
            f"{path} is not an index of weights: {type(error).__name__}: {error}",
            hint='It is JSON with a "weight_map" from names of tensors to files beside it.',
        ) from error
    files: dict[str, dict[str, Stored]] = {}
    for file in dict.fromkeys(places.values()):
        if os.path.isabs(file) or ".." in Path(file).parts:
            raise WeightsError(f"{path} names the file {file!r}, which is not beside it")
        if file.lower().endswith(_INDEX):
            raise WeightsError(f"{path} names the file {file}, which is an index itself")
        if not os.path.isfile(path.parent / file):
            of = [name for name, other in places.items() if other == file]
            raise WeightsError(f"{path} names the file {shortened(file, 300)}, which is not there", names=of)
        files[file] = _opened(path.parent / file)
    tensors = {}
    for name, file in places.items():
        if name not in files[file]:
            raise WeightsError(f"{path} places {name!r} in {file}, which does not have it", names=[name])
        tensors[name] = files[file][name]
    return tensors


def _from_safetensors(path: Path) -> dict[str, Stored]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise OnnxplugError(
            f"reading {path} needs safetensors, which is not installed", hint="pip install 'onnxplug[weights]'"
        ) from error

    def opened() -> Any:
        return safe_open(path, framework="pt").get_tensor

    stored: dict[str, Stored] = {}
    try:
        version = version_of(path)
        file: Any = safe_open(path, framework="pt")  # checks the header against the size of the file
        read = _Mapped(opened, file.get_tensor).read
        end = version.size
        for name in reversed(file.offset_keys()):  # the tensors lie one behind the other, up to the end of the file
            described = file.get_slice(name)
            dtype_name, shape = described.get_dtype(), described.get_shape()
            length = math.prod(shape) * _bits(dtype_name) // 8
            end -= length
            dtype = _DTYPES.get(dtype_name)
            stored[name] = Stored(name, path, version, torch.Size(shape), dtype, dtype_name, read, (end, length))
    except Exception as error:
        raise WeightsError(
            f"{path} is not a whole safetensors file: {error}", hint="It may be truncated: fetch it again."
        ) from error
    return dict(sorted(stored.items()))


def _bits(dtype_name: str) -> int:
    """The bits of an element, from the name of a dtype of safetensors: ``BF16``, ``F8_E4M3``, ``BOOL``."""
    return 8 if dtype_name == "BOOL" else int(re.search(r"\d+", dtype_name)[0])  # type: ignore[index]


def _from_torch(path: Path) -> dict[str, Stored]:
    try:
        version = version_of(path)
        check_archive(path)
        content, is_mapped = _torch_load(path)
    except UsageError as error:
        raise WeightsError(error.message, hint=error.hint) from error
    except Exception as error:
        raise WeightsError(
            f"{path} is not a whole file of torch.save with tensors alone: {type(error).__name__}: {error}".rstrip(),
            hint="It is read with weights_only=True; torch.save(model.state_dict(), path) writes such a file.",
        ) from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise WeightsError(
            f"{path} is not a state_dict: it holds {type_with_article(content)}"
            + (" of other things than tensors" if isinstance(content, Mapping) else ""),
            hint="Save one, torch.save(model.state_dict(), path), or give the mapping itself.",
        )
    sparse = next((name for name, tensor in content.items() if tensor.layout in SPARSE), None)
    if sparse is not None:
        raise WeightsError(f"{shortened(sparse, 200)!r} in {path} is sparse ({content[sparse].layout})", names=[sparse])
    meta = next((name for name, tensor in content.items() if tensor.is_meta), None)
    if meta is not None:
        raise WeightsError(
            f"{shortened(meta, 200)!r} in {path} has no numbers: it was saved from the meta device", names=[meta]
        )

    read = _Mapped(lambda: _torch_load(path)[0].__getitem__, content.__getitem__, not is_mapped).read
    return {
        name: Stored(name, path, version, tensor.shape, tensor.dtype, str(tensor.dtype), read)
        for name, tensor in content.items()
    }


def _torch_load(path: Path) -> tuple[Any, bool]:
    """The content of a file of torch.save, and whether its tensors are mapped to memory: those of the newer format are."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True), True
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True), False


# -- external="safetensors" ---------------------------------------------------------------------------------------------


def in_safetensors(weights: Mapping[str, ir.TensorProtocol], folder: Path) -> dict[str, tuple[str, int, int]]:
    """The tensors whose bytes are in a safetensors file as the model has them: their files, offsets and lengths.

    Args:
        folder: The model's folder; the files must be in it, or in folders of it.
    """
    places: dict[str, tuple[str, int, int]] = {}
    locations: dict[Path, str] = {}
    sources: dict[str, tuple[Stored, bool]] = {n: t.meta[SOURCE] for n, t in weights.items() if SOURCE in t.meta}
    for name, (stored, is_plain) in sources.items():
        tensor = weights[name]
        if stored.place is None:
            continue
        if stored.path not in locations:
            stored.check_unchanged()
            locations[stored.path] = _location(stored.path, folder)
        offset, length = stored.place
        itemsize = max(1, tensor.dtype.bitwidth // 8)
        if not is_plain or not is_large(tensor) or offset % itemsize:
            continue
        if length != tensor.nbytes:
            raise WeightsError(f"the weight {name!r} has {length} bytes in {stored.path}, not {tensor.nbytes}")
        places[name] = (locations[stored.path], offset, length)
    if not locations:
        raise UsageError(
            "external='safetensors' needs weights from safetensors files, and no weight of the model comes from one",
            hint="save(path, weights='model.safetensors', external='safetensors')",
        )
    return places


def _location(file: Path, folder: Path) -> str:
    real, base = os.path.realpath(file), os.path.realpath(folder)
    if os.path.commonpath((real, base)) != base:
        raise SaveError(
            f"the model can't refer to {file}: a model's data is in its own folder, {folder}, or below",
            hint="Save the model beside the safetensors files, or copy or hard-link them there; a link is followed.",
        )
    return Path(os.path.relpath(real, base)).as_posix()
