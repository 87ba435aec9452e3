"""``onnxplug.bisect``: the smallest graph that still fails, and a script that shows it by itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnxplug_tools.diagnosis.bisect import Bisection
from onnxplug_tools.diagnosis.pieces import Recording
from onnxplug_tools.diagnosis.trouble import Kind
from onnxplug_tools.diagnosis.verdict import Culprit
from torch import nn

import onnxplug
from onnxplug import Rewrite, Rule, hookimpl
from tests.support.check import Call
from tests.support.child import run_fork

#: New interpreters run the scripts of the command line's plugins (tests/cli/test_bisect.py).
pytestmark = pytest.mark.usefixtures("forked_scripts")

RULES = """
from onnxplug import Unsupported

def sinh(g, node):
    return g.op.Sinh(node.args[0])

def static_only(g, node):
    x = node.args[0]
    return g.op.Tanh(x) if all(isinstance(d, int) for d in x.shape) else g.op.Sinh(x)

def plain_norm(g, node):
    return g.op.LayerNormalization(node.args[0], g.op.Expand(1.0, [8]), axis=-1)  # without its weight

def refuses(g, node):
    raise Unsupported("the moon is full")

def smallest(g, node):
    return g.op.TopK(node.args[0], [2], largest=0, _outputs=2)

def three(g, node):
    x, *_ = node.args
    return g.op.Mul(g.op.Tanh(x), 2.0) if x.producer() is not None and x.producer().op_type == "Relu" else g.op.Tanh(x)
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with rules that are wrong, where a script finds it too."""
    name = f"rules_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(RULES, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script from another folder than its own."""
    return run_fork(str(folder / "reproduce.py"), env=dict(os.environ), cwd=folder.parent)


def is_whole(bisection: Bisection, folder: Path) -> str:
    """Checks the conditions that every bisection must fulfil; returns the script."""
    assert bisection.reproduces, bisection.note
    script = (folder / "reproduce.py").read_text(encoding="utf-8")
    assert len(script.splitlines()) <= 30
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in bisection.files)
    assert {"reproduce.py", "reproduce.pt"} <= {p.name for p in bisection.files}
    assert [p.name for p in folder.parent.iterdir() if p.name.startswith(".")] == []
    return script


def layers(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    before = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()]
    return nn.Sequential(*before, *middle, nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3), nn.Softmax(-1)).eval()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.long
