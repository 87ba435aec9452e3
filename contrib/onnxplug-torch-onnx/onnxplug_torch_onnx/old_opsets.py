"""Models of the opsets 9 to 12, which onnxplug's rules do not emit: lowered from opset 13, node by node.

onnx's own version converter has no adapter down from opset 13 for most operators (MatMul, Gather, Cast, Shape), and
converts some wrongly (Softmax over another axis than the last). Here a node stays as it is where the older schema
admits its inputs, attributes and types and ``_SAME`` lists its operator, which means the same there; ``_FORMS`` has the
operators that are rewritten in an older form. Any other node is an error, which names the first opset that has it. The
tests have each operator of both tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx.defs
import onnx_ir as ir

from onnxplug.errors import OpsetError
from onnxplug.opsets import MIN_OPSET

#: The oldest opset that a model is lowered to.
OLDEST = 9
#: The IR version that the exporter of old writes for each opset.
_IR_VERSIONS = {9: 4, 10: 5, 11: 6, 12: 7}
#: The first opset in which an axis or an index may be counted from the end.
_NEGATIVE_SINCE = 11
#: Operators that have changed since opset 9 in nothing but types, optional attributes, and axes counted from the end.
_SAME = frozenset(
    """
    Abs Add ArgMax ArgMin AveragePool Cast Ceil Concat Constant Conv ConvTranspose CumSum DepthToSpace Div Equal Erf
    Exp Expand Floor Gather GatherElements GatherND Gemm Greater Identity If IsInf IsNaN Less Log Loop MatMul Max
    MaxPool Min Mod Mul Neg NonZero OneHot Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceProd Relu
    Reshape Scan ScatterElements ScatterND Shape Sigmoid Sign Size Sqrt Sub Tanh Tile Transpose
    """.split()
)


class _NeedsError(Exception):
    """A node has no form in the opset asked for.

    Attributes:
        since: The first opset in which it has a form.
    """

    def __init__(self, since: int, why: str) -> None:
        super().__init__(why)
        self.since = since


@dataclass
class _Lowering:
    """The lowering of one model to an older opset.

    Attributes:
        model: The model, of opset 13.
        needs: A text for each node without a form in the older opset, and the first opset that has it.
    """

    model: ir.Model
    opset: int
    needs: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Rewrites the nodes, and sets the opset."""
        for node in list(self.model.graph.all_nodes()):
            if node.domain in ("", "ai.onnx"):
                try:
                    self._lower(node)
                except _NeedsError as need:
                    self.needs[f"{node.op_type}: {need}"] = need.since
        if self.needs:
            first, since = max(self.needs.items(), key=lambda item: item[1])
            rest = "" if len(self.needs) == 1 else f" ({len(self.needs)} operators in all)"
            raise OpsetError(
                f"the model has no form in opset {self.opset}: {first}{rest}",
                hint=f"Ask for opset {since} or a newer one.",
            )
        self.model.opset_imports[""] = self.opset
        self.model.ir_version = _IR_VERSIONS[self.opset]

    def _lower(self, node: ir.Node) -> None:
        for until, form in _FORMS.get(node.op_type, ()):
            if self.opset < until:
                form(self, node)
        self._check(node)

    def _check(self, node: ir.Node) -> None:
        """Checks that a node is valid in the older opset, and means there what it means in opset 13."""
        newest = onnx.defs.get_schema(node.op_type, MIN_OPSET)
        changed = newest.since_version > self.opset
        if changed and node.op_type not in _SAME and node.op_type not in _FORMS:
            raise _NeedsError(newest.since_version, f"it is of opset {newest.since_version}")
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset)
        except onnx.defs.SchemaError:
            first = next(v for v in range(self.opset, MIN_OPSET + 1) if _has(node.op_type, v))
            raise _NeedsError(first, f"the operator is of opset {first}") from None
        if changed:
            self._count_axes_from_the_start(node)
            for name in [name for name in node.attributes if name not in schema.attributes]:
                self._leave_out(node, name, newest)
            self._check_types(node, schema)

    def _leave_out(self, node: ir.Node, name: str, newest: onnx.defs.OpSchema) -> None:
        value = node.attributes[name].value
        default = newest.attributes[name].default_value
        usual = onnx.helper.get_attribute_value(default) if default.name else None
        if isinstance(usual, bytes):
            usual = usual.decode()
        if value != usual and not (name == "dilations" and set(value) == {1}):
            first = _first(node.op_type, self.opset, lambda schema: name in schema.attributes)
            raise _NeedsError(first, f"{name}={value} is of opset {first}")
        del node.attributes[name]

    def _check_types(self, node: ir.Node, schema: onnx.defs.OpSchema) -> None:
        wrong = _wrong_type(node, schema)
        if wrong is not None:
            first = _first(node.op_type, self.opset, lambda newer: _wrong_type(node, newer) is None)
            raise _NeedsError(first, f"{wrong} is a type of opset {first}")

    def _count_axes_from_the_start(self, node: ir.Node) -> None:
        if self.opset >= _NEGATIVE_SINCE:
            return
        for name in ("axis", "axes"):
            attribute = node.attributes.get(name)
            if attribute is None:
                continue
            axes = [attribute.value] if name == "axis" else list(attribute.value)
            if min(axes, default=0) < 0:
                rank = self.rank(node.outputs[0] if node.op_type == "Unsqueeze" else node.inputs[0])
                rank += node.op_type == "OneHot"
                counted = [axis + rank if axis < 0 else axis for axis in axes]
                self.set(node, name, counted[0] if name == "axis" else counted)

    # -- tools of the forms --------------------------------------------------------------------------------------------

    def rank(self, value: ir.Value | None) -> int:
        """The rank of a value."""
        if value is None or value.shape is None:
            raise _NeedsError(MIN_OPSET, "how many axes its operand has is not known")
        return value.shape.rank()

    def constant(self, node: ir.Node, number: int, since: int) -> Any:
        """The elements of an operand that is an attribute in the older form; ``None`` where it is left out."""
        value = node.inputs[number] if number < len(node.inputs) else None
        if value is None:
            return None
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None:
            raise _NeedsError(since, f"operand {number} is computed, and an attribute below opset {since}")
        return tensor.numpy().tolist()

    def set(self, node: ir.Node, name: str, value: Any) -> None:
        """Gives a node an attribute."""
        node.attributes[name] = ir.convenience.convert_attribute(name, value)

    def new(self, before: ir.Node, op: str, inputs: Iterable[ir.Value | None], **attributes: Any) -> ir.Value:
        """The result of a new node, inserted before another node."""
        node = ir.node(op, list(inputs), attributes)
        (result,) = node.outputs
        result.name = f"{before.outputs[0].name}_{op.lower()}"
        assert before.graph is not None
        before.graph.insert_before(before, node)
        return result

    def stored(self, node: ir.Node, array: np.ndarray[Any, Any], label: str) -> ir.Value:
        """A new constant of the model, for an operand of a node."""
        name = f"{node.outputs[0].name}_{label}"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.dtype, value.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
        self.model.graph.register_initializer(value)
        return value


