"""Saving: complete or not at all. What stood at the destination stays whole until the new model takes its place."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import onnx_ir as ir

from onnxplug import logs
from onnxplug.errors import SaveError, UsageError, WeightsError
from onnxplug.kinds import check_kind, check_path
from onnxplug.run.content import ModelView, Progress, Writer, content
from onnxplug.run.external import Place, in_safetensors, is_large, part_name, places_of, size_of
from onnxplug.run.files import claim_data_file, flush, flush_folder, is_data_file, is_part, remove_if, staged_file
from onnxplug.run.references import References, data_files, folder_references
from onnxplug.run.resume import RESUMABLE_BYTES, Partial, plan_of, remove_partial
from onnxplug.run.weights import SOURCE, check_numbers

_LOGGER = logs.logger("save")
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
    """The initializers' tensors by name; those of ``instead`` go before."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = (instead or {}).get(value, value.const_value)
        if tensor is not None:
            found[name] = tensor
    return found


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

    A symbolic link at the destination stays one: the file that it points to is replaced, with its permissions kept.
    External data is written to ``NAME.data`` beside the model; while a model in the folder refers to a file of this name,
    to ``NAME.data.2`` and so on. Data that the replaced model used is removed unless another model refers to it.

    Args:
        model: The model.
        destination: A path, or a binary file object (single file).
        external_data: Weights in a file of their own; ``None`` decides by size.
        without: Names of initializers that are not stored.
        keep_initializers_as_inputs: List the weights as inputs too.
        weights: What initializers hold, instead of what they hold in the model.
        shard: The largest size of a data file.
        external: ``"safetensors"``: what lies in safetensors files as the model has it stays there.
        progress: Told of the bytes that are written.

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
    view = ModelView(model, chosen, inputs)
    if hasattr(destination, "write"):
        if external_data:
            raise SaveError("external data needs a file path, not a file object")
        for piece in view.pieces():
            _write_object(destination, piece)
        return
    path = check_destination(destination)
    _check_sources(path, chosen)
    linked = in_safetensors(chosen, path.parent) if external is not None else {}
    written = {name: tensor for name, tensor in chosen.items() if name not in linked}
    size = _bytes(written)
    beside: dict[str, Place] = {}
    if external_data or (external_data is None and size > LARGE_MODEL_BYTES):
        beside = places_of({n: t for n, t in written.items() if is_large(t)}, limit)
    _LOGGER.debug("%s: %d bytes of weights, files beside it: %d", path, size, len({p.file for p in beside.values()}))
    saver = _Saver(path, view, Writer(sum(place.length for place in beside.values()), progress))
    try:
        if beside:
            saver.save_with_data(beside, linked, size)
        else:
            check_destination(destination, size)
            saver.save(linked)
        if beside or linked:
            _warn_of_distant_link(destination, path)
    except WeightsError:
        saver.forget_partial()
        raise
    except OSError as error:
        raise _save_error(path, error, size, saver) from error
    except UnicodeError as error:
        raise SaveError(f"can't write {str(path)!r}: its name is not UTF-8, which external data needs") from error
    finally:
        saver.clean_up()


