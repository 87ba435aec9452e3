"""Saving: complete or not at all. What stood at the destination stays whole until the new model takes its place."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]

from onnxplug.errors import SaveError, WeightsError
from onnxplug.run.files import claim_data_file, flush, flush_folder, is_data_file, remove_if, staged_file
from onnxplug.run.protobuf import to_proto
from onnxplug.run.references import References, data_files, folder_references
from onnxplug.run.weights import check_numbers

#: Bytes of weights above which they go into a file of their own; protobuf ends at 2 GB.
LARGE_MODEL_BYTES = 1536 * 1024 * 1024
#: Tensors below this stay in the model's file even when the weights go beside it.
SMALL_TENSOR_BYTES = 1024
#: Offsets of tensors in a data file: those of at least a megabyte begin a page, so that they can be mapped.
_ALIGNMENT, _PAGE, _LARGE_TENSOR_BYTES = 64, 4096, 1 << 20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return _bytes(_weights(model))


def _weights(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    return {name: v.const_value for name, v in model.graph.initializers.items() if v.const_value is not None}


def _bytes(weights: Mapping[str, ir.TensorProtocol]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def save_model(
    model: ir.Model,
    destination: Any,
    *,
    external_data: bool | None = None,
    without: Collection[str] = (),
    keep_initializers_as_inputs: bool = False,
) -> None:
    """Writes a model, which is left as it is.

    A symbolic link at the destination stays one: the file that it points to is replaced, with its permissions kept.
    External data is written to ``NAME.data`` beside the model; while a model in the folder refers to a file of this name,
    to ``NAME.data.2`` and so on. Data that the replaced model used is removed unless another model refers to it.

    Args:
        model: The model.
        destination: A path, or a binary file object (single file).
        external_data: Weights in a file of their own; ``None`` decides by size.
        without: Names of initializers that are not stored.
        keep_initializers_as_inputs: List the weights as inputs too.

    Raises:
        SaveError: It can't be written: no such folder, not a regular file, no permission, no room.
        WeightsError: A weight has no numbers.
    """
    weights = {name: tensor for name, tensor in _weights(model).items() if name not in without}
    stored = [value for name, value in model.graph.initializers.items() if name not in without]
    check_numbers(stored, "the model can't be saved")
    inputs = list(model.graph.inputs)
    if keep_initializers_as_inputs:
        inputs += [v for v in model.graph.initializers.values() if not v.is_graph_input()]
    view = _ModelView(model, weights, inputs)
    if hasattr(destination, "write"):
        if external_data:
            raise SaveError("external data needs a file path, not a file object")
        _write_object(destination, view.serialize())
        return
    size = _bytes(weights)
    path = check_destination(destination, size)
    saver = _Saver(path)
    try:
        external = _external(weights) if external_data or (external_data is None and size > LARGE_MODEL_BYTES) else []
        if external:
            saver.save_with_data(view, external)
            _warn_of_distant_link(destination, path)
        else:
            saver.save(view)
    except OSError as error:
        raise _save_error(path, error, size, saver.replaced) from error
    except UnicodeError as error:
        raise SaveError(f"can't write {str(path)!r}: its name is not UTF-8, which external data needs") from error
    finally:
        saver.clean_up()


def check_destination(destination: Any, size: int = 0) -> Path:
    """The regular file that a path names, its symbolic links followed; it need not exist yet.

    Args:
        destination: The path.
        size: Bytes to be written there, if known.

    Raises:
        SaveError: A model can't be written there.
    """
    given = os.fsdecode(os.fspath(destination))
    try:
        found: os.stat_result | None = os.stat(given)
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except (OSError, ValueError) as error:
        raise SaveError(f"can't write {given}: {error}") from error
    path = Path(os.path.realpath(given))
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
        raise SaveError(f"can't write {given}: it is {kind}", hint="Give the name of a file.")
    if found is not None and not path.is_file():  # for example /dev/fd/3 of a removed file
        raise SaveError(f"can't write {given}: it has no name in a folder", hint="Give the name of a file.")
    folder = path.parent
    if not folder.is_dir():
        raise SaveError(f"can't write {given}: there is no folder {folder}", hint=f"Make it: mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SaveError(f"can't write {given}: no permission to write in {folder}")
    if found is not None and not os.access(path, os.W_OK):
        raise SaveError(f"can't write {given}: the file is write-protected", hint="Remove it, or save elsewhere.")
    free = shutil.disk_usage(folder).free
    if size > free:
        raise SaveError(
            f"can't write {given}: it needs {size / 1e6:.0f} MB and {folder} has {free / 1e6:.0f} MB free",
            hint="Free some room, or save elsewhere.",
        )
    return path


def _warn_of_distant_link(destination: Any, path: Path) -> None:
    given = Path(os.fsdecode(os.fspath(destination)))
    if os.path.realpath(given.parent) != str(path.parent):
        warnings.warn(
            f"{given} is a link to {path}, and its weights are in the folder of {path}: ONNX Runtime loads it by that name only",
            stacklevel=4,
        )


def _save_error(path: Path, error: OSError, size: int, replaced: bool) -> SaveError:
    hint = "The new model is in place." if replaced else "What was there before is untouched."
    if error.errno == errno.ENOSPC:
        return SaveError(
            f"can't write {path}: the disk is full ({size / 1e6:.0f} MB of weights)",
            hint=f"{hint} Free some room, or save elsewhere.",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SaveError(f"can't write {path}: {error.strerror}", hint=hint)
    return SaveError(f"can't write {path}: {error}", hint=hint)


def _write_object(file: Any, content: bytes) -> None:
    """Writes to a file object, also to one that takes a part at a time.

    Raises:
        SaveError: It takes text, or it can't be written to.
    """
    try:
        while content:
            written = file.write(content)
            if not isinstance(written, int):
                if isinstance(file, io.RawIOBase):
                    raise SaveError("can't write to the file object: it does not block, and is full")
                return
            content = content[written:]
    except TypeError as error:
        raise SaveError(
            f"can't write to the file object: {error}", hint="Open it for bytes: open(path, 'wb')."
        ) from error
    except (OSError, ValueError) as error:
        raise SaveError(f"can't write to the file object: {error}") from error


class _Saver:
    """One save to a path.

    Attributes:
        replaced: Whether the new model stands at the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = False
        self._files: list[IO[bytes]] = []
        self._mine: set[str] = set()  # data files of this save
        self._old: set[str] = set()  # those of the model that it replaces

    def save(self, view: _ModelView) -> None:
        """Writes the model as a single file."""
        self._finish(view, view.serialize())

    def save_with_data(self, view: _ModelView, external: Sequence[str]) -> None:
        """Writes the model with the named weights in a data file."""
        folder = self.path.parent
        live, old = _live_data(view, folder), sorted(self._replaced_data())
        claim = claim_data_file(folder, self.path.name, lambda name: name in live)
        self._files.append(claim)
        data = Path(claim.name)
        data.name.encode()  # the location is text in UTF-8
        if not os.fstat(claim.fileno()).st_size:
            self._mine.add(data.name)
        staged = self._stage(folder / old[0] if old else self.path)
        locations = {name: _append(staged, view.weights[name]) for name in external}
        flush(staged)
        content = view.serialize(data.name, locations)
        os.replace(staged.name, data)
        self._mine.add(data.name)
        self._finish(view, content)

    def _stage(self, like: Path) -> IO[bytes]:
        file = staged_file(self.path.parent)
        self._files.append(file)
        with contextlib.suppress(FileNotFoundError):
            _copy_permissions(like, file)
        return file

    def _replaced_data(self) -> set[str]:
        try:
            return {name for name in data_files(self.path) or () if is_data_file(name, self.path.name)}
        except OSError:
            return set()

    def _finish(self, view: _ModelView, content: bytes) -> None:
        staged = self._stage(self.path)
        staged.write(content)
        flush(staged)
        flush_folder(self.path.parent)  # the data file is renamed before the model
        self._old = self._replaced_data() - _live_data(view, self.path.parent)
        os.replace(staged.name, self.path)
        self.replaced = True
        flush_folder(self.path.parent)

    def clean_up(self) -> None:
        """Closes all files, and removes those that the model at the path does not need."""
        for file in self._files:
            if Path(file.name).name not in self._mine:
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.fstat(file.fileno()), os.lstat(file.name)):
                        os.unlink(file.name)
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        for name in sorted(self._mine):
            remove_if(self.path.parent / name, lambda data: not self._references().include(data.name))
        for name in sorted(self._old - self._mine):
            remove_if(self.path.parent / name, self._is_unused)

    def _references(self) -> References:
        return folder_references(self.path.parent, self.path.name)

    def _is_unused(self, data: Path) -> bool:
        references = self._references()
        if references.unreadable and not references.include(data.name):
            warnings.warn(
                f"{data} is kept: {', '.join(references.unreadable)} can't be read as a model and may refer to it",
                stacklevel=6,
            )
        return not references.may_include(data.name)


