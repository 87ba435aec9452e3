"""TorchScript symbolic functions, ``fn(g, *args)``, as converters.

The function runs on a scratch TorchScript graph with torch's own ``GraphContext``, so that everything in
``torch.onnx.symbolic_helper`` and the ``symbolic_opsetN`` modules works as in a TorchScript export; the nodes that it
makes are then emitted through the builder, which checks and simplifies them like all nodes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxplug import torch_private
from onnxplug.build.dtypes import ONNX_TO_TORCH, to_onnx_dtype
from onnxplug.errors import ConversionError, Unsupported, UsageError
from onnxplug.registry.rule import Rule

_GLOBALS_LOCK = threading.RLock()
_KINDS = {
    "i": ir.AttributeType.INT,
    "is": ir.AttributeType.INTS,
    "f": ir.AttributeType.FLOAT,
    "fs": ir.AttributeType.FLOATS,
    "s": ir.AttributeType.STRING,
    "ss": ir.AttributeType.STRINGS,
}
_BODIES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


def symbolic(
    function: Callable[..., Any], *, domains: Mapping[str, int] | None = None, python_scalars: bool = False
) -> Callable[..., Any]:
    """A converter of a TorchScript symbolic function, as ``torch.onnx.register_custom_op_symbolic`` takes it.

    Args:
        function: ``fn(g, *args)``, also with the decorator ``symbolic_helper.parse_args``.
        domains: Versions of the custom domains that it emits; by default the target's or the plugin's.
        python_scalars: Pass numbers, strings and lists of them as Python objects, as an
            ``autograd.Function``'s ``symbolic`` gets them, not as constants of the graph.

    Returns:
        A converter ``(g, node)`` for a :class:`~onnxplug.Rule`.

    Raises:
        UsageError: ``function`` can't be called.
    """
    if not callable(function):
        raise UsageError(f"compat.symbolic takes a function (g, *args), got {function!r}")
    versions = dict(domains or {})

    def convert(g: Any, node: Any) -> Any:
        return run_symbolic(g, function, node.args, versions, python_scalars=python_scalars)

    convert.__module__ = getattr(function, "__module__", None) or __name__
    convert.__qualname__ = getattr(function, "__qualname__", repr(function))
    convert.__doc__ = function.__doc__
    convert.onnxplug_converter = True  # type: ignore[attr-defined]
    return convert


def registered_symbolics(*namespaces: str, domains: Mapping[str, int] | None = None) -> list[Rule]:
    """Rules for the functions registered by ``torch.onnx.register_custom_op_symbolic`` in this process.

    Args:
        namespaces: Only operators of these namespaces; of all by default.
        domains: Versions of the custom domains that they emit; by default the target's or the plugin's.

    Returns:
        A rule for each operator and opset range, for ``to_onnx(rules=...)``.
    """
    from onnxplug.torch_private import torchscript_registration as registration

    rules = []
    for name, group in registration.registry._registry.items():
        own = dict(group._functions._overrides)
        if not own or (namespaces and name.partition("::")[0] not in namespaces):
            continue
        # A version holds until the next version.
        versions = sorted(own)
        for version, following in zip(versions, [*versions[1:], None], strict=True):
            until = following - 1 if following is not None else None
            convert = symbolic(own[version], domains=domains)
            convert.onnxplug_registered = True  # type: ignore[attr-defined]
            rules.append(Rule(name, convert, opset=(version, until)))
    return rules


def run_symbolic(
    g: Any, function: Callable[..., Any], args: Sequence[Any], domains: Mapping[str, int], *, python_scalars: bool
) -> Any:
    """Calls a symbolic function and emits its nodes; returns its results as Values.

    Raises:
        Unsupported: The function raises torch's export error.
    """
    scratch = _Scratch(g, python_scalars)
    bound = [scratch.argument(a) for a in args]
    with _exporting(scratch.opset):
        try:
            results = function(scratch.context(), *bound)
        except torch.onnx.errors.OnnxExporterError as error:
            raise Unsupported(f"the symbolic function can't translate this: {str(error).splitlines()[0]}") from error
    return _Emitter(g, scratch.values, domains).results(scratch.graph, results)


@contextlib.contextmanager
def _exporting(opset: int) -> Iterator[None]:
    """Sets torch's globals as during a TorchScript export; one thread at a time."""
    from onnxplug.torch_private import torchscript_globals as exporting

    with _GLOBALS_LOCK:
        before = exporting.export_onnx_opset_version, exporting.in_onnx_export
        # torch keeps shapes and constants by value name in a map of the process; this pass empties the map first.
        torch_private.infer_torchscript_shapes(torch_private.JitGraph(), {}, opset)
        exporting.export_onnx_opset_version, exporting.in_onnx_export = opset, True
        try:
            yield
        finally:
            exporting.export_onnx_opset_version, exporting.in_onnx_export = before


