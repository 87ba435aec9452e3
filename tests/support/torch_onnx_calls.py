"""Calls that ``torch.onnx.export`` accepts, which are run both ways, and helpers of tests of ``onnxplug.export``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.onnx import OperatorExportTypes, TrainingMode

import onnxplug

X, Y = torch.linspace(-2, 2, 8).reshape(2, 4), torch.linspace(1, -1, 6).reshape(2, 3)
LIB = torch.library.Library("inplace", "DEF")
LIB.define("cap(Tensor x, float limit, int[] axes) -> Tensor")
LIB.impl("cap", lambda x, limit, axes: x.clamp(-limit, limit), "CompositeExplicitAutograd")
LIB.define("twice(Tensor x) -> Tensor")
LIB.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.drop(self.linear(x)))
        return result


class Capped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.inplace.cap(x, 1.5, [0, 1]) + 1
        return result


def net() -> Net:
    return Net().eval()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def exported(model: Any, args: Any, **options: Any) -> onnxplug.OnnxProgram:
    program = onnxplug.export(model, args, **options)
    assert program is not None
    return program


class Affine(nn.Module):
    """Two inputs, the second of them optional, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        with torch.no_grad():
            self.norm.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor, y: Any = None, scale: Any = None) -> torch.Tensor:
        result = self.norm(self.linear(x))
        result = result if y is None else result + y
        return result if scale is None else result * scale


class Nested(nn.Module):
    """A dict goes in; a dict with a list comes out."""

    def forward(self, x: torch.Tensor, parts: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"sum": x + parts["b"], "pair": [parts["a"] * 2, x - 1]}