def _copy_permissions(source: Path, file: IO[bytes]) -> None:
    """Gives a new file the mode and, where the system lets us, the owner of another one."""
    status = os.stat(source)
    if hasattr(os, "fchown"):
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
    os.chmod(file.name, stat.S_IMODE(status.st_mode))


def _external(weights: Mapping[str, ir.TensorProtocol]) -> list[str]:
    return [n for n, t in weights.items() if t.nbytes >= SMALL_TENSOR_BYTES and t.dtype != ir.DataType.STRING]


def _live_data(view: _ModelView, folder: Path) -> set[str]:
    """Files of the folder that the model itself still reads its weights from."""
    paths = {Path(os.path.realpath(t.path)) for t in view.weights.values() if isinstance(t, ir.ExternalTensor)}
    return {path.name for path in paths if path.parent == folder}


def _append(file: IO[bytes], tensor: ir.TensorProtocol) -> tuple[int, int]:
    """Writes a tensor's bytes; returns their offset and length."""
    alignment = _PAGE if tensor.nbytes >= _LARGE_TENSOR_BYTES else _ALIGNMENT
    file.write(bytes(-file.tell() % alignment))
    offset = file.tell()
    if tensor.dtype.bitwidth < 8:
        file.write(tensor.tobytes())
    else:
        file.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)
    return offset, file.tell() - offset


