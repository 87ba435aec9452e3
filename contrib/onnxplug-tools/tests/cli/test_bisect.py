"""``onnxplug bisect``: its output, its files and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onnxplug.cli.app import run
from tests.support.distributions import Dist, place, run_python

MODEL = """
import torch

@torch.library.custom_op("bisected::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@op.register_fake
def _(x):
    return torch.empty_like(x)

class Net(torch.nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu())).exp()

def good():
    return Net(torch.nn.Sigmoid()), (torch.randn(2, 4),)

def lacking():
    return Net(op), (torch.randn(2, 4),)

def padded():
    pool = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 8)), torch.nn.ConstantPad1d(1, 0.0), torch.nn.MaxPool1d(2, 1), torch.nn.Flatten())
    net = Net(torch.nn.Sequential(torch.nn.Identity(), pool))
    net.last = torch.nn.Linear(9, 3)
    net.forward = lambda x: net.last(net.middle(-net.first(x).abs() - 1))
    return net, (torch.randn(2, 4),)

def uncapturable():
    class Bad(torch.nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x
    return Bad(), (torch.randn(2, 4),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_scripts: None) -> Path:
    (tmp_path / "bisected_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_without_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bisect", "bisected_model.py:good", "--dynamic", "x=batch,_"]) == 0
    assert "no fault" in capsys.readouterr().out
    assert not (folder / "bisected").exists()


def test_an_operator_without_a_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script imports the module that defines the operator."""
    assert run(["bisect", "bisected_model.py:lacking"]) == 1
    printed = capsys.readouterr()
    assert "conversion: 1 operator has no rule" in printed.out
    assert "1 of 5 operators left" in printed.out
    assert "note:" not in printed.out
    assert "written: bisected/reproduce.py" in printed.out
    assert printed.err == ""  # no terminal: no stages
    assert "import bisected_model" in (folder / "bisected" / "reproduce.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("saved", [False, True])
def test_a_fault_of_onnxruntime(
    folder: Path, saved: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "bisected_model:padded"
    if saved:
        torch.manual_seed(0)
        monkeypatch.syspath_prepend(folder)
        import bisected_model

        model, args = bisected_model.padded()
        torch.export.save(torch.export.export(model, args), folder / "model.pt2")
        target = "model.pt2"
    assert run(["bisect", target, "--target", "none", "-o", "out", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "Pad_Fusion" in printed
    script = (folder / "out" / "reproduce.py").read_text(encoding="utf-8")
    assert "target=None" in script
    assert "torch.ops.aten.pad" in script


def test_bad_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("", encoding="utf-8")
    for arguments, message in {
        ("nothing.py:make",): "there is no file nothing.py",
        ("bisected_model.py:nothing",): "has no 'nothing'",
        ("no_such.pt2",): "there is no file no_such.pt2",
        ("bisected_model.py:good", "-o", "full"): "full is not empty",
        ("bisected_model.py:good", "-o", "no/where"): "there is no folder",
        ("bisected_model.py:good", "--target", "toaster"): "toaster",
        ("bisected_model.py:good", "--opset", "3"): "opset 3 is not supported",
    }.items():
        assert run(["bisect", *arguments]) == 2, arguments
        assert message in " ".join(capsys.readouterr().err.split())
    assert run(["bisect", "bisected_model.py:uncapturable"]) == 1
    assert "torch.export can't capture" in capsys.readouterr().err


PLUGIN = """
from onnxplug import Rewrite, hookimpl

def careless(g, node):
    return g.op.Tanh(node.inputs[0])

@hookimpl
def onnxplug_rewrites():
    return [Rewrite("careless", "Sigmoid", careless)]
"""


@pytest.mark.long
def test_a_wrong_rewrite_of_a_plugin(folder: Path) -> None:
    """The rewrite is named, and the script, run by a new interpreter, asks for the plugin."""
    place(folder, Dist("onnxplug-shop", PLUGIN))
    printed = run_python(folder, "-m", "onnxplug", "bisect", "bisected_model.py:good", status=1)
    assert "at fault: the rewrite careless" in printed
    assert "1 of 5 operators left" in printed
    assert "note:" not in printed
    assert "'shop'" in (folder / "bisected" / "reproduce.py").read_text(encoding="utf-8")
    printed = run_python(
        folder, "-m", "onnxplug", "bisect", "bisected_model.py:good", "--no-plugin", "shop", "-o", "other"
    )
    assert "no fault" in printed