def check_settings(
    external_data: bool | None = None, include_initializers: bool = True, shard: Any = None, external: Any = None
) -> int | None:
    """Checks the arguments of :func:`save_model` before anything is done; returns the largest size of a data file.

    Raises:
        UsageError: One is malformed, or two contradict each other.
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
    files = {tensor.meta[SOURCE].stored.path for tensor in weights.values() if SOURCE in tensor.meta}
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
        from rich.filesize import decimal

        raise SaveError(
            f"can't write {given}: it needs {decimal(size)} and {folder} has {decimal(free)} free",
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


def _save_error(path: Path, error: OSError, size: int, saver: _Saver) -> SaveError:
    hint = "The new model is in place." if saver.replaced else "What was there before is untouched."
    kept = saver.keep_partial()
    if kept is not None:
        hint += f" What is written of the new model is kept, {kept}*: saving it again goes on from there."
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

    def __init__(self, path: Path, view: ModelView, writer: Writer) -> None:
        self.path = path
        self.replaced = False
        self._view = view
        self._writer = writer
        self._files: list[IO[bytes]] = []
        self._mine: set[str] = set()  # data files of this save
        self._old: set[str] = set()  # those of the model that it replaces
        self._partial: Partial | None = None

    def save(self, linked: Mapping[str, tuple[str, int, int]]) -> None:
        """Writes the model as a single file, but for weights that are in other files already."""
        self._finish(linked)

    def save_with_data(
        self, places: Mapping[str, Place], linked: Mapping[str, tuple[str, int, int]], size: int
    ) -> None:
        """Writes the model with weights in data files.

        Args:
            places: Where each of them lies there.
            linked: Those that are in other files already.
            size: Bytes of all that are written.

        Raises:
            SaveError: There is too little room.
        """
        self.path.name.encode()  # the location is text in UTF-8
        count = 1 + max(place.file for place in places.values())
        old = sorted(self._replaced_data())
        files, done = self._data_files(places, count, self.path.parent / old[0] if old else self.path)
        check_destination(self.path, size - sum(places[name].length for name in done))
        for name, place in places.items():
            self._write(files[place.file], name, place, done)
        for file in files:
            flush(file)
        live, names = _live_data(self._view, self.path.parent), []
        for number, file in enumerate(files):
            claim = claim_data_file(
                self.path.parent, self.path.name, lambda name: name in live, part_name(number, count)
            )
            self._files.append(claim)
            data = Path(claim.name)
            if not os.fstat(claim.fileno()).st_size:
                self._mine.add(data.name)
            os.replace(file.name, data)
            self._mine.add(data.name)
            names.append(data.name)
        self._finish({**linked, **{n: (names[p.file], p.offset, p.length) for n, p in places.items()}})

    def _data_files(
        self, places: Mapping[str, Place], count: int, like: Path
    ) -> tuple[list[IO[bytes]], frozenset[str]]:
        """The files to write data to, and the names of the tensors that are there from an earlier save."""
        sources = {n: t.meta[SOURCE] for n in places if SOURCE in (t := self._view.weights[n]).meta}
        ends = {n: (places[n].file, places[n].offset + places[n].length) for n, s in sources.items() if s.is_lasting}
        if sum(places[name].length for name in ends) >= RESUMABLE_BYTES:
            import onnxplug

            tensors = {
                name: (t.dtype.name, list(t.shape.numpy()), sources[name].identity if name in ends else None)
                for name in places
                for t in (self._view.weights[name],)
            }
            plan = plan_of(onnxplug.__version__, places, tensors)
            self._partial = Partial.open(self.path.parent, self.path.name, plan, ends, count)
        if self._partial is None:
            return [self._stage(like) for _ in range(count)], frozenset()
        for file in self._partial.files:
            with contextlib.suppress(FileNotFoundError):
                _copy_permissions(like, file)
        return self._partial.files, frozenset(self._partial.done)

    def _write(self, file: IO[bytes], name: str, place: Place, done: frozenset[str]) -> None:
        if name in done:
            self._writer.advance(place.length)
            return
        file.seek(0, os.SEEK_END)
        if file.tell() < place.offset:
            file.write(bytes(place.offset - file.tell()))
        file.seek(place.offset)
        self._writer.write(file, content(self._view.weights[name]))
        if self._partial is not None and self._is_lasting(name):
            self._partial.note(name, place.length)

    def _is_lasting(self, name: str) -> bool:
        source = self._view.weights[name].meta.get(SOURCE)
        return source is not None and source.is_lasting

    def keep_partial(self) -> Path | None:
        """Keeps what is written for a later save; the beginning of the files' names, or ``None`` where nothing is kept."""
        if self._partial is None or self.replaced:
            return None
        partial, self._partial = self._partial, None
        return partial.path if partial.close(keep=True) else None

    def forget_partial(self) -> None:
        """Removes what is written."""
        if self._partial is not None:
            self._partial.close(keep=False)
            self._partial = None

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

    def _finish(self, places: Mapping[str, tuple[str, int, int]]) -> None:
        staged = self._stage(self.path)
        for piece in self._view.pieces(places):
            staged.write(piece)
        flush(staged)
        flush_folder(self.path.parent)  # the data file is renamed before the model
        self._old = self._replaced_data() - _live_data(self._view, self.path.parent)
        os.replace(staged.name, self.path)
        self.replaced = True
        flush_folder(self.path.parent)
        # Those that a save left which was killed between its data files and its model.
        self._old.update(n for n in os.listdir(self.path.parent) if is_part(n, self.path.name))

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
        if self._partial is not None:
            self._partial.close(keep=not self.replaced)
        elif self.replaced:
            remove_partial(self.path.parent, self.path.name)
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


def _live_data(view: ModelView, folder: Path) -> set[str]:
    """Files of the folder that the model itself still reads its weights from."""
    paths = {Path(os.path.realpath(t.path)) for t in view.weights.values() if isinstance(t, ir.ExternalTensor)}
    return {path.name for path in paths if path.parent == folder}


def to_bytes(model: ir.Model) -> bytes:
    """The model as one protobuf."""
    return b"".join(ModelView(model, _weights(model), list(model.graph.inputs)).pieces())
