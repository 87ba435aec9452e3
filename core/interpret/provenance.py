"""The FX node, module and rule that an ONNX node comes from, and its metadata about them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from onnxplug.build.provenance import (
    CLASSES,
    DECOMPOSED,
    FX_NODE,
    NAMES,
    NAMESPACE,
    NO_MODULE,
    PACKAGE,
    RULE,
    SOURCE,
    STRICT_ROOT,
    TRACE,
    OfExport,
    Provenance,
    without_modules,
)
from onnxplug.capture.project import relative_line, relative_trace
from onnxplug.metadata import Metadata
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.registry.rule import Rule
from onnxplug.version import VERSION

#: Entries of a module stack that are no modules.
_NO_MODULES = (STRICT_ROOT, NO_MODULE)
#: An object's address, which differs from run to run.
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class ModuleScope:
    """A module that FX nodes belong to.

    Args:
        path: Its path as torch writes it; ``None`` outside of the model.
        kind: Its class, or the name of its class.
        around: The module around it.

    Attributes:
        path: Its path in the model, ``"encoder.layer.0"``.
        place: The same with slashes.
    """

    __slots__ = ("_around", "_kind", "_texts", "path", "place")

    def __init__(self, path: str | None = None, kind: Any = "", around: ModuleScope | None = None) -> None:
        self._texts = None if path is not None else ("", "[", "[")
        self._around = around
        self._kind = kind
        self.path = "" if path is None else path.removeprefix(f"{STRICT_ROOT}.")
        self.place = self.path.replace(".", "/")

    @property
    def texts(self) -> tuple[str, str, str]:
        """The beginnings of its nodes' namespace and of their lists of classes and of names."""
        if self._texts is None:
            around = self._around if self._around is not None else NO_SCOPE
            namespace, classes, names = around.texts
            kind = self._kind if isinstance(self._kind, str) else _class_name(self._kind)
            path = self.path
            self._texts = f"{namespace}{path}: {kind}/", f"{classes}{kind!r}, ", f"{names}{path!r}, "
        return self._texts


def _class_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


#: The scope of nodes that belong to no module.
NO_SCOPE = ModuleScope()


class Context(NamedTuple):
    """Module, line and call for nodes of branches and decompositions, which have none recorded themselves.

    Attributes:
        scope: Their module.
        location: The user's file and line; ``None`` for the user's graphs.
        trace: The stack trace.
        call: The module call that they belong to; ``None`` where module calls aren't needed.
        decomposing: The operators that the graph is a decomposition of, the outermost first.
    """

    scope: ModuleScope = NO_SCOPE
    location: str | None = None
    trace: str = ""
    call: str | None = None
    decomposing: tuple[str, ...] = ()


class Describer:
    """The part that all provenances of an export share.

    Args:
        metadata: The level of metadata.
        line: Writes an FX node; ``None`` where the metadata has no FX nodes.
    """

    def __init__(self, metadata: Metadata, line: Callable[[torch.fx.Node], str] | None = None) -> None:
        self.metadata = metadata
        self.line = line
        self._scopes: dict[tuple[str, ...], ModuleScope] = {}
        self._targets: dict[int, tuple[Any, str, str]] = {}
        self._packages: dict[str, str] = {}
        self._makers: dict[int, tuple[Rule | None, Mapping[str, str]]] = {}

    def scope_of(self, fx: torch.fx.Node) -> ModuleScope | None:
        """The module of an FX node, by its recorded stack."""
        stack: Mapping[str, tuple[str, Any]] | None = fx.meta.get("nn_module_stack")
        if not stack:
            return None
        key = tuple(stack)
        scope = self._scopes.get(key)
        if scope is None:
            scope = NO_SCOPE
            for end, (path, kind) in enumerate(stack.values(), 1):
                known = self._scopes.get(key[:end])
                if known is None:
                    known = scope if path in _NO_MODULES else ModuleScope(path, kind, scope)
                    self._scopes[key[:end]] = known
                scope = known
        return scope if scope is not NO_SCOPE else None

    def target(self, target: Any) -> tuple[str, str]:
        """A node's target as torch writes it, and its :func:`repr`."""
        cached = self._targets.get(id(target))
        if cached is None:  # each keeps its target alive, so that no id is used again
            text = ADDRESS.sub("", str(target))
            cached = self._targets[id(target)] = target, text, repr(text)
        return cached[1:]

    def source(self, location: str) -> str:
        """A user's file and line as metadata."""
        return location if self.metadata.absolute_paths else relative_line(location)

    def trace(self, trace: str) -> str:
        """A stack trace as metadata."""
        return trace if self.metadata.absolute_paths or not trace else relative_trace(trace)

    def maker(self, rule: Rule | None) -> Mapping[str, str]:
        """The metadata about the rule that emitted a node; without a rule, onnxplug's own."""
        cached = self._makers.get(id(rule))
        if cached is None:  # each keeps its rule alive, so that no id is used again
            distribution = PROJECT_NAME if rule is None else rule.source or "rules of the call"
            package = self._packages.get(distribution)
            if package is None:
                package = self._packages[distribution] = _with_version(distribution)
            metadata = {PACKAGE: package} if rule is None else {RULE: rule.name, PACKAGE: package}
            cached = self._makers[id(rule)] = rule, metadata
        return cached[1]


