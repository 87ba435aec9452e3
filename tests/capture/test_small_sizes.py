"""Dynamic dimensions whose example size is 0 or 1: the model's branch at that size is never taken for every size's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug
from onnxplug import CaptureError, FixedDimensionError
from onnxplug.torch_private import fx_config
from tests.support.releases import not_with

ZERO, ONE = torch.ones(0, 3), torch.arange(3.0).reshape(1, 3)
Model = Callable[[torch.Tensor], torch.Tensor]


def other(x: torch.Tensor) -> torch.Tensor:
    """A result whose shape shows the branch that was taken."""
    return x.new_ones(7)


BRANCHES: dict[str, tuple[Model, torch.Tensor]] = {
    "shape == 0": (lambda x: other(x) if x.shape[0] == 0 else x + 1, ZERO),
    "size() == 0": (lambda x: other(x) if x.size(0) == 0 else x + 1, ZERO),
    "len": (lambda x: x + 1 if len(x) else other(x), ZERO),
    "shape > 0": (lambda x: x + 1 if x.shape[0] > 0 else other(x), ZERO),
    "numel == 0": (lambda x: other(x) if x.numel() == 0 else x + 1, ZERO),
    "not numel": (lambda x: other(x) if not x.numel() else x + 1, ZERO),
    "shape == 1": (lambda x: other(x) if x.shape[0] == 1 else x + 1, ONE),
    "shape > 1": (lambda x: x + 1 if x.shape[0] > 1 else other(x), ONE),
    "shape < 2": (lambda x: other(x) if x.shape[0] < 2 else x + 1, ONE),
    "numel == 3": (lambda x: other(x) if x.numel() == 3 else x + 1, ONE),
}


def same(model: Model, program: onnxplug.OnnxProgram, x: torch.Tensor) -> None:
    torch.testing.assert_close(program(x)[0], model(x))


@pytest.mark.parametrize(
    ("name", "strict"), [*((n, None) for n in BRANCHES), ("numel == 0", True), ("shape > 1", True)]
)
def test_an_automatic_dimension_that_a_branch_depends_on_is_static(name: str, strict: bool | None) -> None:
    model, x = BRANCHES[name]
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: Dim.AUTO},), strict=strict, verify=True)
    assert program.model.graph.inputs[0].shape[0] == x.shape[0]
    same(model, program, x)


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("wanted", ["batch", Dim("batch"), Dim.DYNAMIC], ids=str)
def test_a_dynamic_dimension_that_a_branch_depends_on_is_an_error(name: str, wanted: Any) -> None:
    model, x = BRANCHES[name]
    with pytest.raises(CaptureError, match="dynamic") as caught:
        onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: wanted},))
    if not isinstance(wanted, Dim):
        assert re.search(r"test_small_sizes\.py:\d+ fixes it", str(caught.value))


STAYS: dict[str, tuple[Model, torch.Tensor]] = {
    "linear": (nn.Linear(3, 2).eval(), ONE),
    "max": (lambda x: x.new_ones(max(1, x.shape[0])).sum() + x, ONE),
    "max of 0": (lambda x: x.new_ones(max(1, x.shape[0])), ZERO),
    "cat": (lambda x: torch.cat([x, torch.ones(2, 3)]), ZERO),
    "reshape": (lambda x: x.reshape(x.shape[0], 3, 1) + x.view(-1, 3, 1), ZERO),
    "sum": (lambda x: x.sum(0), ZERO),
    "a relation of two sizes": (lambda x: x + x[: x.shape[0]] if x.shape == x.clone().shape else other(x), ONE),
}


@pytest.mark.parametrize("name", STAYS)
@pytest.mark.parametrize("wanted", ["batch", Dim.AUTO], ids=str)
def test_a_dimension_that_nothing_depends_on_stays_dynamic(name: str, wanted: Any, request: Any) -> None:
    if name == "max":
        request.applymarker(not_with("2.9", "takes max(1, n) for n"))
    model, x = STAYS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: wanted},))
    assert not isinstance(program.model.graph.inputs[0].shape[0], int)
    same(model, program, x)
    same(model, program, torch.randn(5, 3))


def test_two_sizes_of_1_may_be_the_same_size() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] == y.shape[0] else y

    shapes = {"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}}
    program = onnxplug.to_onnx(model, (ONE, ONE.clone()), dynamic_shapes=shapes)
    assert not isinstance(program.model.graph.inputs[0].shape[0], int)
    x = torch.randn(4, 3)
    torch.testing.assert_close(program(x, x)[0], x + 1)


#: Functions that ask whether a size is 1 to settle strides and forms that ONNX does not have; each with two shapes.
LAYOUT: dict[str, tuple[Model, tuple[int, ...], tuple[int, ...]]] = {
    "reshape": (lambda x: x.transpose(0, 1).reshape(-1, 4) + 1, (1, 5, 4), (3, 2, 4)),
    "contiguous": (lambda x: x.permute(2, 0, 1).contiguous() + 1, (1, 1, 4), (3, 2, 5)),
    "heads": (
        lambda x: x.view(*x.shape[:2], 2, 2).transpose(1, 2).contiguous().view(-1, x.shape[1], 2),
        *((2, 1, 4), (3, 5, 4)),
    ),
    "a pool": (lambda x: nn.functional.adaptive_avg_pool2d(x, 1), (1, 1, 1, 1), (2, 3, 5, 6)),
    "inner": (lambda x: torch.inner(x, x * 2), (1, 4), (3, 5)),
    "tensordot": (lambda x: torch.tensordot(x, x.t(), 1), (1, 4), (3, 5)),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", LAYOUT)
def test_strides_are_no_reason_to_fix_a_size_of_1(name: str, strict: bool) -> None:
    model, example, other_shape = LAYOUT[name]
    dims = {
        axis: f"d{axis}"
        for axis, size in enumerate(example)
        if not (name == "heads" and axis == 2)
        if size != 4 or axis < 2
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, (torch.randn(example),), dynamic_shapes=(dims,), strict=strict)
    sizes = tuple(size if axis in dims else example[axis] for axis, size in enumerate(other_shape))
    for shape in (example, sizes, (*sizes[:1], 1, *sizes[2:])):
        same(model, program, torch.randn(shape))


def test_a_layer_of_attention_at_one_step() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    program = onnxplug.to_onnx(layer, (torch.randn(2, 1, 4),), dynamic_shapes=({0: "b", 1: "t"},))
    for shape in ((2, 1, 4), (3, 7, 4), (1, 5, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x)[0], layer(x))


def test_a_channel_that_weights_fix_is_still_an_error() -> None:
    with pytest.raises(FixedDimensionError, match=r"axis 1 of the input .* was declared dynamic.*c == 1"):
        onnxplug.to_onnx(nn.Conv1d(1, 2, 3).eval(), (torch.randn(2, 1, 5),), dynamic_shapes=({1: "c"},))


#: The place of a squeeze in a warning. torch 2.9 records the lines of modules' ``forward`` alone.
AT = r"squeeze at .*test_small_sizes\.py:\d+" if not torch.__version__.startswith("2.9.") else "squeeze"
SQUEEZES: dict[str, Model] = {
    "all": lambda x: x.squeeze() + 1,
    "dim": lambda x: x.squeeze(0) + 1,
    "negative dim": lambda x: x.squeeze(-2) + 1,
    "dims": lambda x: x.squeeze([0, 1]) + 1,
    "function": lambda x: torch.squeeze(x, dim=0) + 1,
    "in place": lambda x: x.clone().squeeze_(0) + 1,
    "a slice": lambda x: torch.cat([x, x])[1:].squeeze(0) + 1,
}


@pytest.mark.parametrize("name", SQUEEZES)
def test_squeeze_of_an_automatic_dimension_of_size_1(name: str) -> None:
    program = onnxplug.to_onnx(SQUEEZES[name], (ONE,), dynamic_shapes=({0: Dim.AUTO},), verify=True)
    assert program.model.graph.inputs[0].shape[0] == 1
    same(SQUEEZES[name], program, ONE)


@pytest.mark.parametrize("name", sorted(set(SQUEEZES) - {"a slice"}))
@pytest.mark.parametrize("wanted", ["batch", Dim.DYNAMIC], ids=str)
def test_squeeze_of_a_dynamic_dimension_of_size_1_warns(name: str, wanted: Any) -> None:
    with pytest.warns(UserWarning, match=rf"{AT}.* keeps axis 0.*axis 0 of the input"):
        program = onnxplug.to_onnx(SQUEEZES[name], (ONE,), dynamic_shapes=({0: wanted},))
    x = torch.randn(5, 3)
    torch.testing.assert_close(program(x)[0], x + 1)


@pytest.mark.parametrize("name", SQUEEZES)
def test_squeeze_of_a_dynamic_dimension_of_another_size_is_right_but_for_size_1(name: str) -> None:
    """At size 1 PyTorch's result has an axis less."""
    with pytest.warns(UserWarning, match=rf"right only where .*batch.* != .*{AT}"):
        program = onnxplug.to_onnx(SQUEEZES[name], (torch.randn(4, 3),), dynamic_shapes=({0: "batch"},))
    assert all(case.sizes["batch"] != 1 for case in program.verify().cases)
    same(SQUEEZES[name], program, torch.randn(7, 3))


