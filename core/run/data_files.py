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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import onnx_ir as ir

from onnxplug.errors import UsageError
from onnxplug.run.files import remove_leftovers

#: Tensors below this number of bytes stay in the model's file even when the weights go into a data file.
SMALL_TENSOR_BYTES = 1024
#: Offsets of tensors in a data file: tensors of at least a megabyte begin a page, so that they can be mapped.
_ALIGNMENT, _PAGE, _LARGE_TENSOR_BYTES = 64, 4096, 1 << 20
_UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)}
#: No protocol buffer, and so no model, has so many bytes.
_TOO_LARGE = 2**31
#: The ending of a data file's name after the name of the model's file.
_ENDING = r"\.data(\.\d+)?(-\d{5,}-of-\d{5,})?"
#: An entry of external data as protocol buffers have it, up to the location's length.
_LOCATION = re.compile(rb"\n\x08location\x12([\x00-\x7f]|[\x80-\xff][\x00-\x7f])", re.DOTALL)


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
    mentioned = _Mentions(model)
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


def remove_unread(model: Path, kept: Collection[str]) -> None:
    """Removes a model's data files that no model of the folder mentions: of the replaced model, and of killed processes.

    A process that saves keeps a staged file from before it makes data files until its model mentions them. So a data file that
    exists before the search for staged files, and that no model mentions after it, is not read by a model that is being saved
    either. While another process saves the same model, nothing is removed: that process does it.

    Args:
        model: The model's file.
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
        ]
    if not names or remove_leftovers(model):
        return
    mentioned = _Mentions(model)
    for name in names:
        if not mentioned.may_include(name):
            with contextlib.suppress(OSError):
                os.unlink(model.parent / name)


def is_data_file(name: str, model: Path) -> bool:
    """Whether a file's name is of the form that :func:`new_data_files` gives."""
    return re.fullmatch(re.escape(model.name) + _ENDING, name) is not None


class _Mentions:
    """The names of a model's data files that the models of its folder mention, backups such as ``model.onnx.bak`` included.

    Args:
        model: The model's file; files with its ending are models too.
        alone: Whether only this model is read.
    """

    def __init__(self, model: Path, *, alone: bool = False) -> None:
        self._texts: set[bytes] = set()
        self._is_complete = True
        # Bytes that may follow the name are matched too: the beginning of a mention counts.
        pattern = re.compile(re.escape(os.fsencode(model.name)) + rb"\.data[-.\dof]{0,40}")
        for path in [model] if alone else _models_beside(model):
            try:
                with _mapped(path) as content:
                    self._texts.update(pattern.findall(content))
            except FileNotFoundError:  # removed since the folder was listed
                continue
            except OSError:
                self._is_complete = False

    def __contains__(self, name: str) -> bool:
        text = os.fsencode(name)
        # A point or a dash begins no field of a protocol buffer: the name goes on, and is another name.
        return any(m.startswith(text) and m[len(text) : len(text) + 1] not in (b".", b"-") for m in self._texts)

    def may_include(self, name: str) -> bool:
        """Whether a model mentions a file, or can't be read and may do so."""
        return not self._is_complete or name in self


def is_mentioned(model: Path, name: str) -> bool:
    """Whether a model's file mentions a data file, or may do so."""
    return _Mentions(model, alone=True).may_include(name)


def _models_beside(model: Path) -> list[Path]:
    with os.scandir(model.parent) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if (".onnx" in entry.name or entry.name.endswith(model.suffix or model.name))
            and not re.search(_ENDING + "$", entry.name)
            and entry.is_file()
        ]


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    """The bytes of a model's file; empty where it is empty or larger than a model can be."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 < size < _TOO_LARGE:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def data_files(model: Path) -> set[str]:
    """The locations of the external data of a model's file; the weights in it are not read.

    Raises:
        OSError: The file can't be read.
    """
    with _mapped(model) as content:
        locations = set()
        for match in _LOCATION.finditer(content):
            length = match[1]
            end = match.end() + (length[0] & 127) + ((length[1] << 7) if len(length) > 1 else 0)
            locations.add(os.path.normpath(content[match.end() : end].decode("utf-8", "surrogateescape")))
        return locations
