"""Which FX node, module and rule nodes come from, and how their metadata say it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onnxplug.build.module_calls import NO_MODULE, STRICT_ROOT
from onnxplug.build.provenance import (
    CLASSES,
    DECOMPOSED,
    FX_NODE,
    NAMES,
    NAMESPACE,
    PACKAGE,
    RULE,
    SOURCE,
    TRACE,
    OfExport,
    Provenance,
    quoted,
    without_modules,
)
from onnxplug.capture.project import relative_line, relative_trace
from onnxplug.metadata import Metadata
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.registry.rule import Rule

#: What stands for a module in a stack, and is none.
_NO_MODULES = (STRICT_ROOT, NO_MODULE)
#: Where an object of this process is: another one in every run.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class ModuleScope:
    """A module that FX nodes are part of, and those around it.

    Args:
        modules: Their paths and classes, the outermost first.

    Attributes:
        path: Its path in the model, ``"encoder.layer.0"``.
        place: The same with slashes.
    """

    __slots__ = ("_modules", "_texts", "path", "place")

    def __init__(self, modules: Sequence[tuple[str, Any]]) -> None:
        self._modules = modules
        self._texts: tuple[str, str, str] | None = None
        self.path = modules[-1][0].removeprefix(f"{STRICT_ROOT}.") if modules else ""
        self.place = self.path.replace(".", "/")

    @property
    def texts(self) -> tuple[str, str, str]:
        """How the namespace of its nodes begins, and the lists of classes and of names."""
        if self._texts is None:
            paths = [path.removeprefix(f"{STRICT_ROOT}.") for path, _ in self._modules]
            classes = [kind if isinstance(kind, str) else _class_name(kind) for _, kind in self._modules]
            namespace = "".join([f"{path}: {kind}/" for path, kind in zip(paths, classes, strict=True)])
            self._texts = namespace, quoted(classes), quoted(paths)
        return self._texts


def _class_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


#: That of nodes that are of no module.
NO_SCOPE = ModuleScope(())


class Context(NamedTuple):
    """What holds for the nodes of a graph that know nothing of it themselves: those of branches and decompositions.

    Attributes:
        scope: Their module.
        location: The user's file and line; ``None`` for the user's graphs.
        trace: The stack trace.
        call: The call of a module that they are part of; ``None`` where that isn't asked for.
        decomposing: The operators that the graph is a decomposition of, the outermost first.
    """

    scope: ModuleScope = NO_SCOPE
    location: str | None = None
    trace: str = ""
    call: str | None = None
    decomposing: tuple[str, ...] = ()


class Describer:
    """What the provenances of one export share.

    Args:
        metadata: What the model says.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._scopes: dict[tuple[str, ...], ModuleScope] = {}
        self._targets: dict[int, tuple[Any, str, str]] = {}
        self._lines: dict[torch.fx.Node, str] = {}
        self._packages: dict[str, str] = {}

    def scope_of(self, fx: torch.fx.Node) -> ModuleScope | None:
        """The module that an FX node says it is part of."""
        stack: Mapping[str, tuple[str, Any]] | None = fx.meta.get("nn_module_stack")
        if not stack:
            return None
        key = tuple(stack)
        found = self._scopes.get(key)
        if found is None:
            modules = [entry for entry in stack.values() if entry[0] not in _NO_MODULES]
            found = self._scopes[key] = ModuleScope(modules) if modules else NO_SCOPE
        return found if found is not NO_SCOPE else None

    def target(self, target: Any) -> tuple[str, str]:
        """What is called, as torch writes it, and its :func:`repr`."""
        found = self._targets.get(id(target))
        if found is None:  # each keeps its target alive, so that no id is given twice
            text = _ADDRESS.sub("", str(target))
            found = self._targets[id(target)] = target, text, repr(text)
        return found[1:]

    def line(self, fx: torch.fx.Node) -> str:
        """An FX node as a line of text."""
        found = self._lines.get(fx)
        if found is None:
            if fx.op == "placeholder":  # as format_node writes it, which takes far longer; a model has many
                found = f"%{fx.name} : [num_users={len(fx.users)}] = placeholder[target={fx.target}]"
            else:
                found = str(fx.format_node())
                found = _ADDRESS.sub("", found) if " at 0x" in found else found
            self._lines[fx] = found
        return found

    def listing(self, graph: torch.fx.Graph) -> str:
        """The text of an FX graph, a node a line."""
        return "\n".join(["graph():", *(f"    {self.line(fx)}" for fx in graph.nodes if fx.op != "output")])

    def source(self, location: str) -> str:
        """A user's file and line as the metadata say it."""
        return location if self.metadata.absolute_paths else relative_line(location)

    def trace(self, trace: str) -> str:
        """A stack trace as the metadata say it."""
        return trace if self.metadata.absolute_paths or not trace else relative_trace(trace)

    def package(self, distribution: str) -> str:
        """A distribution with its version, where it is one that is installed."""
        found = self._packages.get(distribution)
        if found is None:
            found = self._packages[distribution] = _with_version(distribution)
        return found


