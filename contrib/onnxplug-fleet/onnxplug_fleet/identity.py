"""The parts that an export depends on: equal parts mean an equal file, and a changed part is the reason for a new file.

Times of change are not read. The files of code are the files of the modules that loading the target imported, and of
all modules that these reach; the files of data are the files that the process opened meanwhile. Modules and files that
are imported or opened later, while the model is captured, are noted with the result, and compared by content the next
time (:class:`Watched`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import sys
import sysconfig
import types
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxplug_fleet.values import Contents, hashed, value_text

#: Distributions whose versions every export depends on, beside Python's version.
_ALWAYS = ("torch", "numpy", "ml-dtypes", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: The metadata folder of a distribution that is not installed as usual.
_METADATA = f".egg-info{os.sep}"
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/share/", "/usr/lib/")
#: The plugin that has no part in an export.
_OWN = "onnxplug-fleet"


def digest(parts: Any) -> str:
    """A digest of parts."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=20).hexdigest()


# -- the parts ---------------------------------------------------------------------------------------------------------


def parts_of(
    arguments: Mapping[str, Any], host: Any, watched: Watched, modules: Collection[str] = ()
) -> dict[str, str]:
    """The parts of an export's arguments and code.

    Args:
        arguments: The arguments of ``to_onnx``: ``model``, ``args``, ``kwargs``.
        host: The plugins.
        watched: The files and modules of the target.
        modules: Names of more modules whose code is a part.
    """
    model = arguments["model"]
    parts = {
        **{
            f"input {name}": values_of(leaf) for name, leaf in _leaves((arguments.get("args"), arguments.get("kwargs")))
        },
        **_state(model),
        **plugins_text(host),
        "version python": sys.version.split()[0],
        **{f"version {name}": _version(name) for name in _ALWAYS},
    }
    parts |= watched.files({*_modules_of(model), *modules}, with_globals=True)
    parts |= {f"environment {name}": value for name, value in os.environ.items() if name.startswith("ONNXPLUG_")}
    return parts


def values_of(tree: Any) -> str:
    """A text of the inputs of a call."""
    return Contents(_is_own).of_value(tree)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    from onnxplug.torch_private import pytree

    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        yield pytree.keystr(path[1:]).strip("[]'") or "0", leaf