def _has(op: str, opset: int) -> bool:
    try:
        return not onnx.defs.get_schema(op, opset).deprecated
    except onnx.defs.SchemaError:
        return False


def _first(op: str, above: int, admits: Callable[[onnx.defs.OpSchema], bool]) -> int:
    """The first opset above a given opset whose schema of an operator meets a condition."""
    opsets = range(above + 1, MIN_OPSET + 1)
    return next((v for v in opsets if _has(op, v) and admits(onnx.defs.get_schema(op, v))), MIN_OPSET)


def _wrong_type(node: ir.Node, schema: onnx.defs.OpSchema) -> str | None:
    """The type of an operand or result that a schema does not admit; operands of one type variable have one type."""
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    bound: dict[str, str] = {}
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    for values, parameters in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for number, value in enumerate(values):
            parameter = parameters[min(number, len(parameters) - 1)]
            if value is None or value.dtype is None or not isinstance(value.type, ir.TensorType):
                continue
            name = f"tensor({value.dtype.name.lower()})"
            if name not in allowed.get(parameter.type_str, {parameter.type_str}):
                return name
            mixed = parameter.option == variadic and not parameter.is_homogeneous
            if not mixed and bound.setdefault(parameter.type_str, name) != name:
                return f"{name} beside {bound[parameter.type_str]}"
    return None


def _axes_as_attribute(lowering: _Lowering, node: ir.Node) -> None:
    """ReduceSum, Squeeze, Unsqueeze, Split: their second operand is an attribute below opset 13."""
    name = "split" if node.op_type == "Split" else "axes"
    values = lowering.constant(node, 1, 13)
    if node.attributes.pop("noop_with_empty_axes", None) is not None and not values:
        raise _NeedsError(13, "without axes it does nothing from opset 13 on")
    if values is not None:
        node.resize_inputs(1)
        lowering.set(node, name, values)
    lowering._count_axes_from_the_start(node)


def _softmax(lowering: _Lowering, node: ir.Node) -> None:
    """Softmax, LogSoftmax: below opset 13 over all axes from ``axis`` on, so that axis is brought to the end."""
    (x,) = node.inputs
    rank, axis = lowering.rank(x), node.attributes["axis"].value if "axis" in node.attributes else -1
    axis, last = axis % rank if rank else 0, rank - 1
    if axis == last or not rank:
        lowering.set(node, "axis", max(last, 0))
        return
    order = [last if a == axis else axis if a == last else a for a in range(rank)]
    turned = lowering.new(node, "Transpose", [x], perm=order)
    result = lowering.new(node, node.op_type, [turned], axis=last)
    node.op_type = "Transpose"
    node.attributes.clear()
    lowering.set(node, "perm", order)
    node.replace_input_with(0, result)