def _with_version(distribution: str) -> str:
    if distribution == PROJECT_NAME:
        import onnxplug

        return f"{PROJECT_NAME} {onnxplug.__version__}"
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return distribution


class FxProvenance(OfExport):
    """An FX node, in its module, by a rule.

    Args:
        describer: What the provenances of the export share.
        fx: The FX node.
        context: What holds for it.
        scope: Its module.
        location: The user's file and line.
        call: The call of a module that it is part of; ``None`` where that isn't asked for.
        rule: The rule that emits; ``None`` where none does: for sizes.
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
        self._said = None
        self._describer = describer
        self._fx = fx
        self._context = context
        self._scope = scope
        self._location = location
        self._rule = rule

    def by(self, rule: Rule) -> FxProvenance:
        """The same by a rule."""
        return FxProvenance(self._describer, self._fx, self._context, self._scope, self._location, self.call, rule)

    @property
    def location(self) -> str | None:
        """The user's file and line."""
        return self._location

    @property
    def title(self) -> str:
        """The module's path and the FX node's name."""
        return f"{self._scope.path}/{self._fx.name}" if self._scope.path else self._fx.name

    def _say(self, full: bool) -> dict[str, str]:
        fx, scope, describer = self._fx, self._scope, self._describer
        name = fx.name
        target, quoted_target = describer.target(fx.target)
        namespace, classes, names = scope.texts
        said = {NAMESPACE: f"{namespace}{name}: {target}"}
        if self._location is not None:
            said[SOURCE] = describer.source(self._location)
        if full:
            said[CLASSES] = f"{classes}{quoted_target}]"
            said[NAMES] = f"{names}{name!r}]"
            said[FX_NODE] = describer.line(fx)
            said[TRACE] = describer.trace(fx.meta.get("stack_trace") or self._context.trace)
            if self._context.decomposing:
                said[DECOMPOSED] = ", ".join(self._context.decomposing)
            self._add_rule(said)
        return said

    def _add_rule(self, said: dict[str, str]) -> None:
        rule = self._rule
        if rule is not None:
            said[RULE] = rule.name
        said[PACKAGE] = self._describer.package(PROJECT_NAME if rule is None else rule.source or "rules of the call")

    def in_function(self, name: str) -> Provenance:
        """Where the nodes of a function's body come from: the rule, and nothing that is one call's own."""
        return _InFunction(self, name)

    def _shared(self, name: str, full: bool) -> dict[str, str]:
        target, _ = self._describer.target(self._fx.target)
        said = without_modules(name, target, full)
        if full:
            self._add_rule(said)
        return said


class _InFunction(OfExport):
    """The body of a function that a rule defines; further calls share it."""

    __slots__ = ("_definer",)

    def __init__(self, definer: FxProvenance, name: str) -> None:
        super().__init__(name, "function")
        self._said = None
        self._definer = definer

    @property
    def location(self) -> str | None:
        """The line of the first call, for errors."""
        return self._definer.location

    def _say(self, full: bool) -> dict[str, str]:
        return self._definer._shared(self._name, full)