def _state(model: Any) -> dict[str, str]:
    """The parts of a model: weights, buffers and other attributes of modules, or a function's bound values."""
    import torch

    if isinstance(model, torch.export.ExportedProgram):
        state = {**model.state_dict, **{k: v for k, v in model.constants.items() if isinstance(v, torch.Tensor)}}
        return {**{f"weight {k}": value_text(v) for k, v in state.items()}, "graph": hashed(str(model).encode())}
    if isinstance(model, torch.jit.ScriptFunction):
        return {"graph": hashed(str(model.inlined_graph).encode())}
    if not isinstance(model, torch.nn.Module):
        return {"function": Contents(_is_own).of_function(model)}
    parts = {f"weight {name}": value_text(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    parts |= {f"weight {name}": value_text(tensor) for name, tensor in model.named_buffers(remove_duplicate=False)}
    if isinstance(model, torch.jit.ScriptModule):
        return {**parts, "graph": _code_of_script(model)}
    contents = Contents(_is_own, [*model.parameters(), *model.buffers(), *model.modules()])
    for name, module in model.named_modules():
        parts[f"module {name or '(the model)'}"] = f"{type(module).__qualname__} {contents.of_module(module)}"
    return parts


def _code_of_script(model: Any) -> str:
    """A digest of the code, constants and attributes of a ScriptModule and its submodules: of its file, without lines of source."""
    with zipfile.ZipFile(io.BytesIO(model.save_to_buffer())) as file:
        names = [name for name in sorted(file.namelist()) if not name.endswith(".debug_pkl")]
        return hashed(*(piece for name in names for piece in (name.partition("/")[2].encode(), file.read(name))))


def _modules_of(model: Any) -> set[str]:
    """The names of the Python modules that define the classes or the function of a model."""
    import torch

    items = list(model.modules()) if isinstance(model, torch.nn.Module) else [model]
    kinds = {kind for item in items for kind in type(item).__mro__}
    return {kind.__module__ for kind in kinds} | {getattr(model, "__module__", "") or ""}


def plugins_text(host: Any) -> dict[str, str]:
    """The version and code of each plugin in use, the builtin rules among them."""
    records = host.records() if hasattr(host, "records") else []
    plugins = {}
    for record in records:
        if record.status != "loaded" or record.distribution == _OWN:
            continue
        root = record.value.partition(":")[0].partition(".")[0]
        plugins[f"plugin {record.distribution}"] = f"{record.version} {_code_of_package(root)}"
    return plugins


@functools.cache
def _code_of_package(name: str) -> str:
    """A digest of a package's Python files."""
    module = sys.modules.get(name)
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    files = [(path, path.relative_to(folder).as_posix()) for folder in folders for path in _python_files(folder)]
    if not folders and (file := getattr(module, "__file__", None)) is not None:
        files = [(Path(file), Path(file).name)]
    pieces = [
        piece for path, name in sorted(files, key=lambda row: row[1]) for piece in (name.encode(), path.read_bytes())
    ]
    return hashed(*pieces)


def _python_files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder, followlinks=True):  # a checkout of onnxplug holds links
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Top-level name of a module to the distributions that have it."""
    return importlib.metadata.packages_distributions()


# -- files -------------------------------------------------------------------------------------------------------------

#: The paths that were opened since the last :class:`Watched` began; an audit hook can't be removed.
_opened: set[str] | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        path, mode, flags = arguments
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
        if not writes and isinstance(path, str | bytes | os.PathLike):
            _opened.add(os.path.abspath(os.fsdecode(path)))


class Watched:
    """Notes the modules that are imported and the files that are opened from now on.

    Args:
        target: The target of the export; a file that it names counts as opened.
        without: Folders whose files are left out: the folders that the fleet itself writes.
        fresh: Whether the process is the job's own: every module that is imported from now on is the target's.
    """

    def __init__(self, target: str, without: Iterable[str] = (), *, fresh: bool) -> None:
        global _opened, _hooked
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True
        _opened = set()
        place = target.partition(":")[0] if ".py:" in target else target.rpartition(":")[2] or target
        if os.path.exists(place):
            _opened |= {os.path.join(d, f) for d, _, names in os.walk(place) for f in names} or {os.path.abspath(place)}
        self._before, self._fresh = set(sys.modules), fresh
        self._place = os.path.abspath(place)
        self._without = tuple(os.path.abspath(folder) + os.sep for folder in without)

    def files(self, modules: Iterable[str] = (), *, with_globals: bool = False) -> dict[str, str]:
        """The parts of files and versions so far.

        Args:
            modules: Names of modules that define the model; the modules that their code names are followed.
            with_globals: Whether the values of global names in files of code are parts too.
        """
        parts: dict[str, str] = {}
        for name in self._reached(modules):
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is None or not file.endswith(".py"):
                continue
            kind = _kind(file)
            if kind == "installed":
                for distribution in distributions().get(name.partition(".")[0], ()):
                    parts[f"version {distribution}"] = _version(distribution)
            elif kind == "own" and name.partition(".")[0] not in _plugin_roots():
                parts[f"code {_relative(file)}"] = _content(file)
                if with_globals:
                    parts[f"globals {_relative(file)}"] = Contents(_is_own).of_globals(sys.modules[name])
        for path in sorted(_opened or ()):
            if path.endswith(".py") and path == self._place:
                parts[f"code {_relative(path)}"] = _content(path)
            elif self._is_data(path):
                parts[f"file {_relative(path)}"] = _content(path)
        return parts

    def _is_data(self, path: str) -> bool:
        if path.endswith((".py", ".pyc", ".so")) or path.startswith((*_SYSTEM, *self._without)) or _METADATA in path:
            return False
        return _kind(path) == "own" and not path.startswith(_plugin_folders()) and os.path.isfile(path)

    def _reached(self, modules: Iterable[str]) -> set[str]:
        """New modules, the given modules, and every module that the code of own files among them names."""
        new = [name for name in list(sys.modules) if name not in self._before]
        pending = [n for n in new if self._fresh or _kind(getattr(sys.modules[n], "__file__", None) or "") == "own"] + [
            *modules
        ]
        reached: set[str] = set()
        while pending:
            name = pending.pop()
            module = sys.modules.get(name)
            if module is None or name in reached:
                continue
            reached.add(name)
            file = getattr(module, "__file__", None)
            if file is not None and _kind(file) == "own" and name.partition(".")[0] not in _plugin_roots():
                for value in list(vars(module).values()):
                    owner = (
                        value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                    )
                    if isinstance(owner, str) and owner != "__main__":
                        pending.append(owner)
        return reached


@functools.cache
def _plugin_roots() -> frozenset[str]:
    """The packages that are parts by themselves: onnxplug and its plugins."""
    points = importlib.metadata.entry_points(group="onnxplug")
    return frozenset({"onnxplug", *(point.module.partition(".")[0] for point in points)})


def _plugin_folders() -> tuple[str, ...]:
    """The folders of onnxplug and its plugins, as far as they are imported."""
    modules = [sys.modules[name] for name in _plugin_roots() if name in sys.modules]
    return tuple(os.path.join(folder, "") for module in modules for folder in getattr(module, "__path__", ()))


@functools.cache
def _kind(file: str) -> str:
    """``"installed"`` for a distribution's file, ``"python"`` for Python's own file, ``"own"`` for any other file."""
    path = os.path.abspath(file)
    if any(mark in path for mark in _INSTALLED):
        return "installed"
    return "python" if path.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))) else "own"


def _is_own(kind: type) -> bool:
    """Whether a class is of an own file: not a distribution's, Python's or a plugin's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and _kind(file) == "own" and kind.__module__.partition(".")[0] not in _plugin_roots()


def _relative(path: str) -> str:
    return os.path.relpath(path).replace(os.sep, "/")


def _content(path: str) -> str:
    """A digest of a file; ``"gone"`` for a file that can't be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=12)).hexdigest()
    except OSError:
        return "gone"


def contents(parts: Mapping[str, str]) -> dict[str, str]:
    """The same parts of files and versions as they are now."""
    now = {}
    for part in parts:
        kind, _, name = part.partition(" ")
        now[part] = _version(name) if kind == "version" else _content(name)
    return now


def is_outdated(result: Mapping[str, Any] | None, folder: Path) -> bool:
    """Whether a file or a version has changed since a job had its result; a job without a result is not outdated.

    Args:
        result: The result.
        folder: The folder of the job's paths.
    """
    known = {**result.get("parts", {}), **result.get("late", {})} if result is not None else {}
    parts = {part: text for part, text in known.items() if part.partition(" ")[0] in ("code", "file", "version")}
    parts.pop("version python", None)  # no distribution has this name
    with contextlib.chdir(folder):
        return contents(parts) != parts


# -- causes ------------------------------------------------------------------------------------------------------------


#: The kinds of parts in the order in which people look for a cause.
_KINDS = (
    "target",
    "option",
    "threshold",
    "code",
    "globals",
    "weight",
    "file",
    "input",
    "data",
    "metrics",
    "graph",
    "plugin",
    "version",
)


def _rank(part: str) -> int:
    kind = part.partition(" ")[0]
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def changes(before: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """The differences from the parts of the last export, in words; a version or an option with both values."""
    if before is None:
        return ["it is the first export"]
    changed = []
    for part in sorted({*before, *now}, key=lambda part: (_rank(part), part)):
        if before.get(part) == now.get(part):
            continue
        kind = part.partition(" ")[0]
        if part not in now:
            changed.append(f"{part} is gone")
        elif part not in before:
            changed.append(f"{part} is new")
        elif kind in ("version", "option", "environment", "threshold"):
            changed.append(f"{part}: {before[part]} became {now[part]}")
        elif kind == "plugin":
            old, new = before[part].split()[0], now[part].split()[0]
            changed.append(
                f"{part}: {old} became {new}" if old != new else f"{part}: its code changed, which has the rules"
            )
        else:
            changed.append(f"{part} changed")
    return changed
