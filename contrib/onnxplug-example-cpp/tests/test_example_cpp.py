"""The installed package: the operator in PyTorch, its export, and its kernel in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onnxplug_example_cpp import leaky_sum

import onnxplug
import onnxplug.runtime


def by_hand(x: torch.Tensor, leak: float) -> torch.Tensor:
    sums = [x[..., 0]]
    for t in range(1, x.shape[-1]):
        sums.append(x[..., t] + leak * sums[-1])
    return torch.stack(sums, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 1, 6), (4, 1)])
def test_the_operator(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(leaky_sum(x, 0.5), by_hand(x, 0.5))
    torch.testing.assert_close(leaky_sum(x.mT if x.dim() > 1 else x, -2.0), by_hand(x.mT if x.dim() > 1 else x, -2.0))


def test_arguments_that_the_operator_refuses() -> None:
    assert leaky_sum(torch.zeros(2, 0), 0.5).shape == (2, 0)
    with pytest.raises(RuntimeError, match="at least one dimension"):
        leaky_sum(torch.tensor(1.0), 0.5)
    with pytest.raises(RuntimeError, match="float32 or float64"):
        leaky_sum(torch.ones(3, dtype=torch.int64), 0.5)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.example_cpp.leaky_sum.default, (torch.randn(3, 4), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_export_verify_run(dtype: torch.dtype) -> None:
    program = onnxplug.to_onnx(
        lambda x: leaky_sum(x.relu(), 0.5),  # 0.5 is exact in the attribute's 32 bits
        (torch.randn(3, 4, dtype=dtype),),
        dynamic_shapes=({0: "rows", 1: "steps"},),
    )
    assert [n.op_type for n in program.model.graph] == ["Relu", "LeakySum"]
    report = program.verify()
    assert {case.runtime for case in report.cases} == {"onnxruntime"}
    special = torch.tensor([[1.0, float("inf"), -1.0], [float("nan"), 0.0, 2.0]], dtype=dtype)
    for x in (special, torch.zeros(2, 0, dtype=dtype), torch.randn(1, 1, dtype=dtype)):
        torch.testing.assert_close(program(x)[0], leaky_sum(x.relu(), 0.5), equal_nan=True)


def test_a_leak_that_would_be_rounded_is_refused() -> None:
    assert onnxplug.to_onnx(lambda x: leaky_sum(x, 0.1), (torch.randn(2, 3),), verify=True)
    with pytest.raises(onnxplug.ConversionError, match=r"leak=0\.1 of a float64 tensor"):
        onnxplug.to_onnx(lambda x: leaky_sum(x, 0.1), (torch.randn(2, 3, dtype=torch.float64),))


def test_a_session_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    x = torch.randn(2, 5)
    onnxplug.to_onnx(lambda x: leaky_sum(x, 0.25), (x,), path, input_names=["x"])
    session = onnxplug.runtime.inference_session(path)
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), leaky_sum(x, 0.25))
    (library,) = onnxplug.runtime.custom_op_libraries(path)
    assert Path(library).name == "libexample_ort.so"
