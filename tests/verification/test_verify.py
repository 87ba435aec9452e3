"""Verification at other sizes and values, and every kind of difference."""

from __future__ import annotations

import math
import os
import threading
import warnings
from itertools import permutations
from typing import Any

import onnx
import pytest
import torch
from onnxplug_tools.verification import resized_inputs, verify_file
from torch import nn

import onnxplug
from onnxplug import VerificationError
from onnxplug.errors import CaptureError, UsageError
from onnxplug.verification.inputs import generated_inputs
from tests.support.check import Call


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


class Halved(nn.Module):
    """Takes maps, and others of half their sizes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool2d(x, 2) + y


class Volumes(nn.Module):
    """Refuses sides that 4 doesn't divide, as a network does that joins maps of each half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = nn.functional.avg_pool3d(x, 4)
        return x + nn.functional.interpolate(small, scale_factor=4.0)


def test_volumes_grow_by_16_at_most() -> None:
    sides = {0: "batch", 2: "depth", 3: "height", 4: "width"}
    example = {"batch": 2, "depth": 8, "height": 8, "width": 12}
    program = onnxplug.to_onnx(Volumes(), (torch.randn(2, 1, 8, 8, 12),), dynamic_shapes=({**sides},))
    drawn = [case.sizes for case in program.verify(seeds=range(4)).cases if case.seed is not None]
    assert all(math.prod(sizes.values()) <= 16 * math.prod(example.values()) for sizes in drawn)
    assert all(any(sizes[name] > size for sizes in drawn) for name, size in example.items())


def test_declared_multiples_are_respected() -> None:
    height, width = torch.export.Dim("height", min=2, max=9), torch.export.Dim("width")
    dims = ({0: "batch", 1: 8 * height, 2: 4 * width}, {0: "batch", 1: 4 * height, 2: 2 * width})
    inputs = torch.randn(2, 32, 16), torch.randn(2, 16, 8)
    report = onnxplug.to_onnx(Halved(), inputs, dynamic_shapes=dims).verify(seeds=range(6))
    assert not report.skipped
    sizes = [case.sizes for case in report.cases]
    assert len({(case["8*height"], case["4*width"]) for case in sizes}) > 3
    for case in sizes:
        assert case["8*height"] in range(16, 49, 8)  # two steps more than exported at most
        assert case["4*height"] * 2 == case["8*height"]
        assert case["4*width"] in range(4, 200, 4)
        assert case["2*width"] * 2 == case["4*width"]


@pytest.mark.parametrize("offset", [-8, 8])
def test_a_declared_size_with_an_offset(offset: int) -> None:
    rows = torch.export.Dim("rows", min=2, max=9)
    exported = onnxplug.to_onnx(
        lambda x, y: (x.reshape(8, -1).sum(0) * 2, y * 2),
        (torch.randn(8 * 4 + offset), torch.randn(4 * 4)),
        dynamic_shapes=({0: 8 * rows + offset}, {0: 4 * rows}),
    )
    report = exported.verify(seeds=range(6))
    assert not report.skipped
    sizes = [case.sizes for case in report.cases[1:]]
    assert len({case["rows"] for case in sizes}) > 3
    assert all(case.get("4*rows", 4 * case["rows"]) == 4 * case["rows"] for case in sizes)


def test_a_root_of_torchs_has_the_name_of_its_dim() -> None:
    exported = onnxplug.to_onnx(
        lambda x: x * 2, (torch.randn(40),), dynamic_shapes=({0: 8 * torch.export.Dim("rows", min=2) + 8},)
    )
    assert [str(value.shape) for value in exported.model.graph.inputs] == ["[8*rows + 8]"]