def _with_version(distribution: str) -> str:
    if distribution == PROJECT_NAME:
        return f"{PROJECT_NAME} {VERSION}"
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return distribution


class FxProvenance(OfExport):
    """The origin of a node that a rule emitted for an FX node in its module.

    Args:
        describer: The describer of the export.
        fx: The FX node.
        context: The context of its graph.
        scope: Its module.
        location: The user's file and line.
        call: The module call that it belongs to; ``None`` where module calls aren't needed.
        rule: The rule that emits; ``None`` for sizes, which no rule emits.
    """

    __slots__ = ("_context", "_describer", "_fx", "_location", "_rule", "_scope")

    def __init__(
        self,
        describer: Describer,
        fx: torch.fx.Node,
        context: Context,
        scope: ModuleScope,
        location: str | None,
        call: str | None,
        rule: Rule | None = None,
    ) -> None:
        self.place = scope.place
        self.call = call
        self._metadata = None
        self._describer = describer
        self._fx = fx
        self._context = context
        self._scope = scope
        self._location = location
        self._rule = rule

    def by(self, rule: Rule) -> FxProvenance:
        """The same origin with a rule."""
        return FxProvenance(self._describer, self._fx, self._context, self._scope, self._location, self.call, rule)

    @property
    def location(self) -> str | None:
        """The user's file and line."""
        return self._location

    @property
    def title(self) -> str:
        """The module's path and the FX node's name."""
        return f"{self._scope.path}/{self._fx.name}" if self._scope.path else self._fx.name

    def _make_metadata(self, full: bool) -> dict[str, str]:
        fx, scope, describer = self._fx, self._scope, self._describer
        name = fx.name
        target, quoted_target = describer.target(fx.target)
        namespace, classes, names = scope.texts
        metadata = {NAMESPACE: f"{namespace}{name}: {target}"}
        if self._location is not None:
            metadata[SOURCE] = describer.source(self._location)
        if full:
            metadata |= {
                CLASSES: f"{classes}{quoted_target}]",
                NAMES: f"{names}{name!r}]",
                FX_NODE: describer.line(fx) if describer.line is not None else "",
                TRACE: describer.trace(fx.meta.get("stack_trace") or self._context.trace),
            }
            if self._context.decomposing:
                metadata[DECOMPOSED] = ", ".join(self._context.decomposing)
            metadata |= describer.maker(self._rule)
        return metadata

    def in_function(self, name: str) -> Provenance:
        """The origin of a function's body: the rule, and nothing that belongs to a single call."""
        return _InFunction(self, name)

    def _shared(self, name: str, full: bool) -> dict[str, str]:
        target, _ = self._describer.target(self._fx.target)
        metadata = without_modules(name, target, full)
        if full:
            metadata |= self._describer.maker(self._rule)
        return metadata


class _InFunction(OfExport):
    """The origin of nodes in the body of a function that a rule defines; later calls share it."""

    __slots__ = ("_definer",)

    def __init__(self, definer: FxProvenance, name: str) -> None:
        super().__init__(name, "function")
        self._metadata = None
        self._definer = definer

    @property
    def location(self) -> str | None:
        """The line of the first call, for errors."""
        return self._definer.location

    def _make_metadata(self, full: bool) -> dict[str, str]:
        return self._definer._shared(self._name, full)
