"""External data: which files the ONNX models of a folder read their weights from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Messages of ONNX's protocol buffer on the way to external data: field number to the message that it holds.
_FIELDS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
_GRAPH = 7
#: No protocol buffer has so many bytes.
_TOO_LARGE = 2**31
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Malformed(Exception):
    """The bytes are not the protocol buffer of a model."""


class References(NamedTuple):
    """What the models of a folder refer to.

    Attributes:
        names: Names of files in the folder that a model refers to.
        unreadable: Files named ``*.onnx`` that cannot be read as models: they may refer to any file.
    """

    names: frozenset[str]
    unreadable: tuple[str, ...] = ()

    def include(self, name: str) -> bool:
        """Whether a model refers to a file."""
        return os.path.normcase(name) in self.names

    def may_include(self, name: str) -> bool:
        """Whether a model refers to a file, or may do so."""
        return bool(self.unreadable) or self.include(name)


def folder_references(folder: Path, model: str) -> References:
    """Reads all models of a folder, backups such as ``model.onnx.bak`` included. Weights inside the files are not read.

    Args:
        folder: The folder.
        model: Name of a model file; files with its ending are models too.
    """
    names: set[str] = set()
    unreadable = []
    suffix = os.path.splitext(model)[1]
    with os.scandir(folder) as entries:
        for entry in entries:
            if ".onnx" not in entry.name and entry.name != model and not (suffix and entry.name.endswith(suffix)):
                continue
            try:
                if not entry.is_file():
                    continue
                found = data_files(Path(entry.path))
            except FileNotFoundError:  # removed since the folder was listed
                continue
            except OSError:
                found = None
            if found is not None:
                names |= found
            elif entry.name.endswith(".onnx"):  # "model.onnx.json" and the like are not models
                unreadable.append(entry.name)
    return References(frozenset(names), tuple(unreadable))


def data_files(path: Path) -> set[str] | None:
    """Normalised locations of a model file's external data; ``None`` if the file is not a complete model.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return set()
        if size >= _TOO_LARGE:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return {os.path.normcase(os.path.normpath(location)) for location in _locations(content)}
            except (_Malformed, UnicodeDecodeError):
                return None


def _locations(content: mmap.mmap) -> Iterator[str]:
    pending = [("Model", 0, len(content))]
    has_graph = False
    while pending:
        message, start, end = pending.pop()
        nested = _FIELDS[message]
        for field, begin, stop in _fields(content, start, end):
            has_graph |= message == "Model" and field == _GRAPH
            kind = nested.get(field)
            if kind == "Entry":
                entry = {f: content[b:s] for f, b, s in _fields(content, begin, stop)}
                if entry.get(1) == b"location":
                    yield entry.get(2, b"").decode()
            elif kind is not None:
                pending.append((kind, begin, stop))
    if not has_graph:
        raise _Malformed


def _fields(content: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of the fields of a message that hold bytes; others are passed over."""
    while start < end:
        key, start = _varint(content, start, end)
        kind = key & 7
        if not key >> 3:  # no field has the number 0: this is another file, of zeros perhaps
            raise _Malformed
        if kind == _BYTES:
            length, start = _varint(content, start, end)
            if start + length > end:
                raise _Malformed
            yield key >> 3, start, start + length
            start += length
        elif kind == _VARINT:
            _, start = _varint(content, start, end)
        elif kind in (_FIXED64, _FIXED32):
            start += 8 if kind == _FIXED64 else 4
        else:
            raise _Malformed
    if start != end:
        raise _Malformed


def _varint(content: mmap.mmap, start: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while start < end and shift < 70:
        byte = content[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
    raise _Malformed
