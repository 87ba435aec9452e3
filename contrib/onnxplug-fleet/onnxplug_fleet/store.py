"""The store of artefacts: a folder, or any file system of fsspec (s3://, gs://, az://, memory://)."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxplug.errors import OnnxplugError, UsageError
from onnxplug_fleet.identity import contents, digest

#: Stores without folders: to make a folder would make the bucket of a mistyped URL.
_OF_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}


class Store:
    """Results by their keys.

    ``objects/ID/`` has the files of an export. ``keys/KEY.json``, written after all of them, names that folder: a
    process that is killed leaves no half of a result.

    Args:
        url: A folder, or a URL.

    Raises:
        UsageError: fsspec does not know the URL, or lacks a package for it.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self.fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UsageError(f"the store {url!r} can't be opened: {error}") from None

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return "file" in self._protocols

    @property
    def _protocols(self) -> set[str]:
        return set(self.fs.protocol if isinstance(self.fs.protocol, tuple | list) else (self.fs.protocol,))

    def path(self, name: str) -> str:
        """The path of an entry, as the file system has it."""
        return posixpath.join(self._root, name)

    def find(self, key: str) -> dict[str, Any] | None:
        """The result that is kept for a key, if the late parts of its export are unchanged; else ``None``."""
        for kept in self._kept(key):
            if contents(kept["late"]) == kept["late"]:
                return kept
        return None

    def _kept(self, key: str) -> list[dict[str, Any]]:
        try:
            read: list[dict[str, Any]] = json.loads(self.fs.cat_file(self.path(f"keys/{key}.json")))
        except (FileNotFoundError, ValueError):  # ValueError: its writer was killed
            return []
        return read

    def keep(self, key: str, result: dict[str, Any], folder: Path) -> str:
        """Keeps the files of a result; returns the name of their folder.

        Args:
            key: The key of the result.
            result: The result, which JSON can hold.
            folder: The folder of the files.

        Raises:
            OnnxplugError: The files can't be written.
        """
        name = f"objects/{digest([key, result['late']])}"
        self.put(name, folder)
        others = [kept for kept in self._kept(key) if kept["late"] != result["late"]]
        text = json.dumps([{**result, "object": name}, *others])
        self._written(lambda: self._write(f"keys/{key}.json", text.encode()))
        return name

    def put(self, name: str, folder: Path) -> None:
        """Copies a folder's files to the store.

        Raises:
            OnnxplugError: The files can't be written.
        """
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in files:
            entry = f"{name}/{path.relative_to(folder).as_posix()}"
            self._written(lambda path=path, entry=entry: self._copy(path, entry))

    def _make_folder(self, entry: str) -> None:
        if not self._protocols & _OF_BUCKETS:
            self.fs.makedirs(posixpath.dirname(self.path(entry)), exist_ok=True)

    def _copy(self, path: Path, entry: str) -> None:
        self._make_folder(entry)
        self.fs.put_file(str(path), self.path(entry))

    def _write(self, entry: str, content: bytes) -> None:
        self._make_folder(entry)
        if not self.is_local:
            self.fs.pipe_file(self.path(entry), content)
            return
        scratch = Path(f"{self.path(entry)}.{os.getpid()}")
        scratch.write_bytes(content)
        os.replace(scratch, self.path(entry))

    def _written(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            raise OnnxplugError(f"the store {self.url} can't be written: {error}") from error

    def read(self, name: str) -> bytes | None:
        """The content of an entry; ``None`` where there is none."""
        try:
            content: bytes = self.fs.cat_file(self.path(name))
        except (FileNotFoundError, IsADirectoryError):
            return None
        return content

    def json(self, name: str) -> Mapping[str, Any] | None:
        """The content of an entry that is JSON."""
        content = self.read(name)
        return None if content is None else json.loads(content)
