"""Inputs and outputs of every kind: the names of inputs, the results, and the state that is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import onnxplug
from onnxplug import CaptureError, UsageError
from onnxplug.verification.compare import compare


def names(values: Any) -> list[str]:
    return [v.name for v in values]


def export(function: Any, *args: Any, **options: Any) -> onnxplug.OnnxProgram:
    program = onnxplug.to_onnx(function, args, **options)
    program.verify()
    return program


X, Y = torch.randn(2, 3), torch.randn(2, 3)


def test_nested_inputs_and_keywords() -> None:
    def model(x: Any, *, pair: Any, options: Any) -> Any:
        return x + pair[0] * options["scale"] - pair[1]["deep"]

    kwargs = {"options": {"scale": Y}, "pair": [X, {"deep": Y * 2}]}
    program = onnxplug.to_onnx(model, (X,), kwargs=kwargs)
    assert program.verify().cases
    assert len(program.model.graph.inputs) == 4
    # Keywords in another order than at export.
    again = program(X, pair=[X, {"deep": Y * 2}], options={"scale": Y})
    torch.testing.assert_close(again[0], model(X, **kwargs))


@dataclass
class Both:
    first: torch.Tensor
    second: torch.Tensor


class Named(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


_pytree.register_dataclass(Both, serialized_type_name="tests.Both")


def test_dataclass_in_and_out() -> None:
    program = export(lambda both: Both(both.first + 1, both.second * 2), Both(X, Y))
    assert names(program.model.graph.outputs) == ["first", "second"]
    result = program.unflatten(program(Both(X, Y)))
    assert isinstance(result, Both)
    torch.testing.assert_close(result.second, Y * 2)


def test_named_tuple_out() -> None:
    assert names(export(lambda x: Named(x + 1, x * 2), X).model.graph.outputs) == ["logits", "hidden"]


def test_none_inputs_and_outputs() -> None:
    program = export(lambda x, mask, y: {"sum": x + y, "mask": mask, "none": None}, X, None, Y)
    assert names(program.model.graph.inputs) == ["x", "y"]
    assert names(program.model.graph.outputs) == ["sum"]
    assert program.unflatten(program(X, None, Y))["none"] is None
    with pytest.raises(UsageError, match="'mask' was None"):
        program(X, X, Y)


def test_numbers_are_baked_in_and_checked() -> None:
    program = export(lambda x, k, f, flag: x * k + f if flag else x, X, 3, 0.5, True)
    assert names(program.model.graph.inputs) == ["x"]
    with pytest.raises(UsageError, match="'k' is fixed at 3"):
        program(X, 4, 0.5, True)


@pytest.mark.parametrize(("fixed", "other"), [(float("nan"), 0.5), (-0.0, 0.0), (0.0, -0.0)])
def test_a_float_is_checked_with_its_sign_and_as_nan(fixed: float, other: float) -> None:
    program = export(lambda x, f: x / f, X, fixed)
    for x in (X, -X):
        torch.testing.assert_close(program(x, fixed)[0], x / fixed, equal_nan=True)
    with pytest.raises(UsageError, match="'f' is fixed at"):
        program(X, other)


def test_an_int_may_stay_an_input() -> None:
    program = onnxplug.to_onnx(lambda x, k: x * k, (X, 3), dynamic_shapes=(None, torch.export.Dim.DYNAMIC))
    assert names(program.model.graph.inputs) == ["x", "k"]
    torch.testing.assert_close(program(X, 5)[0], X * 5)


def test_numbers_among_the_outputs() -> None:
    program = export(lambda x: (x + 1, 7, None, 2.5), X)
    assert len(program.model.graph.outputs) == 3
    assert program.unflatten(program(X))[1:] == (7, None, 2.5)


def test_unused_inputs_are_kept() -> None:
    program = export(lambda x, unused: x + 1, X, Y)
    assert names(program.model.graph.inputs) == ["x", "unused"]


def test_outputs_that_are_inputs_constants_or_twice_the_same() -> None:
    constant = torch.arange(3.0)

    def model(x: torch.Tensor) -> Any:
        y = x + 1
        return x, y, y, constant, y.relu()

    program = export(model, X)
    assert len(set(names(program.model.graph.outputs))) == 5
    results = program(X)
    torch.testing.assert_close(results[0], X)
    torch.testing.assert_close(results[2], X + 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def test_tied_weights_are_stored_once_under_their_name() -> None:
    program = onnxplug.to_onnx(Tied().eval(), (torch.tensor([[1, 2]]),), verify=True)
    weights = [v for v in program.model.graph.initializers.values() if v.const_value.size == 40]
    assert [w.name for w in weights] == ["embedding.weight"]


class Views(nn.Module):
    """Buffers that see one memory in different ways."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        z = torch.randn(size, dtype=dtype)
        views = {"plain": z, "same": z.view(size), "negated": torch._neg_view(z), "other": torch._neg_view(z)[::2]}
        if dtype.is_complex:
            views |= {"conj": z.conj(), "both": torch._neg_view(z.conj()), "imag": z.imag, "less": z.conj().imag}
        for name, view in views.items():
            self.register_buffer(name, view)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [buffer * x[: len(buffer)] for buffer in self.buffers()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [4, 100])
