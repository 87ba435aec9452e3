"""Where nodes come from: the source of their names and of their metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import onnx_ir as ir

from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.version import VERSION

#: The keys of nodes' metadata; ``torch.onnx.export`` writes the keys with ``torch.onnx``, and ``namespace``, too.
NAMESPACE = "namespace"
CLASSES = "pkg.torch.onnx.class_hierarchy"
NAMES = "pkg.torch.onnx.name_scopes"
FX_NODE = "pkg.torch.onnx.fx_node"
TRACE = "pkg.torch.onnx.stack_trace"
SOURCE = "pkg.onnxplug.source"
RULE = "pkg.onnxplug.rule"
PACKAGE = "pkg.onnxplug.package"
DECOMPOSED = "pkg.onnxplug.decomposed"
REWRITE = "pkg.onnxplug.rewrite"
REPLACED = "pkg.onnxplug.rewritten_from"
FUNCTION = "pkg.onnxplug.function"
#: Metadata key of a function: the class of modules whose calls it replaces.
CLASS = "pkg.onnxplug.class"
#: Metadata key of a node's call of a module, until the model is finished. Rewrites pass it on with the rest of the metadata.
MODULE_CALL = "pkg.onnxplug.module_call"
#: The strict mode's name for the model in the graphs of branches and bodies.
STRICT_ROOT = "_export_root"
#: torch's mark on nodes that a pass of its own made.
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
#: The keys that only full metadata has.
FULL_ALONE = (CLASSES, NAMES, FX_NODE, TRACE, RULE, PACKAGE, DECOMPOSED, REPLACED)
#: All keys.
ALL_KEYS = (*FULL_ALONE, NAMESPACE, SOURCE, REWRITE, FUNCTION)


class Provenance:
    """The origin of nodes that no FX node led to, for example the copy of an output.

    Metadata are made on demand: a call whose nodes are shared, or that emits none, costs nothing.

    Args:
        name: The part of the model: a function, an output.
        kind: Its kind in a word.
        place: The path of the module, with slashes; nodes' names begin with it.

    Attributes:
        place: As above.
        call: The call of a module, as it stands in the metadata; ``None`` where it isn't needed.
        words: The nodes' name, where it states their purpose in words.
    """

    __slots__ = ("_kind", "_name", "call", "place")
    words: str | None = None

    def __init__(self, name: str, kind: str, place: str = "", call: str | None = None) -> None:
        self._name = name
        self._kind = kind
        self.place = place
        self.call = call

    @property
    def location(self) -> str | None:
        """The user's file and line, ``None`` where it isn't known."""
        return None

    @property
    def title(self) -> str:
        """Its line in a list."""
        return f"{self._name}: {self._kind}"

    def metadata(self, full: bool) -> Mapping[str, str]:
        """The metadata of the nodes.

        Args:
            full: Everything; otherwise the metadata that a model is shipped with.
        """
        return without_modules(self._name, self._kind, full)

    def in_function(self, name: str) -> Provenance:
        """The origin of the nodes of a function's body, which the calls share."""
        return Provenance(name, "function")


def without_modules(name: str, kind: str, full: bool) -> dict[str, str]:
    """The metadata of nodes that belong to no module.

    Args:
        name: The part of the model that they belong to.
        kind: Its kind in a word.
        full: Everything.
    """
    metadata = {NAMESPACE: f"{name}: {kind}"}
    return {**metadata, **without_fx_node([kind], [name])} if full else metadata