@pytest.mark.parametrize("size", [4, 1])
def test_squeeze_of_a_captured_program_is_right_but_for_size_1(size: int) -> None:
    module = nn.Module()
    module.forward = SQUEEZES["dim"]
    with fx_config.patch(backed_size_oblivious=True):
        captured = torch.export.export(module, (torch.randn(size, 3),), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.warns(UserWarning, match=r"right only where x\.shape\[0\] != 1: PyTorch's squeeze"):
        program = onnxplug.to_onnx(captured)
    assert all(1 not in case.sizes.values() for case in program.verify(args=(torch.randn(2, 3),)).cases)
    with pytest.raises(onnxplug.VerificationError) as error:
        program.verify(args=(torch.randn(1, 3),))
    assert "right only where x.shape[0] != 1, as the export warned" in str(error.value.hint)


POOLED: dict[str, Model] = {
    "all": lambda x: nn.functional.avg_pool2d(x, (3, 2)).squeeze() + 1,
    "dim": lambda x: nn.functional.avg_pool2d(x, (3, 2)).squeeze(2).transpose(1, 2) + 1,
    "dims": lambda x: nn.functional.avg_pool2d(x, (3, 2)).squeeze((1, -2)) + 1,
    "in place": lambda x: nn.functional.avg_pool2d(x, (3, 2)).squeeze_(2) + 1,
}


@pytest.mark.parametrize("name", POOLED)
def test_squeeze_of_a_size_that_is_1_for_all_declared_heights_says_nothing(name: str) -> None:
    axes = {2: Dim("height", min=3, max=5), 3: Dim("width", min=4)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(POOLED[name], (torch.randn(2, 1, 4, 8),), dynamic_shapes=(axes,))
    for rows in (3, 4, 5):
        same(POOLED[name], program, torch.randn(2, 1, rows, 10))


def test_squeeze_of_a_dimension_declared_to_be_larger_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(
            SQUEEZES["dim"], (torch.randn(4, 3),), dynamic_shapes=({0: Dim("batch", min=2)},), verify=True
        )
    same(SQUEEZES["dim"], program, torch.randn(7, 3))


def test_squeeze_of_other_axes_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(
            lambda x: x[None].squeeze(0) + 1, (ONE,), dynamic_shapes=({0: "batch"},), verify=True
        )
    assert str(program.model.graph.inputs[0].shape[0]) == "batch"


def test_only_the_axis_concerned_becomes_static() -> None:
    """Nested inputs, several leaves, and one dict of shapes used for all of them."""
    shape = {0: Dim.AUTO, 1: Dim.AUTO}

    def model(pair: list[torch.Tensor], more: dict[str, torch.Tensor]) -> torch.Tensor:
        return pair[0].squeeze(0) + pair[1].sum(0) + more["z"].sum(0)

    args = ([torch.randn(1, 1), torch.randn(1, 1)], {"z": torch.randn(1, 1)})
    shapes = {"pair": [shape, shape], "more": {"z": shape}}
    program = onnxplug.to_onnx(model, args, dynamic_shapes=shapes)
    assert shape == {0: Dim.AUTO, 1: Dim.AUTO}
    dims = [[isinstance(d, int) for d in v.shape] for v in program.model.graph.inputs]
    assert dims == [[True, False], [False, False], [False, False]]


def test_torch_is_left_as_it_was() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    before = ShapeEnv.create_symbol
    with pytest.raises(CaptureError):
        onnxplug.to_onnx(BRANCHES["shape == 0"][0], (ZERO,), dynamic_shapes=({0: "b"},))
    assert ShapeEnv.create_symbol is before


MANY = torch.arange(12.0).reshape(4, 3)
#: Branches that differ at the size 1 alone, with the condition that holds for the larger sizes.
ONE_APART: dict[str, tuple[Model, str]] = {
    "shape > 1": (lambda x: other(x) if x.shape[0] > 1 else x + 1, "batch > 1"),
    "shape == 1": (lambda x: x + 1 if x.shape[0] == 1 else other(x), "batch != 1"),
    "len": (lambda x: other(x) if len(x) >= 2 else x + 1, "batch >= 2"),
    "not": (lambda x: other(x) if not x.shape[0] < 2 else x + 1, "batch >= 2"),
    "numel": (lambda x: other(x) if x.numel() > 3 else x + 1, "3*batch > 3"),
    "an operator asked before": (lambda x: (x @ x.t() if x.shape[0] > 1 else x + 1).contiguous(), "batch > 1"),
    "after an operator": (lambda x: other(y) if (y := x @ torch.ones(3, 3)).shape[0] > 1 else x, "batch > 1"),
}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *((name, "batch") for name in ONE_APART),
        # len() is an int, which makes an automatic dimension static.
        *((name, Dim.AUTO) for name in ONE_APART if name != "len"),
    ],
    ids=str,
)
def test_a_branch_for_the_size_1_is_a_warning(name: str, wanted: Any) -> None:
    model, condition = ONE_APART[name]
    text = re.escape(condition if isinstance(wanted, str) else condition.replace("batch", "x.shape[0]"))
    with pytest.warns(
        UserWarning, match=rf"is right only where {text}: the model's code at .*test_small_sizes\.py:\d+ "
    ):
        program = onnxplug.to_onnx(model, (MANY,), dynamic_shapes=({0: wanted},))
    same(model, program, MANY)
    with pytest.raises(
        onnxplug.VerificationError, match=r"Hint: The model's code asks .* at .*test_small_sizes\.py:\d+"
    ):
        program.verify(seeds=range(8))