class _Scratch:
    """A TorchScript graph, and the builder's Values of its inputs.

    Attributes:
        values: Name of a graph value to the builder's Value.
        opset: The target's opset, or the newest that torch's symbolic functions know.
    """

    def __init__(self, g: Any, python_scalars: bool) -> None:
        from onnxplug.torch_private import torchscript_max_opset

        self.graph: Any = torch_private.JitGraph()
        self.values: dict[str, Any] = {}
        self.opset = min(g.opset, torchscript_max_opset)
        self._g = g
        self._python = python_scalars

    def context(self) -> Any:
        """The ``g`` argument of the symbolic function."""
        from onnxplug.torch_private import GraphContext

        none: Any = None
        return GraphContext(
            graph=self.graph,
            block=self.graph,
            opset=self.opset,
            original_node=none,
            params_dict={},
            env={},
            values_in_env=set(),
        )

    def argument(self, item: Any) -> Any:
        """An argument of the node as a symbolic function expects it."""
        if isinstance(item, ir.Value):
            return self._tensor(item)
        if isinstance(item, torch.dtype | torch.device | torch.layout | torch.memory_format):
            from onnxplug.torch_private import JitScalarType

            item = int(JitScalarType.from_dtype(item)) if isinstance(item, torch.dtype) else None
        many = isinstance(item, list | tuple)
        if many and any(part is None or isinstance(part, ir.Value | list | tuple) for part in item):
            return self._list([self.argument(part) for part in item])
        if self._python:
            return item
        if item is None:
            return self._node("prim::Constant", torch_private.JitNoneType.get())
        if isinstance(item, bool | int | float):
            return self._constant(torch.tensor(item, dtype=torch.float64 if isinstance(item, float) else None))
        if isinstance(item, str):
            value = self._node("onnx::Constant", torch_private.JitStringType.get())
            value.node().s_("value", item)
            return value
        if many and all(isinstance(part, bool | int | float) for part in item):
            exact = torch.float64 if any(isinstance(part, float) for part in item) else None
            return self._constant(torch.tensor(list(item), dtype=exact if item else torch.int64))
        return item

    def _tensor(self, value: ir.Value) -> Any:
        known = self._g.constant(value)
        if known is not None and known.size <= 64 and value.dtype in ONNX_TO_TORCH and known.dtype.kind in "fiub":
            result = self._constant(torch.from_numpy(known.copy()))
        else:
            result = self.graph.addInput()
            kind: Any = torch_private.JitTensorType.get()
            if value.dtype is not None:
                kind = kind.with_dtype(ONNX_TO_TORCH[value.dtype])
            if value.shape is not None:
                kind = kind.with_sizes([d if isinstance(d, int) else None for d in value.shape])
            result.setType(kind)
        self.values[result.debugName()] = value
        return result

    def _constant(self, tensor: torch.Tensor) -> Any:
        kind = torch_private.JitTensorType.get().with_dtype(tensor.dtype).with_sizes(list(tensor.shape))
        value = self._node("onnx::Constant", kind)
        value.node().t_("value", tensor)
        return value

    def _list(self, items: Sequence[Any]) -> Any:
        if self._python and not all(isinstance(item, torch_private.JitValue) for item in items):
            return list(items)
        return self._node("prim::ListConstruct", torch_private.JitListType(torch_private.JitTensorType.get()), items)

    def _node(self, kind: str, type_: Any, inputs: Sequence[Any] = ()) -> Any:
        node = self.graph.insertNode(self.graph.create(kind, list(inputs), 1))
        node.output().setType(type_)
        return node.output()


