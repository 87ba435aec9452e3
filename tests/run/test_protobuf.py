"""The protocol buffer of a model is the one that ``onnx_ir`` makes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.run.protobuf import to_proto


def exported(model: Any, *args: Any, **options: Any) -> ir.Model:
    return onnxplug.to_onnx(model, args, **options).model


def dynamic() -> ir.Model:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    return exported(model.eval(), torch.randn(2, 4), dynamic_shapes=({0: "batch"},))


def branches() -> ir.Model:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos(), (x,))

    return exported(forward, torch.randn(3))


def with_function() -> ir.Model:
    def convert(g: Any, node: Any) -> Any:
        return g.function("local", "SinRelu", lambda x: g.op.Sin(g.op.Relu(x)), [node.args[0]])

    rule = onnxplug.Rule("aten::relu.default", convert)
    return exported(nn.ReLU(), torch.randn(3), rules=[rule], opset_version=18)


def strings_and_sequences() -> ir.Model:
    """Types other than tensors, values without one, and contents that are not numbers."""
    x = ir.Value(name="x", type=ir.SequenceType(ir.TensorType(ir.DataType.FLOAT)), shape=ir.Shape(["n", None]))
    words = ir.Value(name="words", const_value=ir.StringTensor([b"a", b"b"], shape=ir.Shape([2])))
    first = ir.Node("", "Identity", [x], name="first")
    first.outputs[0].name, first.outputs[0].type, first.outputs[0].shape = "same", x.type, x.shape
    second = ir.Node("custom", "Both", [first.outputs[0], None, words], num_outputs=2, name="second")
    second.outputs[0].name, second.outputs[1].name = "untyped", "out"
    second.outputs[1].type = ir.TensorType(ir.DataType.INT64)
    graph = ir.Graph([x], [second.outputs[1]], nodes=[first, second], initializers=[words], name="g")
    graph.opset_imports.update({"": 20, "custom": 1})
    return ir.Model(graph, ir_version=10, producer_name="test", domain="d", model_version=3, doc_string="words")


def annotated() -> ir.Model:
    """A model with a user's additions: denotations, annotations, documentation, metadata."""
    model = dynamic()
    nodes = list(model.graph)
    value = nodes[0].outputs[0]
    assert value.shape is not None
    value.shape = ir.Shape(value.shape.dims, denotations=["DATA_BATCH", None])
    other = nodes[1].outputs[0]
    assert other.dtype is not None
    other.type = ir.TensorType(other.dtype, denotation="TENSOR")
    nodes[2].outputs[0].doc_string = "read me"
    nodes[2].outputs[0].metadata_props["key"] = "value"
    weight = next(iter(model.graph.initializers.values()))
    for annotated_value in (weight, nodes[0].outputs[0], model.graph.outputs[0], model.graph.inputs[0]):
        annotated_value.meta["quant_parameter_tensor_names"] = {"ZERO_POINT_TENSOR": "zero", "SCALE_TENSOR": "scale"}
    model.graph.doc_string = "a graph"
    model.graph.metadata_props["where"] = "here"
    model.metadata_props["who"] = "me"
    return model


def weights_as_inputs() -> ir.Model:
    model = dynamic()
    model.graph.inputs.extend(model.graph.initializers.values())
    return model


MODELS: dict[str, Callable[[], ir.Model]] = {
    "dynamic": dynamic,
    "branches": branches,
    "function": with_function,
    "other types": strings_and_sequences,
    "annotated": annotated,
    "weights as inputs": weights_as_inputs,
}


def ordered(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The message with its unordered fields in a fixed order."""
    for repeated, key in ((proto.graph.value_info, "name"), (proto.graph.quantization_annotation, "tensor_name")):
        items = sorted(repeated, key=lambda item: getattr(item, key))
        del repeated[:]
        repeated.extend(items)
    return proto


@pytest.mark.parametrize("name", MODELS)
def test_equals_that_of_onnx_ir(name: str) -> None:
    model = MODELS[name]()
    expected = ir.to_proto(model)
    assert expected.graph.node
    # Initializers are described by their tensors; other information about them stays.
    infos = [info for info in expected.graph.value_info if info.name in model.graph.initializers]
    for info in infos:
        if info.metadata_props or info.doc_string:
            info.ClearField("type")
        else:
            expected.graph.value_info.remove(info)
    assert ordered(to_proto(model)) == ordered(expected)


def test_other_contents_and_inputs() -> None:
    model = dynamic()
    graph = model.graph
    before = [(name, id(v.const_value)) for name, v in graph.initializers.items()]
    some = dict.fromkeys(list(graph.initializers)[:2], ir.tensor(np.zeros(3, np.float32), name="another"))
    proto = to_proto(model, tensors=some, inputs=[*graph.inputs, graph.initializers[next(iter(some))]])
    assert [t.name for t in proto.graph.initializer] == list(some)
    assert [i.name for i in proto.graph.input] == [graph.inputs[0].name, next(iter(some))]
    assert not {info.name for info in proto.graph.value_info} & set(graph.initializers)
    assert [(name, id(v.const_value)) for name, v in graph.initializers.items()] == before


def test_an_initializer_without_content_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = dynamic()
    name, value = next(iter(model.graph.initializers.items()))
    value.const_value = None
    with caplog.at_level(logging.WARNING):
        proto = to_proto(model)
    assert name not in {t.name for t in proto.graph.initializer}
    assert repr(name) in caplog.text


def test_fake_weights_are_refused() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = exported(nn.Linear(3, 3).eval(), torch.randn(1, 3))
    with pytest.raises(ir.serde.SerdeError):
        to_proto(model)
