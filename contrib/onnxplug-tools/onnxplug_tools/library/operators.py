"""The operators that a library registers with torch, with their schemas and kernels."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.registry.names import find_overload
from onnxplug.text import counted
from onnxplug.torch_private import (
    DispatchKey,
    custom_operators,
    decomposition_table,
    has_kernel_for_dispatch_key,
    operator_registry,
    registered_operators,
)

#: Operators that compute gradients, by their names.
_GRADIENTS = re.compile(r"backward|(^|_)grad_(output|ind|input|weight)")
#: Seconds that importing a library may take.
_SECONDS = 300
_FAKE = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_CPU = ("CPU", "AutogradCPU", "Autograd", "CompositeImplicitAutograd", "CompositeExplicitAutograd")


@dataclass(frozen=True)
class LibraryOperator:
    """One overload of an operator.

    Attributes:
        name: Its qualified name, ``"acme::nms.default"``.
        schema: Its schema in words, without the namespace.
        is_composite: Whether torch computes it by other operators, in its kernel or by a decomposition.
        arguments: The name of each argument, its type and whether it has a default.
    """

    name: str
    schema: str
    has_fake: bool
    mutates: tuple[str, ...]
    is_composite: bool
    runs_on_cpu: bool
    is_for_gradients: bool
    arguments: tuple[tuple[str, str, bool], ...] = ()

    @property
    def needs_rule(self) -> bool:
        """Whether a model needs a translation of it: nothing else computes it, and it gives new values.

        A bool or a string is a value of the model's Python code, which has it when the model is captured.
        """
        is_constant = re.search(r"-> (bool|str)$", self.schema) is not None
        return not (self.is_composite or self.is_for_gradients or self.is_out_variant or is_constant)

    @property
    def is_out_variant(self) -> bool:
        """Whether it writes its results to tensors that are given for them (``out=``)."""
        return bool(self.mutates) and re.search(r"\.out|_out(\.|$)", self.name) is not None

    @property
    def packet(self) -> str:
        """The name without the overload."""
        return self.name.partition(".")[0]


def registered() -> frozenset[str]:
    """The names of all operators that torch knows now; the overload ``default`` is left out of a name."""
    return frozenset(registered_operators())


def namespace_of(name: str) -> str:
    """The namespace of a qualified name."""
    return name.partition("::")[0]


def operators(names: Sequence[str]) -> list[LibraryOperator]:
    """The operators of some names that torch knows, in the order of the names."""
    overloads = ((name, find_overload(name)) for name in sorted(names))
    return [_operator(name, overload) for name, overload in overloads if overload is not None]


def operators_of(namespaces: Sequence[str]) -> list[LibraryOperator]:
    """The operators of namespaces that are registered now."""
    return operators([name for name in registered() if namespace_of(name) in namespaces])


def _operator(name: str, overload: Any) -> LibraryOperator:
    schema = overload._schema
    has = _kernels(name)
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return LibraryOperator(
        name=f"{schema.name}.{schema.overload_name or 'default'}",
        schema=str(schema).partition("::")[2],
        has_fake=_has_fake(schema, has(_FAKE)),
        mutates=written,
        is_composite=has(("CompositeImplicitAutograd",)) or overload in decomposition_table,
        runs_on_cpu=has(_CPU),
        is_for_gradients=_GRADIENTS.search(schema.name.partition("::")[2]) is not None,
        arguments=tuple((a.name, str(a.real_type), a.has_default_value()) for a in schema.arguments),
    )


def _kernels(name: str) -> Callable[[Sequence[str]], bool]:
    def has(keys: Sequence[str]) -> bool:
        return any(has_kernel_for_dispatch_key(name, getattr(DispatchKey, key)) for key in keys)

    return has


def _has_fake(schema: Any, has_kernel: bool) -> bool:
    """Whether torch knows the shapes of an operator's results. Without a fake, ``custom_op`` has a raising kernel."""
    defined = custom_operators.get(schema.name)
    if defined is not None:
        return getattr(defined, "_abstract_fn", None) is not None or not schema.returns
    return has_kernel or operator_registry.find(schema.name).fake_impl.kernel is not None


