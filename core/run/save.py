"""Saving: staged beside the destination, flushed, the model's file replaced last."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxplug.errors import SaveError

#: Bytes of weights above which they go into a file of their own; protobuf ends at 2 GB.
LARGE_MODEL_BYTES = 1536 * 1024 * 1024
#: Tensors below this stay in the model's file even when the weights go beside it.
SMALL_TENSOR_BYTES = 1024


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def save_model(model: ir.Model, destination: Any, *, external_data: bool | None = None) -> None:
    """Writes a model; what stood at the destination stays whole until the new file is complete.

    Args:
        model: The model; it is left as it is.
        destination: A path, or a binary file object (single file).
        external_data: Weights in a file of their own, named after the model and its content; ``None`` decides by size.

    Raises:
        SaveError: It can't be written: no such folder, no permission, no room.
    """
    size = weight_bytes(model)
    if hasattr(destination, "write"):
        if external_data:
            raise SaveError("external data needs a file path, not a file object")
        destination.write(ir.to_proto(model).SerializeToString())
        return
    path = Path(os.fspath(destination))
    _check_destination(path, size)
    staging: list[Path] = []
    try:
        if external_data or (external_data is None and size > LARGE_MODEL_BYTES):
            _save_external(model, path, staging)
        else:
            _save_single(model, path, staging)
    except OSError as error:
        raise _save_error(path, error, size) from error
    except ValueError as error:  # protobuf's own limit
        raise SaveError(f"can't write {path}: {error}", hint="A model over 2 GB needs external_data=True.") from error
    finally:
        for leftover in staging:
            with contextlib.suppress(OSError):
                leftover.unlink()


def _check_destination(path: Path, size: int) -> None:
    folder = path.parent
    if path.is_dir():
        raise SaveError(f"can't write {path}: it is a folder", hint="Give the name of a file in it.")
    if not folder.is_dir():
        raise SaveError(f"can't write {path}: there is no folder {folder}", hint=f"Make it: mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        raise SaveError(f"can't write {path}: no permission to write in {folder}")
    free = shutil.disk_usage(folder).free
    if size > free:
        raise SaveError(
            f"can't write {path}: it needs {size / 1e6:.0f} MB and {folder} has {free / 1e6:.0f} MB free",
            hint="Free some room, or save elsewhere.",
        )


def _save_error(path: Path, error: OSError, size: int) -> SaveError:
    if error.errno == errno.ENOSPC:
        return SaveError(
            f"can't write {path}: the disk is full ({size / 1e6:.0f} MB of weights)",
            hint="What was there before is untouched. Free some room, or save elsewhere.",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SaveError(f"can't write {path}: {error.strerror}", hint="What was there before is untouched.")
    return SaveError(f"can't write {path}: {error}", hint="What was there before is untouched.")


def _stage(path: Path, suffix: str, staging: list[Path]) -> Path:
    staged = path.parent / f".{path.name}.{secrets.token_hex(4)}{suffix}.tmp"
    staging.append(staged)
    return staged


def _flush(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(staged: Path, path: Path, staging: list[Path]) -> None:
    os.replace(staged, path)
    staging.remove(staged)
    if os.name == "posix":
        _flush(path.parent)


def _save_single(model: ir.Model, path: Path, staging: list[Path]) -> None:
    staged = _stage(path, "", staging)
    old = _data_files(path)
    with open(staged, "wb") as file:
        file.write(ir.to_proto(model).SerializeToString())
        file.flush()
        os.fsync(file.fileno())
    _replace(staged, path, staging)
    _remove(old)


def _save_external(model: ir.Model, path: Path, staging: list[Path]) -> None:
    old = _data_files(path)
    # A name of its own for each save: the old model keeps its own data until the new one has taken its place.
    data = path.parent / f"{path.name}.{secrets.token_hex(4)}.data"
    staging.append(data)
    with _initializers_restored(model):
        external = ir.external_data.convert_tensors_to_external(
            [
                v.const_value
                for v in model.graph.initializers.values()
                if v.const_value is not None and v.const_value.nbytes >= SMALL_TENSOR_BYTES
            ],
            path.parent,
            data.name,
        )
        named = {tensor.name: tensor for tensor in external}
        for name, value in model.graph.initializers.items():
            if name in named:
                value.const_value = named[name]
        content = ir.to_proto(model).SerializeToString()
    if data.exists():
        _flush(data)
    staged = _stage(path, "", staging)
    with open(staged, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _replace(staged, path, staging)
    staging.remove(data)
    _remove([f for f in old if f != data])


@contextlib.contextmanager
def _initializers_restored(model: ir.Model) -> Iterator[None]:
    before = [(value, value.const_value) for value in model.graph.initializers.values()]
    for value, tensor in before:
        if tensor is not None and tensor.name != value.name:
            with contextlib.suppress(AttributeError):
                tensor.name = value.name
    try:
        yield
    finally:
        for value, tensor in before:
            value.const_value = tensor


def _data_files(path: Path) -> list[Path]:
    """Data files that earlier saves to this path left beside it."""
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.data")
    return [f for f in path.parent.iterdir() if pattern.fullmatch(f.name)]


def _remove(files: list[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def to_bytes(model: ir.Model) -> bytes:
    """The model as one protobuf."""
    buffer = io.BytesIO()
    save_model(model, buffer)
    return buffer.getvalue()
