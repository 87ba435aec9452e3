"""Functions of a library that others take the place of while a model is captured: a patch for plugins."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

from onnxplug.errors import PluginError
from onnxplug.registry.rule import object_of


@dataclass(frozen=True)
class LibraryFunctions:
    """A patch that exchanges functions of a library, wherever a module of anyone has them under their own names.

    In another version of the library than ``requires`` admits, and where a function has other parameters than the one in its
    place, its call is an error that names both versions.

    Attributes:
        functions: ``"module:name"``, or ``"module:Class.name"`` of a method, to the function in its place, or to its
            ``"package.module:name"``, which is imported only where the process has imported the library's module.
        requires: The library by its import name, and the versions of which the functions are: ``"natten>=0.21,<0.22"``.
    """

    functions: Mapping[str, Callable[..., Any] | str]
    requires: str

    def __call__(self) -> AbstractContextManager[None]:
        """The context in which they are exchanged."""
        return self._exchanged()

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        from onnxplug.capture.patching import patched

        with ExitStack() as stack:
            for owner, name, function in self.places():
                stack.enter_context(patched(owner, name, function))
            yield

    def put(self) -> None:
        """Exchanges the functions for good.

        Raises:
            PluginError: The library has another version.
        """
        self.check()
        for owner, name, function in self.places():
            setattr(owner, name, function)

    def check(self) -> None:
        """Looks at the version of the library.

        Raises:
            PluginError: It is another one than ``requires`` admits.
        """
        if problem := self._problem():
            raise self._error(problem)

    def places(self) -> list[tuple[Any, str, Any]]:
        """Modules and classes that have one of the functions, its name there, and what takes its place."""
        places: list[tuple[Any, str, Any]] = []
        imported = {place: given for place, given in self.functions.items() if place.partition(":")[0] in sys.modules}
        problem = self._problem() if imported else ""  # reading a version from files takes milliseconds
        for place, given in imported.items():
            path, _, name = place.partition(":")
            owner, dot, method = name.partition(".")
            theirs = getattr(sys.modules[path], owner, None)
            found = getattr(theirs, method, None) if dot else theirs
            ours = object_of(given, "a function")
            if found is None or found is ours:
                continue
            differs = f"{path}.{name} of {self._version()} has other parameters" if _differ(found, ours) else ""
            function = self._refusal(problem or differs) if problem or differs else ours
            if dot:
                is_bound = inspect.isfunction(inspect.getattr_static(theirs, method))
                places.append((theirs, method, function if is_bound else staticmethod(function)))
            else:
                modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
                places += [(module, owner, function) for module in modules if vars(module).get(owner) is theirs]
        return places

    def _version(self) -> str | None:
        """The version of the library; ``None`` where there is none."""
        name = Requirement(self.requires).name
        stated = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
        if isinstance(stated, str):
            return stated
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    def _problem(self) -> str:
        version = self._version()
        if version is None or Requirement(self.requires).specifier.contains(version, prereleases=True):
            return ""
        return f"{version} is installed"

    def _error(self, problem: str) -> PluginError:
        return PluginError(
            f"the functions of {self.requires} are translated; {problem}", hint=f"pip install '{self.requires}'"
        )

    def _refusal(self, problem: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise self._error(problem)

        return refused


def _differ(theirs: Any, ours: Any) -> bool:
    """Whether two functions have other parameters. An operator names them otherwise; a function of an extension names none."""
    schema = getattr(getattr(theirs, "default", None), "_schema", None)
    own = list(inspect.signature(ours).parameters)
    if schema is not None:
        return len(schema.arguments) != len(own)
    try:
        return list(inspect.signature(theirs).parameters) != own
    except ValueError:
        return False
