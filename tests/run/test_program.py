"""What OnnxProgram takes over from torch.onnx.ONNXProgram, and what it adds."""

from __future__ import annotations

import io
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import UsageError


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(
        self, x: torch.Tensor, scale: float = 2.0, *, bias: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor | None]:
        y = self.linear(x) * scale
        return {"y": y if bias is None else y + bias, "none": None, "sum": y.sum(-1)}


@pytest.fixture
def model() -> TwoHeads:
    torch.manual_seed(0)
    return TwoHeads().eval()


@pytest.fixture
def program(model: TwoHeads) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(
        model, (torch.randn(2, 3),), kwargs={"bias": torch.randn(4)}, dynamic_shapes={"x": {0: "batch"}, "bias": None}
    )


def test_it_is_a_program_of_torch(program: onnxplug.OnnxProgram) -> None:
    assert isinstance(program, torch.onnx.ONNXProgram)
    onnx.checker.check_model(program.model_proto, full_check=True)


def test_call_and_reference_agree_with_eager(model: TwoHeads, program: onnxplug.OnnxProgram) -> None:
    x, bias = torch.randn(5, 3), torch.randn(4)
    expected = model(x, bias=bias)
    for results in (program(x, bias=bias), program.call_reference(x, bias=bias)):
        torch.testing.assert_close(results[0], expected["y"])
        torch.testing.assert_close(results[1], expected["sum"])


def test_unflatten_gives_the_models_own_structure(model: TwoHeads, program: onnxplug.OnnxProgram) -> None:
    x, bias = torch.randn(1, 3), torch.randn(4)
    structured = program.unflatten(program(x, bias=bias))
    assert set(structured) == {"y", "none", "sum"}
    assert structured["none"] is None
    torch.testing.assert_close(structured["sum"], model(x, bias=bias)["sum"])


def test_a_released_session_comes_back(program: onnxplug.OnnxProgram) -> None:
    inputs = (torch.randn(2, 3),)
    bias = torch.randn(4)
    assert program.runtime is None
    first = program(*inputs, bias=bias)
    assert program.runtime == "onnxruntime"
    program.release()
    assert program.runtime is None
    torch.testing.assert_close(program(*inputs, bias=bias)[0], first[0])


def test_optimize_keeps_the_result(program: onnxplug.OnnxProgram) -> None:
    x, bias = torch.randn(2, 3), torch.randn(4)
    before = program(x, bias=bias)
    program.optimize()
    torch.testing.assert_close(program(x, bias=bias)[0], before[0])


def test_compute_values_gives_inner_ones(program: onnxplug.OnnxProgram) -> None:
    names = [node.outputs[0].name for node in program.model.graph]
    x, bias = torch.randn(2, 3), torch.randn(4)
    inner = program.compute_values([str(names[0])], (x,), {"bias": bias})
    assert len(inner) == 1


def test_save_to_a_file_object(program: onnxplug.OnnxProgram, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    program.save(buffer)
    program.save(tmp_path / "model.onnx")
    assert buffer.getvalue() == (tmp_path / "model.onnx").read_bytes()


def test_save_without_or_with_weights_as_inputs(program: onnxplug.OnnxProgram, tmp_path: Path) -> None:
    weights = set(program.model.graph.initializers)
    program.save(tmp_path / "bare.onnx", include_initializers=False)
    stored = {tensor.name for tensor in onnx.load(tmp_path / "bare.onnx").graph.initializer}
    assert weights - stored == {"linear.weight", "linear.bias"}, "constants, which nobody else has, stay"
    program.save(tmp_path / "inputs.onnx", keep_initializers_as_inputs=True)
    assert weights <= {i.name for i in onnx.load(tmp_path / "inputs.onnx").graph.input}
    assert set(program.model.graph.initializers) == weights
    assert len(program.model.graph.inputs) == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.randn(2, 4),), {"bias": torch.randn(4)}, "axis 1"),
        ((torch.randn(2, 3).double(),), {"bias": torch.randn(4)}, "float64"),
        ((torch.randn(3),), {"bias": torch.randn(4)}, "shape"),
        ((torch.randn(2, 3),), {}, "keyword|structure"),
        ((torch.randn(2, 3),), {"bias": None}, "tensor|structure"),
        (("text",), {"bias": torch.randn(4)}, "tensor"),
    ],
)
def test_wrong_inputs_are_named(program: onnxplug.OnnxProgram, args: tuple, kwargs: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        program(*args, **kwargs)
