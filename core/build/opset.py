"""Opset: the operators of one domain at one version, as a converter calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload

import onnx_ir as ir

from onnxplug.build.spec import OpSpec, custom_spec, onnx_spec
from onnxplug.errors import OpsetError, UsageError
from onnxplug.plugin_api import OnnxOperator

Input = Any
"""An input of an operator: a Value, None, a Python scalar or list, a numpy array or a torch tensor."""
Operators = Mapping[tuple[str, str], OnnxOperator]
"""Domain and name to the record of an ONNX operator."""


class Emitter(Protocol):
    """The builder, as its parts see it (:class:`GraphBuilder`): they emit through it."""

    op: Opset
    opset: int
    opsets: dict[str, int]
    operators: Operators

    def domain(self, name: str, version: int | None = None) -> Opset:
        """The operators of a domain."""

    def const(self, value: Any, dtype: Any = None) -> ir.Value:
        """A shared constant."""

    def cast(self, x: ir.Value, dtype: Any) -> ir.Value:
        """A value in another dtype."""

    def vector(self, sizes: Sequence[Any]) -> ir.Value:
        """A 1-dim int64 value of sizes."""

    def emit(self, spec: OpSpec, inputs: Sequence[Input], attributes: Mapping[str, Any], outputs: int) -> Any:
        """Emits a node and returns its output, or a tuple of several."""


class Operator(Protocol):
    """An operator of an :class:`Opset`: a call emits a node and returns its output."""

    @overload
    def __call__(self, *inputs: Input, _outputs: int, **attributes: Any) -> Any: ...

    @overload
    def __call__(self, *inputs: Input, **attributes: Any) -> ir.Value: ...

    def __call__(self, *inputs: Input, _outputs: int = 1, **attributes: Any) -> Any:
        """Emits a node; with ``_outputs`` other than 1 the result is a tuple."""


class Opset:
    """The operators of one domain at one version: ``g.op.Gemm(a, b, c, alpha=2.0)`` emits a node.

    Positional arguments are inputs: Values, ``None`` for an absent optional input, or Python scalars, lists, numpy arrays
    and torch tensors, which become shared constants of the dtype that the operator wants there. Keyword arguments are
    attributes; an attribute that is ``None`` is left out. ``_outputs=n`` gives a tuple of n Values.

    Args:
        builder: The builder.
        domain, version: The domain, ``""`` for ai.onnx, and its version.
        schemas: The ``OpSchema`` objects of another domain.
    """

    def __init__(self, builder: Emitter, domain: str, version: int, schemas: Sequence[Any] = ()) -> None:
        self._builder = builder
        self._domain = domain
        self._version = version
        self._schemas = schemas

    def __call__(self, op_type: Any = "", *_: Any, **__: Any) -> Any:
        """Refuses the form of torch.onnx's symbolic functions, ``g.op("Tanh", x)``.

        Raises:
            UsageError: Always.
        """
        name = op_type.rpartition("::")[2] if isinstance(op_type, str) else ""
        written = name if name.isidentifier() else "Tanh"
        raise UsageError("g.op is a table of operators, not a function", hint=f"Write g.op.{written}(...).")

    def __getattr__(self, op_type: str) -> Operator:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        known = self._builder.operators.get((self._domain, op_type))
        if self._domain:
            spec = custom_spec(self._domain, op_type, self._version, self._schemas, known)
        else:
            spec = onnx_spec(op_type, self._version, known)
        emit_node = self._builder.emit

        def emit(*inputs: Input, _outputs: int = 1, **attributes: Any) -> Any:
            return emit_node(spec, inputs, attributes, _outputs)

        # The next look-up of this operator finds the function itself.
        self.__dict__[op_type] = emit
        return emit


class Domains:
    """The domains that a graph imports in addition to ai.onnx, each at one version.

    Args:
        g: The builder; ``g.opsets`` has the user's versions, and receives the versions of other domains.
        declared: Domain to the version that a plugin declares.
        schemas: Domain to the ``OpSchema`` objects that plugins registered for it.
    """

    def __init__(self, g: Emitter, declared: Mapping[str, int], schemas: Mapping[str, Sequence[Any]]) -> None:
        self._g = g
        self._declared = declared
        self._schemas = schemas
        self._requested = frozenset(g.opsets)
        self._used: dict[str, tuple[Opset, str]] = {}

    def version_of(self, name: str, default: int = 1) -> int:
        """The version that the model imports, else the version that a plugin declares, else the default."""
        return self._g.opsets.get(name, self._declared.get(name, default))

    def get(self, name: str, version: int | None, call: Any) -> Opset:
        """The operators of a domain (:meth:`GraphBuilder.domain`), for a call under conversion."""
        if version is None:
            version = self.version_of(name)
        present = self._g.opsets.get(name, version)
        user = "the graph" if call is None else str(call)
        if present != version:
            _, first = self._used.get(name, (None, "the export's opset_version"))
            raise OpsetError(
                f"two versions of domain {name!r}: {present} (by {first}) and {version} (by {user})",
                hint="One model imports one version of a domain; make the rules agree on it.",
            )
        if name not in self._used:
            self._g.opsets[name] = version
            self._used[name] = Opset(self._g, name, version, self._schemas.get(name, ())), user
        return self._used[name][0]

    def mark(self) -> int:
        """The present number of domains, for :meth:`undo`."""
        return len(self._used)

    def undo(self, mark: int) -> None:
        """Takes back the versions of the domains that were first used since ``mark``."""
        while len(self._used) > mark:
            name, _ = self._used.popitem()
            if name not in self._requested:
                del self._g.opsets[name]
