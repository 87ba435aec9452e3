"""An observer that warns of operators for which ONNX Runtime's CPU provider has no kernel: it can't load the model."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from onnxplug.build.kernels import HALVES, Kernels, Types
from onnxplug.build.spec import OpSpec, onnx_spec
from onnxplug.observers import Observer, Span
from onnxplug.registry.target import is_onnxruntime_cpu
from onnxplug.warn import warn


class KernelWarnings(Observer):
    """Warns of an export's model, and of the model in half precision or few bits."""

    stays = False

    def __init__(self) -> None:
        self._plan: Any = None

    def end(self, span: Span) -> None:
        """Examines a conversion that has ended."""
        if span.kind != "stage" or span.error is not None:
            return
        if span.name == "conversion":
            self._plan = span.subject
            self._warn(span.result.model)
        elif span.name == "precision":
            self._warn(span.subject.model)

    def _warn(self, model: ir.Model) -> None:
        target = self._plan.target
        table = self._plan.host.kernels("onnxruntime:cpu") if is_onnxruntime_cpu(target.runtime) else None
        without_kernel = _lacking(Kernels(table), model.graph, target.opset) if table is not None else {}
        if not without_kernel:
            return
        operators_by_type = "; ".join(
            f"{dtype.name.lower()} of {', '.join(operators)}" for dtype, operators in without_kernel.items()
        )
        cures = []
        if ir.DataType.BFLOAT16 in without_kernel and target.runtime == "onnxruntime":
            cures.append('target="onnxruntime:cpu" has bfloat16 computed in float32.')
        if without_kernel.keys() - {ir.DataType.BFLOAT16}:
            cures.append(
                "Export them in float32 (model.float(), x.float()), which loses precision, or run the model elsewhere."
            )
        warn(
            f"ONNX Runtime's CPU provider can't load this model: it has no kernel for {operators_by_type}. {' '.join(cures)}"
        )


def _lacking(kernels: Kernels, graph: ir.Graph, opset: int) -> dict[ir.DataType, list[str]]:
    """The operators of a graph that there is no kernel for, sorted, by the element type of their first operand.

    Operators of float32 and float16 are left out (ONNX Runtime computes float16 in float32), and operators that the runtime
    replaces by their bodies.
    """
    operators_of: dict[ir.DataType, set[str]] = {}
    for node in graph.all_nodes():
        if node.domain:
            continue
        spec = onnx_spec(node.op_type, opset)
        types: dict[str, ir.DataType] = {}
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype is not None and spec.only_dtype(index) is None:
                types.setdefault(spec.group_of(index), value.dtype)
        types.pop("", None)
        computed = {name: ir.DataType.FLOAT if dtype == ir.DataType.FLOAT16 else dtype for name, dtype in types.items()}
        if (
            not spec.has_schema
            or set(computed.values()) <= {ir.DataType.FLOAT}
            or _is_computed(kernels, spec, computed)
        ):
            continue
        dtype = next(dtype for dtype in computed.values() if dtype != ir.DataType.FLOAT)
        if dtype == ir.DataType.BFLOAT16 or not _is_inlined(kernels, node.op_type, opset, dtype):
            operators_of.setdefault(dtype, set()).add(node.op_type)
    return {dtype: sorted(operators) for dtype, operators in operators_of.items()}


def _is_computed(kernels: Kernels, spec: OpSpec, types: Types) -> bool:
    """Whether a kernel takes an operator; an operator with neither a kernel nor a body is unknown, and counts as taken."""
    if kernels.has_any(spec):
        return kernels.takes(spec, types)
    schema: Any = onnx.defs.get_schema(spec.op_type, spec.since)
    return HALVES.isdisjoint(types.values()) and not schema.has_function


def _is_inlined(kernels: Kernels, op_type: str, opset: int, dtype: ir.DataType) -> bool:
    """Whether a runtime without a kernel for an operator replaces it by its body, and has kernels for the body's operators.

    ONNX Runtime does so where no operator of the body has changed since the opset that the body is written for.
    """
    schema: Any = onnx.defs.get_schema(op_type, opset)  # onnx's stubs lack the methods for functions
    if schema.has_context_dependent_function:
        return True
    written = max((version for version in schema.function_opset_versions if version <= opset), default=None)
    if written is None:
        return False
    body = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(written))
    for operator in {node.op_type for node in body.node}:
        spec = onnx_spec(operator, opset)
        if spec.since != onnx_spec(operator, written).since:
            return False
        types = {spec.group_of(0): dtype} if spec.group_of(0) else {}
        if not _is_computed(kernels, spec, types) and not _is_inlined(kernels, operator, opset, dtype):
            return False
    return True