def _resize(lowering: _Lowering, node: ir.Node) -> None:
    """Resize: below opset 13 neither the region nor the scales may be absent; an empty tensor means the same."""
    if lowering.opset < 11:
        raise _NeedsError(11, "how places are mapped can be said from opset 11 on")
    empty = lowering.stored(node, np.zeros(0, np.float32), "empty")
    for number in (1, 2):
        if node.inputs[number] is None:
            node.replace_input_with(number, empty)


def _or_equal(lowering: _Lowering, node: ir.Node) -> None:
    """GreaterOrEqual, LessOrEqual: below opset 12 two comparisons. With NaN both are false, as they should be."""
    strict = lowering.new(node, node.op_type.removesuffix("OrEqual"), node.inputs)
    equal = lowering.new(node, "Equal", node.inputs)
    for value in (strict, equal):
        made = value.producer()
        assert made is not None
        lowering._check(made)
        value.dtype, value.shape = ir.DataType.BOOL, node.outputs[0].shape
    node.op_type = "Or"
    node.replace_input_with(0, strict)
    node.replace_input_with(1, equal)


def _gemm(lowering: _Lowering, node: ir.Node) -> None:
    """Gemm: below opset 11 the operand that is added may not be absent."""
    if len(node.inputs) == 3 and node.inputs[2] is not None:
        return
    x = node.inputs[0]
    if x is None or x.dtype is None:
        raise _NeedsError(11, "without a third operand it is of opset 11")
    node.resize_inputs(3)
    node.replace_input_with(2, lowering.stored(node, np.zeros(1, x.dtype.numpy()), "zero"))


def _clip(lowering: _Lowering, node: ir.Node) -> None:
    """Clip: below opset 11 the bounds are attributes; below opset 12 ONNX Runtime has it for floats of 32 bits alone."""
    if node.outputs[0].dtype in (ir.DataType.DOUBLE, ir.DataType.FLOAT16):
        x, low, high = (*node.inputs, None, None)[:3]
        operators = [(op, bound) for op, bound in (("Max", low), ("Min", high)) if bound is not None]
        for op, bound in operators[:-1]:
            x = lowering.new(node, op, [x, bound])
        node.op_type = operators[-1][0]
        node.resize_inputs(2)
        node.replace_input_with(0, x)
        node.replace_input_with(1, operators[-1][1])
    elif lowering.opset < 11:
        bounds = {"min": lowering.constant(node, 1, 11), "max": lowering.constant(node, 2, 11)}
        node.resize_inputs(1)
        for name, bound in bounds.items():
            if bound is not None:
                lowering.set(node, name, float(bound))


def _pad(lowering: _Lowering, node: ir.Node) -> None:
    """Pad: below opset 11 widths and value are attributes."""
    pads, value = lowering.constant(node, 1, 11), lowering.constant(node, 2, 11)
    node.resize_inputs(1)
    lowering.set(node, "pads", pads)
    if value is not None:
        lowering.set(node, "value", float(value))


def _top_k(lowering: _Lowering, node: ir.Node) -> None:
    """TopK: in opset 9 ``k`` is an attribute."""
    (count,) = lowering.constant(node, 1, 10)
    node.resize_inputs(1)
    lowering.set(node, "k", count)


def _slice(lowering: _Lowering, node: ir.Node) -> None:
    """Slice: in opset 9 starts, ends and axes are attributes, and every step is 1."""
    starts, ends, axes, steps = (lowering.constant(node, number, 10) for number in range(1, 5))
    if set(steps or [1]) != {1}:
        raise _NeedsError(10, f"steps {steps} are of opset 10")
    node.resize_inputs(1)
    for name, values in (("starts", starts), ("ends", ends), ("axes", axes)):
        if values is not None:
            lowering.set(node, name, values)


#: The older forms of each operator, each with the opset below which it is used.
_FORMS: dict[str, tuple[tuple[int, Callable[[_Lowering, ir.Node], None]], ...]] = {
    "ReduceSum": ((13, _axes_as_attribute),),
    "Squeeze": ((13, _axes_as_attribute),),
    "Unsqueeze": ((13, _axes_as_attribute),),
    "Split": ((13, _axes_as_attribute),),
    "Softmax": ((13, _softmax),),
    "LogSoftmax": ((13, _softmax),),
    "Resize": ((13, _resize),),
    "GreaterOrEqual": ((12, _or_equal),),
    "LessOrEqual": ((12, _or_equal),),
    "Gemm": ((11, _gemm),),
    "Clip": ((12, _clip),),
    "Pad": ((11, _pad),),
    "TopK": ((10, _top_k),),
    "Slice": ((10, _slice),),
}


def lower(model: ir.Model, opset: int) -> None:
    """Lowers a model of opset 13 to an older opset, in place.

    Args:
        model: The model; of no use after an error.
        opset: 9 to 12.

    Raises:
        OpsetError: A node has no form in the older opset.
    """
    _Lowering(model, opset).run()
