"""Layers of ``torch.ao.nn.quantized`` and ``torch.ao.nn.intrinsic.quantized``, with packed weights and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.quantized as nnq
from torch import nn

import onnxplug
from onnxplug.errors import CaptureError, VerificationError
from tests.support.quantised import IMAGE, SCALE, SEQUENCE, VOLUME, ZERO, Quantised, check_quantised, engine, weighted

Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _setting(seeded: None) -> Iterator[None]:
    with engine("fbgemm"):
        yield


def with_numbers(layer: Any) -> Any:
    """A layer with random running statistics, and a scale and zero point."""
    for name, buffer in layer.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand(buffer.shape) + 0.3)
    layer.scale, layer.zero_point = torch.tensor(SCALE), torch.tensor(ZERO)
    return layer


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def prelu(scale: float = 0.004) -> nn.Module:
    layer = nnq.PReLU(SCALE, ZERO, 4)
    layer.set_weight(torch.quantize_per_tensor(torch.rand(4), scale, 3, torch.quint8))
    return layer


LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "linear": (lambda: weighted(nnq.Linear(6, 5)), (3, 6)),
    "linear_by_tensor": (lambda: weighted(nnq.Linear(6, 5), by_channel=False), (3, 6)),
    "linear_3d": (lambda: weighted(nnq.Linear(6, 5)), (2, 3, 6)),
    "linear_relu": (lambda: weighted(nniq.LinearReLU(6, 5)), (3, 6)),
    "conv1d": (lambda: weighted(nnq.Conv1d(4, 6, 3, stride=2, padding=1)), SEQUENCE),
    "conv2d": (lambda: weighted(nnq.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0))), IMAGE),
    "conv2d_by_tensor": (lambda: weighted(nnq.Conv2d(4, 6, 3), by_channel=False), IMAGE),
    "conv2d_groups": (lambda: weighted(nnq.Conv2d(4, 8, 3, padding=2, dilation=2, groups=2)), IMAGE),
    "conv3d": (lambda: weighted(nnq.Conv3d(4, 6, 3, padding=1)), VOLUME),
    "conv1d_relu": (lambda: weighted(nniq.ConvReLU1d(4, 6, 3)), SEQUENCE),
    "conv2d_relu": (lambda: weighted(nniq.ConvReLU2d(4, 6, 3)), IMAGE),
    "conv3d_relu": (lambda: weighted(nniq.ConvReLU3d(4, 6, 3)), VOLUME),
    "conv2d_reflect": (lambda: weighted(nnq.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), IMAGE),
    "conv_transpose1d": (lambda: weighted(nnq.ConvTranspose1d(4, 6, 3, stride=2), by_channel=False), SEQUENCE),
    "conv_transpose2d": (
        lambda: weighted(nnq.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), by_channel=False),
        IMAGE,
    ),
    "conv_transpose3d": (lambda: weighted(nnq.ConvTranspose3d(4, 6, 2), by_channel=False), VOLUME),
    "batch_norm2d": (lambda: with_numbers(nnq.BatchNorm2d(4)), IMAGE),
    "batch_norm3d": (lambda: with_numbers(nnq.BatchNorm3d(4)), VOLUME),
    "bn_relu2d": (lambda: with_numbers(nniq.BNReLU2d(4)), IMAGE),
    "bn_relu3d": (lambda: with_numbers(nniq.BNReLU3d(4)), VOLUME),
    "layer_norm": (lambda: nnq.LayerNorm((8,), parameter(8), parameter(8), SCALE, ZERO), (3, 2, 8)),
    "group_norm": (lambda: nnq.GroupNorm(2, 4, parameter(4), parameter(4), SCALE, ZERO), IMAGE),
    "instance_norm1d": (lambda: nnq.InstanceNorm1d(4, parameter(4), parameter(4), SCALE, ZERO), SEQUENCE),
    "instance_norm2d": (lambda: nnq.InstanceNorm2d(4, parameter(4), parameter(4), SCALE, ZERO), IMAGE),
    "instance_norm3d": (lambda: nnq.InstanceNorm3d(4, parameter(4), parameter(4), SCALE, ZERO), VOLUME),
    "relu6": (nnq.ReLU6, IMAGE),
    "hardswish": (lambda: nnq.Hardswish(SCALE, ZERO), IMAGE),
    "elu": (lambda: nnq.ELU(SCALE, ZERO, 0.7), IMAGE),
    "leaky_relu": (lambda: nnq.LeakyReLU(SCALE, ZERO, 0.137), IMAGE),
    "sigmoid": (lambda: nnq.Sigmoid(1 / 256, 0), IMAGE),
    "softmax": (lambda: nnq.Softmax(1, 1 / 256, 0), IMAGE),
    "prelu": (prelu, IMAGE),
    # The kernel multiplies positive numbers by 0.504 and by 0.9.
    "prelu_of_small_weights": (lambda: prelu(0.002), IMAGE),
    "prelu_of_a_large_scale": (lambda: prelu(0.3), IMAGE),
    "max_pool2d": (lambda: nn.MaxPool2d(3, 2, 1), IMAGE),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, 2), IMAGE),
    "flatten": (nn.Flatten, IMAGE),
    "dropout": (lambda: nnq.Dropout(0.5), IMAGE),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    make, shape = LAYERS[name]
    model = Quantised(make())
    others = [(torch.randn(shape[0] + 2, *shape[1:]) * 2,), (torch.randn(1, *shape[1:]) * 9,)]
    # ONNX Runtime rounds a bias to the product of both scales.
    check_quantised(model, (torch.randn(shape),), others, quantum=SCALE, share=0.02, verify=True)


@pytest.mark.parametrize(
    "name", ["linear", "conv1d", "conv2d", "conv2d_groups", "conv_transpose2d", "hardswish", "prelu"]
)
@pytest.mark.parametrize(
    "packer", [e for e in torch.backends.quantized.supported_engines if e not in ("none", "fbgemm")]
)
def test_engines(name: str, packer: str) -> None:
    if packer in ("onednn", "x86") and "transpose" in name:
        pytest.skip("PyTorch 2.13's oneDNN computes something else than FBGEMM and than the definition")
    with engine(packer):
        make, shape = LAYERS[name]
        others = [(torch.randn(shape[0] + 1, *shape[1:]) * 3,)]
        check_quantised(Quantised(make()), (torch.randn(shape),), others, quantum=SCALE, share=0.02, verify=True)


def test_fused_with_onednn() -> None:
    if "onednn" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no oneDNN here")
    with engine("onednn"):
        for layer in (nniq.LinearLeakyReLU(6, 5, 0.137), nniq.LinearTanh(6, 5)):
            model = Quantised(weighted(layer))
            check_quantised(model, (torch.randn(3, 6),), [(torch.randn(7, 6) * 3,)], quantum=SCALE, share=0.02)
        for kind in (nniq.ConvAdd2d, nniq.ConvAddReLU2d):
            model = Quantised(weighted(kind(4, 4, 3, padding=1)), inputs=2)
            args = (torch.randn(IMAGE), torch.randn(IMAGE))
            others = [tuple(torch.randn(5, *IMAGE[1:]) * 3 for _ in args)]
            check_quantised(model, args, others, quantum=SCALE, share=0.02)


def test_weights_are_bytes_in_the_file() -> None:
    model = Quantised(nn.Sequential(weighted(nnq.Conv2d(4, 6, 3)), weighted(nnq.Conv2d(6, 5, 1), by_channel=False)))
    model.highest = None  # a clamp would be one more node
    program = check_quantised(model, (torch.randn(IMAGE),), [(-torch.randn(3, 4, 9, 8),)], quantum=SCALE, share=0.02)
    kinds = [node.op_type for node in program.model.graph]
    pair = ["QuantizeLinear", "DequantizeLinear"]
    assert sorted(kinds) == sorted([*pair * 3, "DequantizeLinear", "DequantizeLinear", "Conv", "Conv"])
    stored = program.model.graph.initializers
    weights = [name for name in stored if stored[name].dtype == ir.DataType.INT8 and len(stored[name].shape) == 4]
    assert weights == ["function.0._packed_params.weight", "function.1._packed_params.weight"]
    assert not [v for v in stored.values() if v.dtype == ir.DataType.FLOAT and v.shape is not None and len(v.shape) > 1]
    assert {*stored} >= {"function.0._packed_params.scale", "function.0._packed_params.bias"}


def _spoil(program: onnxplug.OnnxProgram, node: ir.Node, index: int, change: Callable[[Any], Any]) -> None:
    """Replaces a constant input of a node by changed numbers."""
    value = node.inputs[index]
    assert value is not None
    assert value.const_value is not None
    numbers = value.const_value.numpy()
    other = ir.Value(name="spoilt", type=value.type, shape=value.shape)
    other.const_value = ir.tensor(change(numbers).astype(numbers.dtype), name="spoilt")
    program.model.graph.register_initializer(other)
    node.replace_input_with(index, other)


#: Fault to the operator, the number of its node, the input, and the change.
FAULTS: dict[str, tuple[str, int, int, Callable[[Any], Any]]] = {
    "scale_of_input": ("QuantizeLinear", 0, 1, lambda x: x * 1.02),
    "zero_point_of_input": ("QuantizeLinear", 0, 2, lambda x: x + 1),
    "scale_within": ("QuantizeLinear", 1, 1, lambda x: x * 1.02),
    "zero_point_within": ("QuantizeLinear", 1, 2, lambda x: x + 1),
    "scale_of_output": ("QuantizeLinear", 2, 1, lambda x: x * 1.05),
    "zero_point_of_output": ("QuantizeLinear", 2, 2, lambda x: x + 1),
    "bias": ("Conv", 0, 2, lambda x: x * 1.1),
    "weight": ("DequantizeLinear", 0, 0, lambda x: x // 2 * 2),
}


def convolutions() -> nn.Sequential:
    """Two convolutions; the bytes between them stay within 7 bits."""
    first, second = weighted(nnq.Conv2d(4, 6, 3)), weighted(nniq.ConvReLU2d(6, 5, 3))
    first.scale = second.scale = 0.15
    first.zero_point = 60
    return nn.Sequential(first, second)


class Integers(Quantised):
    """:class:`Quantised` with its result in integers."""

    def forward(self, *tensors: torch.Tensor) -> Any:
        (x,) = tensors if self.highest is None else (tensors[0].clamp(max=self.highest),)
        return self.function(self.inputs[0](x)).int_repr()


@pytest.mark.parametrize("kind", [Quantised, Integers])
@pytest.mark.parametrize("name", FAULTS)
def test_verification_finds_a_wrong_number(name: str, kind: type[Quantised]) -> None:
    program = onnxplug.to_onnx(kind(convolutions()), (torch.randn(8, *IMAGE[1:]),), verify=True)
    operator, place, index, change = FAULTS[name]
    nodes = [node for node in program.model.graph if node.op_type == operator]
    if name == "weight":
        nodes = [node for node in nodes if "weight" in str(node.inputs[0] and node.inputs[0].name)]
    _spoil(program, nodes[place], index, change)
    with pytest.raises(VerificationError, match="differ"):
        program.verify()


def test_integers_between_two_quanta_may_go_either_way() -> None:
    program = onnxplug.to_onnx(Integers(convolutions()), (torch.randn(200, *IMAGE[1:]),), verify=True)
    cases = program.verify().cases
    assert sum(case.unstable for case in cases) > 0
    assert max(case.max_abs_difference for case in cases) == 1


def test_a_quantised_result_is_refused() -> None:
    class Bare(Quantised):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return self.function(self.inputs[0](tensors[0]))

    with pytest.raises(CaptureError, match="the model returns a quantised tensor") as error:
        onnxplug.to_onnx(Bare(weighted(nnq.Linear(6, 5))), (torch.randn(3, 6),))
    assert "dequantize()" in (error.value.hint or "")


def test_the_model_is_as_it_was_after_a_failure() -> None:
    model = Quantised(nn.Sequential(weighted(nnq.Linear(6, 5)), nn.LSTM(5, 3))).eval()
    packed, names = model.function[0]._packed_params._packed_params, list(model.state_dict())
    with pytest.raises(CaptureError):
        onnxplug.to_onnx(model, (torch.randn(2, 3, 6),))
    assert model.function[0]._packed_params._packed_params is packed
    assert list(model.state_dict()) == names
    assert isinstance(model.inputs[0].scale, torch.Tensor)
