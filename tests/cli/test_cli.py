"""The command line: what it prints and how it exits; never a traceback."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import onnx
import pytest

from onnxplug.cli.app import run
from onnxplug.cli.inputs import parse_dynamic, parse_functions, parse_input, parse_opset
from onnxplug.errors import UsageError
from tests.support.child import run_child

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x).relu()

def make():
    return Net(), (torch.randn(2, 4),)

def with_keywords():
    return Net(), (), {"x": torch.randn(2, 4)}

def make_chain():
    from collections import OrderedDict

    layers = OrderedDict(first=torch.nn.Linear(4, 512), second=torch.nn.Linear(512, 4))
    return torch.nn.Sequential(layers), (torch.randn(2, 4),)

def broken():
    return 1 / 0

def odd():
    return 3

instance = Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)  # of another test
    import_module("my_model")  # once, as in each process of a user: the import draws random numbers
    return tmp_path


@pytest.mark.parametrize("target", ["nothere.py:make", "nothere.pt2"])
def test_a_missing_file_is_noticed_before_torch_is_imported(target: str) -> None:
    code = f"import sys; from onnxplug.cli.app import run; print(run(['export', '{target}', '-o', 'm.onnx']), 'torch' in sys.modules)"
    assert "2 False" in run_child("-c", code, check=True).stdout


def test_version_and_help_do_not_import_torch() -> None:
    code = "import sys; from onnxplug.cli.app import run; a = run(['--version']), run(['--help']); print('torch' in sys.modules, a)"
    done = run_child("-c", code, check=True)
    assert done.stdout.startswith("onnxplug 0.")
    assert done.stdout.rstrip().endswith("False (0, 0)")


def test_module_form() -> None:
    done = run_child("-m", "onnxplug", "--version", check=True)
    assert done.stdout.startswith("onnxplug 0.")


def test_export_with_decompositions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:make", "-o", "m.onnx", "--decompositions", "core", "--verify"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "decomposed" in printed
    assert "aten::linear.default" in printed
    assert run(["export", "my_model.py:make", "-o", "m.onnx", "--decompositions", "all"]) == 2
    assert "decompositions='all' is unknown" in " ".join(capsys.readouterr().err.split())


def test_export_in_pieces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dynamic", "x=batch,_", "--verify"]
    assert run(["export", "my_model.py:make", "-o", "pieces", "--pieces", "linear", *options]) == 0
    printed = capsys.readouterr().out
    assert "float[batch, 4]" in printed
    assert "computed after the pieces" in printed
    assert "computes what PyTorch does" in printed
    assert [path.name for path in (folder / "pieces").iterdir()] == ["linear.onnx"]
    assert run(["export", "my_model.py:make", "-o", "pieces", "--pieces", "conv"]) == 2
    assert "no submodule 'conv'" in capsys.readouterr().err


def test_export_for_triton(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", "my_model.py:make_chain", "-o", "models", "--triton", "both"]
    assert run([*command, "--pieces", "first,second", "--dynamic", "input=batch,_", "--verify", "--external-data"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("float[batch, 512]") == 2
    assert "models/both_second/1/model.onnx" in printed
    assert "--model-repository=models serves them, and the ensemble both" in printed
    files = {str(path.relative_to(folder / "models")) for path in (folder / "models").rglob("*") if path.is_file()}
    assert files == {
        "both/config.pbtxt",
        *(f"both_{piece}/{file}" for piece in ("first", "second") for file in ("config.pbtxt", "1/model.onnx")),
        *(f"both_{piece}/1/model.onnx.data" for piece in ("first", "second")),
    }
    for arguments, status, message in (
        (command, 2, "--triton is about --pieces"),
        (
            ["export", "nowhere:make", "-o", "other", "--pieces", "a", "--triton", "a b"],
            2,
            "'a b' is no name of a model",
        ),
        (["export", "nowhere:make", "-o", "my_model.py", "--pieces", "a", "--triton", "m"], 1, "my_model.py is a file"),
        (
            ["export", "my_model.py:make", "-o", "other", "--pieces", "linear", "--triton", "m"],
            2,
            "can't be an ensemble",
        ),
    ):
        assert run(arguments) == status
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (folder / "other").exists()


@pytest.mark.parametrize("target", ["my_model.py:make", "my_model:make", "my_model.py:with_keywords"])
def test_export_and_verify(folder: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", target, "-o", "model.onnx", "--dynamic", "x=batch,_", "--verify"]) == 0
    printed = capsys.readouterr()
    assert "float[batch, 4]" in printed.out
    assert "batch=1" in printed.out
    assert printed.err == ""  # no terminal: no stages
    assert run(["verify", "model.onnx", target, "--dynamic", "x=batch,_"]) == 0
    assert "batch=5" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["my_model.py:Net", "my_model.py:instance"])
def test_inputs_from_the_command_line(folder: Path, target: str) -> None:
    options = ["--input", "x=float32[2,4]", "--opset", "18", "--input-names", "a", "--output-names", "b"]
    assert run(["export", target, "-o", "model.onnx", *options]) == 0
    import onnx

    model = onnx.load(folder / "model.onnx")
    assert (model.graph.input[0].name, model.graph.output[0].name, model.opset_import[0].version) == ("a", "b", 18)


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ([], ["output", "past_out"]),
        (["--present-names"], ["output", "present"]),
        (["--mutations", "ignore"], ["output"]),
    ],
)
def test_tensors_that_a_model_writes(folder: Path, options: list[str], outputs: list[str]) -> None:
    text = "import torch\nclass Write(torch.nn.Module):\n    def forward(self, x, past):\n        past.mul_(2)\n        return x + past\n"
    (folder / "writes.py").write_text(text, encoding="utf-8")
    inputs = ["--input", "x=float32[3]", "--input", "past=float32[3]"]
    assert run(["export", "writes.py:Write", "-o", "model.onnx", *inputs, *options]) == 0
    import onnx

    assert [value.name for value in onnx.load(folder / "model.onnx").graph.output] == outputs
    assert run(["verify", "model.onnx", "writes.py:Write", *inputs]) == 0


def test_mutations_of_another_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:Net", "-o", "m.onnx", "--input", "x=float32[2,4]", "--mutations", "drop"]) == 2
    assert "mutations=" in capsys.readouterr().err


def test_pt2_and_external_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    torch.export.save(torch.export.export(torch.nn.Linear(40, 30).eval(), (torch.randn(2, 40),)), folder / "m.pt2")
    assert run(["export", "m.pt2", "-o", "m.onnx", "--external-data"]) == 0
    assert (folder / "m.onnx.data").is_file()
    assert "of external data" in capsys.readouterr().out
    assert run(["verify", "m.onnx", "m.pt2"]) == 0


def test_timm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.vision import define_vision_schemas

    define_vision_schemas()
    options = ["--input", "x=float32[1,3,32,32]", "--dynamic", "x=batch,_,_,_"]
    assert run(["export", "timm:resnet18", "-o", "r.onnx", *options]) == 0
    printed = capsys.readouterr()
    assert "batch, 1000" in printed.out
    assert "timm:resnet18 has random weights; --pretrained takes the trained ones" in printed.err
    assert run(["export", "timm:resnet19", "-o", "r.onnx"]) == 2
    assert "timm has no model 'resnet19'" in (error := capsys.readouterr().err)
    assert "Did you mean 'resnet" in error


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["export"], 2, "Missing argument"),
        (["nosuch"], 2, "No such command"),
        (["export", "nothere.py:make", "-o", "m.onnx"], 2, "there is no file nothere.py"),
        (["export", "nothere:make", "-o", "m.onnx"], 2, "there is no module 'nothere'"),
        (
            ["export", "diffusers:FOLDER", "-o", "folder", "--only-plugin", "torchscript"],
            2,
            "diffusers:FOLDER comes from the plugin package onnxplug-diffusers",
        ),
        (["export", "my_model.py:nothing", "-o", "m.onnx"], 2, "has no 'nothing'"),
        (["export", "my_model.py", "-o", "m.onnx"], 2, "is none of"),
        (["export", "my_model.py:odd", "-o", "m.onnx"], 2, "returned an int"),
        (["export", "nothere.pt2", "-o", "m.onnx"], 2, "there is no file"),
        (["export", "my_model.py:broken", "-o", "m.onnx"], 1, "ZeroDivisionError at"),
        (["export", "my_model.py:make", "-o", "nowhere/m.onnx"], 2, "can't write nowhere/m.onnx: there is no folder"),
        (["export", "my_model.py:make", "-o", "m.onnx", "--opset", "99"], 2, "opset 99 is not supported"),
        (["export", "my_model.py:make", "-o", "m.onnx", "--opset", "x"], 2, "can't be read"),
        (["export", "my_model.py:make", "-o", "m.onnx", "--dynamic", "y=b,_"], 2, "the inputs are x"),
        (["export", "my_model.py:make", "-o", "m.onnx", "--dynamic", "x=b"], 2, "no axis|0"),
        (["export", "my_model.py:Net", "-o", "m.onnx", "--input", "x=flot[2]"], 2, "no dtype 'flot'"),
        (["export", "my_model.py:Net", "-o", "m.onnx", "--input", "x=float32[2,5]"], 1, "can't capture"),
        (["export", "my_model.py:make", "-o", "m.onnx", "--no-plugin", "ghost"], 2, "no plugin 'ghost'"),
        (["--no-plugin", "ghost", "plugins", "list"], 2, "no plugin 'ghost'"),
        (
            ["export", "my_model.py:make", "-o", "m.onnx", "--require-plugin", "ghost>=1"],
            1,
            "ghost>=1 is not installed",
        ),
        (["export", "my_model.py:make", "-o", "m.onnx", "--prefer", "x"], 2, "can't be read"),
        (["export", "my_model.py:make", "-o", "m.onnx", "--dynamic", "x=b,_,_"], 2, "no axis 2 in a tensor of rank 2"),
        (
            ["export", "my_model.py:make", "-o", "m.onnx", "--dynamic", "x=3,_"],
            2,
            "names a dimension '3', which is a number",
        ),
        (["export", "my_model.py:make", "-o", "m.onnx", "--pretrained"], 2, "--pretrained is for timm:NAME"),
        (["export", "my_model.py:broken", "-o", "nowhere/m.onnx"], 2, "can't write nowhere/m.onnx: there is no folder"),
        (["verify", "nothere.onnx", "my_model.py:make"], 2, "there is no file"),
        (["why", "aten::ad.Tensor"], 1, "Did you mean 'aten::add.Tensor'"),
        (["why", "aten::add.Tensor", "--opset", "3"], 2, "opset 3 is not supported"),
        (["inspect", "my_model.py"], 1, "is not an ONNX model"),
    ],
)
def test_failures(
    folder: Path, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    got = run(arguments)
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    if message == "no axis|0":  # a short --dynamic names the first axes
        assert got == 0
        return
    assert got == status, text
    assert message in text
    assert "Traceback" not in text
    assert not list(folder.glob("*.tmp"))


def test_trained_weights_of_timm(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.vision import define_vision_schemas

    define_vision_schemas()
    import timm
    import torch

    requests = []

    def create_model(name: str, pretrained: bool) -> torch.nn.Module:
        requests.append(pretrained)
        if name == "unreachable":
            raise OSError("no network")
        return torch.nn.Conv2d(3, 1, 3)

    monkeypatch.setattr(timm, "create_model", create_model)
    assert run(["export", "timm:small", "-o", "r.onnx", "--pretrained", "--input", "float32[1,3,8,8]"]) == 0
    assert requests == [True]
    assert "random weights" not in capsys.readouterr().err
    assert run(["export", "timm:unreachable", "-o", "r.onnx", "--pretrained"]) == 1
    assert "can't load the trained weights of unreachable: OSError: no network" in capsys.readouterr().err


def test_verify_with_more_axes_than_there_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:make", "-o", "m.onnx"]) == 0
    assert run(["verify", "m.onnx", "my_model.py:make", "--dynamic", "x=b,_,_"]) == 2
    assert "--dynamic names 3 axes of x, which has 2" in capsys.readouterr().err


MASKED = """
import torch
class Masked(torch.nn.Module):
    def forward(self, x, mask=None, *, scale=None):
        return (x if mask is None else x * mask) * (1.0 if scale is None else scale)
