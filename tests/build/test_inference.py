"""Shapes of single nodes: our inference against ONNX Runtime's results, and onnx's inference where ours has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxplug_tools.testing.warnings import fail_on_shape_warnings, shape_warnings

import onnxplug
from onnxplug import OutputMismatchError, Rule
from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.finish.finish import finish


def flattened(g: Any, node: Any) -> Any:
    return g.op.Flatten(g.op.Unsqueeze(node.args[0], [0]), axis=0)


def turned(g: Any, node: Any) -> Any:
    return g.op.Einsum(node.args[0], equation="ab->ba")


def strided(g: Any, node: Any) -> Any:
    weight = g.const(np.ones((1, 1, 1, 1), dtype=np.float32))
    x = g.op.Unsqueeze(node.args[0], [0, 1])
    return g.op.Squeeze(g.op.Conv(x, weight, strides=[2, 2]), [0, 1])


def tiled(g: Any, node: Any) -> Any:
    return g.op.Tile(node.args[0], [1, 2])


@pytest.mark.parametrize("converter", [flattened, turned, strided, tiled])
def test_a_result_of_another_shape_is_an_error(converter: Callable[..., Any]) -> None:
    with pytest.raises(OutputMismatchError, match="where torch has a float\\[3, 4\\]"):
        onnxplug.to_onnx(torch.nn.ReLU(), (torch.randn(3, 4),), rules=[Rule("aten::relu", converter)])


def value(*shape: Any, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    dims = [ir.SymbolicDim(d) if isinstance(d, str) else d for d in shape]
    return ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(dims))


def test_names_of_the_inputs_dimensions_are_kept_and_those_of_onnx_are_not() -> None:
    g = GraphBuilder({"": 21})
    x = value(2, "n", 5)
    assert g.op.Einsum(x, equation="abc->cab").shape == ir.Shape([5, 2, "n"])
    assert list(g.op.Compress(x, g.const([True, False]), axis=2).shape)[:2] == [2, ir.SymbolicDim("n")]
    unique = g.op.Unique(x, _outputs=4)
    assert [v.shape.rank() for v in unique] == [1] * 4
    assert unique[0].shape[0].value is None
    assert [v.dtype.name for v in unique] == ["FLOAT", "INT64", "INT64", "INT64"]


def test_an_operator_that_onnx_cannot_infer_either_has_no_shape() -> None:
    g = GraphBuilder({"": 21})
    assert g.domain("com.acme", 1).Magic(value(2, 3)).shape is None
    assert g.op.NonMaxSuppression(value(1, 6, 4), value(1, 1, 6)).shape[1] == 3
    assert g.op.Expand(value(2, 1), value("r", dtype=ir.DataType.INT64)).shape is None


NODES: dict[str, Callable[[Any, ir.Value], Any]] = {
    "conv": lambda op, x: op.Conv(x, np.ones((6, 4, 3, 2), np.float32), pads=[1, 0, 2, 1], strides=[2, 1], dilations=[2, 1]),
    "conv transpose": lambda op, x: op.ConvTranspose(x, np.ones((4, 3, 3, 2), np.float32), strides=[2, 3], output_padding=[1, 0], pads=[1, 0, 0, 1]),
    "conv same": lambda op, x: op.Conv(x, np.ones((6, 4, 3, 2), np.float32), auto_pad="SAME_UPPER", strides=[2, 2]),
    "max pool": lambda op, x: op.MaxPool(x, kernel_shape=[3, 2], strides=[2, 2], dilations=[1, 2]),
    "max pool ceil": lambda op, x: op.MaxPool(x, kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1),
    "average pool": lambda op, x: op.AveragePool(x, kernel_shape=[3, 2], pads=[1, 1, 1, 0]),
    "tile": lambda op, x: op.Tile(x, [1, 2, 3, 1]),
    "depth to space": lambda op, x: op.DepthToSpace(x, blocksize=2),
    "space to depth": lambda op, x: op.SpaceToDepth(op.Pad(x, [0, 0, 0, 0, 0, 0, 1, 0]), blocksize=2),
    "grid sample": lambda op, x: op.GridSample(x, np.zeros((2, 5, 3, 2), np.float32)),
    "resize": lambda op, x: op.Resize(x, None, None, [2, 4, 9, 3], mode="linear"),
    "resize by scales": lambda op, x: op.Resize(x, None, [1.0, 1.0, 1.5, 0.5], mode="linear"),
    "flatten": lambda op, x: op.Flatten(x, axis=2),
    "flatten from the end": lambda op, x: op.Flatten(x, axis=-1),
    "flatten everything": lambda op, x: op.Flatten(x, axis=0),
    "global pool": lambda op, x: op.GlobalAveragePool(x),
    "einsum": lambda op, x: op.Einsum(x, x, equation="abcd,abce->de"),
    "top k": lambda op, x: op.TopK(x, [3], axis=1, _outputs=2)[0],
    "split": lambda op, x: op.Split(x, num_outputs=3, axis=3, _outputs=3)[2],
    "slice": lambda op, x: op.Slice(x, [-1], [-9], [2], [-2]),
    "one hot": lambda op, x: op.OneHot(op.ArgMax(x, axis=1, keepdims=0), 5, [0.0, 1.0], axis=1),
    "scan of columns": lambda op, x: op.CumSum(x, 1),
    "center crop": lambda op, x: op.CenterCropPad(x, [5, 9], axes=[2, 3]),
    "col2im": lambda op, x: op.Col2Im(op.Reshape(x, [2, 8, 28]), [7, 8], [1, 2], strides=[1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("optimize", [True, False], ids=["optimized", "plain"])
@pytest.mark.parametrize("name", NODES)
def test_the_inferred_shape_is_the_result_s(name: str, optimize: bool) -> None:
    g = GraphBuilder({"": 21}, optimize=optimize)
    x = value(2, 4, 7, 8)
    result = NODES[name](g.op, x)
    inferred = list(result.shape) if result.shape is not None else []
    model = ir.to_proto(finish(g, *assemble(g, [x], [("result", result)], {})))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": np.random.default_rng(0).standard_normal((2, 4, 7, 8)).astype(np.float32)})
    assert len(inferred) == got.ndim
    assert [d if isinstance(d, int) else size for d, size in zip(inferred, got.shape, strict=True)] == list(got.shape)
    assert name in LEFT_OPEN or all(isinstance(d, int) for d in inferred)


#: Sizes that the runtime alone knows: rules of padding that our inference leaves open.
LEFT_OPEN = {"conv same", "max pool ceil", "resize by scales", "center crop"}


def _report(text: str) -> Any:
    report = pytest.TestReport(
        "a::test", ("a", 0, ""), {}, "passed", None, "call", sections=[("Captured stderr call", text)]
    )
    fail_on_shape_warnings(report)
    return report


def test_a_wrong_shape_that_onnxruntime_warns_of_fails_the_test(capfd: pytest.CaptureFixture[str]) -> None:
    def model(condition: list[Any], stated: list[Any]) -> bytes:
        make = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("NonZero", ["x"], ["y"])],
            "g",
            [make("x", onnx.TensorProto.FLOAT, condition)],
            [make("y", onnx.TensorProto.INT64, stated)],
        )
        opset = onnx.helper.make_opsetid("", 21)
        return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()

    from onnxplug.run.session import make_session

    with shape_warnings():
        for stated, wrong in (([1, 3], False), ([1, 2], True)):
            make_session(model([4], stated)).run(None, {"x": np.array([1, 0, 1, 1], dtype=np.float32)})
            report = _report(capfd.readouterr().err)
            assert report.failed is wrong
            assert wrong == ("{1,2}" in str(report.longrepr))
