"""Where the weights of a model lie: which go into other files than the model's own, and where there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from onnxplug.errors import SaveError, UsageError, WeightsError
from onnxplug.run.weights import SOURCE, Source

#: Tensors below this stay in the model's file even when the weights go beside it.
SMALL_TENSOR_BYTES = 1024
#: Offsets of tensors in a data file: those of at least a megabyte begin a page, so that they can be mapped.
_ALIGNMENT, _PAGE, _LARGE_TENSOR_BYTES = 64, 4096, 1 << 20
_UNITS = {"": 1, "B": 1, **{f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}}
_UNITS |= {f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)}


class Place(NamedTuple):
    """Where a tensor lies: the number of the data file, its offset there and its length."""

    file: int
    offset: int
    length: int


def size_of(text: Any) -> int:
    """The bytes of a size: ``2_000_000``, ``"2GB"`` (a billion bytes each), ``"1.5 GiB"`` (2**30).

    Raises:
        UsageError: It is none, or less than a byte.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    elif isinstance(text, str) and (
        found := re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    ):
        unit = _UNITS.get(found[2].upper())
        if unit is None:
            raise UsageError(f"the size {text!r} has the unknown unit {found[2]!r}", hint="Write it as 2GB or 500MB.")
        size = int(float(found[1]) * unit)
    else:
        raise UsageError(f"a size is a number of bytes or a text such as '2GB', got {text!r}")
    if size < 1:
        raise UsageError(f"a file of {text!r} can't hold anything", hint="Write the size as 2GB or 500MB.")
    return size


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor is written to a data file, where there is one."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes >= SMALL_TENSOR_BYTES


def places_of(weights: Mapping[str, ir.TensorProtocol], limit: int | None) -> dict[str, Place]:
    """Places for tensors in data files, in their order.

    Args:
        weights: The tensors by name.
        limit: The largest size of a file; ``None``: all are in one.

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


def part_name(number: int, count: int) -> str:
    """What is added to the name of a data file where there are several: ``-00001-of-00003``."""
    return "" if count == 1 else f"-{number + 1:05d}-of-{count:05d}"


def in_safetensors(weights: Mapping[str, ir.TensorProtocol], folder: Path) -> dict[str, tuple[str, int, int]]:
    """The tensors whose bytes are in a safetensors file as the model has them: their files, offsets and lengths.

    Args:
        weights: The tensors by name.
        folder: The model's folder; the files must be in it, or in folders of it.

    Raises:
        UsageError: None of the tensors comes from such a file.
        SaveError: A file is elsewhere.
        WeightsError: A file has changed.
    """
    found: dict[str, tuple[str, int, int]] = {}
    locations: dict[Path, str] = {}
    sources: dict[str, Source] = {n: t.meta[SOURCE] for n, t in weights.items() if SOURCE in t.meta}
    for name, source in sources.items():
        stored, tensor = source.stored, weights[name]
        if stored.place is None:
            continue
        if stored.path not in locations:
            stored.check_unchanged()
            locations[stored.path] = _location(stored.path, folder)
        offset, length = stored.place
        itemsize = max(1, tensor.dtype.bitwidth // 8)
        if not source.is_plain or not is_large(tensor) or offset % itemsize:
            continue
        if length != tensor.nbytes:
            raise WeightsError(f"the weight {name!r} has {length} bytes in {stored.path}, not {tensor.nbytes}")
        found[name] = (locations[stored.path], offset, length)
    if not locations:
        raise UsageError(
            "external='safetensors' needs weights from safetensors files, and no weight of the model comes from one",
            hint="save(path, weights='model.safetensors', external='safetensors')",
        )
    return found


def _location(file: Path, folder: Path) -> str:
    real, base = os.path.realpath(file), os.path.realpath(folder)
    if os.path.commonpath((real, base)) != base:
        raise SaveError(
            f"the model can't refer to {file}: a model's data is in its own folder, {folder}, or below",
            hint="Save the model beside the safetensors files, or copy or hard-link them there; a link is followed.",
        )
    return Path(os.path.relpath(real, base)).as_posix()
