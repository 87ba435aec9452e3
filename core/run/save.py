"""Saving: complete or not at all. The file at the destination stays whole until the new model replaces it.

The steps of a save; a process may be killed at any of them:

1. The model's file is begun under a hidden name (``files.py``).
2. Weights outside of the model's file are written to new files, whose names no model of the folder mentions, and flushed.
3. The model's file is written, which mentions them, and flushed.
4. ``os.replace`` gives it the name of the model. Before this the old model is there with its own data, which nothing has touched;
   after it the new model with its own data.
5. The data files of the old model are removed, unless another model of the folder mentions them; so are data files that no model
   mentions and nobody has written for a day: files of saves that were killed.

So no model is ever there with weights of another model. Files that a kill leaves until the next save are read by no model.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import onnx_ir as ir

from onnxplug import logs
from onnxplug.errors import SaveError, UsageError
from onnxplug.kinds import check_kind, check_path
from onnxplug.packages import load
from onnxplug.run.data_files import (
    Place,
    is_large,
    mentioned_files,
    new_data_files,
    places_of,
    remove_unread,
    size_of,
)
from onnxplug.run.files import flush, flush_folder, staged
from onnxplug.run.protobuf import content, pieces
from onnxplug.run.weights import SOURCE, check_numbers
from onnxplug.warn import warn

_LOGGER = logs.logger("save")
#: Called with the bytes that are written so far, and the bytes of the whole.
Progress = Callable[[int, int], None]
#: Bytes that are written at a time.
_CHUNK_BYTES = 1 << 24
#: Bytes of weights above which they go into a file of their own; protobuf ends at 2 GB.
LARGE_MODEL_BYTES = 1536 * 1024 * 1024

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


def _weights(model: ir.Model, instead: Mapping[ir.Value, ir.TensorProtocol] | None = None) -> dict[str, Any]:
    """The initializers' tensors by name; tensors of ``instead`` go first."""
    tensors = {}
    for name, value in model.graph.initializers.items():
        tensor = (instead or {}).get(value, value.const_value)
        if tensor is not None:
            tensors[name] = tensor
    return tensors


def _bytes(weights: Mapping[str, ir.TensorProtocol]) -> int:
    return sum(tensor.nbytes for tensor in weights.values() if tensor.dtype != ir.DataType.STRING)


