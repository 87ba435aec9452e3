"""The graph by its modules, as text for Mermaid."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from onnxplug_tools.inspection.view import ModelView, ModuleView, NodeView, ValueView, view
from onnxplug_tools.report.graph import MOST_BOXES, flowchart

import onnxplug
from tests.support import reports

_BOX = re.compile(r"""  n(\d+)(\(\[|\[|\()"([^"]*)"(?:\]\)|\]|\))""")
_EDGE = re.compile(r"  n(\d+) --> n(\d+)")


def _read(text: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Labels to shapes, and edges between labels; every line is a box or an edge."""
    head, *lines = text.splitlines()
    assert head == "flowchart TD"
    boxes = {match[1]: (match[3].partition("<br>")[0], match[2]) for line in lines if (match := _BOX.fullmatch(line))}
    edges = [(match[1], match[2]) for line in lines if (match := _EDGE.fullmatch(line))]
    assert len(boxes) + len(edges) == len(lines)
    return dict(boxes.values()), [(boxes[source][0], boxes[target][0]) for source, target in edges]


def test_modules_from_inputs_to_outputs() -> None:
    report = reports.report()
    assert report.view is not None
    shapes, edges = _read(flowchart(report.view))
    assert [label for label in shapes if label.startswith("blocks.0.")] == [
        "blocks.0.norm",
        "blocks.0.up",
        "blocks.0.down",
    ]
    assert shapes["x"] == shapes["output"] == "(["
    assert shapes["head"] == "["
    assert {("blocks.0.norm", "blocks.0.up"), ("head", "Mul"), ("Mul", "output")} <= set(edges)
    assert flowchart(report.view) in report.markdown()


def test_few_boxes_for_many_modules() -> None:
    report = reports.large()
    assert report.view is not None
    shapes, _ = _read(flowchart(report.view))
    assert 10 <= len(shapes) <= MOST_BOXES + 4
    assert any(" … " in label for label in shapes)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 15, 100])
def test_as_many_boxes_as_requested(most: int) -> None:
    report = reports.report()
    assert report.view is not None
    shapes, _ = _read(flowchart(report.view, most))
    assert 1 <= list(shapes.values()).count("[") <= max(most, 2)


def test_a_module_that_is_called_again() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))

    program = onnxplug.to_onnx(Twice(), (torch.randn(2, 3),))
    shapes, edges = _read(flowchart(view(program.model)))
    assert len([label for label in shapes if label in ("a", "b")]) == 2
    assert len([edge for edge in edges if edge[1] == "a"]) == 2


def test_branches_and_functions() -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    shapes, edges = _read(flowchart(view(onnxplug.to_onnx(branching, (torch.randn(2),)).model)))
    assert edges
    shapes, _ = _read(flowchart(view(reports.exported(functions=True).model)))
    assert any("blocks" in label for label in shapes)


def test_models_of_odd_shapes() -> None:
    report = reports.report()
    assert report.view is not None
    nothing = ModuleView("", (), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ())
    empty = dataclasses.replace(report.view, nodes=(), root=nothing, inputs=(), outputs=())
    assert flowchart(empty) == "flowchart TD"
    shapes, _ = _read(flowchart(dataclasses.replace(report.view, inputs=report.view.inputs * 50)))
    assert "50 inputs" in shapes


def test_hostile_names_are_text() -> None:
    hostile = reports.hostile().view
    assert hostile is not None
    text = flowchart(hostile)
    assert _read(text)[0]
    assert not set("<`\\") & set(text.replace("<br>", ""))


@pytest.mark.long
def test_time_is_linear() -> None:
    """A hundred thousand nodes in a row, each reading the first: within the time of a test."""
    value = ValueView("x", "float", (1,))
    nodes = [
        NodeView(i, "", "Add", "", "", f"m{i % 50}", (), (value, value), (ValueView(f"v{i}", "float", (1,)),), {})
        for i in range(100_000)
    ]
    children = tuple(ModuleView(f"m{i}", (), 2000, 2000, 0, 0, 0, 0, 0, 0, 0, 0, ()) for i in range(50))
    root = ModuleView("", (), 0, 100_000, 0, 0, 0, 0, 0, 0, 0, 0, children)
    large = ModelView("", "", 10, {"": 21}, {}, (value,), (), tuple(nodes), (), root, {"Add": 100_000}, {}, ())
    assert len(_read(flowchart(large))[0]) >= MOST_BOXES // 2