def test_conjugate_and_negated_views_of_one_memory_are_tensors_of_their_own(dtype: torch.dtype, size: int) -> None:
    model, x = Views(size, dtype).eval(), torch.randn(size)
    program = onnxplug.to_onnx(model, (x,), verify=True)
    if size == 100:
        assert "same" not in program.model.graph.initializers
    other = Views(size, dtype)
    program.apply_weights(other.state_dict())
    assert all(compare(got, wanted).equal for got, wanted in zip(program(-x), other(-x), strict=True))


def test_parameter_names_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)).eval()
    program = onnxplug.to_onnx(model, (torch.randn(1, 1, 4, 4),), verify=True)
    assert set(program.model.graph.initializers) >= {"0.weight", "0.bias", "2.running_mean", "4.weight"}


def test_weights_can_be_replaced_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    x = torch.randn(2, 3, 4)  # rank 3: the weight is stored transposed
    program = onnxplug.to_onnx(model, (x,))
    other = nn.Sequential(nn.Linear(4, 4)).eval()
    program.apply_weights(other.state_dict())
    torch.testing.assert_close(program(x)[0], other(x).detach())


def test_names_of_the_user_go_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, add: torch.Tensor) -> Any:
            return x + add + self.out, x

    program = onnxplug.to_onnx(Model(), (X, Y), input_names=["a", "b"], output_names=["out", "add"], verify=True)
    assert names(program.model.graph.inputs) == ["a", "b"]
    assert names(program.model.graph.outputs) == ["out", "add"]
    values = names(program.model.graph.inputs) + names(program.model.graph.initializers.values())
    values += [v.name for node in program.model.graph for v in node.outputs]
    assert len(values) == len(set(values))


def test_an_output_named_as_an_intermediate_value() -> None:
    program = onnxplug.to_onnx(lambda x: (x + 1).relu(), (X,), output_names=["add"], verify=True)
    assert names(program.model.graph.outputs) == ["add"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_names": ["a", "b", "c"]}, "3 names for 2"),
        ({"output_names": ["a", "b"]}, "2 names for 1"),
        ({"input_names": ["a", "a"]}, "twice"),
        ({"input_names": "ab"}, "list of names"),
        ({"input_names": ["a", "b"], "output_names": ["a"]}, "both|in input_names and in output_names"),
    ],
)
def test_bad_names(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.to_onnx(lambda x, y: x + y, (X, Y), **options)


Dim = torch.export.Dim


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: "batch"}, "y": {0: "batch"}},
        {"x": ("batch", None), "y": ["batch", None]},
        ({0: "batch"}, {0: "batch"}),
        [{0: "batch"}, {0: "batch"}],
        {"x": {0: Dim("batch")}, "y": {0: Dim("batch")}},
        {"x": {0: Dim.DYNAMIC}, "y": {0: Dim.DYNAMIC}},
        {"x": {0: Dim.AUTO, 1: Dim.STATIC}, "y": {0: Dim.AUTO}},
    ],
)
def test_every_form_of_dynamic_shapes(shapes: Any) -> None:
    program = onnxplug.to_onnx(lambda x, y: x + y, (X, Y), dynamic_shapes=shapes)
    report = program.verify()
    assert {case.max_abs_difference for case in report.cases} == {0.0}
    first = program.model.graph.inputs[0].shape[0]
    assert not isinstance(first, int)
    if "batch" in str(shapes):
        assert str(first) == "batch" == str(program.model.graph.inputs[1].shape[0])
    assert [tuple(r.shape) for r in program(torch.ones(5, 3), torch.ones(5, 3))] == [(5, 3)]


def test_shapes_collection() -> None:
    collection = torch.export.ShapesCollection()
    collection[X] = {0: Dim.DYNAMIC}
    program = onnxplug.to_onnx(lambda x: x + 1, (X,), dynamic_shapes=collection, verify=True)
    assert not isinstance(program.model.graph.inputs[0].shape[0], int)


def test_additional_inputs() -> None:
    """torch.export's own way to state by examples which sizes are dynamic."""
    inputs = torch.export.AdditionalInputs()
    inputs.add((torch.randn(7, 3), Y))
    program = onnxplug.to_onnx(lambda x, y: x.sum(0) + y, (X, Y), dynamic_shapes=inputs, verify=True)
    sizes = [[type(size) is int for size in value.shape] for value in program.model.graph.inputs]
    assert sizes == [[False, True], [True, True]]