class Pairs(nn.Module):
    """A list of tuples goes in."""

    def forward(self, x: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        return x * past[0][1], past[0][0] - past[1][1], past[1][0] * 3


class Steps(nn.Module):
    """A recurrent layer over any number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        output, (h, _) = self.lstm(x)
        return output, h


class Exportable(getattr(torch.onnx, "ExportableModule", nn.Module)):  # type: ignore[misc]
    """Brings its inputs and their names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Affine().eval()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(x, y)
        return result

    def example_arguments(self) -> Any:
        return (X,), {"y": Y}

    def input_names(self) -> Any:
        return ("first", "second")

    def output_names(self) -> Any:
        return ("result",)

    def dynamic_shapes(self) -> Any:
        return {"x": {0: "rows"}, "y": {0: "rows"}}


def script(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    if bool(n.sum() > 0):
        x = x * 2
    return x + n


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        model = make()
        return model.eval() if isinstance(model, nn.Module) else model

    return made


@dataclass
class Call:
    """A call, and other inputs for the model.

    Attributes:
        model: A function that makes the model.
        args: Example inputs.
        other: Inputs of other values, and of other sizes where they are dynamic, positional ones and keywords.
        options: Further arguments.
    """

    model: Callable[[], Any]
    args: Any
    other: tuple[tuple[Any, ...], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)


def tensors_of(call: Call, model: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call in the order of the graph's inputs."""
    if call.options.get("dynamo") is False and kwargs:
        order = list(inspect.signature(model.forward).parameters)
        kwargs = {name: kwargs[name] for name in order if name in kwargs}
    leaves = torch.utils._pytree.tree_leaves((tuple(args), kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def exported_input_program() -> torch.export.ExportedProgram:
    return torch.export.export(seeded(Affine)(), (X, Y), dynamic_shapes={"x": {0: Dim.DYNAMIC}, "y": {0: Dim.DYNAMIC}})


A = seeded(Affine)
MORE = (torch.randn(5, 4), torch.randn(5, 3))
SAME = (torch.randn(2, 4), torch.randn(2, 3))
OLD = {"dynamo": False}
NAMES = {"input_names": ["a", "b"], "output_names": ["result"]}
PARTS = {"b": X + 1, "a": Y}
PAST = [(Y, X * 2), (Y + 1, Y * 3)]
OTHER_PAST = [(SAME[1], SAME[0]), (SAME[1] - 1, SAME[1] * 2)]

CALLS: dict[str, Call] = {
    "plain": Call(A, (X,), ((SAME[0],), {})),
    "a tensor as args": Call(A, X, ((SAME[0],), {})),
    "two inputs": Call(A, (X, Y), (SAME, {})),
    "a dict at the end": Call(A, (X, {"y": Y}), ((SAME[0],), {"y": SAME[1]})),
    "keywords": Call(A, (X,), ((SAME[0],), {"y": SAME[1]}), {"kwargs": {"y": Y}}),
    "keywords in another order": Call(A, (), ((), {"y": SAME[1], "x": SAME[0]}), {"kwargs": {"y": Y, "x": X}}),
    "keywords in another order, named": Call(
        A, (), ((), {"y": SAME[1], "x": SAME[0]}), {"kwargs": {"y": Y, "x": X}, **NAMES}
    ),
    "a number": Call(A, (X, Y, 2.5), ((*SAME, 2.5), {})),
    "None between inputs": Call(A, (X, None, Y[:, :1]), ((SAME[0], None, SAME[1][:, :1]), {})),
    "names": Call(A, (X, Y), (SAME, {}), dict(NAMES)),
    "fewer names": Call(A, (X, Y), (SAME, {}), {"input_names": ["a"]}),
    "more names": Call(A, (X,), ((SAME[0],), {}), {"input_names": ["a", "b"], "output_names": ["r", "s"]}),
    "dynamic_shapes, tuple": Call(A, (X, Y), (MORE, {}), {"dynamic_shapes": ({0: "n"}, {0: "n"})}),
    "dynamic_shapes, dict": Call(
        A, (X, Y), (MORE, {}), {"dynamic_shapes": {"x": {0: Dim("rows")}, "y": {0: Dim("rows")}}}
    ),
    "dynamic_shapes, hints": Call(A, (X, Y), (MORE, {}), {"dynamic_shapes": ({0: Dim.DYNAMIC}, {0: Dim.AUTO})}),
    "dynamic_axes": Call(
        A, (X, Y), (MORE, {}), {**NAMES, "dynamic_axes": {"a": {0: "n"}, "b": {0: "n"}, "result": {0: "n"}}}
    ),
    "dynamic_axes, lists": Call(A, (X, Y), (MORE, {}), {**NAMES, "dynamic_axes": {"a": [0], "b": [0]}}),
    "dynamic_axes without input_names": Call(A, (X,), ((MORE[0],), {}), {"dynamic_axes": {"x": {0: "n"}}}),
    "dynamic_axes, nested": Call(
        seeded(Pairs),
        (X, PAST),
        ((SAME[0], OTHER_PAST), {}),
        {
            "input_names": ["x", "k0", "v0", "k1", "v1"],
            "dynamic_axes": {"x": {1: "c"}, "k0": {1: "d"}, "v0": {1: "c"}, "k1": {1: "e"}, "v1": {1: "d"}},
        },
    ),
    "nested inputs": Call(seeded(Nested), (X, PARTS, {}), ((SAME[0], {"b": SAME[0], "a": SAME[1]}), {})),
    "nested inputs, named": Call(
        seeded(Nested),
        (X, PARTS, {}),
        ((SAME[0], {"b": SAME[0], "a": SAME[1]}), {}),
        {"input_names": ["i", "j", "k"], "output_names": ["u", "v", "w"]},
    ),
    "nested outputs, the first named": Call(
        seeded(Nested), (X, PARTS, {}), ((SAME[0], {"b": SAME[0], "a": SAME[1]}), {}), {"output_names": ["u"]}
    ),
    "opset 18": Call(A, (X,), ((SAME[0],), {}), {"opset_version": 18}),
    "opset 23": Call(A, (X,), ((SAME[0],), {}), {"opset_version": 23}),
    "one file": Call(A, (X,), ((SAME[0],), {}), {"external_data": False}),
    "not optimized": Call(A, (X,), ((SAME[0],), {}), {"optimize": False}),
    "not folded": Call(A, (X,), ((SAME[0],), {}), {"do_constant_folding": False}),
    "weights as inputs": Call(A, (X,), ((SAME[0],), {}), {"keep_initializers_as_inputs": True}),
    "all that is quiet": Call(
        A, (X,), ((SAME[0],), {}), {"verbose": False, "report": True, "dump_exported_program": True}
    ),
    "verified": Call(A, (X, Y), (SAME, {}), {"verify": True}),
    "an ExportedProgram": Call(exported_input_program, (), (MORE, {})),
    "an ExportedProgram, named": Call(
        exported_input_program, (), (MORE, {}), {**NAMES, "dynamic_shapes": ({0: "rows"}, {0: "rows"})}
    ),
    **(
        {"an ExportableModule": Call(seeded(Exportable), (), ((MORE[0],), {"y": MORE[1]}))}
        if hasattr(torch.onnx, "ExportableModule")
        else {}
    ),
    "an LSTM": Call(
        seeded(Steps),
        (torch.randn(2, 3, 4),),
        ((torch.randn(3, 6, 4),), {}),
        {"dynamic_shapes": ({0: "batch", 1: "steps"},)},
    ),
    # The exporter that was the default before torch 2.9.
    "old: plain": Call(A, (X,), ((SAME[0],), {}), dict(OLD)),
    "old: a tensor as args": Call(A, X, ((SAME[0],), {}), dict(OLD)),
    "old: a dict at the end": Call(A, (X, {"y": Y}), ((SAME[0],), {"y": SAME[1]}), dict(OLD)),
    "old: keywords in another order": Call(
        A, (), ((), {"y": SAME[1], "x": SAME[0]}), {**OLD, **NAMES, "kwargs": {"y": Y, "x": X}}
    ),
    "old: names of weights": Call(
        A, (X,), ((SAME[0],), {}), {**OLD, "input_names": ["image", *(f"learned_{i}" for i in range(4))]}
    ),
    "old: dynamic_axes": Call(
        A, (X, Y), (MORE, {}), {**OLD, **NAMES, "dynamic_axes": {"a": {0: "n"}, "b": {0: "n"}, "result": {0: "n"}}}
    ),
    "old: dynamic_axes, lists": Call(
        A, (X, Y), (MORE, {}), {**OLD, **NAMES, "dynamic_axes": {"a": [0], "b": [0], "result": [0]}}
    ),
    "old: a key of nothing": Call(
        A, (X,), ((SAME[0],), {}), {**OLD, "input_names": ["a"], "dynamic_axes": {"zz": {0: "n"}}}
    ),
    "old: opset 13": Call(A, (X,), ((SAME[0],), {}), {**OLD, "opset_version": 13}),
    "old: weights as inputs": Call(A, (X,), ((SAME[0],), {}), {**OLD, "keep_initializers_as_inputs": True}),
    "old: None": Call(A, (X,), ((SAME[0],), {}), {**OLD, "keep_initializers_as_inputs": None, "verbose": None}),
    "old: nested": Call(
        seeded(Nested), (X, PARTS, {}), ((SAME[0], {"b": SAME[0], "a": SAME[1]}), {}), {**OLD, "output_names": ["u"]}
    ),
    "old: a script": Call(
        lambda: torch.jit.script(script), (X, X - 3), ((SAME[0], SAME[0].abs()), {}), {**OLD, "input_names": ["a", "b"]}
    ),
    "old: a traced module": Call(
        lambda: torch.jit.trace(A(), (X, Y)), (X, Y), (SAME, {}), {**OLD, "output_names": ["result"]}
    ),
    "old: a module in training": Call(
        lambda: seeded(Affine)().train(), (X,), ((SAME[0],), {}), {**OLD, "training": TrainingMode.EVAL}
    ),
    "old: training": Call(lambda: seeded(Affine)(), (X,), ((SAME[0],), {}), {**OLD, "training": TrainingMode.TRAINING}),
    "old: preserved": Call(A, (X,), ((SAME[0],), {}), {**OLD, "training": TrainingMode.PRESERVE}),
    "old: kinds of export": Call(
        A, (X,), ((SAME[0],), {}), {**OLD, "operator_export_type": OperatorExportTypes.ONNX_FALLTHROUGH}
    ),
    "old: functions": Call(A, (X,), ((SAME[0],), {}), {**OLD, "export_modules_as_functions": True}),
    "old: versions of domains": Call(A, (X,), ((SAME[0],), {}), {**OLD, "custom_opsets": {"com.acme": 3}}),
    "old: inlining": Call(A, (X,), ((SAME[0],), {}), {**OLD, "autograd_inlining": False}),
    "old: an LSTM": Call(
        seeded(Steps),
        (torch.randn(2, 3, 4),),
        ((torch.randn(2, 6, 4),), {}),
        {
            **OLD,
            "input_names": ["x"],
            "output_names": ["y", "h"],
            "dynamic_axes": {"x": {1: "steps"}, "y": {1: "steps"}},
        },
    ),
}
