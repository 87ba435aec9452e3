"""Dtype and shape of a single node by onnx's own inference: for operators that ``table.py`` has no function for.

It costs some tens of microseconds a node, and only rare operators come here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir import serde

from onnxplug.build.inference.dims import Dim, Result

#: Where ONNX Runtime differs from onnx's inference: with an empty list of axes it squeezes every axis of size 1, onnx none.
_NOT_BELIEVED = frozenset({"Squeeze"})

#: Elements above which an input's values are not shown to the inference.
_MAX_ELEMENTS = 1024


def infer_by_onnx(
    schema: onnx.defs.OpSchema,
    values: Sequence[ir.Value | None],
    attributes: Mapping[str, ir.Attr],
    outputs: int,
    opsets: Mapping[str, int],
) -> Result:
    """Dtypes and shapes that onnx infers for the outputs of one node; an empty list where it infers nothing.

    Args:
        schema: The operator.
        values: Its inputs.
        attributes: Its attributes; none of them a reference to a function's.
        outputs: Number of outputs.
        opsets: Domain to version, as the model imports them.
    """
    if schema.name in _NOT_BELIEVED and not schema.domain:
        return []
    if not schema.has_type_and_shape_inference_function or any(v is not None and v.dtype is None for v in values):
        return []
    names = ["" if value is None else f"x{index}" for index, value in enumerate(values)]
    operands = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    node = onnx.helper.make_node(schema.name, names, [f"y{i}" for i in range(outputs)], domain=schema.domain)
    node.attribute.extend(serde.serialize_attribute(a) for a in attributes.values())
    data = {
        name: serde.serialize_tensor(value.const_value)
        for name, value in operands
        if value.const_value is not None and value.const_value.size <= _MAX_ELEMENTS
    }
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            schema, node, {name: _type_of(value) for name, value in operands}, data, opset_imports=imports
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError):
        return []
    dims = {d.value for _, value in operands for d in value.shape or () if isinstance(d, ir.SymbolicDim)}
    return [_read(inferred.get(f"y{i}"), dims) for i in range(outputs)]


def _type_of(value: ir.Value) -> onnx.TypeProto:
    dtype = value.dtype
    assert dtype is not None
    sizes = None
    if value.shape is not None:
        sizes = [d if isinstance(d, int) else d.value for d in value.shape]
    return onnx.helper.make_tensor_type_proto(int(dtype), sizes)


def _read(inferred: Any, names: set[str | None]) -> tuple[ir.DataType | None, tuple[Dim, ...] | None]:
    if inferred is None or not inferred.HasField("tensor_type"):
        return None, None
    tensor = inferred.tensor_type
    dtype = ir.DataType(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return dtype, None
    dims: list[Dim] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value"):
            dims.append(dim.dim_value)
        else:
            # A name that onnx made up carries no information.
            dims.append(ir.SymbolicDim(dim.dim_param) if dim.dim_param and dim.dim_param in names else None)
    return dtype, tuple(dims)