def test_a_branch_for_the_size_1_within_a_declared_range_says_nothing() -> None:
    model, _ = ONE_APART["shape > 1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, (MANY,), dynamic_shapes=({0: Dim("batch", min=2)},))
    sizes = [case.sizes["batch"] for case in program.verify(seeds=range(8)).cases]
    assert len(sizes) > 6
    assert min(sizes) > 1


def checked(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] > 1
    if x.shape[0] == 1:
        raise ValueError("one row")
    return x + 1


def test_a_check_for_the_size_1_is_reported() -> None:
    with pytest.warns(UserWarning, match="is right only where batch > 1: "):
        program = onnxplug.to_onnx(checked, (MANY,), dynamic_shapes=({0: "batch"},))
    same(checked, program, MANY[:2])


@pytest.mark.parametrize("names", [{0: "b"}, {0: "b", 1: "t"}])
@pytest.mark.parametrize("shape", [(1, 5, 4), (3, 1, 4), (1, 1, 4)])
def test_attention_at_one_row_or_step(shape: tuple[int, ...], names: dict[int, str]) -> None:
    """Its projection is made contiguous, which asks in C++ whether a size is 1, and the answer is in no number."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]

    layer = Attention().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(layer, (torch.randn(shape),), dynamic_shapes=(names,))
    for b, t in ((1, 1), (1, 7), (4, 7), (4, 1)):
        x = torch.randn(b, t if 1 in names else shape[1], 4)
        torch.testing.assert_close(program(x)[0], layer(x))


def test_a_branch_of_an_installed_package_is_a_hint_of_verification_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxplug.capture import size_guards

    monkeypatch.setattr(size_guards, "_INSTALLED", re.compile(re.escape(__file__)))
    model, _ = ONE_APART["shape > 1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(model, (MANY,), dynamic_shapes=({0: "batch"},))
    with pytest.raises(onnxplug.VerificationError, match="Hint: The model's code asks batch > 1 at"):
        program.verify(seeds=range(8))


def test_recording_branches_leaves_torch_as_it_was() -> None:
    before = torch.SymBool.__bool__, torch.SymInt.__repr__
    with pytest.warns(UserWarning, match="is right only where"):
        onnxplug.to_onnx(ONE_APART["shape > 1"][0], (MANY,), dynamic_shapes=({0: "batch"},))
    assert (torch.SymBool.__bool__, torch.SymInt.__repr__) == before


def test_number_of_elements_of_a_shape() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y[:, None] if x.shape.numel() else x

    program = onnxplug.to_onnx(
        function, (torch.randn(2, 3), torch.randn(2)), dynamic_shapes=({0: "batch"}, {0: "batch"})
    )
    for size in (2, 5):
        args = torch.randn(size, 3), torch.randn(size)
        torch.testing.assert_close(program(*args)[0], function(*args))


#: Without the rows ONNX Runtime refuses to run the model, and nothing warns.
_SLICES = not_with("2.9", "takes a slice within the example for as long as there, at each size that has the rows")
#: Slices of one row of the example, or of none, each with the smallest size at which it has the row.
ONE_ROW: dict[str, tuple[Model, int]] = {
    "the second": (lambda x: x[1:2].squeeze(0) + 1, 2),
    "the third": (lambda x: x[2:3].squeeze() + 1, 3),
    "the last but one": (lambda x: x[-2:-1].squeeze((0,)) + 1, 2),
    "the last of the others": (lambda x: x[1:][-1:].clone().squeeze_(0) + 1, 2),
    "in the middle": (lambda x: x[x.shape[0] // 2 : x.shape[0] // 2 + 1].squeeze(0) + 1, 1),
}


@_SLICES
@pytest.mark.parametrize("name", ONE_ROW)
@pytest.mark.parametrize("wanted", ["n", Dim.DYNAMIC, Dim.AUTO], ids=str)
def test_squeeze_of_a_slice_of_one_row_removes_the_axis(name: str, wanted: Any) -> None:
    model, least = ONE_ROW[name]
    with pytest.warns(UserWarning, match=rf"right only where .* == 1: PyTorch's {AT}.*removes an axis of size 1"):
        program = onnxplug.to_onnx(model, (torch.randn(4, 3),), dynamic_shapes=({0: wanted},), verify=True)
    assert not isinstance(program.model.graph.inputs[0].shape[0], int)
    for rows in (least, least + 1, 7):
        same(model, program, torch.randn(rows, 3))


@_SLICES
def test_squeeze_of_a_slice_that_may_have_two_rows_keeps_the_axis() -> None:
    with pytest.warns(UserWarning, match="keeps axis 0"):
        program = onnxplug.to_onnx(lambda x: x[2:4].squeeze(0), (torch.randn(3, 3),), dynamic_shapes=({0: "n"},))
    same(lambda x: x[2:4], program, torch.randn(5, 3))


@_SLICES
@pytest.mark.parametrize("strict", [None, True])
def test_rows_of_a_slice_one_by_one(strict: bool | None) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        first, second = x[:2].unbind()
        return first - second + sum(row * 2 for row in x[1:4])

    with pytest.warns(UserWarning, match="right only where n >= 4"):
        program = onnxplug.to_onnx(model, (torch.randn(5, 3),), dynamic_shapes=({0: "n"},), strict=strict, verify=True)
    for rows in (4, 5, 9):
        same(model, program, torch.randn(rows, 3))