class Bounded(nn.Module):
    """Computes something else from 8 on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] < 8 else x - 1


def test_inputs_beyond_a_range_are_named() -> None:
    positions = nn.Module()
    positions.weight = nn.Parameter(torch.randn(16, 4))  # type: ignore[assignment]
    positions.forward = lambda x: x + positions.weight[: x.shape[1]]  # type: ignore[operator]
    program = onnxplug.to_onnx(positions, (torch.randn(2, 5, 4),), dynamic_shapes=({0: "batch", 1: "n"},))
    with pytest.raises(VerificationError, match="right only where n is from 0 to 16; here it is 20"):
        program.verify(args=(torch.randn(2, 20, 4),))
    dims = {1: torch.export.Dim("n", min=2, max=7)}
    program = onnxplug.to_onnx(Bounded(), (torch.randn(2, 5),), dynamic_shapes=(dims,))
    assert program.verify(args=(torch.randn(2, 7),)).cases
    with pytest.raises(VerificationError, match="right only where n is from 2 to 7; here it is 9"):
        program.verify(args=(torch.randn(2, 9),))


def refusing(refused: Any) -> Any:
    """An export of a model that refuses some sizes in eager PyTorch, but not while it is captured."""

    def model(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and refused(x.shape[0]):
            raise ValueError("not for this")
        return x + 1

    return onnxplug.to_onnx(model, (torch.randn(4, 3),), dynamic_shapes=({0: "batch"},))


@pytest.mark.parametrize("refused", [lambda n: n == 1, lambda n: n % 4, lambda n: n < 3, lambda n: n != 4])
def test_sizes_that_pytorch_rejects_are_drawn_again(refused: Any) -> None:
    report = refusing(refused).verify()
    assert [case.seed for case in report.cases] == [None, 0, 1, 2]
    assert not any(refused(case.sizes["batch"]) for case in report.cases)
    assert report.skipped[0] == "batch=1: ValueError: not for this"
    assert refusing(refused).verify().cases == report.cases


def test_a_seed_without_sizes_that_fit_is_reported() -> None:
    calls = []
    with pytest.warns(UserWarning, match="nothing was compared for seed 7.*12 draws.*not for this"):
        report = refusing(lambda n: len(calls) > 0 or calls.append(n)).verify(seed=7)
    assert len(report.cases) == 1
    assert len(report.skipped) == 12


def summed(**options: Any) -> onnxplug.OnnxProgram:
    def model(x: torch.Tensor, past: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (torch.cat([past, x]) * mask).cumsum(0)

    shapes = {"x": {0: "sequence"}, "past": {0: "past"}, "mask": {0: "past + sequence"}} | options
    return onnxplug.to_onnx(model, (torch.randn(3, 2), torch.randn(4, 2), torch.rand(7, 2)), dynamic_shapes=shapes)


def loose(**options: Any) -> onnxplug.OnnxProgram:
    """As :func:`summed`, but torch.export finds no relation between the sizes by itself."""

    def model(x: torch.Tensor, past: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([past, x])
        return whole.sum(0) * mask[torch.arange(whole.shape[0])].sum(0)

    shapes = {"x": {0: "sequence"}, "past": {0: "past"}, "mask": {0: "past + sequence"}} | options
    return onnxplug.to_onnx(model, (torch.randn(3, 2), torch.randn(4, 2), torch.rand(7, 2)), dynamic_shapes=shapes)


@pytest.mark.parametrize("make", [summed, loose])
@pytest.mark.parametrize("name", ["past + sequence", "sequence+past", "past - 1 + (sequence + 1)"])
def test_a_dimension_named_by_an_expression_is_that_expression(make: Any, name: str) -> None:
    one = make(mask={0: name})
    assert str(one.model.graph.inputs[2].shape[0]) == "past + sequence"
    report = one.verify(seeds=range(20))
    assert len(report.cases) == 21
    assert len({(case.sizes["past"], case.sizes["sequence"]) for case in report.cases}) > 5
    with pytest.raises(UsageError, match=r"past \+ sequence"):
        one(torch.randn(2, 2), torch.randn(4, 2), torch.randn(7, 2))
    assert one(torch.randn(2, 2), torch.randn(4, 2), torch.randn(6, 2))


def test_expressions_that_do_not_hold() -> None:
    with pytest.raises(
        UsageError,
        match=r"is named 'past \* sequence', which is 12 .past 4, sequence 3., but its size in the example is 7",
    ):
        loose(mask={0: "past * sequence"})
    with pytest.raises(UsageError, match=r"'past \+ sequenc' names 'sequenc'"):
        loose(mask={0: "past + sequenc"})
    with pytest.raises(CaptureError, match=r"torch.export finds its size to be past \+ sequence"):
        summed(mask={0: "past + 3"})
    plain = onnxplug.to_onnx(lambda x: x + 1, (torch.randn(3, 2),), dynamic_shapes=({0: "batch-size"},))
    assert str(plain.model.graph.inputs[0].shape[0]) == "batch-size"


def test_sizes_of_one_name_must_agree() -> None:
    program = onnxplug.to_onnx(
        lambda x, y: x + y, (torch.randn(3, 2), torch.randn(3, 2)), dynamic_shapes=({0: "n"}, {0: "n"})
    )
    with pytest.raises(UsageError, match="axis 0 of the input 'y' is n"):
        program(torch.randn(4, 2), torch.randn(5, 2))


def test_a_failure_can_be_repeated() -> None:
    def convert(g: Any, node: Any) -> Any:
        return g.op.Where(g.op.Greater(node.args[0], 1.0), node.args[0], g.op.Relu(node.args[0]))

    wrong = onnxplug.Rule("aten::abs", convert)
    program = onnxplug.to_onnx(
        lambda x: x.abs(), (torch.full((4, 3), 2.0),), dynamic_shapes=({0: "batch"},), rules=[wrong]
    )
    assert program.verify(seeds=()).cases
    with pytest.raises(VerificationError, match=r"output 'output' differs .* at batch=7, seed 2") as first:
        program.verify(seeds=(2, 1))
    assert "verify(seed=2)" in str(first.value)
    with pytest.raises(VerificationError) as second:
        program.verify(seed=2)
    assert str(second.value) == str(first.value)


def test_related_sizes_fit_together() -> None:
    program = onnxplug.to_onnx(
        lambda x, y: x + y[::2],
        (torch.randn(3, 2), torch.randn(6, 2)),
        dynamic_shapes={"x": {0: torch.export.Dim.AUTO}, "y": {0: torch.export.Dim.AUTO}},
    )
    assert program.verify().cases


def test_generated_values_stay_in_the_examples_range() -> None:
    ids, mask = torch.randint(3, 9, (4, 5)), torch.ones(4, 5, dtype=torch.bool)
    fresh = generated_inputs([ids, mask, 7], [ids, mask, None], {}, 1)
    dummies = [torch.ones(4, 5), torch.zeros(4, 5)]
    assert all(float(x.min()) < 0 for x in generated_inputs(dummies, dummies, {}, 1))
    assert 3 <= int(fresh[0].min()) <= int(fresh[0].max()) <= 8
    assert bool(fresh[1].all())
    assert fresh[2] == 7
    again = generated_inputs([ids, mask, 7], [ids, mask, None], {}, 1)
    torch.testing.assert_close(again[0], fresh[0])
    resized, sizes = resized_inputs([ids], {0: {1: "n"}}, 0)
    assert sizes == {"n": 1}
    assert resized[0].shape == (4, 1)


def test_a_program_without_a_model_or_inputs() -> None:
    exported = torch.export.export(nn.Linear(3, 2).eval(), (torch.randn(2, 3),))
    program = onnxplug.to_onnx(exported)
    program.captured = None
    with pytest.raises(VerificationError, match="no PyTorch model"):
        program.verify()


def test_reference_evaluator_where_onnxruntime_has_no_kernel() -> None:
    report = onnxplug.to_onnx(lambda x: x.cumsum(0), (torch.arange(3, dtype=torch.int16),)).verify()
    assert report.cases
    program = onnxplug.to_onnx(nn.AvgPool2d(2), (torch.randn(1, 2, 4, 4, dtype=torch.float64),))
    with pytest.warns(UserWarning, match=r"can't run the model \(Could not find an implementation for AveragePool"):
        direct = program.verify()
    assert {case.runtime for case in direct.cases} == {"onnxplug.reference"}


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


class Keywords(nn.Module):
    """Some of its inputs may be given by name."""

    def forward(self, x: Any, y: Any = None, *, scales: Any, shift: Any) -> Any:
        return x * scales[0] * scales[1] ** 2 - shift - (0 if y is None else 3 * y)


@pytest.mark.parametrize("order", list(permutations(["y", "scales", "shift"])))
@pytest.mark.parametrize("given", [0, 1, 2])
def test_verify_file_finds_inputs_by_name(given: int, order: tuple[str, ...], tmp_path: Any) -> None:
    """However the keywords are ordered, and how many inputs stand before them."""
    made = {"x": torch.randn(2, 3), "y": torch.randn(2, 3), "shift": torch.randn(2, 3)}
    made |= {"scales": [torch.randn(2, 3), torch.randn(2, 3)]}
    named = dict(list(made.items())[given:])
    path = str(tmp_path / "model.onnx")
    onnxplug.to_onnx(Keywords(), tuple(list(made.values())[:given]), path, kwargs=named)
    args, kwargs = [made["x"]], {name: made[name] for name in order}
    for name in list(made)[1:given]:
        args.append(kwargs.pop(name))
    assert len(verify_file(path, Keywords(), args, kwargs).cases) == 4


def test_verify_file_with_an_output_that_is_no_tensor(tmp_path: Any) -> None:
    text = "g (float[3] x) => (seq(float[3]) y) { y = SequenceConstruct(x, x) }"
    model = onnx.helper.make_model(onnx.parser.parse_graph(text), opset_imports=[onnx.helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(VerificationError, match="the output 'y' is no tensor"):
        verify_file(str(tmp_path / "model.onnx"), lambda x: [x, x], (torch.randn(3),), {})


class Counting(nn.Module):
    """Writes a buffer and its input."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x.sum(0) * self.step)
        x.mul_(2)
        return x + 1


