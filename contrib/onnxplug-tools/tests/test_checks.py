"""``checks=True``: conditions on sizes fail when the model runs, with a message that states the condition."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch.export import Dim

import onnxplug
from onnxplug import UsageError


def three(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sum(0) * mask.sum() + y.sum()


def export(shapes: Any, *sizes: int, model: Any = three, **options: Any) -> onnxplug.OnnxProgram:
    first, *rest = sizes
    args = (torch.randn(first, 4), *(torch.randn(size) for size in rest))
    return onnxplug.to_onnx(model, args, dynamic_shapes=shapes, checks=True, verify=True, **options)


def feed(*sizes: int) -> dict[str, Any]:
    first, mask, y = sizes
    return {"x": np.ones((first, 4), np.float32), "mask": np.ones(mask, np.float32), "y": np.ones(y, np.float32)}


def run(program: onnxplug.OnnxProgram, inputs: dict[str, Any], runtime: str = "onnxruntime") -> Any:
    if runtime == "reference":
        return ReferenceEvaluator(program.model_proto).run(None, inputs)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options).run(None, inputs)


RANGED = {"x": {0: Dim("batch", min=2, max=8)}, "mask": {0: "m"}, "y": None}
RELATED = {"x": {0: "past"}, "mask": {0: "sequence"}, "y": {0: "past + 2*sequence"}}
SAME = {"x": {0: "n"}, "mask": {0: "n"}, "y": {0: "min(n, 4)"}}


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize(
    ("shapes", "sizes", "good", "bad", "words"),
    [
        (
            RANGED,
            (3, 5, 6),
            [(2, 5, 6), (8, 1, 6)],
            [(9, 5, 6), (1, 5, 6), (0, 5, 6)],
            "'x': axis 0 is batch, from 2 to 8",
        ),
        (RELATED, (3, 5, 13), [(1, 1, 3), (4, 2, 8)], [(3, 5, 12), (4, 2, 9)], r"'y': axis 0 is past \+ 2\*sequence"),
        (SAME, (3, 3, 3), [(1, 1, 1), (9, 9, 4)], [(3, 4, 3)], "'mask': axis 0 is n"),
        (SAME, (6, 6, 4), [(2, 2, 2)], [(6, 6, 6), (2, 2, 4)], r"'y': axis 0 is Min\(4, n\)"),
    ],
)
def test_sizes_that_are_not_as_declared(
    shapes: Any, sizes: Any, good: Any, bad: Any, words: str, optimize: bool
) -> None:
    program = export(shapes, *sizes, optimize=optimize)
    for each in good:
        expected = three(*map(torch.from_numpy, feed(*each).values()))
        np.testing.assert_array_equal(run(program, feed(*each))[0], expected)
    for each in bad:
        with pytest.raises(Exception, match=f"check of the input {words}"):
            run(program, feed(*each))
        with pytest.raises(Exception, match="reshape"):
            run(program, feed(*each), "reference")


@pytest.mark.parametrize("opset", [13, 18, 24])
def test_every_opset(opset: int) -> None:
    program = export(RANGED, 3, 5, 6, opset_version=opset)
    with pytest.raises(Exception, match="batch, from 2 to 8"):
        run(program, feed(9, 5, 6))


def test_a_branch_on_sizes() -> None:
    """The graph checks the condition of the model's code on two sizes."""

    def model(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return three(x, mask, y) if x.shape[0] > mask.shape[0] else x.sum(0)

    with pytest.warns(UserWarning, match="right only where"):
        program = export({"x": {0: "a"}, "mask": {0: "b"}, "y": None}, 7, 3, 6, model=model)
    run(program, feed(8, 7, 6))
    with pytest.raises(Exception, match=r"right only where .*test_checks.py:\d+"):
        run(program, feed(7, 7, 6))


def test_without_checks_ranges_are_metadata_alone() -> None:
    args = (torch.randn(3, 4), torch.randn(5), torch.randn(6))
    program = onnxplug.to_onnx(three, args, dynamic_shapes=RANGED)
    assert json.loads(program.model.graph.metadata_props["onnxplug.dimensions"]) == {"batch": {"min": 2, "max": 8}}
    assert "Reshape" not in {node.op_type for node in program.model.graph}
    static = onnxplug.to_onnx(three, args, checks=True)
    assert "onnxplug.dimensions" not in static.model.graph.metadata_props
    assert "Reshape" not in {node.op_type for node in static.model.graph}


def test_an_input_that_branches_read_is_checked() -> None:
    """For readers within the graphs of If too, and for an input that is an output unchanged."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, flag: torch.Tensor) -> Any:
            return torch.cond(flag, lambda x: x + 1, lambda x: x - 1, (x,)), x

    program = onnxplug.to_onnx(
        Model(),
        (torch.randn(3), torch.tensor(True)),
        dynamic_shapes={"x": {0: Dim("n", max=5)}, "flag": None},
        checks=True,
        verify=True,
    )
    for flag in (True, False):
        inputs = {"x": np.ones(6, np.float32), "flag": np.array(flag)}
        with pytest.raises(Exception, match="axis 0 is n, from 0 to 5"):
            run(program, inputs)


def test_complex_inputs_and_numbers() -> None:
    program = onnxplug.to_onnx(
        lambda x, k: (x * 2, k + x.shape[0]),
        (torch.randn(3, dtype=torch.complex64), 4),
        dynamic_shapes={"x": {0: Dim("n", max=5)}, "k": "k"},
        checks=True,
        verify=True,
    )
    with pytest.raises(Exception, match="axis 0 is n, from 0 to 5"):
        program(torch.randn(6, dtype=torch.complex64), 4)


def test_unknown_arguments() -> None:
    for options, words in (
        ({"dynamic_axes": {"x": {0: "n"}}}, "no argument 'dynamic_axes'.*\n.*dynamic_shapes"),
        ({"verbos": True}, "no argument 'verbos'"),
        ({"output_name": ["y"]}, "Did you mean 'output_names'"),
        ({"dynamo": True}, "always captured by torch.export"),
    ):
        with pytest.raises(UsageError, match=words):
            onnxplug.to_onnx(three, (), **options)  # type: ignore[arg-type]


# -- assertions on data ------------------------------------------------------------------------------------------------


class Asserting(torch.nn.Module):
    """Two assertions on data; the result has the given number of axes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() > 0, "the sum must be positive")
        torch._assert_async(x.max() < 5, "all must be below 5")
        return x * 2 if self.rank == 2 else x.sum() if self.rank == 0 else x.sum(0)