def is_installed(name: str) -> bool:
    """Whether Python can import a module; the packages around it are imported."""
    try:
        return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # there is no package around it, or the name is none
        return False


def import_library(name: str) -> Any:
    """Imports a library."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and name.partition(".")[0] == error.name
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise UsageError(
            f"the library {name} is not installed"
            if absent
            else f"the library {name} can't be imported: {type(error).__name__}: {last}",
            hint="Give the name by which Python imports it, and install it in this environment."
            if absent
            else f'python -c "import {name}" shows all of it.',
        ) from error


def distribution_and_version(library: str) -> tuple[str, str] | None:
    """The distribution that brings a library, by its import name, and its version; ``None`` where there is none."""
    names = packages_distributions().get(library.partition(".")[0], ())
    return (names[0], version(names[0])) if names else None


def new_operators(*libraries: str) -> list[LibraryOperator]:
    """The operators that importing libraries registers, in this process, which must not have imported them yet."""
    import torch

    del torch
    before = registered()
    with _definitions_of_torch() as of_torch:
        for library in libraries:
            import_library(library)
    names = registered() - before
    taken = {namespace_of(name) for name in before}
    return operators([n for n in names if namespace_of(n) not in taken and n.partition(".")[0] not in of_torch])


def read_library(*libraries: str) -> list[LibraryOperator]:
    """The operators that importing libraries registers, found out in a process of its own."""
    names = " and ".join(libraries)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "operators.json"
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(answer), *libraries]
        paths = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": paths},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"importing {names} did not end within {_SECONDS} s") from None
        if not answer.exists():
            last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
            raise UsageError(f"importing {names} ended Python with status {done.returncode}: {last}")
        described = json.loads(answer.read_text(encoding="utf-8"))
    if isinstance(described, dict):
        raise UsageError(described["message"], hint=described["hint"])
    rows = (
        {"mutates": tuple(f.pop("mutates")), "arguments": tuple(map(tuple, f.pop("arguments"))), **f} for f in described
    )
    return [LibraryOperator(**row) for row in rows]


def _answer(path: str, *libraries: str) -> None:
    """Writes the file that :func:`read_library` reads."""
    try:
        rows: Any = [asdict(op) for op in new_operators(*libraries)]
    except UsageError as error:
        rows = {"message": error.message, "hint": error.hint}
    Path(path).write_text(json.dumps(rows), encoding="utf-8")


@contextmanager
def _definitions_of_torch() -> Iterator[set[str]]:
    """Collects the operators that modules of torch define meanwhile; a library imports these for other reasons."""
    import torch

    define = torch.library.Library.define
    names: set[str] = set()

    def noted(library: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
            frame = frame.f_back
        name = define(library, schema, *args, **kwargs)
        if frame.f_globals.get("__name__", "").startswith("importlib."):
            names.add(f"{library.ns}::{schema.partition('(')[0].partition('.')[0].strip()}")
        return name

    torch.library.Library.define = noted  # type: ignore[method-assign, assignment]
    try:
        yield names
    finally:
        torch.library.Library.define = define  # type: ignore[method-assign]


def summary(operators: Sequence[LibraryOperator]) -> str:
    """How many operators there are, and of which kinds, in words."""
    kinds = {
        "for gradients": sum(op.is_for_gradients for op in operators),
        "computed by others": sum(op.is_composite and not op.is_for_gradients for op in operators),
        "that write to an output that they are given": sum(op.is_out_variant for op in operators),
    }
    rest = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return counted(len(operators), "operator") + (f" ({rest})" if rest else "")


if __name__ == "__main__":
    _answer(*sys.argv[1:])
