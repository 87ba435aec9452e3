"""Converts a model to float16 or bfloat16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxplug.build.kernels import Kernels
from onnxplug.build.scope import nodes_of
from onnxplug.errors import ConversionError, UsageError
from onnxplug.run.save import weight_bytes
from onnxplug.run.weights import check_numbers
from onnxplug_precision.half.casts import Conversion
from onnxplug_precision.half.ranges import measure
from onnxplug_precision.half.types import FLOAT, all_nodes, infer_dtypes
from onnxplug_precision.half.wide import Facts, decide, floats
from onnxplug_precision.report import Precision, WideNode, differences, results_of

DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def to_half_precision(
    model: ir.Model,
    dtype: str,
    samples: Sequence[Mapping[str, Any]],
    *,
    keep_io: bool = True,
    kernels: Mapping[str, str] | None = None,
    target: str | None = "onnxruntime",
    host: Any = None,
) -> Precision:
    """Converts a model to half precision, in place.

    Args:
        model: The model, in float32.
        dtype: ``"float16"`` or ``"bfloat16"``.
        samples: Tensors by the names of inputs, on which the model runs for the ranges of its values.
        keep_io: Whether inputs and outputs stay in float32.
        kernels: The kernels of the runtime, as ``TargetInfo`` has them; nodes without a kernel stay in float32.
        target: The runtime; for an ``onnxruntime`` its CPU is tried on the nodes.
        host: The plugins that run custom operators.

    Raises:
        UsageError: The dtype is unknown, or nothing of the model is in float32.
        ConversionError: The model does not run on the samples.
        VerificationError: The converted model does not run, or gives NaN.
    """
    half = half_dtype(dtype)
    check_numbers(model.graph.initializers.values(), "the model can't be converted")
    infer_dtypes(model)
    if not any(floats(node.inputs) or floats(node.outputs) for node in all_nodes(model)):
        raise UsageError(f"nothing of the model is in float32, which dtype={dtype!r} would convert")
    bytes_before = weight_bytes(model)
    before = results_of(model, samples, host)
    facts = Facts(
        model,
        half,
        measure(model, samples) if half == ir.DataType.FLOAT16 else {},
        kernels=Kernels(kernels) if kernels is not None else None,
        checked=kernels is not None or (half == ir.DataType.FLOAT16 and str(target).startswith("onnxruntime")),
    )
    decide(facts)
    conversion = Conversion(facts, keep_io)
    conversion.run()
    halves = [n for n in nodes_of(model.graph) if any(v.dtype == half for v in n.outputs) and n.op_type != "Cast"]
    operators = Counter(node.op_type for node in halves)
    if not halves and weight_bytes(model) == bytes_before:
        reasons = "; ".join(dict.fromkeys(f"{node.op_type}: {reason}" for node, reason in facts.wide.items()))
        raise ConversionError(f"nothing of the model can be {dtype}: {reasons}")
    return Precision(
        dtype,
        operators.total(),
        dict(operators.most_common()),
        [WideNode.of(node, reason) for node, reason in facts.wide.items()],
        [str(value.name) for value in facts.fills],
        sum(map(_is_between_precisions, nodes_of(model.graph))),
        bytes_before,
        weight_bytes(model),
        differences(before, results_of(model, samples, host)),
    )


def half_dtype(dtype: str) -> ir.DataType:
    """The element type of a name.

    Raises:
        UsageError: The name is unknown.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype= takes 'float16' or 'bfloat16', not {dtype!r}")
    return DTYPES[dtype]


def _is_between_precisions(node: ir.Node) -> bool:
    if node.op_type != "Cast" or node.domain or node.inputs[0] is None:
        return False
    kinds = {node.inputs[0].dtype, node.outputs[0].dtype}
    return FLOAT in kinds and bool(kinds & {*DTYPES.values()})