def save_model(
    model: ir.Model,
    destination: Any,
    *,
    external_data: bool | None = None,
    without: Collection[str] = (),
    keep_initializers_as_inputs: bool = False,
    weights: Mapping[ir.Value, ir.TensorProtocol] | None = None,
    shard: int | str | None = None,
    external: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a model, which is left as it is.

    A symbolic link at the destination stays: the file that it points to is replaced, with its permissions kept. External data
    is written to ``NAME.data`` in the model's folder; while a model in the folder refers to a file of this name, to
    ``NAME.data.2`` and so on. Data of the replaced model is removed unless another model refers to it.

    Args:
        model: The model.
        destination: A path, or a binary file object (single file).
        external_data: Weights in a file of their own; ``None`` decides by size.
        without: Names of initializers that are not stored.
        keep_initializers_as_inputs: List the weights as inputs too.
        weights: Contents of initializers, instead of those in the model.
        shard: The largest size of a data file.
        external: ``"safetensors"``: tensors that lie in safetensors files in the model's form stay there.
        progress: Called with the bytes that are written.

    Raises:
        SaveError: It can't be written: no such folder, not a regular file, no permission, no room.
        UsageError: Arguments are malformed, or contradict each other.
        WeightsError: A weight has no numbers, or can't be read from its file.
    """
    limit = check_settings(external_data, shard=shard, external=external)
    if limit is not None or external is not None:
        external_data = True
    chosen = {name: tensor for name, tensor in _weights(model, weights).items() if name not in without}
    stored = [value for name, value in model.graph.initializers.items() if name not in without]
    check_numbers((value for value in stored if value not in (weights or {})), "the model can't be saved")
    inputs = list(model.graph.inputs)
    if keep_initializers_as_inputs:
        inputs += [v for v in model.graph.initializers.values() if not v.is_graph_input()]
    if hasattr(destination, "write"):
        if external_data:
            raise SaveError("external data needs a file path, not a file object")
        for piece in pieces(model, chosen, inputs):
            _write_object(destination, piece)
        return
    path = check_destination(destination)
    _check_sources(path, chosen)
    linked = load("external=")(chosen, path.parent) if external is not None else {}
    written = {name: tensor for name, tensor in chosen.items() if name not in linked}
    size = _bytes(written)
    beside: dict[str, Place] = {}
    if external_data or (external_data is None and size > LARGE_MODEL_BYTES):
        beside = places_of({n: t for n, t in written.items() if is_large(t)}, limit)
    _LOGGER.debug("%s: %d bytes of weights, files beside it: %d", path, size, len({p.file for p in beside.values()}))
    _Saver(path, partial(pieces, model, chosen, inputs), chosen, progress).save(beside, linked, size)
    if beside or linked:
        _warn_of_distant_link(destination, path)


def check_settings(
    external_data: bool | None = None, include_initializers: bool = True, shard: Any = None, external: Any = None
) -> int | None:
    """Checks the arguments of :func:`save_model` before anything is done; returns the largest size of a data file.

    Raises:
        UsageError: An argument is malformed, or two contradict each other.
    """
    check_kind("external_data", external_data, (bool, type(None)), "True, False or None")
    if external not in (None, "safetensors"):
        raise UsageError(f"external= takes 'safetensors' or None, got {external!r}")
    limit = size_of(shard) if shard is not None else None
    for name, value in (("shard", shard), ("external", external)):
        if value is not None and external_data is False:
            raise UsageError(f"{name}= can't be given together with external_data=False, which makes a single file")
        if value is not None and not include_initializers:
            raise UsageError(
                f"{name}= can't be given together with include_initializers=False, which writes no weights"
            )
    return limit


def _check_sources(path: Path, weights: Mapping[str, ir.TensorProtocol]) -> None:
    files = {tensor.meta[SOURCE][0].path for tensor in weights.values() if SOURCE in tensor.meta}
    if any(os.path.realpath(file) == str(path) for file in files):
        raise SaveError(f"can't write {path}: its weights are read from this file", hint="Save elsewhere.")


def check_destination(destination: Any, size: int = 0) -> Path:
    """The regular file that a path names, its symbolic links followed; it need not exist yet.

    Args:
        destination: The path.
        size: Bytes to be written there, if known.

    Raises:
        SaveError: A model can't be written there.
    """
    check_path("destination", destination)
    name = os.fsdecode(os.fspath(destination))
    try:
        status: os.stat_result | None = os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        status = None
    except (OSError, ValueError) as error:
        raise SaveError(f"can't write {name}: {error}") from error
    path = Path(os.path.realpath(name))
    if status is not None and not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise SaveError(f"can't write {name}: it is {kind}", hint="Give the name of a file.")
    if status is not None and not path.is_file():  # for example /dev/fd/3 of a removed file
        raise SaveError(f"can't write {name}: it has no name in a folder", hint="Give the name of a file.")
    folder = path.parent
    if not folder.is_dir():
        raise SaveError(f"can't write {name}: there is no folder {folder}", hint=f"Make it: mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SaveError(f"can't write {name}: no permission to write in {folder}")
    if status is not None and not os.access(path, os.W_OK):
        raise SaveError(f"can't write {name}: the file is write-protected", hint="Remove it, or save elsewhere.")
    free = shutil.disk_usage(folder).free
    if size > free:
        from rich.filesize import decimal

        raise SaveError(
            f"can't write {name}: it needs {decimal(size)} and {folder} has {decimal(free)} free",
            hint="Free some room, or save elsewhere.",
        )
    return path


def _warn_of_distant_link(destination: Any, path: Path) -> None:
    link = Path(os.fsdecode(os.fspath(destination)))
    if os.path.realpath(link.parent) != str(path.parent):
        warn(
            f"{link} is a link to {path}, and its weights are in the folder of {path}: ONNX Runtime loads it by that name only"
        )


def _write_object(file: Any, content: bytes) -> None:
    """Writes to a file object, even if it accepts only a part at a time.

    Raises:
        SaveError: It accepts only text, or it can't be written to.
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
    """One save to a path."""

    def __init__(
        self,
        path: Path,
        pieces: Callable[[Mapping[str, tuple[str, int, int]]], Iterable[Any]],
        weights: Mapping[str, ir.TensorProtocol],
        progress: Progress | None,
    ) -> None:
        self._path = path
        self._pieces = pieces
        self._weights = weights
        self._progress = progress
        self._replaced = False
        #: The data files that the model at the path mentions, before it is replaced.
        self._old: set[str] = set()

    def save(self, beside: Mapping[str, Place], linked: Mapping[str, tuple[str, int, int]], size: int) -> None:
        """Writes the model.

        Args:
            beside: The places of weights that are written to data files.
            linked: The places of weights that are in other files already.
            size: The bytes of all written weights.

        Raises:
            SaveError: It can't be written.
            WeightsError: A weight can't be read.
        """
        path, data = self._path, []
        try:
            check_destination(path, size)
            with staged(path) as file:
                with contextlib.suppress(FileNotFoundError):
                    _copy_permissions(path, file)
                if beside:
                    path.name.encode()  # a location is text in UTF-8
                    data = new_data_files(path, 1 + max(place.file for place in beside.values()))
                    self._write_data(data, beside)
                names = [Path(other.name).name for other in data]
                places = {name: (names[p.file], p.offset, p.length) for name, p in beside.items()}
                for piece in self._pieces({**linked, **places}):
                    file.write(piece)
                flush(file)
                flush_folder(path.parent)
                self._old, _ = mentioned_files(path, [path])
                os.replace(file.name, path)
                self._replaced = True
                flush_folder(path.parent)
        except OSError as error:
            raise self._error(error, size) from error
        except UnicodeError as error:
            raise SaveError(f"can't write {str(path)!r}: its name is not UTF-8, which external data needs") from error
        finally:
            self._clean_up(data)

    def _write_data(self, files: Sequence[IO[bytes]], places: Mapping[str, Place]) -> None:
        old = sorted(mentioned_files(self._path, [self._path])[0])
        like = self._path.parent / old[0] if old else self._path
        with contextlib.suppress(FileNotFoundError):
            for file in files:
                _copy_permissions(like, file)
        done, total = 0, sum(place.length for place in places.values())
        for name, place in places.items():
            file = files[place.file]
            file.write(bytes(place.offset - file.tell()))
            for part in _parts(self._weights[name]):
                file.write(part)
                done += len(part)
                if self._progress is not None:
                    self._progress(done, total)
        for file in files:
            flush(file)

    def _clean_up(self, data: Sequence[IO[bytes]]) -> None:
        """Removes the data files of a failed save, or else of the replaced model."""
        mentioned, is_known = mentioned_files(self._path, () if self._replaced else [self._path])
        for file in data:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                if not self._replaced and is_known and Path(file.name).name not in mentioned:
                    os.unlink(file.name)
        if self._replaced:
            read = {Path(os.path.realpath(t.path)) for t in self._weights.values() if isinstance(t, ir.ExternalTensor)}
            kept = {path.name for path in read if path.parent == self._path.parent}
            with contextlib.suppress(OSError):
                remove_unread(self._path, self._old, kept.union(Path(file.name).name for file in data))

    def _error(self, error: OSError, size: int) -> SaveError:
        hint = "The new model is in place." if self._replaced else "What was there before is untouched."
        if error.errno == errno.ENOSPC:
            return SaveError(
                f"can't write {self._path}: the disk is full ({size / 1e6:.0f} MB of weights)",
                hint=f"{hint} Free some room, or save elsewhere.",
            )
        known = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        return SaveError(f"can't write {self._path}: {error.strerror if known else error}", hint=hint)


def _parts(tensor: ir.TensorProtocol) -> Iterator[Any]:
    """The bytes of a tensor in chunks, so that progress can be shown; the tensor is in memory until the last chunk is written."""
    data = content(tensor)
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _copy_permissions(source: Path, file: IO[bytes]) -> None:
    """Gives a new file the mode and, where the system allows it, the owner of another file."""
    status = os.stat(source)
    if hasattr(os, "fchown"):
        with contextlib.suppress(OSError):
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
    os.chmod(file.name, stat.S_IMODE(status.st_mode))


def to_bytes(model: ir.Model) -> bytes:
    """The model as one protobuf."""
    return b"".join(pieces(model, _weights(model), model.graph.inputs))
