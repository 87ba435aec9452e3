"""An onnxscript function or an ``onnx.FunctionProto`` as the translation of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx.defs
import onnx_ir as ir

from onnxplug.errors import ConversionError, Decline, Unsupported, UsageError
from onnxplug_torch_onnx.binding import Parameter, bind, mismatch, parameters_of

#: Operators whose semantics changed at an opset while the node's form stayed the same.
_CHANGED = {("Softmax", 13), ("LogSoftmax", 13), ("Hardmax", 13), ("RoiAlign", 16), ("GroupNormalization", 21)}


def function_body(
    function: Any, *, functions: Sequence[Any] = (), version: int | None = None, inline: bool = False
) -> Callable[..., Any]:
    """A converter that calls a model-local function.

    The model gets the function in the function's domain, rebuilt for the target opset, and the operator becomes a
    node that calls it. A runtime that has a kernel of that domain and name uses it instead of the body.

    Args:
        function: An ``@onnxscript.script()`` function, an ``onnx.FunctionProto`` or an ``onnx_ir.Function``. The
            operator's arguments go to its inputs and attributes in order, keyword-only ones by name.
        functions: Further functions that its body calls; an onnxscript function includes its own.
        version: Version of the function's domain in the model; by default the plugin's or the target's version of it.
        inline: Emit the body in place of the call.

    Returns:
        A converter ``(g, node)`` for a :class:`~onnxplug.Rule`. It declines a node whose dtypes the function's
        annotations exclude.

    Raises:
        UsageError: ``function`` is of none of these types.
    """
    main, parameters = _read(function)
    known = {main.identifier(): main}
    for other in [*_called_by(function), *functions]:
        read, _ = _read(other)
        known[read.identifier()] = read

    own = function.opset.version if _is_script(function) else 1

    def convert(g: Any, node: Any) -> Any:
        bound = bind(node, parameters, f"the function {main.domain}::{main.name}")
        reason = mismatch(parameters, bound)
        if reason is not None:
            raise Decline(reason)
        wanted = version if version is not None else g.version_of(main.domain, own)
        return call(g, main, parameters, bound, known, version=wanted, inline=inline)

    convert.__module__ = getattr(function, "__module__", None) or main.domain
    convert.__qualname__ = getattr(function, "__qualname__", None) or main.name
    convert.onnxplug_converter = True  # type: ignore[attr-defined]
    return convert


def is_function(item: Any) -> bool:
    """Whether an object is a function that :func:`function_body` takes."""
    return isinstance(item, onnx.FunctionProto | ir.Function) or _is_script(item)


def _is_script(item: Any) -> bool:
    return hasattr(item, "to_function_proto") and hasattr(item, "function_ir")


def _read(function: Any) -> tuple[ir.Function, list[Parameter]]:
    if _is_script(function):
        read = ir.serde.deserialize_function(function.to_function_proto())
        return read, parameters_of(function.op_signature)
    if isinstance(function, onnx.FunctionProto):
        function = ir.serde.deserialize_function(function)
    if not isinstance(function, ir.Function):
        raise UsageError(
            f"compat.function_body takes an onnxscript function, an onnx.FunctionProto or an onnx_ir.Function, got "
            f"{function!r}"
        )
    parameters = [Parameter(str(v.name), group=f"T{i}", required=True) for i, v in enumerate(function.inputs)]
    for attr in function.attributes.values():
        parameters.append(Parameter(attr.name, attr.type, required=attr.value is None))
    return function, parameters


def _called_by(function: Any) -> list[Any]:
    if not _is_script(function):
        return []
    return list(function.function_ir.get_called_functions().values())


def call(
    g: Any,
    function: ir.Function,
    parameters: Sequence[Parameter],
    bound: Mapping[str, Any],
    known: Mapping[Any, ir.Function],
    *,
    version: int | None = None,
    inline: bool = False,
) -> Any:
    """Calls a function with arguments by parameter name; returns its output, or a tuple of them."""
    names = [str(v.name) for v in function.inputs]
    inputs = [_as_input(g, bound.get(name)) for name in names]
    while inputs and inputs[-1] is None:
        inputs.pop()
    attributes = {p.name: _typed(p, bound) for p in parameters if p.attribute is not None and p.name in bound}
    for attr in function.attributes.values():
        if attr.value is not None and attr.name not in attributes:
            attributes[attr.name] = attr
    attributes = {k: v for k, v in attributes.items() if v is not None}
    replay = _Replay(g, function, known, version, inline)

    def build(*values: Any, **references: Any) -> list[Any]:
        missing = [None] * (len(names) - len(values))
        return replay.run(dict(zip(names, [*values, *missing], strict=True)), references)

    count = len(function.outputs)
    if inline:
        results = build(*inputs, **attributes)
        return results[0] if count == 1 else tuple(results)
    return g.function(
        function.domain, function.name, build, inputs, version=version, outputs=count, attributes=attributes
    )


def _as_input(g: Any, value: Any) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(item, ir.Value) for item in value):
        return g.vector(value)
    return value


def _typed(parameter: Parameter, bound: Mapping[str, Any]) -> Any:
    value = bound[parameter.name]
    if value is None or isinstance(value, ir.Attr):
        return value
    assert parameter.attribute is not None
    if parameter.attribute == ir.AttributeType.TENSOR and not isinstance(value, ir.TensorProtocol):
        return value
    return ir.Attr(parameter.name, parameter.attribute, value)


class _Replay:
    """Emits the body of a function through the builder, which checks every node at the target opset."""

    def __init__(
        self, g: Any, function: ir.Function, known: Mapping[Any, ir.Function], version: int | None, inline: bool
    ) -> None:
        self._g = g
        self._function = function
        self._known = known
        self._version = version
        self._inline = inline

    def run(self, inputs: Mapping[str, Any], attributes: Mapping[str, ir.Attr]) -> list[Any]:
        """Emits the body for inputs by name and attributes (values, or references to the enclosing function's)."""
        env: dict[int, Any] = {id(v): inputs[str(v.name)] for v in self._function.inputs}
        for node in self._function:
            self._node(node, env, attributes)
        return [env[id(v)] for v in self._function.outputs]

    def _node(self, node: ir.Node, env: dict[int, Any], attributes: Mapping[str, ir.Attr]) -> None:
        inputs = [None if v is None else self._value(v, env) for v in node.inputs]
        resolved_attributes = {}
        for name, attr in node.attributes.items():
            resolved = self._attribute(attr, env, attributes)
            if resolved is not None:
                resolved_attributes[name] = resolved
        results = self._emit(node, inputs, resolved_attributes)
        several = results if isinstance(results, list | tuple) else (results,)
        for old, new in zip(node.outputs, several, strict=True):
            env[id(old)] = new

    def _value(self, value: ir.Value, env: Mapping[int, Any]) -> Any:
        if id(value) in env:
            return env[id(value)]
        if value.const_value is not None:
            return self._g.const(value.const_value.numpy())
        raise ConversionError(f"the function {self._function.name!r} reads {value.name!r}, which nothing makes")

    def _emit(self, node: ir.Node, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        g = self._g
        identifier = (node.domain, node.op_type, node.overload)
        called = self._known.get(identifier)
        if called is not None:
            names = [str(v.name) for v in called.inputs]
            parameters = [Parameter(n) for n in names]
            parameters += [Parameter(a.name, a.type, a.value is None) for a in called.attributes.values()]
            bound = {**dict(zip(names, inputs, strict=False)), **attributes}
            return call(g, called, parameters, bound, self._known, version=self._version, inline=self._inline)
        if node.domain not in ("", "ai.onnx"):
            version = self._function.opset_imports.get(node.domain)
            return getattr(g.domain(node.domain, version), node.op_type)(
                *inputs, _outputs=len(node.outputs), **attributes
            )
        written = self._function.opset_imports.get("", g.opset)
        check_meaning(node.op_type, written, g.opset, self._function.name)
        if node.op_type == "Constant" and not any(a.is_ref() for a in attributes.values()):
            return g.const(_constant(attributes))
        result = getattr(g.op, node.op_type)(*inputs, _outputs=len(node.outputs), **attributes)
        if node.op_type == "Constant":
            _type_constant(result, attributes)
        return result

    def _attribute(self, attr: ir.Attr, env: Mapping[int, Any], attributes: Mapping[str, ir.Attr]) -> Any:
        if attr.is_ref():
            return attributes.get(str(attr.ref_attr_name))
        if attr.type == ir.AttributeType.GRAPH:
            return self._subgraph(attr.as_graph(), env, attributes)
        if attr.type == ir.AttributeType.GRAPHS:
            return [self._subgraph(graph, env, attributes) for graph in attr.as_graphs()]
        return attr

    def _subgraph(self, graph: ir.Graph, env: Mapping[int, Any], attributes: Mapping[str, ir.Attr]) -> ir.Graph:
        def build(*values: ir.Value) -> list[Any]:
            inner = {**env, **{id(old): new for old, new in zip(graph.inputs, values, strict=True)}}
            for node in graph:
                self._node(node, inner, attributes)
            return [self._value(v, inner) for v in graph.outputs]

        formals = [
            (v.dtype if v.dtype is not None else ir.DataType.UNDEFINED, list(v.shape) if v.shape is not None else None)
            for v in graph.inputs
        ]
        return self._g.subgraph(build, formals)


def check_meaning(op_type: str, written: int, opset: int, function: str) -> None:
    """Refuses an operator that means something else at an opset than where a function is written for.

    Args:
        op_type: The operator.
        written: The opset that the function is written for.
        opset: The opset that the operator is emitted at.
        function: The function's name.

    Raises:
        Unsupported: It means something else.
    """
    for name, since in _CHANGED:
        if name == op_type and min(written, opset) < since <= max(written, opset):
            raise Unsupported(
                f"the function {function!r} is written for opset {written}, and {op_type} means something else at opset {opset}",
                hint=f"Write the function for opset {opset}, or use an opset range for its rule.",
            )


def _constant(attributes: Mapping[str, Any]) -> Any:
    """The array of a Constant node."""
    import numpy as np

    ((name, attr),) = attributes.items()
    value = attr.value
    if name == "value":
        return value.numpy()
    if name in ("value_int", "value_ints"):
        return np.array(value, dtype=np.int64)
    if name in ("value_float", "value_floats"):
        return np.array(value, dtype=np.float32)
    raise Unsupported(f"a Constant with {name} in a function")


def _type_constant(value: ir.Value, attributes: Mapping[str, ir.Attr]) -> None:
    """Types a Constant whose value is an attribute of the function: the attribute's type gives its dtype and rank."""
    kinds = ir.AttributeType
    (attr,) = attributes.values()
    known = {
        kinds.INT: (ir.DataType.INT64, ()),
        kinds.FLOAT: (ir.DataType.FLOAT, ()),
        kinds.INTS: (ir.DataType.INT64, (None,)),
        kinds.FLOATS: (ir.DataType.FLOAT, (None,)),
    }.get(attr.type)
    if known is not None:
        value.type = ir.TensorType(known[0])
        value.shape = ir.Shape(known[1])
