"""Values of two models on the same inputs: which correspond, and which differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest
import torch
from onnxplug_tools.inspection.compare_runs import Runtimes, compare_runs
from onnxplug_tools.inspection.load import load_model
from onnxplug_tools.onnx_file import as_ir

import onnxplug
from onnxplug.errors import OnnxplugError, UsageError
from tests.support.onnx_files import BATCH, example, made


def _of(before: onnx.ModelProto, after: onnx.ModelProto, **options: Any) -> Runtimes:
    return compare_runs(as_ir(before, "before"), as_ir(after, "after"), **options)


def _export(path: Path, model: torch.nn.Module, args: Any, **options: Any) -> ir.Model:
    onnxplug.to_onnx(model, args, path, dynamic_shapes=BATCH, **options)
    return load_model(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.long
def test_two_exporters(tmp_path: Path, batch: int) -> None:
    model, args = example()
    torch.onnx.export(model, args, tmp_path / "torch.onnx", dynamic_shapes=BATCH, verbose=False)
    comparison = compare_runs(
        _export(tmp_path / "ours.onnx", model, args), load_model(tmp_path / "torch.onnx"), sizes={"batch": batch}
    )
    assert comparison.equal
    assert comparison.inputs == {"x": f"float32[{batch}, 3, 8, 8]"}
    assert len(comparison.values) == 10
    assert comparison.alone == 0
    assert comparison.first is None


class Attention(torch.nn.Module):
    """Exporters translate it to the same operators in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.proj = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.nn.functional.gelu(self.proj(y.transpose(1, 2).reshape(batch, length, width)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_nodes_that_only_look_alike_do_not_correspond(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = torch.nn.Sequential(Attention(), Attention()).eval(), (torch.randn(2, 5, 8),)
    ours = _export(tmp_path / "ours.onnx", model, args)

    def of_torch() -> ir.Model:
        torch.onnx.export(model, args, tmp_path / "torch.onnx", dynamic_shapes=BATCH, verbose=False)
        return load_model(tmp_path / "torch.onnx")

    comparison = compare_runs(ours, of_torch(), sizes={"batch": 3})
    assert comparison.equal
    assert comparison.first is None
    assert {value.operator for value in comparison.values} >= {"Softmax", "Gelu"}
    with torch.no_grad():
        model[1].proj.bias[1] += 1
    comparison = compare_runs(ours, of_torch(), sizes={"batch": 3})
    assert not comparison.equal
    assert comparison.first is not None
    assert comparison.first.module == "1" or comparison.first.module.startswith("1.proj")


def test_two_opsets_with_a_wrong_weight(tmp_path: Path) -> None:
    """The Gelu of opset 21 corresponds to the last of opset 18's nodes for it; a fault is found where it begins."""
    model, args = example()
    before = _export(tmp_path / "before.onnx", model, args)
    same = compare_runs(before, _export(tmp_path / "18.onnx", model, args, opset_version=18))
    assert same.equal
    assert "layers.0" in {value.module for value in same.values if value.operator == "Gelu"}
    with torch.no_grad():
        model.layers[1].linear.bias[2] += 0.5
    comparison = compare_runs(before, _export(tmp_path / "after.onnx", model, args, opset_version=18))
    assert not comparison.equal
    assert comparison.first is not None
    assert (comparison.first.module, comparison.first.operator) == ("layers.1.linear", "Gemm")
    assert comparison.first.largest == pytest.approx(0.5)
    assert (comparison.first.count, comparison.first.total) == (1, 4)
    assert comparison.first.text.startswith("at [0, 2]: ")
    assert {value.module for value in comparison.values if value.equal} >= {"conv", "layers.0", "layers.0.linear"}


RELU = oh.make_node("Relu", ["x"], ["a"])


def _chain(factor: float) -> onnx.ModelProto:
    return made([RELU, oh.make_node("Mul", ["a", "k"], ["y"])], weights={"k": np.float32(factor)})


def test_tolerances() -> None:
    assert _of(_chain(1.0), _chain(1.00001), sizes={"n": 8}).equal
    assert not _of(_chain(1.0), _chain(1.01), sizes={"n": 8}).equal
    assert _of(_chain(1.0), _chain(1.01), sizes={"n": 8}, rtol=0.02).equal
    assert not _of(_chain(1.0), _chain(1.00001), sizes={"n": 8}, rtol=1e-7, atol=0.0).equal


def test_nan_against_a_number_differs() -> None:
    comparison = _of(_chain(1.0), _chain(float("nan")), given=[("x", torch.ones(1, 4))])
    assert not comparison.equal
    assert _of(_chain(float("nan")), _chain(float("nan"))).equal


def test_outputs() -> None:
    """Outputs of other names, in their order; an output that a model lacks; another dtype or shape."""
    nodes = [RELU, oh.make_node("Neg", ["x"], ["b"])]
    one, two = [("a", ["n", 4])], [("a", ["n", 4]), ("b", ["n", 4])]
    assert _of(made(nodes, outputs=two), made(nodes, outputs=two[::-1])).equal
    comparison = _of(made(nodes, outputs=two), made(nodes, outputs=one))
    assert not comparison.equal
    assert comparison.unmatched == ("b",)
    renamed = made([oh.make_node("Relu", ["x"], ["other"])], outputs=[("other", ["n", 4])])
    assert _of(made(nodes[:1], outputs=one), renamed).equal
    wider = made([oh.make_node("Concat", ["x", "x"], ["a"], axis=1)], outputs=[("a", ["n", 8])])
    assert _of(made(nodes[:1], outputs=one), wider).outputs[0].text == "float32[1, 4], then float32[1, 8]"


def _parsed(text: str) -> onnx.ModelProto:
    opsets = [oh.make_opsetid("", 21), oh.make_opsetid("ai.onnx.ml", 3)]
    return oh.make_model(onnx.parser.parse_graph(text), opset_imports=opsets, ir_version=10)


def _list(nodes: str, kind: str = "seq(float[2])") -> onnx.ModelProto:
    return _parsed(f"g (float[2] x) => ({kind} y) {{ {nodes} }}")


def _map(keys: str, nodes: str = "") -> onnx.ModelProto:
    nodes = nodes or "z = Identity(x)"
    return _parsed(
        f"g (float[1,2] x) => (seq(map(int64, float)) y) {{ {nodes} y = ai.onnx.ml.ZipMap<classlabels_int64s={keys}>(z) }}"
    )


SEQUENCE, SCALED = "z = Neg(x) y = SequenceConstruct(x, z)", "z = Add(x, x) y = SequenceConstruct(x, z)"
OPTIONAL = "optional(float[2])"


@pytest.mark.parametrize(
    ("before", "after", "counts", "text"),
    [
        (_list(SEQUENCE), _list(SEQUENCE), (0, 4), "agrees"),
        (_list(SEQUENCE), _list(SCALED), (2, 4), r"\[1\]: at \[.\]: .*; 2 of 2 elements differ"),
        (_list(SEQUENCE), _list("y = SequenceConstruct(x)"), (0, 0), "a sequence of 2 elements, then a sequence of 1 element"),
        (_list("y = SequenceConstruct(x)"), _list("y = Identity(x)", "float[2]"), (0, 0), "a sequence of 1 element, then a tensor"),
        (_list("y = SequenceEmpty()"), _list("y = SequenceEmpty()"), (0, 0), "agrees"),
        (_list("y = Optional(x)", OPTIONAL), _list("y = Optional(x)", OPTIONAL), (0, 2), "agrees"),
        (_list("y = Optional(x)", OPTIONAL), _list("z = Neg(x) y = Optional(z)", OPTIONAL), (2, 2), "at .*"),
        (_map("[3, 4]"), _map("[3, 4]"), (0, 2), "agrees"),
        (_map("[3, 4]"), _map("[3, 4]", "z = Neg(x)"), (2, 2), r"\[0\]\[3\]: at .*"),
        (_map("[3, 4]"), _map("[3, 5]"), (0, 0), "a sequence of 1 element, then a sequence of 1 element"),
    ],
)  # fmt: skip
def test_outputs_that_are_no_tensors(
    before: onnx.ModelProto, after: onnx.ModelProto, counts: tuple[int, int], text: str
) -> None:
    comparison = _of(before, after)
    (output,) = comparison.outputs
    assert (output.count, output.total) == counts
    assert re.fullmatch(text, output.text)
    assert comparison.equal == output.equal == (text == "agrees")


def test_without_intermediates() -> None:
    comparison = _of(_chain(1.0), _chain(2.0), intermediates=False)
    assert comparison.values == ()
    assert not comparison.equal


def test_values_that_a_fused_node_hides_are_compared() -> None:
    """A Conv and its Relu are one node of ONNX Runtime, unless the value between them is asked for."""
    weights = {"w": np.ones((2, 3, 3, 3), np.float32)}

    def model(scale: float) -> onnx.ModelProto:
        return made(
            [oh.make_node("Conv", ["x", "w"], ["c"]), oh.make_node("Relu", ["c"], ["y"])],
            inputs=[("x", [1, 3, 8, 8])],
            weights={"w": weights["w"] * np.float32(scale)},
        )

    comparison = _of(model(1.0), model(1.5))
    assert [(value.operator, value.equal) for value in comparison.values] == [("Conv", False), ("Relu", False)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"given": [("z", torch.ones(1, 4))]}, "no input 'z'"),
        ({"given": [("x", torch.ones(1, 4)), ("x", torch.ones(1, 4))]}, "given twice"),
        ({"given": [(None, torch.ones(1, 4)), (None, torch.ones(1, 4))]}, "more inputs are given"),
        ({"given": [("x", torch.ones(1, 5))]}, "has the shape"),
        ({"given": [("x", torch.ones(4))]}, "has the shape"),
        ({"given": [("x", torch.ones(1, 4, dtype=torch.int64))]}, "is torch.int64"),
        ({"given": [("x", torch.ones(2, 4))], "sizes": {"n": 3}}, "has n = 2, elsewhere it is 3"),
        ({"sizes": {"m": 3}}, "no input has a dimension 'm'"),
    ],
)
def test_inputs_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _of(_chain(1.0), _chain(1.0), **options)


