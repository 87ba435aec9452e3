"""Opset: the operators of one domain at one version, as a converter calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload

import onnx_ir as ir

from onnxplug.build.spec import OpSpec, custom_spec, onnx_spec
from onnxplug.errors import UsageError

Input = Any
"""What an operator takes as input: a Value, None, a Python scalar or list, a numpy array or a torch tensor."""


class Emitter(Protocol):
    """What an :class:`Opset` needs of the builder."""

    schemas: dict[str, Sequence[Any]]

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

    Positional arguments are inputs: Values, ``None`` for an absent optional one, or Python scalars, lists, numpy arrays
    and torch tensors, which become shared constants of the dtype that the operator wants there. Keyword arguments are
    attributes; one that is ``None`` is left out. ``_outputs=n`` gives a tuple of n Values.
    """

    def __init__(self, builder: Emitter, domain: str, version: int) -> None:
        self._builder = builder
        self._domain = domain
        self._version = version

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
        builder = self._builder
        if self._domain:
            spec = custom_spec(self._domain, op_type, self._version, builder.schemas.get(self._domain, ()))
        else:
            spec = onnx_spec(op_type, self._version)
        emit_node = builder.emit

        def emit(*inputs: Input, _outputs: int = 1, **attributes: Any) -> Any:
            return emit_node(spec, inputs, attributes, _outputs)

        # The next look-up of this operator finds the function itself.
        self.__dict__[op_type] = emit
        return emit
