"""Verification: other sizes, other values, and every kind of difference found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import VerificationError
from onnxplug.run.inputs import generated_inputs, resized_inputs
from onnxplug.run.verify import compare, verify_file


def program(**options: Any) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(nn.Linear(3, 2).eval(), (torch.randn(2, 3),), **options)


def test_sizes_and_seeds() -> None:
    report = program(dynamic_shapes=({0: "batch"},)).verify(seeds=(0, 1, 2, 3))
    assert [case.sizes["batch"] for case in report.cases] == [2, 1, 3, 5, 1]
    assert [case.seed for case in report.cases] == [None, 0, 1, 2, 3]
    assert {case.runtime for case in report.cases} == {"onnxruntime"}


def test_static_models_are_tried_on_other_values() -> None:
    assert len(program().verify().cases) == 4


def test_ranges_are_respected() -> None:
    dims = {0: torch.export.Dim("batch", min=3, max=4)}
    report = onnxplug.to_onnx(nn.Linear(3, 2).eval(), (torch.randn(3, 3),), dynamic_shapes=(dims,)).verify()
    assert {case.sizes["batch"] for case in report.cases} <= {3, 4}


def test_sizes_that_pytorch_rejects_are_said_to_be_skipped() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            return x + 1
        if x.shape[0] == 1:
            raise ValueError("not for one")
        return x + 1

    report = onnxplug.to_onnx(model, (torch.randn(4, 3),), dynamic_shapes=({0: "batch"},)).verify()
    assert len(report.cases) == 3
    assert "not for one" in report.skipped[0]


def test_related_sizes_fit_together() -> None:
    one = onnxplug.to_onnx(
        lambda x, y: x + y[::2],
        (torch.randn(3, 2), torch.randn(6, 2)),
        dynamic_shapes={"x": {0: torch.export.Dim.AUTO}, "y": {0: torch.export.Dim.AUTO}},
    )
    assert one.verify().cases


def test_generated_values_stay_in_the_examples_range() -> None:
    ids, mask = torch.randint(3, 9, (4, 5)), torch.ones(4, 5, dtype=torch.bool)
    fresh, _ = generated_inputs([ids, mask, 7], [ids, mask, None], {}, 1)
    assert 3 <= int(fresh[0].min()) <= int(fresh[0].max()) <= 8
    assert bool(fresh[1].all())
    assert fresh[2] == 7
    again, _ = generated_inputs([ids, mask, 7], [ids, mask, None], {}, 1)
    torch.testing.assert_close(again[0], fresh[0])
    resized, sizes = resized_inputs([ids], {0: {1: "n"}}, 0)
    assert sizes == {"n": 1}
    assert resized[0].shape == (4, 1)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.ones(2), torch.ones(3), "shape"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float32, PyTorch has torch.float64"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), r"index \[1\]: ONNX has 2.0, PyTorch 2.5"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"index \[1\]: ONNX has 2, PyTorch 3"),
        (torch.tensor([2**62 + 1]), torch.tensor([2**62]), "differs"),
        (torch.tensor([float("nan")]), torch.tensor([0.0]), "nan"),
        (torch.tensor([0.0]), torch.tensor([float("nan")]), "nan"),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), "inf"),
        (torch.tensor([float("inf")]), torch.tensor([3e38]), "inf"),
        (torch.tensor([True]), torch.tensor([False]), "differs"),
        (torch.tensor(1.0), torch.tensor(2.0), r"index \[\]"),
    ],
)
def test_differences_are_found(actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        compare("out", actual, expected, "here")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([float("nan"), float("inf")]), torch.tensor([float("nan"), float("inf")])),
        (torch.zeros(0), torch.zeros(0)),
        (torch.tensor([100.0, 1e-5]), torch.tensor([100.0, 1.1e-5])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.01], dtype=torch.bfloat16)),
    ],
)
def test_no_difference(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert compare("out", actual, expected) < 0.1


def test_tolerances_can_be_given() -> None:
    with pytest.raises(VerificationError):
        compare("out", torch.tensor([1.0]), torch.tensor([1.00001]), "", 1e-7, 0.0)
    assert compare("out", torch.tensor([1.0]), torch.tensor([1.5]), "", 0.0, 1.0) == 0.5


@pytest.mark.parametrize("actual", [5.0, float("-inf"), float("nan")])
def test_no_tolerance_takes_a_number_for_an_infinity(actual: float) -> None:
    with pytest.raises(VerificationError, match="differs"):
        compare("out", torch.tensor([actual]), torch.tensor([float("inf")]), "", 1e-3, 1e-3)
    assert compare("out", torch.tensor([float("inf")]), torch.tensor([float("inf")]), "", 1e-3, 1e-3) == 0.0


def test_a_program_without_a_model_or_inputs() -> None:
    exported = torch.export.export(nn.Linear(3, 2).eval(), (torch.randn(2, 3),))
    one = onnxplug.to_onnx(exported)
    one.captured = None
    with pytest.raises(VerificationError, match="no PyTorch model"):
        one.verify()


def test_reference_evaluator_where_onnxruntime_has_no_kernel() -> None:
    report = onnxplug.to_onnx(lambda x: x.cumsum(0), (torch.arange(3, dtype=torch.int16),)).verify()
    assert report.cases
    direct = onnxplug.to_onnx(
        lambda x: x.sin(), (torch.randn(3, dtype=torch.float64),), rules=[onnxplug.Rule("aten::sin", lambda g, n: g.op.Sinh(g.op.Asinh(g.op.Sin(n.args[0]))))]
    ).verify()  # fmt: skip
    assert {case.runtime for case in direct.cases} == {"onnx.reference"}


def test_verify_file(tmp_path: Any) -> None:
    model = nn.Linear(3, 2).eval()
    path = str(tmp_path / "model.onnx")
    onnxplug.to_onnx(model, (torch.randn(2, 3),), path, dynamic_shapes=({0: "batch"},))
    report = verify_file(path, model, (torch.randn(2, 3),), {}, {"input": {0: "batch"}})
    assert [case.sizes for case in report.cases][1:] == [{"batch": 1}, {"batch": 3}, {"batch": 5}]
    with pytest.raises(VerificationError, match="no input 'nope'"):
        verify_file(path, model, (torch.randn(2, 3),), {}, {"nope": {0: "batch"}})
    with pytest.raises(VerificationError, match="takes 1 inputs"):
        verify_file(path, model, (torch.randn(2, 3),) * 2, {})
