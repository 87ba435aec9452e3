"""The picture of a graph by its modules."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from onnxplug_tools.inspection.view import ModelView, ModuleView, NodeView, ValueView, view
from onnxplug_tools.report.picture import MOST_BOXES, Picture, picture

import onnxplug
from tests.support import reports


def _check(found: Picture) -> None:
    """Nothing lies on anything else, and all of it is within the bounds."""
    left, top, width, height = found.bounds
    for box in found.boxes:
        assert left <= box.x - box.width / 2
        assert box.x + box.width / 2 <= left + width
        assert top <= box.y <= box.y + box.height <= top + height
    for a, b in itertools.combinations(found.boxes, 2):
        assert a.y != b.y or abs(a.x - b.x) >= (a.width + b.width) / 2


def _named(found: Picture) -> dict[str, int]:
    return {box.label: number for number, box in enumerate(found.boxes)}


def test_modules_from_inputs_to_outputs() -> None:
    report = reports.report()
    assert report.view is not None
    found = picture(report.view)
    _check(found)
    labels = [box.label for box in found.boxes]
    assert [label for label in labels if label.startswith("blocks.0.")] == [
        "blocks.0.norm",
        "blocks.0.up",
        "blocks.0.down",
    ]
    assert {box.label: box.kind for box in found.boxes}["x"] == "input"
    places = {box.label: box.y for box in found.boxes}
    chain = ["x", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.1.norm", "blocks.2.down", "head", "output"]
    assert [places[name] for name in chain] == sorted({places[name] for name in chain})
    assert not any(line.backward for line in found.lines)
    assert any("blocks.0.norm → blocks.0.up" in line.title for line in found.lines)
    assert sum(box.share for box in found.boxes) == pytest.approx(1.0)


def test_few_boxes_for_many_modules() -> None:
    report = reports.large()
    assert report.view is not None
    found = picture(report.view)
    _check(found)
    assert 10 <= len(found.boxes) <= MOST_BOXES + 4
    assert any(" … " in box.label for box in found.boxes)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 15, 100])
def test_as_many_boxes_as_asked_for(most: int) -> None:
    report = reports.report()
    assert report.view is not None
    found = picture(report.view, most)
    _check(found)
    assert len([box for box in found.boxes if box.kind == "module"]) <= max(most, 2)


def test_a_module_that_is_called_again_goes_back() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))

    program = onnxplug.to_onnx(Twice(), (torch.randn(2, 3),))
    found = picture(view(program.model))
    _check(found)
    assert [line.backward for line in found.lines].count(True) == 1


def test_branches_and_functions() -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    _check(picture(view(onnxplug.to_onnx(branching, (torch.randn(2),)).model)))
    program = reports.exported(functions=True)
    found = picture(view(program.model))
    _check(found)
    assert sum("blocks" in box.label for box in found.boxes) >= 1


def test_lines_from_one_box_share_their_lane() -> None:
    """What every block reads is one line for most of its way."""
    value = ValueView("mask", "float", (1, 4))
    nodes = [
        NodeView(
            i,
            "",
            "Add",
            "",
            "",
            f"m{i}",
            (),
            (value, ValueView(f"v{i - 1}", "float", (4,))),
            (ValueView(f"v{i}", "float", (4,)),),
            {},
        )
        for i in range(12)
    ]
    children = tuple(ModuleView(f"m{i}", (), 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, ()) for i in range(12))
    root = ModuleView("", (), 0, 12, 0, 0, 0, 0, 0, 0, 0, 0, children)
    found = picture(ModelView("", "", 10, {"": 21}, {}, (value,), (), tuple(nodes), (), root, {"Add": 12}, {}, ()))
    _check(found)
    assert len(found.lines) == 12 + 11
    ways = sorted((line.path for line in found.lines if line.title.startswith("mask")), key=len)
    for shorter, longer in itertools.pairwise(ways[1:]):
        assert longer.startswith(shorter.rpartition("C")[0])


def test_models_of_odd_shapes() -> None:
    report = reports.report()
    assert report.view is not None
    nothing = ModuleView("", (), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ())
    empty = dataclasses.replace(report.view, nodes=(), root=nothing, inputs=(), outputs=())
    assert picture(empty).boxes == []
    _check(picture(dataclasses.replace(report.view, inputs=report.view.inputs * 50)))
    hostile = reports.hostile().view
    assert hostile is not None
    _check(picture(hostile))


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
    _check(picture(large))
