"""Models and reports that the tests of reports share."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from onnxplug_tools.inspection.view import ModelView, ModuleView, NodeView, ValueView
from onnxplug_tools.report.differences import CaseDifference, Histogram, OutputDifference
from onnxplug_tools.report.record import (
    Attempt,
    Capture,
    Decomposed,
    Failure,
    File,
    MissingRule,
    Plugin,
    Rewritten,
    SizeCondition,
    Verification,
    Warned,
)
from onnxplug_tools.report.report import ExportReport

import onnxplug

#: Text that acts unless it is made inert: markup, ends of elements, links, directions of text, halves of characters.
HOSTILE = (
    "<img src=x onerror=\"document.title='run'\">",
    "</script><script>document.title='run'</script>",
    "<!-- ]]> -->",
    "'\"` | **bold** [link](http://evil.invalid) ![image](http://evil.invalid/x.png)",
    "right \u202eto left\u202c \u0000\u001b[31m\x85 \ud800 {{ 7 * 7 }} &lt;",
)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Three equal blocks, and an operator that torch decomposes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.ops.reports_test.halved(self.head(x))


@torch.library.custom_op("reports_test::nothing", mutates_args=())
def nothing(x: torch.Tensor) -> torch.Tensor:
    """An operator that no rule translates."""
    return x.clone()


@nothing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_LIBRARY = torch.library.Library("reports_test", "FRAGMENT")
_LIBRARY.define("halved(Tensor x) -> Tensor")
_LIBRARY.impl("halved", lambda x: x * 0.5, "CompositeImplicitAutograd")

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def net() -> Net:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    return Net().eval()


def exported(**options: Any) -> onnxplug.OnnxProgram:
    """The model exported, with a dynamic batch."""
    options = {"dynamic_shapes": ({0: "batch"},), "report": True, "plugins": [], **options}
    program: onnxplug.OnnxProgram = onnxplug.to_onnx(net(), (X,), **options)
    return program


@cache
def program() -> onnxplug.OnnxProgram:
    """A program with its report, verified; not to be changed."""
    return exported(verify=True)


def report() -> ExportReport:
    """The report of :func:`program`; not to be changed."""
    result = program().report
    assert result is not None
    return result


def hostile() -> ExportReport:
    """A report of which every text is hostile."""
    text = "\n".join(HOSTILE)
    value = ValueView(text, text, (text, 2))
    nodes = tuple(
        NodeView(
            i,
            text,
            text,
            text,
            "",
            text,
            (text,),
            (value,),
            (value,),
            {text: text},
            text,
            text,
            text,
            f"{text}:7",
            (text,),
            3,
        )
        for i in range(3)
    )
    module = ModuleView(text, (text,), 3, 3, 1, 1, 4, 4, 9, 9, 0, 0, ())
    root = dataclasses.replace(module, path="", nodes=0, children=(module,))
    view = ModelView(text, text, 10, {text: 1}, {}, (value,), (value,), nodes, (), root, {text: 3}, {text: 4}, ())
    case = CaseDifference({text: 2}, 1, text, [OutputDifference(text, text, 4, 1.0, 1, Histogram(equal=4), text)])
    return ExportReport(
        model=text,
        began="2026-11-23T04:00:00+01:00",
        failure=Failure(
            text,
            text,
            text,
            hint=text,
            place=f"{text}:3",
            submodule=text,
            tries=(text,),
            missing=(MissingRule(text, (f"{text}:4",), (text,)),),
            traceback=text,
        ),
        versions={"onnxplug": text, text: text},
        system=text,
        plugins=[Plugin(text, text, text, "failed", text)],
        arguments={text: text},
        opsets={text: 21},
        inputs=[(text, text)],
        outputs=[(text, text)],
        sizes={text: 2},
        capture=Capture(
            text,
            1.0,
            3,
            attempts=[Attempt(text, 0.5, text)],
            repeated=2,
            dimensions={text: text},
            conditions=[SizeCondition(text, f"{text}:5", True)],
        ),
        decomposed=[Decomposed(text, text, 1, (f"{text}:6",))],
        folded={text: 1},
        rewrites=[Rewritten(text, text, 1, 1, 0.1)],
        functions={text: 1},
        packages={text: 3},
        verification=Verification([case], [text], text),
        warnings=[Warned(text, text, f"{text}:8")],
        files=[File(text, 3)],
        view=view,
    )


def large(count: int = 10_000) -> ExportReport:
    """A report of a model with many nodes, in a thousand modules."""
    value = ValueView("v", "float", ("batch", 128))
    nodes = []
    for i in range(count):
        layer, part = i * 100 // count, i % 10
        inputs = (ValueView(f"v{i - 1}", "float", ("batch", 128)),) if i else (value,)
        outputs = (ValueView(f"v{i}", "float", ("batch", 128)),)
        nodes.append(
            NodeView(
                i,
                f"layers/{layer}/part_{part}/Add_{i}",
                ("Add", "MatMul", "Softmax", "Gather", "Mul")[i % 5],
                "",
                "",
                f"layers.{layer}.part_{part}",
                ("Model", "Layer", "Part"),
                inputs,
                outputs,
                {"axis": str(i % 3)},
                "onnxplug.converters.arithmetic:add",
                "onnxplug",
                "0.1.0",
                f"models/large.py:{i % 700 + 1}",
                (),
                i * 10,
            )
        )
    layers = []
    for layer in range(100):
        parts = tuple(
            ModuleView(f"layers.{layer}.part_{p}", ("Part",), 10, 10, 128, 128, 512, 512, 100, 100, 0, 0, ())
            for p in range(10)
        )
        layers.append(ModuleView(f"layers.{layer}", ("Layer",), 0, 100, 0, 1280, 0, 5120, 0, 1000, 0, 0, parts))
    holder = ModuleView("layers", ("ModuleList",), 0, count, 0, 128_000, 0, 512_000, 0, 100_000, 0, 0, tuple(layers))
    root = ModuleView("", ("Model",), 0, count, 0, 128_000, 0, 512_000, 0, 100_000, 0, 0, (holder,))
    output = (ValueView(f"v{count - 1}", "float", ("batch", 128)),)
    operators = {"Add": count // 5, "MatMul": count // 5}
    view = ModelView("large", "onnxplug", 10, {"": 21}, {}, (value,), output, tuple(nodes), (), root, operators, {}, ())
    return ExportReport(model="Large", versions={"onnxplug": "0.1.0"}, view=view)
