"""ONNX Runtime's CPU kernels as the judge of single nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxplug_reference import ExtendedReferenceEvaluator, TorchReferenceEvaluator
from onnxplug_reference.torch_ops.arrays import to_array


def node_model(
    op: str,
    inputs: Sequence[np.ndarray | None],
    outputs: Sequence[str | None],
    opset: int = 21,
    domain: str = "com.microsoft",
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node, and its inputs by name.

    Args:
        op: The operator.
        inputs: The inputs; ``None`` where one is absent.
        outputs: The element type of each output by numpy's name; ``None`` where one is left out.
        opset: Version of ai.onnx.
        domain: The operator's domain.
        attributes: The node's attributes.
    """
    names = [f"i{k}" if value is not None else "" for k, value in enumerate(inputs)]
    results = [f"o{k}" if kind is not None else "" for k, kind in enumerate(outputs)]
    node = onnx.helper.make_node(op, names, results, domain=domain, **attributes)
    feeds = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True) if value is not None}

    def info(name: str, dtype: Any, shape: Any) -> onnx.ValueInfoProto:
        element = (
            onnx.TensorProto.STRING
            if np.dtype(dtype) == np.object_
            else onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        )
        return onnx.helper.make_tensor_value_info(name, element, shape)

    graph = onnx.helper.make_graph(
        [node],
        "g",
        [info(name, value.dtype, value.shape) for name, value in feeds.items()],
        [info(name, kind, None) for name, kind in zip(results, outputs, strict=True) if kind is not None],
    )
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    """The results of ONNX Runtime, its optimisations off."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def agree(
    op: str,
    inputs: Sequence[np.ndarray | None],
    outputs: Sequence[str | None] = ("float32",),
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **attributes: Any,
) -> None:
    """Asserts that both of our evaluators give the results of ONNX Runtime for a node."""
    model, feeds = node_model(op, inputs, outputs, **attributes)
    expected = by_onnxruntime(model, feeds)
    for evaluator in (ExtendedReferenceEvaluator, TorchReferenceEvaluator):
        _same(list(evaluator(model).run(None, feeds)), expected, rtol, atol)


def _same(got: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float) -> None:
    for result, theirs in zip(got, expected, strict=True):
        mine = to_array(result)
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        if theirs.dtype.kind in "f":
            np.testing.assert_allclose(mine.astype(np.float64), theirs.astype(np.float64), rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(mine, theirs)