class _Emitter:
    """Emits the nodes of a TorchScript graph of ONNX operators through the builder."""

    def __init__(self, g: Any, values: dict[str, Any], domains: Mapping[str, int]) -> None:
        self._g = g
        self._values = values
        self._domains = domains

    def results(self, graph: Any, results: Any) -> Any:
        """Emits a graph; returns the Values of the symbolic function's results."""
        self._block(graph)
        return self._result(results)

    def _result(self, item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [self._result(part) for part in item]
        if isinstance(item, torch_private.JitValue):
            return self._value(item)
        if item is None:
            return None
        if isinstance(item, bool | int | float | torch.Tensor):
            return self._g.const(item)
        raise ConversionError(f"the symbolic function returned {item!r}, which is not a value of its graph")

    def _value(self, value: Any) -> Any:
        name = value.debugName()
        if name in self._values:
            return self._values[name]
        if value.node().kind() == "onnx::Constant" and value.node().kindOf("value") == "s":
            return self._g.op.Constant(value_string=value.node().s("value"))
        raise ConversionError(f"the symbolic function uses {name}, which is not a value of this graph")

    def _input(self, value: Any) -> Any:
        operand = self._value(value)
        return self._g.vector(operand) if isinstance(operand, list) else operand

    def _block(self, block: Any) -> None:
        for node in block.nodes():
            kind = node.kind()
            outputs = list(node.outputs())
            if kind == "onnx::Constant":
                if node.hasAttribute("value") and node.kindOf("value") == "s":
                    continue
                # A tensor of the node that is already mapped to a Value keeps that mapping.
                self._values.setdefault(outputs[0].debugName(), self._constant(node))
            elif kind == "prim::Constant":
                self._values[outputs[0].debugName()] = None
            elif kind in ("prim::ListConstruct", "prim::TupleConstruct"):
                self._values[outputs[0].debugName()] = [self._value(v) for v in node.inputs()]
            else:
                self._emit(node, kind, outputs)

    def _constant(self, node: Any) -> Any:
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            return self._g.const(node.t("value"))
        return self._g.op.Constant(**self._attributes(node))

    def _emit(self, node: Any, kind: str, outputs: Sequence[Any]) -> None:
        domain, _, op_type = kind.partition("::")
        if domain in ("aten", "prim", "caffe2"):
            raise Unsupported(f"the symbolic function makes {kind}, which is not an operator of ONNX")
        opset = self._g.op if domain == "onnx" else self._g.domain(domain, self._domains.get(domain))
        attributes = self._attributes(node)
        blocks = list(node.blocks())
        if blocks:
            names = _BODIES.get(op_type, ())
            if len(names) != len(blocks):
                raise Unsupported(f"the symbolic function gives {kind} {len(blocks)} blocks")
            attributes.update({n: self._subgraph(b) for n, b in zip(names, blocks, strict=True)})
        inputs = [self._input(v) for v in node.inputs()]
        emitted = getattr(opset, op_type)(*inputs, _outputs=len(outputs), **attributes)
        for old, new in zip(outputs, emitted if isinstance(emitted, tuple) else (emitted,), strict=True):
            _take_type(new, old)
            self._values[old.debugName()] = new

    def _subgraph(self, block: Any) -> ir.Graph:
        formals = list(block.inputs())

        def build(*values: ir.Value) -> list[Any]:
            self._values.update({f.debugName(): v for f, v in zip(formals, values, strict=True)})
            self._block(block)
            return [self._value(v) for v in block.outputs()]

        return self._g.subgraph(build, [_described(f) for f in formals])

    def _attributes(self, node: Any) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        for name in node.attributeNames():
            # torch names the kind of a list of floats "c".
            kind = {"c": "fs"}.get(node.kindOf(name), node.kindOf(name))
            value = getattr(node, kind)(name)
            if kind in _KINDS:
                attributes[name] = ir.Attr(name, _KINDS[kind], value)
            elif kind in ("t", "ts"):
                attributes[name] = value
            else:
                raise Unsupported(f"the attribute {name!r} of {node.kind()} is of TorchScript's kind {kind!r}")
        return attributes


def _described(value: Any) -> tuple[Any, Any]:
    dtype, sizes = _tensor_type(value)
    return (dtype if dtype is not None else ir.DataType.FLOAT, sizes)


def _tensor_type(value: Any) -> tuple[torch.dtype | None, list[int | None] | None]:
    kind = value.type()
    if not isinstance(kind, torch_private.JitTensorType):
        return None, None
    return kind.dtype(), kind.varyingSizes()


def _take_type(value: ir.Value, old: Any) -> None:
    """Sets the type that the function has set, where the builder infers none (operators without a schema)."""
    dtype, sizes = _tensor_type(old)
    if value.dtype is None and dtype is not None:
        value.type = ir.TensorType(to_onnx_dtype(dtype))
    if value.shape is None and sizes is not None:
        value.shape = ir.Shape(sizes)