def test_derived_and_related_dimensions() -> None:
    program = onnxplug.to_onnx(
        lambda x, y: torch.cat([x, y], 0) + torch.cat([y, x], 0),
        (torch.randn(2, 3), torch.randn(4, 3)),
        dynamic_shapes={"x": {0: "n"}, "y": {0: "m"}},
        verify=True,
    )
    assert [str(v.shape[0]) for v in program.model.graph.inputs] == ["n", "m"]


def test_example_of_size_one_stays_dynamic() -> None:
    program = onnxplug.to_onnx(
        nn.Linear(3, 2).eval(), (torch.randn(1, 3),), dynamic_shapes=({0: "batch"},), verify=True
    )
    assert tuple(program(torch.randn(6, 3))[0].shape) == (6, 2)


def test_a_name_shared_by_sizes_that_differ() -> None:
    with pytest.raises((CaptureError, UsageError)):
        onnxplug.to_onnx(
            lambda x, y: (x + 1, y + 1),
            (torch.randn(2, 3), torch.randn(4, 3)),
            dynamic_shapes={"x": {0: Dim("b")}, "y": {0: Dim("c", min=9)}},
        )


@pytest.mark.parametrize("name", ["b", Dim("b")], ids=str)
def test_one_name_for_example_sizes_that_differ(name: Any) -> None:
    shapes = {"x": {1: name}, "more": [{0: name}]}
    with pytest.raises(UsageError, match=r"'b' has the size 3 in axis 1 of x and 5 in axis 0 of more\[0\]"):
        onnxplug.to_onnx(lambda x, more: x.sum() + more[0], (torch.ones(2, 3), [torch.ones(5)]), dynamic_shapes=shapes)


def test_ten_models_in_one_argument_position() -> None:
    program = onnxplug.to_onnx(lambda *xs: sum(xs), tuple(torch.full((2,), float(i)) for i in range(10)), verify=True)
    assert len(program.model.graph.inputs) == 10


def test_script_module() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval())
    program = onnxplug.to_onnx(scripted, (X,))
    torch.testing.assert_close(program(X)[0], scripted(X).detach())
    assert [list(v.shape) for v in program.model.graph.inputs] == [[2, 3]], "nothing was declared dynamic"


def test_script_module_with_buffers_and_constants() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
            self.shift = torch.tensor([4.0, 5.0, 6.0])
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x * self.scale + self.shift), y.view(y.shape[0], -1)

    scripted = torch.jit.script(Model().eval())
    program = onnxplug.to_onnx(scripted, (X, Y))
    assert all(isinstance(d, int) for v in program.model.graph.inputs for d in v.shape)
    for got, wanted in zip(program(X, Y), scripted(X, Y), strict=True):
        torch.testing.assert_close(got, wanted.detach())


def test_graph_module_and_exported_program() -> None:
    exported = torch.export.export(nn.Linear(3, 2).eval(), (X,))
    assert onnxplug.to_onnx(exported, verify=True).model.graph.num_nodes() == 1
    traced = torch.fx.symbolic_trace(nn.Linear(3, 2).eval())
    assert onnxplug.to_onnx(traced, (X,), verify=True).model.graph.num_nodes() == 1


def test_the_exported_program_is_left_as_it_was() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.mul_(2)
        return y

    module = nn.Module()
    module.forward = model  # type: ignore[method-assign]
    exported = torch.export.export(module, (X,))
    before = str(exported.graph)
    onnxplug.to_onnx(exported, verify=True)
    assert str(exported.graph) == before