def test_verify_file_compares_written_buffers(tmp_path: Any) -> None:
    path, x = str(tmp_path / "model.onnx"), torch.randn(3, 2)
    onnxplug.to_onnx(Counting(1.0), (x,), path, dynamic_shapes=({0: "n"},))
    assert len(verify_file(path, Counting(1.0), (x,), {}, {"x": {0: "n"}}).cases) == 4
    with pytest.raises(VerificationError, match="'count_out' differs"):
        verify_file(path, Counting(2.0), (x,), {}, {"x": {0: "n"}})
    with pytest.raises(VerificationError, match="the output 'count_out' beyond the 1 results"):
        verify_file(path, lambda x: x * 2 + 1, (x,), {})
    with pytest.raises(VerificationError, match=r"3 outputs .*, PyTorch 4"):
        verify_file(path, lambda x: (x * 2 + 1, x, x, x), (x,), {})


class Clipping(nn.Module):
    """Writes its weight: by an embedding's largest norm, in ``no_grad``, and under a second name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, max_norm=0.5 if way == "norm" else None)
        self.tied = self.table.weight
        self.way = way

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.way == "clamp":
            with torch.no_grad():
                self.tied.clamp_(-0.5, 0.5)
        return self.table(numbers) * 2


@pytest.mark.parametrize("way", ["norm", "clamp"])
def test_a_model_that_writes_its_weight(way: str, tmp_path: Any) -> None:
    path, model, numbers = str(tmp_path / "model.onnx"), Clipping(way).eval(), torch.tensor([1, 2, 8])
    program = onnxplug.to_onnx(model, (numbers,), path, dynamic_shapes=({0: "n"},))
    before = model.table.weight.detach().clone()
    assert program.verify().cases
    assert verify_file(path, model, (numbers,), {}, {"numbers": {0: "n"}}).cases
    torch.testing.assert_close(model.table.weight.detach(), before, rtol=0, atol=0)
    with torch.no_grad():
        model.table.weight[8] *= 3
    with pytest.raises(VerificationError, match="differs"):
        verify_file(path, model, (numbers,), {}, {"numbers": {0: "n"}})


class Uncopyable(nn.Module):
    """Writes a buffer, and has an attribute that ``copy.deepcopy`` refuses, or a parameter with the buffer's memory."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.total = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("sum", self.total.data if attribute == "memory" else torch.zeros(4))
        if attribute == "lock":
            self.locks = [threading.Lock()]
        elif attribute == "result":
            self.doubled = self.linear.weight * 2
        elif attribute == "weight norm":
            self.linear = nn.utils.weight_norm(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum.add_(x.mean(0))
        return self.linear(x) + self.sum + self.total


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("attribute", ["lock", "result", "weight norm", "memory"])
def test_a_model_that_can_not_be_copied_plainly(attribute: str, tmp_path: Any) -> None:
    path, model, x = str(tmp_path / "model.onnx"), Uncopyable(attribute).eval(), torch.randn(3, 4)
    program = onnxplug.to_onnx(model, (x,), path, dynamic_shapes=({0: "n"},))
    assert program.verify().cases
    assert verify_file(path, model, (x,), {}, {"x": {0: "n"}}).cases
    assert not model.sum.any()
    with torch.no_grad():
        model.linear.bias += 1
    with pytest.raises(VerificationError, match="differs"):
        verify_file(path, model, (x,), {}, {"x": {0: "n"}})


def test_verify_file_draws_expressions(tmp_path: Any) -> None:
    path = str(tmp_path / "model.onnx")

    def model(x: torch.Tensor, past: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([past, x]) * mask

    args = (torch.randn(3, 2), torch.randn(4, 2), torch.rand(7, 2))
    dynamic = {"x": {0: "sequence"}, "past": {0: "past"}, "mask": {0: "past + sequence"}}
    onnxplug.to_onnx(model, args, path, dynamic_shapes=dynamic)
    report = verify_file(path, model, args, {}, dynamic, seeds=range(10))
    assert len(report.cases) == 11
    assert report.skipped == []


@pytest.mark.parametrize("sizes", [{"x": None}, {"past": None}])
def test_an_expression_of_a_static_size(sizes: dict[str, Any]) -> None:
    """A name in an expression is unknown where its own dimension is static."""
    with pytest.raises(UsageError, match="but no dimension has that name"):
        loose(**sizes)


def test_names_that_torch_ties() -> None:
    """Two names of one size: the expression is written with the first."""
    program = onnxplug.to_onnx(
        lambda x, y, mask: (x + y).sum(0) + mask[torch.arange(2 * x.shape[0])].sum(0),
        (torch.randn(3, 2), torch.randn(3, 2), torch.randn(6, 2)),
        dynamic_shapes=({0: "a"}, {0: "b"}, {0: "a + b"}),
    )
    assert [str(value.shape[0]) for value in program.model.graph.inputs] == ["a", "a", "2*a"]
    assert len(program.verify(seeds=range(6)).cases) == 7


@pytest.mark.parametrize("padded", [2, 5])
def test_attention_without_its_fast_path(padded: int) -> None:
    """torch's fast path gives 0 at padded positions, which torch.export does not capture."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.nn.TransformerEncoder(layer, 2).eval()
        mask = torch.zeros(3, 5, dtype=torch.bool)
        mask[0, 5 - padded :] = True
        kwargs = {"src_key_padding_mask": mask}
        onnxplug.to_onnx(model, (torch.randn(3, 5, 16),), kwargs=kwargs).verify(seeds=())
    assert torch.backends.mha.get_fastpath_enabled()


def _counted(x: torch.Tensor) -> int:
    return 4 if torch.compiler.is_exporting() else x.shape[0]


@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.log(x).sum(0).mean() / _counted(x),
        lambda x: torch.softmax(torch.sqrt(x) / _counted(x), -1),
        lambda x: x.pow(0.5).mean((0, 1)) / _counted(x),
    ],
    ids=["log", "sqrt", "pow"],
)
def test_inputs_at_which_no_result_is_finite_compare_nothing(model: Any) -> None:
    """Numbers of both signs give NaN in both models; the elements of the example do not."""
    program = onnxplug.to_onnx(Call(model), (torch.rand(4, 8) + 0.5,), dynamic_shapes={"args": ({0: "rows"},)})
    with pytest.raises(VerificationError, match="differ"):
        program.verify()


def test_results_that_are_never_finite() -> None:
    """NaN at the example inputs too: its places are compared."""
    program = onnxplug.to_onnx(Call(lambda x: torch.log(-x.abs() - 1)), (torch.rand(4, 8),))
    assert len(program.verify().cases) == 4


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_tensors_written_in_place_that_are_no_buffers(strict: bool) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.states = torch.ones(3), [torch.zeros(3), torch.ones(3)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state.mul_(0.5).add_(x.mean(0))
            self.states[1].add_(x[0])
            return x + self.state * self.states[1]

    model, n = nn.Sequential(Written()), torch.export.Dim("n")
    program = onnxplug.to_onnx(model, (torch.randn(4, 3),), dynamic_shapes=({0: n},), strict=strict)
    assert len(program.model.graph.outputs) == 3
    assert len(program.verify().cases) == 4
    program.model.graph.outputs[1], program.model.graph.outputs[2] = list(program.model.graph.outputs)[:0:-1]
    with pytest.raises(VerificationError, match="differs"):
        program.verify()


class Stateful(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.calls, self.last, self.states = reads, 0, torch.zeros(3), [torch.zeros(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.last = self.calls + 1, x + 1
        self.states[0] = self.states[0] + x.mean(0)
        return x * self.states[0] if self.reads else x * 2


def test_a_verified_model_is_what_it_was() -> None:
    model = Stateful(reads=False)
    before = (model.last, *model.states)
    program = onnxplug.to_onnx(
        model, (torch.randn(4, 3),), dynamic_shapes={"x": {0: torch.export.Dim("n")}}, verify=True
    )
    assert len(program.verify().cases) == 4
    assert model.calls == 0
    assert all(x is y for x, y in zip((model.last, *model.states), before, strict=True))


def test_the_list_that_a_model_changes_is_named() -> None:
    model = Stateful(reads=True)
    with pytest.warns(UserWarning, match=r"'states\[0\]'"):
        program = onnxplug.to_onnx(model, (torch.randn(4, 3),), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    state = model.states[0]
    with pytest.raises(VerificationError) as caught:
        program.verify()
    assert "forward changes" in str(caught.value.hint)
    assert "states" in str(caught.value.hint)
    assert model.states[0] is state


def test_verification_leaves_what_others_share() -> None:
    class Drawing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(3)
            os.environ["ONNXPLUG_TEST_VERIFY"] = "1"
            return x * 2

    program = onnxplug.to_onnx(Drawing(), (torch.randn(3),))
    os.environ.pop("ONNXPLUG_TEST_VERIFY", None)
    before = torch.get_rng_state()
    try:
        program.verify()
        assert os.environ.get("ONNXPLUG_TEST_VERIFY") == "1"
        assert not torch.equal(torch.get_rng_state(), before)
    finally:
        os.environ.pop("ONNXPLUG_TEST_VERIFY", None)
