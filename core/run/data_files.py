"""The data files of a model: their names, and the places of the weights in them.

A data file is unused if its name is in the bytes of no model of the folder: a model that reads ``model.onnx.data`` has this name in
its bytes, wherever the tensor is in it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from onnxplug.errors import UsageError
from onnxplug.run.files import is_abandoned

#: Tensors below this number of bytes stay in the model's file even when the weights go into a data file.
SMALL_TENSOR_BYTES = 1024
#: Offsets of tensors in a data file: tensors of at least a megabyte begin a page, so that they can be mapped.
_ALIGNMENT, _PAGE, _LARGE_TENSOR_BYTES = 64, 4096, 1 << 20
_UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)}
#: No protocol buffer, and so no model, has so many bytes.
_TOO_LARGE = 2**31
#: No model with weights in other files is larger.
_MOST_WITHOUT_WEIGHTS = 1 << 28
#: The ending of a data file's name after the name of the model's file.
_ENDING = r"\.data(\.\d+)?(-\d{5,}-of-\d{5,})?"


class Place(NamedTuple):
    """The place of a tensor: the number of the data file, its offset there and its length."""

    file: int
    offset: int
    length: int


def size_of(text: Any) -> int:
    """The bytes of a size: ``2_000_000``, ``"2GB"`` (a billion bytes each), ``"1.5 GiB"`` (2**30).

    Raises:
        UsageError: It is no size, or less than a byte.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    elif isinstance(text, str) and (
        match := re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    ):
        unit = _UNITS.get(match[2].upper())
        if unit is None:
            raise UsageError(f"the size {text!r} has the unknown unit {match[2]!r}", hint="Write it as 2GB or 500MB.")
        size = int(float(match[1]) * unit)
    else:
        raise UsageError(f"a size is a number of bytes or a text such as '2GB', got {text!r}")
    if size < 1:
        raise UsageError(f"a file of {text!r} can't hold anything", hint="Write the size as 2GB or 500MB.")
    return size


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor is written to the data file, if there is one."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes >= SMALL_TENSOR_BYTES


def places_of(weights: Mapping[str, ir.TensorProtocol], limit: int | None) -> dict[str, Place]:
    """Places for tensors in data files, in their order.

    Args:
        weights: The tensors by name.
        limit: The largest size of a file; ``None`` for a single file.

    Raises:
        UsageError: A tensor is larger than the limit.
    """
    places: dict[str, Place] = {}
    file = end = 0
    for name, tensor in weights.items():
        length = tensor.nbytes
        offset = end + -end % (_PAGE if length >= _LARGE_TENSOR_BYTES else _ALIGNMENT)
        if limit is not None and offset + length > limit:
            if length > limit:
                raise UsageError(
                    f"the weight {name!r} has {length} bytes, more than the {limit} that shard= allows a file",
                    hint="A tensor lies in one file: choose a larger size.",
                )
            file, offset = file + 1, 0
        places[name] = Place(file, offset, length)
        end = offset + length
    return places


# -- files -------------------------------------------------------------------------------------------------------------


def new_data_files(model: Path, count: int) -> list[IO[bytes]]:
    """New files for a model's data: ``NAME.data``, or the first of ``NAME.data.2``, … that isn't there and that no model mentions.

    Args:
        model: The model's file.
        count: The number of files: of several, each has ``-00001-of-00003`` behind its name.

    Raises:
        OSError: They can't be made.
    """
    mentioned, _ = mentioned_files(model, _models_beside(model))
    for number in itertools.count(1):
        stem = f"{model.name}.data" + (f".{number}" if number > 1 else "")
        names = [f"{stem}-{part:05d}-of-{count:05d}" for part in range(1, count + 1)] if count > 1 else [stem]
        if any(os.path.lexists(model.parent / name) or name in mentioned for name in names):
            continue
        files: list[IO[bytes]] = []
        try:
            for name in names:
                files.append(open(model.parent / name, "xb"))  # noqa: SIM115 - the caller closes it
        except BaseException as error:
            for file in files:
                file.close()
                os.unlink(file.name)
            if not isinstance(error, FileExistsError):  # another process was quicker
                raise
        else:
            return files
    raise AssertionError("there are names without end")


def remove_unread(model: Path, replaced: Collection[str], kept: Collection[str]) -> None:
    """Removes data files that no model of the folder mentions: of the replaced model, and of processes killed a day ago.

    A newer file may be of a process that saves the same model now: its model, which is not there yet, will mention it.

    Args:
        model: The model's file.
        replaced: The data files of the model that was there.
        kept: Names of files that stay.
    """
    with os.scandir(model.parent) as entries:
        names = [
            entry.name
            for entry in entries
            if is_data_file(entry.name, model)
            and entry.name not in kept
            and entry.is_file(follow_symlinks=False)
            and os.access(entry, os.W_OK)
            and (entry.name in replaced or is_abandoned(entry.path))
        ]
    mentioned, is_complete = mentioned_files(model, _models_beside(model) if names else ())
    for name in names:
        if is_complete and name not in mentioned:
            with contextlib.suppress(OSError):
                os.unlink(model.parent / name)


def is_data_file(name: str, model: Path) -> bool:
    """Whether a file's name is of the form that :func:`new_data_files` gives."""
    return re.fullmatch(re.escape(model.name) + _ENDING, name) is not None


def mentioned_files(model: Path, readers: Iterable[Path]) -> tuple[set[str], bool]:
    """The names of a model's data files in the bytes of files, and whether all of these could be read.

    Args:
        model: The model's file.
        readers: The files.
    """
    pattern = re.compile(re.escape(os.fsencode(model.name)) + _ENDING.encode())
    names, is_complete = set(), True
    for path in readers:
        try:
            with open(path, "rb") as file:
                # An empty file can't be mapped, and no model has as many bytes as a protocol buffer can't have.
                if 0 < os.fstat(file.fileno()).st_size < _TOO_LARGE:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                        names |= {os.fsdecode(match[0]) for match in pattern.finditer(content)}
        except FileNotFoundError:  # removed since the folder was listed
            continue
        except OSError:
            is_complete = False
    return names, is_complete


def _models_beside(model: Path) -> list[Path]:
    """The models of a model's folder, itself and backups such as ``model.onnx.bak`` included."""
    with os.scandir(model.parent) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if (".onnx" in entry.name or entry.name.endswith(model.suffix or model.name))
            and not re.search(_ENDING + "$", entry.name)
            and entry.is_file()
        ]


def data_files(model: Path) -> set[str]:
    """The locations of the external data of a model's file; none of a file with so many bytes that it has the weights itself.

    Raises:
        OSError: The file can't be read.
    """
    proto = onnx.ModelProto()
    if os.path.getsize(model) <= _MOST_WITHOUT_WEIGHTS:
        with contextlib.suppress(DecodeError):  # it is no model
            proto.ParseFromString(model.read_bytes())
    entries = (entry for tensor in proto.graph.initializer for entry in tensor.external_data)
    return {os.path.normpath(entry.value) for entry in entries if entry.key == "location"}
