"""Where nodes come from: what they are named after, and what their metadata say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import onnx_ir as ir

from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.version import VERSION

#: The keys of nodes' metadata. Those of torch are what ``torch.onnx.export`` writes.
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
#: Where a function says which class of modules it stands for.
CLASS = "pkg.onnxplug.class"
#: Where a node says which call of a module it comes from, until the model is finished. Rewrites pass it on with the rest.
MODULE_CALL = "pkg.onnxplug.module_call"
#: What the strict mode calls the model in the graphs of branches and bodies.
STRICT_ROOT = "_export_root"
#: What torch writes where a pass of its own made the node.
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
#: What nodes say with full metadata alone.
FULL_ALONE = (CLASSES, NAMES, FX_NODE, TRACE, RULE, PACKAGE, DECOMPOSED, REPLACED)
#: All that they may say.
ALL_KEYS = (*FULL_ALONE, NAMESPACE, SOURCE, REWRITE, FUNCTION)


class Provenance:
    """Where nodes come from that are no FX node's: an output's copy, for example.

    Nothing is worked out before it is asked for: nobody asks of a call whose nodes are shared, or that makes none.

    Args:
        name: What it is part of.
        kind: What that is.
        place: The path of the module, with slashes; nodes' names begin with it.

    Attributes:
        place: As above.
        call: The call of a module, for the metadata; ``None`` where that isn't asked for.
        words: The nodes' name, where it says in words what they are there for.
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
        """What it is in a list of others."""
        return f"{self._name}: {self._kind}"

    def said(self, full: bool) -> Mapping[str, str]:
        """The metadata of the nodes.

        Args:
            full: Everything; otherwise what a model is shipped with.
        """
        return without_modules(self._name, self._kind, full)

    def in_function(self, name: str) -> Provenance:
        """Where the nodes of a function's body come from, which the calls share."""
        return Provenance(name, "function")


def without_modules(name: str, kind: str, full: bool) -> dict[str, str]:
    """The metadata of nodes that are of no module.

    Args:
        name: What they are part of.
        kind: What that is.
        full: Everything.
    """
    said = {NAMESPACE: f"{name}: {kind}"}
    return {**said, **without_fx_node([kind], [name])} if full else said


def without_fx_node(classes: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """What nodes say with full metadata alone that onnxplug makes for no FX node.

    Args:
        classes: The classes of their modules, the outermost first.
        names: The paths of those.
    """
    own = f"{PROJECT_NAME} {VERSION}"
    return {CLASSES: repr([*classes]), NAMES: repr([*names]), FX_NODE: "", TRACE: "", PACKAGE: own}


class OfExport(Provenance):
    """Where nodes of one export come from: what they say is worked out once."""

    __slots__ = ("_said",)
    _said: dict[str, str] | None

    def said(self, full: bool) -> Mapping[str, str]:
        """The metadata of the nodes.

        Args:
            full: Everything; otherwise what a model is shipped with. It is the same in every call.
        """
        if self._said is None:
            self._said = self._say(full)
        return self._said

    def _say(self, full: bool) -> dict[str, str]:
        raise NotImplementedError


class Further(OfExport):
    """The same with further metadata.

    Args:
        before: Where the nodes come from.
        properties: The further metadata.
    """

    __slots__ = ("_before", "_properties")

    def __init__(self, before: Provenance, properties: Mapping[str, str]) -> None:
        super().__init__("", "", before.place, before.call)
        self._said = None
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

    def _say(self, full: bool) -> dict[str, str]:
        return {**self._before.said(full), **self._properties}

    def in_function(self, name: str) -> Provenance:
        """As of the provenance before."""
        return self._before.in_function(name)


class Named(Further):
    """The same under a name in words, which says what the node is there for.

    Args:
        before: Where the nodes come from.
        name: The name.
    """

    __slots__ = ("words",)

    def __init__(self, before: Provenance, name: str) -> None:
        super().__init__(before, {})
        self.words = name


class Rewritten(Further):
    """What a rewrite emitted at a node.

    Args:
        before: Where the node came from.
        rewrite: The rewrite's name.

    Attributes:
        replaced: The nodes that it took out of the graph: operators, and where they came from.
    """

    __slots__ = ("_rewrite", "replaced")

    def __init__(self, before: Provenance, rewrite: str) -> None:
        # Rewrites may follow each other a thousand times: none holds the one before it.
        super().__init__(before._before if isinstance(before, Rewritten) else before, {})
        self._rewrite = rewrite
        self.replaced: list[tuple[str, Provenance]] = []

    def _history(self) -> tuple[list[str], list[str]]:
        """The rewrites that led to this, the last one first, and the titles of the nodes that were there before any."""
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

    def _say(self, full: bool) -> dict[str, str]:
        rewrites, titles = self._history()
        said = {**super()._say(full), REWRITE: ", ".join(rewrites)}
        if full:
            said[REPLACED] = repr(titles)
        return said


#: Where nodes come from of which nothing is known.
NOWHERE = Provenance("onnxplug", "graph")


class Provenances:
    """Where the nodes of a graph come from: the call under conversion, and what each emitted node is recorded with.

    Attributes:
        call: The call under conversion (:class:`onnxplug.FxNode`), ``None`` between calls.
        current: Where every node comes from that is emitted now.
        package: The distribution whose rule converts it; ``None`` for the builtin ones.
        of: Node to where it comes from.
        packages: Node to the distribution whose rule made it, without those of builtin rules.
    """

    def __init__(self) -> None:
        self.call: Any = None
        self.current = NOWHERE
        self.package: str | None = None
        self.of: dict[ir.Node, Provenance] = {}
        self.packages: dict[ir.Node, str] = {}

    def record(self, node: ir.Node) -> None:
        """Records where a node that was emitted comes from."""
        self.of[node] = self.current
        if self.package is not None:
            self.packages[node] = self.package

    @contextmanager
    def converting(self, call: Any, provenance: Provenance) -> Iterator[None]:
        """A context in which a call is the current one: errors name it.

        Args:
            call: The call under conversion.
            provenance: Where every node comes from that is emitted meanwhile.
        """
        outer = self.call, self.current
        self.call, self.current = call, provenance
        try:
            yield
        finally:
            self.call, self.current = outer

    def annotated(self, properties: Mapping[str, str]) -> AbstractContextManager[None]:
        """A context in which nodes bear further metadata."""
        return self.converting(self.call, Further(self.current, properties))