def test_dynamic_shapes_of_open_keywords() -> None:
    class Open(nn.Module):
        def forward(self, x: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            return x * kwargs["a"] + kwargs["b"]

    model = Open()
    named = {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}
    shapes = {name: {0: "batch"} for name in ("x", "a", "b")}
    program = onnxplug.to_onnx(model, (torch.randn(2, 3),), kwargs=named, dynamic_shapes=shapes, verify=True)
    assert [v.name for v in program.model.graph.inputs] == ["x", "a", "b"]
    assert "forward" not in model.__dict__
    x, a, b = (torch.randn(5, 3) for _ in range(3))
    torch.testing.assert_close(program(x, a=a, b=b)[0], model(x, a=a, b=b))


class Cached(nn.Module):
    def forward(self, x: torch.Tensor, past: Any, mask: torch.Tensor) -> Any:
        return x + past[0]["k"] * mask, [p["k"] + x for p in past], mask * 2


def cached(n: int) -> tuple[Any, ...]:
    return torch.randn(n), [{"k": torch.randn(n)}, {"k": torch.randn(n)}], torch.randn(n)


LEAVES = ["x", "past_0_k", "past_1_k", "mask"]


def test_names_of_arguments_name_their_parts() -> None:
    program = onnxplug.to_onnx(Cached(), cached(3), input_names=["ids", "cache", "m"], output_names=["y", "new", "z"])
    assert names(program.model.graph.inputs) == ["ids", "cache_0_k", "cache_1_k", "m"]
    assert names(program.model.graph.outputs) == ["y", "new_0", "new_1", "z"]
    program.verify(args=cached(3))
    program = onnxplug.to_onnx(Cached(), cached(3), input_names=["x", "past", "mask"])
    assert names(program.model.graph.inputs) == LEAVES
    program = onnxplug.to_onnx(Cached(), cached(3)[:1], kwargs=dict(zip(("past", "mask"), cached(3)[1:], strict=True)))
    assert names(program.model.graph.inputs) == LEAVES
    kwargs = {"mask": cached(3)[2], "past": cached(3)[1]}  # in another order than in the signature
    program = onnxplug.to_onnx(Cached(), cached(3)[:1], kwargs=kwargs, input_names=["a", "b", "c"])
    assert names(program.model.graph.inputs) == ["a", "b", "c_0_k", "c_1_k"]
    program.verify()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_names": ["x", "past"]}, "input_names has 2 names for 4 values (x, past_0_k, past_1_k, mask)"),
        ({"input_names": ["x"]}, "input_names has 1 names for 4 values"),
        ({"output_names": ["x", "past"]}, "output_names has 2 names for 4 values"),
    ],
)
def test_too_few_names_of_nested_values(options: dict[str, Any], message: str) -> None:
    import re

    with pytest.raises(UsageError, match=re.escape(message)):
        onnxplug.to_onnx(Cached(), cached(3), **options)
    if "output_names" not in options:
        with pytest.raises(UsageError, match=re.escape(message)):
            onnxplug.export(Cached(), cached(3), **options)


def test_too_few_names_of_results_in_a_call_of_torch_onnx() -> None:
    """torch.onnx gives the names to the first values, on which libraries rely."""
    program = onnxplug.export(Cached(), cached(3), output_names=["x", "past"])
    assert names(program.model.graph.outputs)[:2] == ["x", "past"]
    assert len(program.model.graph.outputs) == 4
    program.verify(args=cached(3))


def test_too_few_names_of_plain_inputs() -> None:
    with pytest.raises(UsageError, match=r"input_names has 1 names for 2 values \(x, y\)"):
        onnxplug.to_onnx(lambda x, y: x + y, (X, Y), input_names=["a"])


@pytest.mark.parametrize(
    ("names", "shapes"),
    [
        (["a", "b", "c"], {"a": {0: "n"}, "b": [{"k": {0: "n"}}, {"k": {0: "n"}}], "c": {0: "n"}}),
        (["a", "b0", "b1", "c"], {name: {0: "n"} for name in ("a", "b0", "b1", "c")}),
        (["mask", "b0", "b1", "x"], {name: {0: "n"} for name in ("mask", "b0", "b1", "x")}),
        (["a", "b", "c"], {"x": {0: "n"}, "past": [{"k": {0: "n"}}, {"k": {0: "n"}}], "mask": {0: "n"}}),
    ],
)
def test_dynamic_shapes_by_input_names(names: list[str], shapes: Any) -> None:
    program = onnxplug.to_onnx(Cached(), cached(3), input_names=names, dynamic_shapes=shapes)
    assert [list(value.shape) for value in program.model.graph.inputs] == [["n"]] * 4
    for n in (5, 1):
        program.verify(args=cached(n))


def test_dynamic_shapes_by_names_of_one_argument_alone() -> None:
    shapes = {"c": {0: "n"}}
    program = onnxplug.to_onnx(
        lambda x, y: (x + 1, y - 1), (torch.randn(2), torch.randn(2)), input_names=["b", "c"], dynamic_shapes=shapes
    )
    assert [str(value.shape) for value in program.model.graph.inputs] == ["[2]", "[n]"]


@pytest.mark.parametrize("shapes", [{"d": {0: "n"}}, {"a": {0: "n"}, "d": None}])
def test_dynamic_shapes_by_unknown_names(shapes: Any) -> None:
    with pytest.raises(UsageError, match=r"dynamic_shapes names '[ad]', but the inputs are x, y"):
        onnxplug.to_onnx(lambda x, y: x + y, (X, Y), input_names=["a", "b"], dynamic_shapes=shapes)


def test_dynamic_axes_by_names_of_nested_arguments() -> None:
    axes = {"a": {0: "n"}, "b": {0: "n"}, "c": {0: "n"}}
    program = onnxplug.export(Cached(), cached(3), input_names=["a", "b", "c"], dynamic_axes=axes)
    assert [list(value.shape) for value in program.model.graph.inputs] == [["n"]] * 4
    program.verify(args=cached(5))
