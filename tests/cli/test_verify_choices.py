"""``onnxplug verify`` of a file that chooses among equal elements: topk, sort, and values computed from them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from onnxplug.cli.app import run

MODEL = """
import torch

class Best(torch.nn.Module):
    '''The best boxes by scores of few values, many of them equal.'''

    def __init__(self):
        super().__init__()
        self.score, self.box = torch.nn.Linear(8, 1), torch.nn.Linear(8, 4)

    def forward(self, x):
        scores = (self.score(x).squeeze(-1) > 0).float()
        best = scores.topk(4, dim=1)[1]
        return best, self.box(x).gather(1, best.unsqueeze(-1).expand(-1, -1, 4)).sigmoid()

def make():
    return Best(), (torch.randn(2, 30, 8),)

def saved():
    return torch.export.export(Best().eval(), (torch.randn(2, 30, 8),))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "best.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "dynamic"),
    [
        ([], []),
        (["--opset", "18", "--metadata", "none", "--target", "none"], []),
        (["--input-names", "image", "--output-names", "place,box"], ["--dynamic", "image=batch,_,_"]),
        (["--no-optimize"], []),
    ],
    ids=["plain", "portable", "named and dynamic", "not optimised"],
)
def test_equal_elements_in_another_order(folder: Path, options: list[str], dynamic: list[str]) -> None:
    exported = [option.replace("image=", "x=") for option in dynamic]
    assert run(["export", "best.py:make", "-o", "m.onnx", *options, *exported]) == 0
    assert run(["verify", "m.onnx", "best.py:make", *dynamic]) == 0


def test_of_a_captured_program(folder: Path) -> None:
    assert run(["export", "best.py:saved", "-o", "m.onnx"]) == 0
    assert run(["verify", "m.onnx", "best.py:saved"]) == 0


def test_a_wrong_choice_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "best.py:make", "-o", "m.onnx"]) == 0
    model = onnx.load("m.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "TopK")
    (largest,) = (attribute for attribute in node.attribute if attribute.name == "largest")
    largest.i = 0
    onnx.save(model, "wrong.onnx")
    assert run(["verify", "wrong.onnx", "best.py:make"]) == 1
    assert "differs" in capsys.readouterr().err


def test_results_computed_from_the_chosen_elements_are_still_compared(folder: Path) -> None:
    assert run(["export", "best.py:make", "-o", "m.onnx"]) == 0
    model = onnx.load("m.onnx")
    (bias,) = (tensor for tensor in model.graph.initializer if tensor.name == "box.bias")
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 0.01, bias.name))
    onnx.save(model, "wrong.onnx")
    assert run(["verify", "wrong.onnx", "best.py:make"]) == 1
