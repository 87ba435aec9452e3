"""The module, line and rule that a node comes from, by its metadata, or else by its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxplug.build.provenance import CLASSES, NAMES, NAMESPACE, NO_MODULE, PACKAGE, REWRITE, RULE, SOURCE, TRACE
from onnxplug_tools.inspection.words import text_of

#: The key under which onnxscript's optimiser names its rewrites in the files of ``torch.onnx.export``.
_REWRITE_OF_TORCH = "pkg.onnxscript.rewriter.rule_name"
#: The most parts of a module's path; the rest of a longer path is cut off.
_DEEPEST = 100
#: A part of a path. Names in words ("0 <= n, of x") are no paths.
_PART = re.compile(r"[\w.\-:@$<>]+")
#: torch numbers further calls of one module.
_CALL = re.compile(r"@\d+(?=\.|$)")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
#: Files of torch, and code that it made itself.
_NOT_THE_USERS = re.compile(r"(^|[\\/])torch[\\/]|^<")
_VERSIONED = re.compile(r"(\S+) (\d\S*)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node comes from.

    Attributes:
        modules: The paths of the modules that it is part of with their classes, the outermost first; the last is its own. The
            class is empty where it is not known.
        source: The user's ``file:line``.
    """

    modules: tuple[tuple[str, str], ...] = ()
    rule: str | None = None
    package: str | None = None
    version: str | None = None
    source: str | None = None
    rewritten: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The path of its module; empty for the model itself."""
        return self.modules[-1][0] if self.modules else ""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of the modules that it is part of, the outermost first, as far as they are known."""
        return tuple(kind for _, kind in self.modules if kind)


def place_of(name: str | None, metadata: Mapping[str, str]) -> Place:
    """Where a node comes from.

    Args:
        metadata: Its metadata: of onnxplug (short or full), of ``torch.onnx.export``, or without any of their keys.
    """
    named = path_of_name(name)
    if not metadata:
        return Place(((named, ""),)) if named else Place()
    metadata = {text_of(key): text_of(value) for key, value in metadata.items()}
    modules = _modules(metadata, named)
    if modules is None:
        modules = ((named, ""),) if named else ()
    package, version = metadata.get(PACKAGE), None
    versioned = _VERSIONED.fullmatch(package) if package else None
    if versioned is not None:
        package, version = versioned.groups()
    rewritten = metadata.get(REWRITE) or metadata.get(_REWRITE_OF_TORCH) or ""
    return Place(
        modules,
        metadata.get(RULE),
        package,
        version,
        metadata.get(SOURCE) or _source(metadata.get(TRACE)),
        tuple(part.strip() for part in rewritten.split(",") if part.strip()),
    )


def path_of_name(name: str | None) -> str:
    """The module's path by a node's name: ``"layers.0.linear"`` of ``"layers/0/linear/Gemm"``; empty where it has none.

    torch's TorchScript exporter repeats the path of a list within it: ``"/layers/layers.0/linear/Gemm"``.
    """
    if not name or "/" not in name:
        return ""
    parts = name.removeprefix("/").split("/")[:-1]
    path: list[str] = []
    for part in parts:
        if not _PART.fullmatch(part):
            return ""
        if path and part.startswith(f"{path[-1]}."):
            path[-1] = part
        else:
            path.append(part)
    return normal_path(".".join(path))


def normal_path(path: str) -> str:
    """A module's path without the number of a call, at most :data:`_DEEPEST` parts."""
    if "@" in path:
        path = _CALL.sub("", path)
    if path.count(".") >= _DEEPEST:
        path = ".".join(path.split(".", _DEEPEST)[:_DEEPEST])
    return path


def _modules(metadata: Mapping[str, str], named: str) -> tuple[tuple[str, str], ...] | None:
    """The modules that metadata name, with their classes; ``None`` where metadata name none."""
    entries = _from_lists(metadata.get(NAMES), metadata.get(CLASSES))
    if entries is None:
        namespace = metadata.get(NAMESPACE)
        if not namespace:
            return None
        entries = _from_namespace(namespace)
    entries = [(normal_path(path), kind) for path, kind in entries if NO_MODULE not in (path, kind)]
    # The last entry is the FX node's; for the call of a function that stands for a module it is the module's.
    if entries and not (named and entries[-1][0] == named and (len(entries) < 2 or entries[-2][0] != named)):
        entries.pop()
    return tuple(entries)


def _from_lists(names: str | None, classes: str | None) -> list[tuple[str, str]] | None:
    if not names or not classes:
        return None
    try:
        paths, kinds = ast.literal_eval(names), ast.literal_eval(classes)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if not isinstance(paths, list) or not isinstance(kinds, list) or len(paths) != len(kinds):
        return None
    return [(str(path), str(kind)) for path, kind in zip(paths, kinds, strict=True)]


def _from_namespace(namespace: str) -> list[tuple[str, str]]:
    """``"PATH: CLASS/PATH: CLASS/NAME: OPERATOR"`` in parts; a path or an operator may have a slash of its own."""
    entries: list[tuple[str, str]] = []
    pending = ""
    for part in namespace.split("/"):
        path, separator, kind = f"{pending}{part}".partition(": ")
        if separator:
            entries.append((path, kind))
            pending = ""
        else:
            pending = f"{pending}{part}/"
    if pending and entries:  # the rest of an operator that has a slash
        entries[-1] = (entries[-1][0], f"{entries[-1][1]}/{pending[:-1]}")
    return entries


def _source(trace: str | None) -> str | None:
    """The user's line in a stack trace: the last frame outside of torch; ``None`` where there is none."""
    if not trace:
        return None
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if not _NOT_THE_USERS.search(frame[0])]
    return ":".join(own[-1]) if own else None
