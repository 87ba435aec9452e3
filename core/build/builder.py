"""GraphBuilder: emits the nodes of converters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build.attributes import Attributes, check_dtypes, check_node
from onnxplug.build.calls import Interpreter, NoInterpreter
from onnxplug.build.dtypes import as_array, to_onnx_dtype
from onnxplug.build.functions import Functions
from onnxplug.build.inference.dims import Constant, Result, content_key, text_tensor
from onnxplug.build.kernels import HALVES, Kernels
from onnxplug.build.names import Names
from onnxplug.build.opset import Domains, Input, Operators, Opset
from onnxplug.build.provenance import Provenances
from onnxplug.build.reshape import reshape
from onnxplug.build.scope import Scopes
from onnxplug.build.sizes import Size, Sizes
from onnxplug.build.spec import MAX_FOLDED, OpSpec
from onnxplug.build.stored import Make, Weights
from onnxplug.build.widening import Widening
from onnxplug.errors import ConversionError, OpsetError, Unsupported
from onnxplug.host import plugin_host
from onnxplug.observers import Events
from onnxplug.registry.target import DEFAULT_RUNTIME

Value = ir.Value
Mark = tuple[int, int, int]  # the numbers of nodes, of records of sizes and of domains

_INT = {int}
_first = itemgetter(0)


class GraphBuilder:
    """Emits typed ONNX nodes and simplifies while it does.

    Args:
        opsets: Target version of each domain; ``""`` is ai.onnx.
        optimize: Fold constants, share equal pure nodes, drop nodes that do nothing. Without it, every requested node is
            emitted.
        domains: Known versions of other domains, used when a converter names none.
        schemas: Domain to the ``OpSchema`` objects that plugins registered for it.
        runtime: The program that the model is made for; ``None`` is portable ONNX.
        kernels: The runtime's kernels; an operator without a kernel is computed in a wider element type. ``None``: not known.
        exact: Whether special values must be exact where that costs time.
        expressions: Name of a dynamic size to its sympy expression.
        operators: Domain and name to the record of an ONNX operator (``onnxplug_operators``); ``None``: the installed plugins'.
        events: Receives the builder's counts and times; ``None``: nobody does.

    Attributes:
        op: The operators of ai.onnx at the target opset.
        opset: The target version of ai.onnx.
        opsets: Every domain that the graph imports, with its version.
        optimize, runtime, exact, operators: The arguments.
        sizes: Which values hold dynamic sizes.
        weights: The tensors that are exported with the model, and the initializers derived from them.
        scope: The graph and its subgraphs under construction.
        functions: The model-local functions.
        provenance: The call under conversion, and where each node comes from.
        interpreter: Converts the calls of the FX graph.
        names: The names in the assembled graph.
    """

    def __init__(
        self,
        opsets: Mapping[str, int],
        *,
        optimize: bool = True,
        domains: Mapping[str, int] | None = None,
        schemas: Mapping[str, Sequence[Any]] | None = None,
        runtime: str | None = DEFAULT_RUNTIME,
        exact: bool = False,
        kernels: Kernels | None = None,
        expressions: Mapping[str, Any] | None = None,
        operators: Operators | None = None,
        events: Events | None = None,
    ) -> None:
        self.opsets: dict[str, int] = dict(opsets)
        self.opset: int = self.opsets[""]
        self.optimize = optimize
        self.runtime = runtime
        self.exact = exact
        self.operators = operators if operators is not None else plugin_host().operators()
        self.op = Opset(self, "", self.opset)
        self.provenance = Provenances()
        self.names = Names()
        self.interpreter: Interpreter = NoInterpreter()
        self.sizes = Sizes(self, expressions if expressions is not None else {})
        self.weights = Weights(self.sizes, self.names)
        self.scope = Scopes(self.sizes, self.provenance)
        self.functions = Functions(self, self.scope, self.sizes, self.provenance)
        self._has_kernels = kernels is not None
        self._widening = Widening(self, self.provenance, kernels, islands=optimize and not exact)
        self._domains = Domains(self, domains or {}, schemas or {})
        self._constants: dict[Any, Value] = {}
        self._attributes = Attributes(self.sizes.describe)
        self.events = events

    # -- emission ------------------------------------------------------------------------------------------------------

    def domain(self, name: str, version: int | None = None) -> Opset:
        """The operators of a domain, e.g. ``g.domain("com.acme", 2).NMS(boxes, scores, _outputs=2)``.

        Args:
            name: The domain; ``""`` is ai.onnx.
            version: Its version; ``None`` is the user's, else the version that a plugin declares, else 1.

        Returns:
            An object whose attributes are the domain's operators, as ``g.op`` is for ai.onnx.

        Raises:
            OpsetError: The graph already uses another version of that domain.
        """
        if name not in ("", "ai.onnx"):
            return self._domains.get(name, version, self.provenance.call)
        if version is not None and version != self.opset:
            raise OpsetError(f"ai.onnx {version} was requested, but the export's opset is {self.opset}")
        return self.op

    def version_of(self, domain: str, default: int = 1) -> int:
        """The version of a domain that the model imports, else the version that a plugin declares, else ``default``."""
        return self._domains.version_of(domain, default)

    def emit(self, spec: OpSpec, inputs: Sequence[Input], attributes: Mapping[str, Any], outputs: int) -> Any:
        """Emits one node, or finds a value that already holds its result. Converters use ``g.op``.

        Args:
            spec: The operator.
            inputs: Values, ``None`` for an absent optional input, or Python objects, which become constants.
            attributes: Attributes by name; attributes that are ``None`` are left out.
            outputs: Number of outputs.

        Returns:
            The output, or a tuple of several.

        Raises:
            ConversionError: The inputs, attributes or outputs do not fit the operator's schema.
        """
        values = [
            v if v is None or type(v) is Value else self._as_input(v, spec, i, inputs) for i, v in enumerate(inputs)
        ]
        while values and values[-1] is None:
            values.pop()
        if spec.has_schema:
            check_node(spec, values, outputs)
        if self._has_kernels or (
            spec.no_bfloat16 and any(v is not None and v.dtype == ir.DataType.BFLOAT16 for v in values)
        ):
            widened = self._widening.emit(spec, values, attributes, outputs)
            if widened is not None:
                return widened
        attrs: dict[str, ir.Attr] = {}
        raw: dict[str, Any] = {}
        keys: list[Any] = []
        references: list[ir.Attr] = []
        attribute_of = self._attributes.of
        for name, value in attributes.items():
            if value is not None:
                attr, attr_key = attribute_of(spec, name, value)
                attrs[name] = attr
                keys.append((name, attr_key))
                if attr.is_ref():
                    references.append(attr)
                else:
                    raw[name] = attr.value
        for name in spec.required_attributes:
            if name not in attrs:
                raise ConversionError(f"{spec.op_type} needs the attribute {name!r}")
        key = None
        if self.optimize and spec.pure:
            if outputs == 1 and not references:
                known = self._without_node(spec, values, raw)
                if known is not None:
                    return known
            if len(keys) > 1:
                keys.sort(key=_first)
            key = (spec, outputs, *map(id, values), *keys)
            seen = self.scope.innermost.lookup(key)
            if seen is not None:
                return seen[0] if outputs == 1 else seen
        # A float that is only known at a function's call does not determine shapes; anything else may.
        typed = spec.op_type != "Constant" and (
            not references or all(a.type == ir.AttributeType.FLOAT for a in references)
        )
        return self._append(spec, values, attrs, raw if typed else None, outputs, key)

    def _without_node(self, spec: OpSpec, values: Sequence[Value | None], raw: Mapping[str, Any]) -> Value | None:
        """A value that holds the result already, or the folded constant; ``None`` where a node must compute it."""
        started = time.perf_counter_ns() if self.events is not None else 0
        known = self._simplified(spec, values, raw)
        if self.events is not None:
            self.events.count("part", "simplification and folding", started)
        return known

    def _simplified(self, spec: OpSpec, values: Sequence[Value | None], raw: Mapping[str, Any]) -> Value | None:
        if spec.simplify is not None:
            simplified: Value | None = spec.simplify(self, values, raw)
            if simplified is not None:
                return simplified
        if spec.fold is None:
            return None
        if any(value is not None and value.const_value is None for value in values):
            return None
        folded = self._folded(spec, values, raw)
        if self.events is not None:
            self.events.count("fold", spec.op_type, hit=folded is not None)
        return folded

    def _folded(self, spec: OpSpec, values: Sequence[Value | None], raw: Mapping[str, Any]) -> Value | None:
        """The folded result of an operator on constants; ``None`` where it is left to the runtime."""
        assert spec.fold is not None
        arrays = [None if v is None else self.constant(v) for v in values]
        if sum(a.size for a in arrays if a is not None) > MAX_FOLDED:
            return None
        result = spec.fold(arrays, raw)
        return None if result is None or result.size > MAX_FOLDED else self.const(result)

    def _append(
        self,
        spec: OpSpec,
        values: Sequence[Value | None],
        attrs: Mapping[str, ir.Attr],
        raw: Mapping[str, Any] | None,
        outputs: int,
        key: Any,
    ) -> Any:
        if spec.input_types:
            check_dtypes(spec, values, lambda value: value.const_value is not None or self.is_weight(value))
        # Nothing is inferred from an attribute that is known at a function's call alone.
        inferred = self._infer(spec, values, attrs, raw, outputs) if raw is not None else []
        results = []
        for index in range(outputs):
            dtype, dims = inferred[index] if index < len(inferred) else (None, None)
            if dtype is None:
                dtype = spec.output_dtype(index, values)
            kind = ir.TensorType(dtype) if dtype is not None else None
            results.append(Value(type=kind, shape=self.sizes.shape_of(dims) if dims is not None else None))
        # Without a name until the model is complete.
        node = ir.Node(spec.domain, spec.op_type, values, attrs, outputs=results, name="")
        self.provenance.record(node)
        answer = tuple(node.outputs)
        self.scope.innermost.add(node, key, answer)
        return answer[0] if outputs == 1 else answer

    def _infer(
        self,
        spec: OpSpec,
        values: Sequence[Value | None],
        attrs: Mapping[str, ir.Attr],
        raw: Mapping[str, Any],
        outputs: int,
    ) -> Result:
        started = time.perf_counter_ns() if self.events is not None else 0
        inferred: Result = spec.infer(values, raw, spec) if spec.infer is not None else []
        if not inferred or inferred[0][1] is None:
            inferred = self._infer_by_onnx(spec, values, attrs, outputs) or inferred
        if self.events is not None:
            self.events.count("part", "shape inference", started)
        return inferred

    def _infer_by_onnx(
        self, spec: OpSpec, values: Sequence[Value | None], attrs: Mapping[str, ir.Attr], outputs: int
    ) -> Result:
        if spec.schema is None or any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in attrs.values()
        ):
            return []
        from onnxplug.build.inference.by_onnx import infer_by_onnx

        started = time.perf_counter_ns() if self.events is not None else 0
        inferred = infer_by_onnx(spec.schema, values, attrs, outputs, self.opsets)
        if self.events is not None:
            self.events.count("part", "shape inference, by onnx", started)
        return inferred

    # -- inputs and constants ------------------------------------------------------------------------------------------

    def _as_input(self, item: Any, spec: OpSpec, index: int, inputs: Sequence[Input]) -> Value:
        """A constant for a Python object given as input, of the dtype that the operator wants there."""
        if isinstance(item, list | tuple):
            if not set(map(type, item)) <= _INT and any(isinstance(part, Value) for part in item):
                return self.vector(item)
        elif isinstance(item, torch.Tensor | np.ndarray | np.generic):
            return self.const(item)
        elif isinstance(item, Value):
            return item
        dtype = spec.only_dtype(index)
        if dtype is None:
            group = spec.group_of(index)
            for position, other in enumerate(inputs):
                if group and type(other) is Value and spec.group_of(position) == group:
                    dtype = other.dtype
                    break
        return self.const(item, dtype)

    def const(self, value: Any, dtype: torch.dtype | ir.DataType | None = None) -> Value:
        """A shared constant of a Python scalar, text, nested list, numpy array or torch tensor.

        Args:
            value: The content; the constant has its shape.
            dtype: The element type. ``None``: int64 for ints, float32 for floats, bool for bools; arrays and tensors keep theirs.
        """
        wanted = to_onnx_dtype(dtype) if dtype is not None else None
        quick: Any = None
        kind = type(value)
        if (kind is list or kind is tuple) and set(map(type, value)) <= _INT:
            quick = (list, tuple(value), wanted)
            constant = self._constants.get(quick)
            if constant is not None:
                return constant
        elif isinstance(value, int | float):
            # 1 == 1.0 == True and 0.0 == -0.0 to a dict, but not to us.
            quick = (type(value), value, math.copysign(1.0, value) if value == 0 else 1.0, wanted)
            constant = self._constants.get(quick)
            if constant is not None:
                return constant
        array = as_array(value, wanted)
        key = content_key(array)
        constant = self._constants.get(key)
        if constant is None:
            tensor = Constant(array) if array.dtype.kind not in "OU" else text_tensor(array)
            constant = Value(type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
            self._constants[key] = constant
        if quick is not None:
            self._constants[quick] = constant
            if self._has_kernels and wanted in HALVES and quick[0] is not list:
                self._widening.remember(constant, self.const(value, ir.DataType.FLOAT))
        return constant

    def constant(self, value: Value | None) -> np.ndarray | None:
        """The numpy array of a constant, ``None`` for a value that is only known at run time.

        Parameters and buffers are never known: their values may be replaced in the exported model. The form they are stored in
        may depend on them: ``g.stored(x)`` and ``g.derive(x, make, key)``.
        """
        if value is None or value.const_value is None:
            return None
        return value.const_value.numpy()

    def cast(self, x: Value, dtype: torch.dtype | ir.DataType) -> Value:
        """``x`` converted to ``dtype``; ``x`` itself when it has that dtype.

        Args:
            x: The value.
            dtype: The element type, of torch or of ONNX.

        Returns:
            A value of the shape of ``x``.
        """
        wanted = to_onnx_dtype(dtype)
        if x.dtype == wanted:
            return x
        if self._has_kernels:
            return self._widening.cast(x, wanted)
        return self.op.Cast(x, to=int(wanted))

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def shape(self, x: Value) -> Value:
        """The shape of ``x`` as a 1-dim int64 Value with an element for each axis; a constant when the shape is static."""
        return self.op.Shape(x)

    def dim(self, x: Value, axis: int) -> Size:
        """The size of one axis.

        Args:
            x: The value.
            axis: The axis; a negative axis counts from the end.

        Returns:
            An int when the size is static, else a 0-dim int64 Value.
        """
        if x.shape is None:
            return self.sizes.read(x, axis)
        dims = x.shape.dims
        axis %= len(dims)
        size = dims[axis]
        return size if isinstance(size, int) else self._dynamic_dim(x, axis, size)

    def dims(self, x: Value) -> list[Size]:
        """The size of every axis of ``x``, whose rank must be known."""
        assert x.shape is not None
        dims = x.shape.dims
        return [size if isinstance(size, int) else self._dynamic_dim(x, axis, size) for axis, size in enumerate(dims)]

    def _dynamic_dim(self, x: Value, axis: int, dim: ir.SymbolicDim) -> Value:
        size = self.sizes.find(dim)
        return size if size is not None else self.sizes.read(x, axis, dim.value)

    def size(self, dim: int | ir.SymbolicDim) -> Size:
        """A dimension as a size.

        Returns:
            An int when the dimension is static, else the 0-dim int64 Value that holds its size.

        Raises:
            Unsupported: No value in the graph holds the size, and it can't be computed from others.
        """
        return self.sizes.require(dim) if isinstance(dim, ir.SymbolicDim) else dim

    def concrete_shape(self, x: Value | Sequence[Size | ir.SymbolicDim], what: str = "shape") -> list[int]:
        """Static sizes as ints, for attributes and for converters that need them.

        Args:
            x: A value, whose shape is meant, or sizes.
            what: A noun for the sizes, for the message of the error.

        Raises:
            Unsupported: A size is dynamic, and the message names it; or the rank is unknown.
        """
        if isinstance(x, Value) and x.shape is None:
            raise Unsupported(f"the {what} must be static, but its rank is unknown")
        sizes: Sequence[Any] = list(x.shape or ()) if isinstance(x, Value) else x
        for axis, size in enumerate(sizes):
            if not isinstance(size, int):
                name = size.value if isinstance(size, ir.SymbolicDim) else self.sizes.describe(size)
                raise Unsupported(
                    f"the {what} must be static, but axis {axis} is the dynamic dimension {name!r}",
                    hint=f"Export with {name!r} static.",
                )
        return list(sizes)

    def vector(self, sizes: Sequence[Size | ir.SymbolicDim]) -> Value:
        """A 1-dim int64 Value of sizes, axes or other integers; adjacent ints become one constant."""
        parts: list[Value] = []
        pending: list[int] = []
        for size in sizes:
            if isinstance(size, int):
                pending.append(int(size))
                continue
            size = size if isinstance(size, Value) else self.sizes.require(size)
            constant = self.constant(size)
            if constant is not None and constant.size == 1:
                pending.append(int(constant.reshape(())))
                continue
            if pending:
                parts.append(self.const(pending))
                pending = []
            parts.append(self.as_vector(size))
        if pending or not parts:
            parts.append(self.const(pending, ir.DataType.INT64))
        return parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0)

    def as_vector(self, size: Size) -> Value:
        """A size as an int64 Value of shape [1]."""
        return self.vector([size]) if isinstance(size, int) else self.sizes.vector_of(size)

    def as_scalar(self, size: Size) -> Value:
        """A size as a 0-dim int64 Value."""
        return self.const(size) if isinstance(size, int) else size

    def reshape(self, x: Value, sizes: Sequence[Size | ir.SymbolicDim]) -> Value:
        """``x`` with another shape, by as few nodes as the sizes allow.

        A size equal to the input's at the same axis is copied (0 in ONNX's Reshape), one other dynamic size is inferred at run time
        (-1), and only additional dynamic sizes are computed. A size of -1 stays -1.

        Args:
            x: The value.
            sizes: The new shape: ints, sizes or dimensions; their product is the number of elements of ``x``.

        Raises:
            Unsupported: A size is 0 below opset 14, or no value in the graph holds a dynamic size.
        """
        return reshape(self, self.sizes, x, sizes)

    # -- weights -------------------------------------------------------------------------------------------------------

    def stored(self, x: Value | None) -> torch.Tensor | None:
        """The tensor that a parameter, buffer or constant is exported with; ``None`` for anything else.

        It is for decisions. A number taken from it would remain when the weights are replaced: whatever depends on the
        content is made by :meth:`derive`.
        """
        return self.weights.stored(x)

    def is_weight(self, x: Value | None) -> bool:
        """Whether a value is a parameter or a buffer of the model, or was derived from one by :meth:`derive` as a torch tensor.

        :meth:`derive` takes such a value, also in a model with fake weights, for which :meth:`stored` is ``None``.
        """
        return self.weights.is_weight(x)

    def derive(self, source: Value, make: Make, key: Hashable, *, form: str = "derived") -> Value:
        """An initializer made of a stored tensor, at export and again whenever the weights are replaced.

        Args:
            source: A parameter, a buffer or a constant: a value for which :meth:`is_weight` is true or :meth:`stored` is
                not ``None``.
            make: A function of the tensor that returns the stored tensor: a torch tensor, or an ``onnx_ir`` tensor for dtypes
                that torch lacks.
            key: Identifies ``make``: equal keys of one source share one initializer.
            form: A word for the new form: the initializer is called ``SOURCE.FORM``.

        Returns:
            The initializer, with the dtype and shape of the result of ``make``.

        Raises:
            UsageError: ``source`` is known at run time only.
        """
        return self.weights.derive(source, make, key, form=form)

    # -- other calls and graphs ----------------------------------------------------------------------------------------

    def convert(self, call: Any) -> Any:
        """Converts a call that was derived from the current call: ``g.convert(node.part("real"))``.

        Args:
            call: The call (:class:`onnxplug.FxNode`).

        Returns:
            The results of the first rule that does not decline.

        Raises:
            Decline: No rule translates it; the calling converter declines too unless it catches that.
        """
        return self.interpreter.convert(call)

    def call_next(self, node: Any) -> Any:
        """Converts the current call by the next rule, or by its decomposition when no rule is left.

        Args:
            node: The converter's own ``node``.

        Returns:
            The results of that rule or decomposition.
        """
        return self.interpreter.convert(node)

    def subgraph(
        self,
        build: Callable[..., Value | Sequence[Value]],
        inputs: Sequence[tuple[torch.dtype | ir.DataType, Sequence[Any] | None]] = (),
        name: str = "body",
    ) -> ir.Graph:
        """A graph for an If, Loop or Scan attribute; it may use every value of the graphs around it.

        Args:
            build: Called with a Value for each input; returns the graph's outputs.
            inputs: Dtype and dimensions (``None`` for an unknown rank) of each input.
            name: The graph's name.
        """
        return self.scope.subgraph(build, inputs, name)

    def function(
        self,
        domain: str,
        name: str,
        build: Callable[..., Value | Sequence[Value]],
        inputs: Sequence[Any],
        *,
        version: int | None = None,
        outputs: int = 1,
        attributes: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls a model-local function, defining it at first use.

        Args:
            domain: The function's domain; the model imports it at ``version``.
            name: The function's name.
            build: Called with a formal Value for each input (with the call's dtypes and ranks, without sizes; ``None`` for
                an absent input) and with a reference for each attribute, to pass to nodes of the body as their own; emits
                the body through this builder and returns its outputs.
            inputs: The call's inputs.
            version: Version of the domain; ``None`` is the version that the plugin or the target gives it, else 1.
            outputs: Number of outputs.
            attributes: The call's attributes. The function declares them; calls with other values share the body.

        Returns:
            The call's output, or a tuple of them when ``outputs`` is not 1.

        Raises:
            ConversionError: It has no domain of its own, reads values of the graph around it, or returns another number of
                outputs.
        """
        return self.functions.call(domain, name, build, inputs, version=version, outputs=outputs, attributes=attributes)

    # -- undoing -------------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """The present end of emission, for :meth:`rollback`."""
        return len(self.scope.innermost.nodes), self.sizes.mark(), self._domains.mark()

    def rollback(self, mark: Mark) -> None:
        """Removes every node emitted since ``mark``, and all records of them: the domains' versions too."""
        nodes, sizes, domains = mark
        self.scope.innermost.rollback(nodes)
        self.sizes.undo(sizes)
        self._domains.undo(domains)
