"""Products in the form that quantisers know: MatMul with a constant matrix that isn't transposed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants

from onnxplug.build.scope import nodes_of

_FLOAT = ir.DataType.FLOAT
#: The largest number of elements of constants that are folded.
_LARGEST = 1 << 40


def prepare(model: ir.Model, *, gemms: bool) -> None:
    """Gives a model the form that quantisers know, in place.

    Functions are inlined. A matrix that is stored transposed, such as an embedding's table, gets an initializer of its
    own.

    Args:
        gemms: Whether a Gemm with a constant matrix becomes MatMul and Add.
    """
    if model.functions:
        InlinePass()(model)
    # weights of recurrent networks, which Gather, Concat or Transpose read
    fold_constants(model, input_size_limit=_LARGEST, output_size_limit=_LARGEST)
    for node in list(nodes_of(model.graph)):
        if not node.domain and node.op_type == "MatMul":
            _lay_out(model, node)
        elif not node.domain and node.op_type == "Gemm":
            _scale_bias(model, node)
            if gemms:
                _split(model, node)
    RemoveUnusedNodesPass()(model)


def _lay_out(model: ir.Model, node: ir.Node) -> None:
    """Replaces the Transpose of a constant matrix, which a MatMul reads, by a transposed constant."""
    weight = node.inputs[1]
    turn = weight.producer() if weight is not None else None
    if turn is None or turn.op_type != "Transpose" or turn.domain or turn.inputs[0] is None:
        return
    array = _matrix(turn.inputs[0])
    if array is not None:
        node.replace_input_with(1, _stored(model, f"{turn.inputs[0].name}_transposed", array.T))


def _scale_bias(model: ir.Model, node: ir.Node) -> None:
    """Multiplies the constant bias of a Gemm by its ``beta``, which ONNX Runtime's quantiser and kernel ignore."""
    beta, bias = node.attributes.get_float("beta", 1.0), node.inputs[2] if len(node.inputs) > 2 else None
    array = _constant(bias) if bias is not None and beta != 1.0 else None
    if bias is not None and array is not None:
        node.replace_input_with(2, _stored(model, f"{bias.name}_scaled", array * np.float32(beta)))
        del node.attributes["beta"]


def _split(model: ir.Model, node: ir.Node) -> None:
    """Replaces a Gemm by MatMul and Add."""
    numbers = {name: node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")}
    operand, weight, *bias = node.inputs
    array = _matrix(weight) if weight is not None else None
    if array is None or node.attributes.get_int("transA", 0) != 0 or {*numbers.values()} != {1.0}:
        return
    if node.attributes.get_int("transB", 0):
        assert weight is not None
        weight = _stored(model, f"{weight.name}_transposed", array.T)
    out = node.outputs[0]
    product = ir.Node("", "MatMul", [operand, weight], name=node.name)
    nodes = [product]
    if bias and bias[0] is not None:
        nodes.append(ir.Node("", "Add", [product.outputs[0], bias[0]], name=f"{node.name or out.name}/Add"))
        product.outputs[0].name, product.outputs[0].type = f"{out.name}_product", out.type
        product.outputs[0].shape = out.shape
    for new in nodes:
        new.metadata_props.update(node.metadata_props)
    last = nodes[-1].outputs[0]
    graph = node.graph
    assert graph is not None
    graph.insert_before(node, nodes)
    last.type, last.shape = out.type, out.shape
    name = out.name
    ir.convenience.replace_all_uses_with(out, last, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    last.name = name


def _constant(value: ir.Value) -> np.ndarray | None:
    """The array of a constant of float32; ``None`` for other values."""
    tensor = value.const_value if value.is_initializer() and not value.is_graph_input() else None
    return tensor.numpy() if tensor is not None and tensor.dtype == _FLOAT else None


def _matrix(value: ir.Value) -> np.ndarray | None:
    """The array of a constant matrix of float32; ``None`` for other values."""
    array = _constant(value)
    return array if array is not None and array.ndim == 2 else None


def _stored(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """An initializer; an existing one of the same name and content is reused."""
    stem, number = name, 1
    while (known := model.graph.initializers.get(name)) is not None:
        if known.const_value is not None and np.array_equal(known.const_value.numpy(), array):
            return known
        name, number = f"{stem}_{number}", number + 1
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(name=name, type=ir.TensorType(_FLOAT), shape=ir.Shape(array.shape), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def left_alone(model: ir.Model, kind: str) -> list[tuple[ir.Node, str]]:
    """The products of a model in float32, each with the reason."""
    nodes = []
    for node in nodes_of(model.graph):
        if (
            node.domain
            or node.op_type not in ("MatMul", "Gemm", "Conv", "ConvTranspose")
            or node.outputs[0].dtype != _FLOAT
        ):
            continue
        weight = node.inputs[1]
        if weight is None or ((maker := weight.producer()) is not None and maker.op_type == "DequantizeLinear"):
            continue
        if not weight.is_initializer():
            nodes.append((node, "both operands are computed"))
        elif "Conv" in node.op_type and kind == "dynamic":
            nodes.append(
                (node, "a convolution, which is slower in integers of dynamic scales: dynamic:convolutions=yes")
            )
        elif "Conv" in node.op_type:
            nodes.append((node, "a convolution, for which there is no kernel of 4 bits"))
        else:
            nodes.append((node, f"its weight has the shape {list(weight.shape or [])}"))
    return nodes


def why_none(model: ir.Model, kind: str) -> str:
    """The reasons why nothing of a model was quantised, counted."""
    reasons = Counter(f"{node.op_type}: {reason}" for node, reason in left_alone(model, kind))
    return (
        ", ".join(f"{count} {what}" for what, count in reasons.most_common())
        or "it has no MatMul, Gemm or Conv in float32"
    )