@pytest.mark.parametrize("runtime", ["onnxruntime", "reference"])
@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("shapes", [None, ({0: Dim("rows", max=9)},)], ids=["static", "dynamic"])
def test_assertions_of_a_model_on_its_data(rank: int, opset: int, runtime: str, shapes: Any) -> None:
    model, x = Asserting(rank), torch.ones(3, 2)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=shapes, checks=True, opset_version=opset)
    (got,) = run(program, {"x": x.numpy()}, runtime)
    torch.testing.assert_close(torch.from_numpy(np.asarray(got)), model(x))
    assert [str(output.shape) for output in program.model.graph.outputs] == [
        {0: "[]", 1: "[2]", 2: "[3,2]" if shapes is None else "[rows,2]"}[rank]
    ]
    for bad, message in ((-x, "the sum must be positive"), (x * 6, "all must be below 5")):
        with pytest.raises(Exception, match=message if runtime == "onnxruntime" else None):
            run(program, {"x": bad.numpy()}, runtime)


def test_without_checks_assertions_are_left_out() -> None:
    program = onnxplug.to_onnx(Asserting(2), (torch.ones(3, 2),))
    assert [node.op_type for node in program.model.graph] == ["Mul"]
    assert len(program.model.graph.outputs) == 1


def test_an_assertion_without_a_message() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.sum() > 0)
        return x * 2

    program = onnxplug.to_onnx(model, (torch.ones(3),), checks=True)
    run(program, {"x": np.ones(3, np.float32)})
    with pytest.raises(Exception, match=r"check: the assertion at .*test_checks\.py:\d+"):
        run(program, {"x": -np.ones(3, np.float32)})


def test_an_assertion_in_a_branch_is_named_as_not_checked() -> None:
    def asserting(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async(x.max() < 5, "below five")
        return x * 2

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, asserting, lambda x: x + 1, (x,))

    with pytest.warns(UserWarning, match=r"does not check the assertion at .*test_checks\.py:\d+: it is in a branch"):
        program = onnxplug.to_onnx(model, (torch.ones(3),), checks=True)
    assert len(program.model.graph.outputs) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxplug.to_onnx(model, (torch.ones(3),))