def make():
    return Masked().eval(), (torch.ones(2, 4), torch.zeros(2, 4)), {"scale": torch.ones(4)}
def dict_at_the_end():
    return Masked().eval(), (torch.ones(2, 4), {"mask": torch.ones(2, 4)})
"""


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        (["mask=float32[1,4]"], [[2, 4], [1, 4], [4]]),
        (["scale=float32[1]"], [[2, 4], [2, 4], [1]]),
        (["float32[1,4]"], [[1, 4], [2, 4], [4]]),
        (["x=float32[1,4]", "scale=float32[1]"], [[1, 4], [2, 4], [1]]),
        (["float32[3,4]", "mask=float32[3,1]"], [[3, 4], [3, 1], [4]]),
    ],
)
def test_an_input_replaces_its_own_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], shapes: list[list[int]]
) -> None:
    (tmp_path / "masked.py").write_text(MASKED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    inputs = [part for text in options for part in ("--input", text)]
    assert run(["export", "masked.py:make", "-o", "m.onnx", *inputs]) == 0
    import onnx

    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [i.name for i in graph.input] == ["x", "mask", "scale"]
    assert [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input] == shapes


def test_a_dict_at_the_end_of_a_targets_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "masked.py").write_text(MASKED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run(["export", "masked.py:dict_at_the_end", "-o", "m.onnx", "--verify"]) == 0
    assert run(["verify", "m.onnx", "masked.py:dict_at_the_end"]) == 0


def test_verify_finds_a_difference(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "my_model.py:make", "-o", "model.onnx"]) == 0
    text = (folder / "my_model.py").read_text(encoding="utf-8").replace(".relu()", ".relu() + 1")
    (folder / "other_model.py").write_text(text, encoding="utf-8")
    assert run(["verify", "model.onnx", "other_model.py:make"]) == 1
    assert "differs at index" in capsys.readouterr().err


def test_plugins_list_why_and_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "list", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {"name": "builtin", "distribution": "onnxplug", "status": "loaded"}.items() <= records[0].items()
    assert run(["why", "aten::gelu.default", "--opset", "19"]) == 0
    printed = capsys.readouterr().out
    assert "activation:gelu_plain" in printed
    assert "needs opset 20 or later, the target is 19" in printed
    assert run(["export", "my_model.py:make", "-o", "model.onnx"]) == 0
    assert run(["inspect", "model.onnx"]) == 0
    assert "Gemm 1" in capsys.readouterr().out


def test_input_texts() -> None:
    spec = parse_input("ids=int64[2,3]{5..7}")
    assert spec.name == "ids"
    assert spec.value.shape == (2, 3)
    assert 5 <= int(spec.value.min()) <= int(spec.value.max()) <= 7
    assert parse_input("float16[4]").name is None
    assert parse_input("k=3").value == 3
    assert parse_input("flag=true").value is True
    assert parse_input("f=-0.5e2").value == -50.0
    assert parse_input("s=float32[]").value.shape == ()
    for text in ("x", "x=float32", "x=float32[a]", "=float32[2]", "x=float32[-1]", ""):
        with pytest.raises(UsageError):
            parse_input(text)


def test_dynamic_and_opset_texts() -> None:
    assert parse_dynamic(["x=batch,_,size", "y=_"]) == {
        "x": {0: "batch", 1: None, 2: "size"},
        "y": {0: None},
    }
    assert parse_opset("21,com.microsoft=1") == {"": 21, "com.microsoft": 1}
    for text in ("x", "x=a b", "=a", "x=3,_"):
        with pytest.raises(UsageError):
            parse_dynamic([text])


BLOCKS = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh() + x

def make():
    return torch.nn.Sequential(Block(), Block(), torch.nn.Tanh()), (torch.randn(2, 4),)
"""


@pytest.mark.parametrize(
    ("options", "result"),
    [
        (["--functions"], ["onnxplug.modules::Block"]),
        (["--function-classes", "Block, Tanh"], ["onnxplug.modules::Block", "onnxplug.modules::Tanh"]),
        (["--function-domain", "acme"], ["acme::Block"]),
        ([], []),
    ],
    ids=str,
)
def test_functions(
    options: list[str],
    result: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blocks.py").write_text(BLOCKS, encoding="utf-8")
    assert run(["export", "blocks.py:make", "-o", "m.onnx", "--verify", *options]) == 0
    printed = capsys.readouterr().out
    assert ("for calls of modules: Block 2" in printed) == bool(result)
    functions = onnx.load(tmp_path / "m.onnx").functions
    assert [f"{f.domain}::{f.name}" for f in functions] == result


def test_functions_that_cannot_be_read() -> None:
    with pytest.raises(UsageError, match="--function-classes 'A,' can't be read"):
        parse_functions(False, "A,", None)
    with pytest.raises(UsageError, match="can't be in the domain ''"):
        parse_functions(False, None, "")