def without_fx_node(classes: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The full metadata of nodes that onnxplug emits for no FX node.

    Args:
        classes: The classes of their modules, the outermost first.
        names: The paths of the modules.
    """
    own = f"{PROJECT_NAME} {VERSION}"
    return {CLASSES: repr([*classes]), NAMES: repr([*names]), FX_NODE: "", TRACE: "", PACKAGE: own}


class OfExport(Provenance):
    """The origin of nodes of one export; their metadata are made once."""

    __slots__ = ("_metadata",)
    _metadata: dict[str, str] | None

    def metadata(self, full: bool) -> Mapping[str, str]:
        """The metadata of the nodes.

        Args:
            full: Everything; otherwise the metadata that a model is shipped with. It is the same in every call.
        """
        if self._metadata is None:
            self._metadata = self._make_metadata(full)
        return self._metadata

    def _make_metadata(self, full: bool) -> dict[str, str]:
        raise NotImplementedError


class WithProperties(OfExport):
    """Another origin with more metadata.

    Args:
        before: Where the nodes come from.
        properties: The additional metadata.
    """

    __slots__ = ("_before", "_properties")

    def __init__(self, before: Provenance, properties: Mapping[str, str]) -> None:
        super().__init__("", "", before.place, before.call)
        self._metadata = None
        self._before = before
        self._properties = properties

    @property
    def location(self) -> str | None:
        """As of the provenance before."""
        return self._before.location

    @property
    def title(self) -> str:
        """As of the provenance before."""
        return self._before.title

    def _make_metadata(self, full: bool) -> dict[str, str]:
        return {**self._before.metadata(full), **self._properties}

    def in_function(self, name: str) -> Provenance:
        """As of the provenance before."""
        return self._before.in_function(name)


class Named(WithProperties):
    """Another origin under a name in words, which states the node's purpose.

    Args:
        before: Where the nodes come from.
        name: The name.
    """

    __slots__ = ("words",)

    def __init__(self, before: Provenance, name: str) -> None:
        super().__init__(before, {})
        self.words = name


class Rewritten(WithProperties):
    """The origin of nodes that a rewrite emitted at a node.

    Args:
        before: Where the node came from.
        rewrite: The rewrite's name.

    Attributes:
        replaced: The nodes that it took out of the graph: their operators and origins.
    """

    __slots__ = ("_rewrite", "replaced")

    def __init__(self, before: Provenance, rewrite: str) -> None:
        # Rewrites may follow each other a thousand times: none holds the rewrite before it.
        super().__init__(before._before if isinstance(before, Rewritten) else before, {})
        self._rewrite = rewrite
        self.replaced: list[tuple[str, Provenance]] = []

    def _history(self) -> tuple[list[str], list[str]]:
        """The rewrites that led to this node, the last first, and the titles of the nodes before the first rewrite."""
        rewrites: dict[str, None] = {}
        titles: dict[str, None] = {}
        pending: list[tuple[str, Provenance]] = [("", self)]
        seen: set[int] = set()
        while pending:
            op_type, provenance = pending.pop()
            if not isinstance(provenance, Rewritten):
                titles[f"{provenance.title}: {op_type}"] = None
            elif id(provenance) not in seen:
                seen.add(id(provenance))
                rewrites[provenance._rewrite] = None
                pending += provenance.replaced[::-1]
        return list(rewrites), list(titles)

    def _make_metadata(self, full: bool) -> dict[str, str]:
        rewrites, titles = self._history()
        metadata = {**super()._make_metadata(full), REWRITE: ", ".join(rewrites)}
        if full:
            metadata[REPLACED] = repr(titles)
        return metadata


#: The origin of nodes about which nothing is known.
NOWHERE = Provenance("onnxplug", "graph")


class Provenances:
    """The origins of a graph's nodes: the call under conversion, and the record of each emitted node.

    Attributes:
        call: The call under conversion (:class:`onnxplug.FxNode`), ``None`` between calls.
        current: The origin of the nodes that are emitted now.
        package: The distribution whose rule converts it; ``None`` for builtin rules.
        of: Node to its origin.
        packages: Node to the distribution whose rule made it; nodes of builtin rules are left out.
    """

    def __init__(self) -> None:
        self.call: Any = None
        self.current = NOWHERE
        self.package: str | None = None
        self.of: dict[ir.Node, Provenance] = {}
        self.packages: dict[ir.Node, str] = {}

    def record(self, node: ir.Node) -> None:
        """Records the origin of an emitted node."""
        self.of[node] = self.current
        if self.package is not None:
            self.packages[node] = self.package

    @contextmanager
    def converting(self, call: Any, provenance: Provenance) -> Iterator[None]:
        """A context in which a call is the current call: errors name it.

        Args:
            call: The call under conversion.
            provenance: The origin of the nodes that are emitted meanwhile.
        """
        outer = self.call, self.current
        self.call, self.current = call, provenance
        try:
            yield
        finally:
            self.call, self.current = outer

    def annotated(self, properties: Mapping[str, str]) -> AbstractContextManager[None]:
        """A context in which nodes bear additional metadata."""
        return self.converting(self.call, WithProperties(self.current, properties))