class _ModelView:
    """A model with the weights and inputs that are to be written.

    Attributes:
        weights: The initializers' tensors by name.
    """

    def __init__(self, model: ir.Model, weights: Mapping[str, ir.TensorProtocol], inputs: Sequence[ir.Value]) -> None:
        self._model = model
        self.weights = weights
        self._inputs = inputs

    def serialize(self, data: str = "", locations: Mapping[str, tuple[int, int]] | None = None) -> bytes:
        """The model's protocol buffer; weights with a location (offset, length) are in the file ``data``.

        Raises:
            SaveError: It is larger than protocol buffers can be, or a weight has no content.
        """
        tensors: dict[str, ir.TensorProtocol] = {}
        for name, tensor in self.weights.items():
            place = (locations or {}).get(name)
            if place is not None:
                tensor = ir.ExternalTensor(data, *place, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name)
            elif isinstance(tensor, ir.ExternalTensor):  # its location is relative to the file that it came from
                tensor = ir.Tensor(tensor.numpy(), tensor.dtype, shape=tensor.shape, name=name)
            tensors[name] = tensor
        proto = onnx.ModelProto()
        try:
            to_proto(self._model, proto, tensors=tensors, inputs=self._inputs)
            return proto.SerializeToString()
        except WeightsError:
            raise
        except (ir.serde.SerdeError, EncodeError, ValueError) as error:
            hint = "A model over 2 GB needs external_data=True." if proto.ByteSize() >= 2**31 else None
            raise SaveError(f"the model can't be written as a protocol buffer: {error}", hint=hint) from error


def to_bytes(model: ir.Model) -> bytes:
    """The model as one protobuf."""
    return _ModelView(model, _weights(model), list(model.graph.inputs)).serialize()