def test_a_wrong_rule(rules: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    rule = Rule("aten::tanh", f"{rules}:sinh")
    dynamic = ({0: "batch"},)
    bisection = onnxplug.bisect(layers(nn.Tanh()), (X,), rules=[rule], dynamic_shapes=dynamic, output=folder)
    assert bisection.trouble is not None
    assert (bisection.trouble.kind, bisection.operators) == (Kind.DIFFERENCE, ["aten::tanh.default"])
    assert bisection.verdict is not None
    assert bisection.verdict.culprit is Culprit.RULE
    assert bisection.before >= 10
    script = is_whole(bisection, folder)
    assert "torch.ops.aten.tanh.default(" in script
    assert "dynamic_shapes" not in script
    done = run_script(folder)
    assert done.returncode == 1
    assert f"the rule {rules}:sinh" in done.stderr
    assert [node.op_type for node in onnx.load(folder / "reproduce.onnx").graph.node] == ["Sinh"]


def test_an_operator_that_can_not_be_converted(rules: str, tmp_path: Path) -> None:
    rule = Rule("aten::tanh", f"{rules}:refuses")
    bisection = onnxplug.bisect(layers(nn.Tanh()), (X,), rules=[rule], output=tmp_path / "out")
    assert bisection.trouble is not None
    assert (bisection.trouble.kind, bisection.operators) == (Kind.CONVERSION, ["aten::tanh.default"])
    assert "the moon is full" in str(bisection)
    is_whole(bisection, tmp_path / "out")
    assert not (tmp_path / "out" / "reproduce.onnx").exists()


def test_a_fault_of_two_operators_together(rules: str) -> None:
    """The rule is wrong only after a Relu."""
    rule = Rule("aten::tanh", f"{rules}:three")
    bisection = onnxplug.bisect(layers(nn.Tanh(), nn.ReLU(), nn.Tanh()), (X,), rules=[rule])
    assert bisection.operators == ["aten::relu.default", "aten::tanh.default"]
    assert (bisection.files, bisection.reproduces) == ([], None)


def test_an_operator_with_several_results(rules: str, tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        values, places = (x.exp() + 1).topk(2)
        return values.sum() * places

    rule = Rule("aten::topk", f"{rules}:smallest")
    bisection = onnxplug.bisect(Call(model), (X,), rules=[rule], output=tmp_path / "out")
    assert bisection.operators == ["aten::topk.default"]
    is_whole(bisection, tmp_path / "out")


OPEN: dict[str, Any] = {
    "singular vectors": lambda x: torch.linalg.svd(x[..., :4], full_matrices=False)[0],
    "eigenvectors": lambda x: torch.linalg.eigh(x + x.mT)[1],
    "equal elements": lambda x: x.round().topk(3)[1].float(),
}


@pytest.mark.parametrize("name", OPEN)
def test_what_pytorch_leaves_open_is_not_what_is_wrong(name: str, rules: str) -> None:
    x = torch.randn(6, 12, 12, generator=torch.Generator().manual_seed(0))
    rule = Rule("aten::tanh", f"{rules}:sinh")
    bisection = onnxplug.bisect(Call(lambda x: OPEN[name](x).tanh()), (x,), rules=[rule])
    assert bisection.operators == ["aten::tanh.default"]
    assert bisection.verdict is not None
    assert bisection.verdict.culprit is Culprit.RULE


def test_an_optimiser_of_onnxruntime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(18, 3),
    )  # fmt: skip
    bisection = onnxplug.bisect(model, (torch.randn(1, 1, 6, 6),), target=None, output=tmp_path / "out")
    assert len(bisection.operators) == 2
    assert bisection.verdict is not None
    assert bisection.verdict.name == "its optimiser Pad_Fusion (level 'basic')"
    assert "target=None" in is_whole(bisection, tmp_path / "out")


def test_a_model_that_onnxruntime_refuses() -> None:
    model = Call(lambda x: nn.functional.max_pool2d(x.exp(), 2, 4, 0, 5, ceil_mode=True).tanh())
    bisection = onnxplug.bisect(model, (torch.rand(1, 1, 20, 20),), target=None)
    assert bisection.trouble is not None
    assert (bisection.trouble.kind, len(bisection.operators)) == (Kind.RUN, 1)


class WrongRewrite:
    @hookimpl
    def onnxplug_rewrites(self) -> list[Rewrite]:
        return [Rewrite("other_axis", "Softmax", lambda g, n: None if n.attributes.get_int("axis", -1) == 0 else g.op.Softmax(n.inputs[0], axis=0))]  # fmt: skip


def test_a_wrong_rewrite(isolated_registry: Any, tmp_path: Path) -> None:
    """The plugin lives in this process alone: the script runs the ONNX model."""
    isolated_registry.add_plugin(WrongRewrite(), name="wrong")
    bisection = onnxplug.bisect(layers(), (X,), output=tmp_path / "out")
    assert bisection.operators == ["aten::softmax.int"]
    assert bisection.verdict is not None
    assert (bisection.verdict.culprit, bisection.verdict.name) == (Culprit.REWRITE, "other_axis")
    assert "InferenceSession" in is_whole(bisection, tmp_path / "out")


def test_rules_that_no_script_can_import(tmp_path: Path) -> None:
    refusing = Rule("aten::tanh", lambda g, node: 1 / 0)
    bisection = onnxplug.bisect(layers(nn.Tanh()), (X,), rules=[refusing], output=tmp_path / "other")
    assert bisection.operators == ["aten::tanh.default"]
    assert bisection.reproduces is False
    assert "not a function of a module" in bisection.note


def test_weights(rules: str, tmp_path: Path) -> None:
    """A script of an operator with weights has these weights."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.arange(1.0, 9.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, (8,), self.scale)

    rule = Rule("aten::layer_norm", f"{rules}:plain_norm")
    bisection = onnxplug.bisect(layers(Norm(), Norm()), (X,), rules=[rule], output=tmp_path / "out")
    assert bisection.operators == ["aten::layer_norm.default"]
    data = torch.load(tmp_path / "out" / "reproduce.pt")
    assert [list(t.shape) for t in data["inputs"]] == [[3, 8]]
    assert all(tensor.shape == (8,) for tensor in data["state"].values())
    is_whole(bisection, tmp_path / "out")


def test_a_fault_with_dynamic_sizes_alone(rules: str, tmp_path: Path) -> None:
    rule = Rule("aten::tanh", f"{rules}:static_only")
    dynamic = ({0: "batch"},)
    bisection = onnxplug.bisect(layers(nn.Tanh()), (X,), rules=[rule], dynamic_shapes=dynamic, output=tmp_path / "out")
    assert bisection.operators == ["aten::tanh.default"]
    assert "dynamic_shapes=" in is_whole(bisection, tmp_path / "out")
    assert onnxplug.bisect(layers(nn.Tanh()), (X,), rules=[rule]).trouble is None


@pytest.mark.long
def test_control_flow_is_loaded(rules: str, tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,)).exp()

    rule = Rule("aten::sin", f"{rules}:sinh"), Rule("aten::cos", f"{rules}:sinh")
    bisection = onnxplug.bisect(layers(Branches()), (X,), rules=rule, output=tmp_path / "out")
    assert bisection.operators == ["cond"]
    assert "torch.export.load" in is_whole(bisection, tmp_path / "out")
    assert (tmp_path / "out" / "reproduce.pt2").is_file()


# -- models without fault, and models that can't be reduced ------------------------------------------------------------


def test_a_model_without_fault(tmp_path: Path) -> None:
    bisection = onnxplug.bisect(layers(), (X,), output=tmp_path / "out")
    assert bisection.trouble is None
    assert str(bisection).startswith("no fault")
    assert not (tmp_path / "out").exists()


def test_a_fault_of_the_capture(tmp_path: Path) -> None:
    class Counts(nn.Module):
        times = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counts.times += 1
            return x * Counts.times

    bisection = onnxplug.bisect(Counts(), (X,), output=tmp_path / "out")
    assert bisection.verdict is not None
    assert bisection.verdict.culprit is Culprit.CAPTURE
    assert "nothing to reduce" in str(bisection)
    assert not (tmp_path / "out").exists()


def test_a_model_that_can_not_be_captured() -> None:
    with pytest.raises(onnxplug.CaptureError):
        onnxplug.bisect(Call(lambda x: x if x.sum().item() > 0 else -x), (X,))


def test_an_exported_program_without_inputs(rules: str, tmp_path: Path) -> None:
    program = torch.export.export(layers(nn.Tanh()), (X,))
    wrong = [Rule("aten::tanh", f"{rules}:sinh")]
    assert onnxplug.bisect(program, rules=wrong).operators == ["aten::tanh.default"]
    program.example_inputs = None
    with pytest.raises(onnxplug.OnnxplugError, match="example inputs"):
        onnxplug.bisect(program, rules=wrong)
    with pytest.raises(onnxplug.OnnxplugError, match="example inputs"):
        onnxplug.bisect(program, rules=[Rule("aten::tanh", f"{rules}:refuses")])


@pytest.mark.parametrize("name", ["f", "verify", "report", "pieces"])
def test_options_that_make_no_sense_here(name: str) -> None:
    with pytest.raises(onnxplug.UsageError, match=f"takes no {name}="):
        onnxplug.bisect(layers(), (X,), **{name: True})


def test_imports_are_a_list() -> None:
    """The script would import the letters of a name."""
    with pytest.raises(onnxplug.UsageError, match="imports= takes a list, got 'package'"):
        onnxplug.bisect(layers(), (X,), imports="package")


def test_folders_that_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("", encoding="utf-8")
    for name, message in (("file", "is a file"), ("full", "is not empty"), ("no/where", "there is no folder")):
        with pytest.raises(onnxplug.UsageError, match=message):
            onnxplug.bisect(layers(), (X,), output=tmp_path / name)
    for name in ("a\0b", "a" * 5000):
        with pytest.raises(onnxplug.SaveError, match="can't be written"):
            onnxplug.bisect(layers(), (X,), output=name)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(onnxplug.UsageError, match="can't be written"):
        onnxplug.bisect(layers(), (X,), output=tmp_path / "out")


def test_a_folder_named_by_bytes(rules: str, tmp_path: Path) -> None:
    output = os.fsencode(tmp_path / "out")
    rule = Rule("aten::tanh", f"{rules}:sinh")
    bisection = onnxplug.bisect(layers(nn.Tanh()), (X,), rules=[rule], output=output)  # type: ignore[arg-type]
    assert bisection.files[0].parent == tmp_path / "out"


def test_a_failed_write_leaves_no_files(rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("onnxplug_tools.diagnosis.bisect._put", full)
    with pytest.raises(onnxplug.SaveError, match="no space left"):
        onnxplug.bisect(layers(nn.Tanh()), (X,), rules=[Rule("aten::tanh", f"{rules}:sinh")], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_pieces_stand_by_themselves() -> None:
    """Each single operator of a model, cut out, computes the same as within the model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor, k: int) -> Any:
            self.calls += 1
            values, places = self.norm(x).topk(2)
            y = torch.cond(values.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (values,))
            return torch.fft.fft(y).abs() * x.shape[0] * k, places

    program = onnxplug.to_onnx(Model().eval(), (X, 2), dynamic_shapes=({0: "batch"}, None))
    assert program.recipe is not None
    recording = Recording(program.recipe.functional, [X, 2])
    assert len(recording.operators) > 8
    from onnxplug_tools.diagnosis.trouble import trouble_of

    pieces = [(node, piece) for node in recording.operators if (piece := recording.piece([node])) is not None]
    assert len(pieces) > 4
    for node, piece in pieces:
        assert [n.name for n in piece.operators] == [node.name]
        assert trouble_of(piece, program.recipe, program.host)[0] is None, node.format_node()