def test_inputs_that_are_made_up() -> None:
    """Sizes that are given in one input hold for the others; expressions follow; a size that is not given is 1."""
    inputs = [("x", ["n", 4]), ("z", ["2*n + 1", "m"])]
    nodes = [oh.make_node("ReduceSum", ["x"], ["a"], keepdims=0), oh.make_node("Add", ["a", "z"], ["y"])]
    model = made(nodes, inputs=inputs)
    comparison = _of(model, model, given=[(None, torch.zeros(3, 4))])
    assert comparison.inputs == {"x": "float32[3, 4]", "z": "float32[7, 1]"}
    assert comparison.assumed == ("m",)
    comparison = _of(model, model, sizes={"n": 2, "m": 5})
    assert comparison.inputs == {"x": "float32[2, 4]", "z": "float32[5, 5]"}
    assert comparison.assumed == ()


def test_models_that_take_other_inputs_or_do_not_run() -> None:
    with pytest.raises(UsageError, match="the second model takes the inputs z, the first model x"):
        _of(_chain(1.0), made([oh.make_node("Relu", ["z"], ["y"])], inputs=[("z", ["n", 4])]))
    broken = made([oh.make_node("Reshape", ["x", "s"], ["y"])], weights={"s": np.int64([7])})
    with pytest.raises(OnnxplugError, match="can't run the second model"):
        _of(_chain(1.0), broken)
    text = oh.make_model(
        oh.make_graph(
            [oh.make_node("Identity", ["x"], ["y"])],
            "g",
            [oh.make_tensor_value_info("x", onnx.TensorProto.STRING, [1])],
            [oh.make_tensor_value_info("y", onnx.TensorProto.STRING, [1])],
        )
    )
    with pytest.raises(UsageError, match="can't make one up"):
        _of(text, text)
