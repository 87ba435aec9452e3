"""``onnxplug export --dtype`` and ``onnxplug convert FILE``: files of any exporter, reports, invalid input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxplug.cli.app import run

LOOSER = {"half": ({"rtol": 1e-2, "atol": 5e-3}, "float16 has 11 bits")}
MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 2)).eval(), (torch.randn(3, 8),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    assert run(["export", "m.py:make", "-o", "m.onnx", "--dynamic", "input=batch,_"]) == 0
    np.savez("data.npz", input=np.random.default_rng(0).standard_normal((4, 8), np.float32))
    return tmp_path


def weights(path: str) -> set[int]:
    return {tensor.data_type for tensor in onnx.load(path).graph.initializer if np.prod(tensor.dims) > 8}


def outputs(path: str) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    x = np.load("data.npz")["input"]
    return session.run(None, {taken.name: x.astype(np.float16) if "16" in taken.type else x})[0].astype(np.float32)


def test_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "float16", "--verify", "--calibrate", "data.npz", "--dynamic", "input=batch,_"]
    assert run(["export", "m.py:make", "-o", "h.onnx", *options]) == 0
    printed = capsys.readouterr().out
    assert "float16: 3 nodes" in printed
    assert "output output: largest difference" in printed
    assert "Same as PyTorch" in printed
    assert weights("h.onnx") == {onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize(
    "more", [[], ["--no-keep-io"], ["--input", "data.npz"], ["--calibrate", "."], ["--external-data"]]
)
def test_convert(folder: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "m.onnx", "--to", "float16", "-o", "h.onnx", *more]) == 0
    printed = capsys.readouterr()
    assert "float16: 3 nodes" in printed.out
    assert ("made up" in printed.err) == (more not in (["--input", "data.npz"], ["--calibrate", "."]))
    assert weights("h.onnx") == {onnx.TensorProto.FLOAT16}
    np.testing.assert_allclose(outputs("h.onnx"), outputs("m.onnx"), **LOOSER["half"][0])


def test_a_file_without_types_of_values(folder: Path) -> None:
    model = onnx.load("m.onnx")
    del model.graph.value_info[:]
    onnx.save(model, "plain.onnx")
    assert run(["convert", "plain.onnx", "--to", "float16", "-o", "plain.onnx", "--sizes", "batch=4"]) == 0
    assert weights("plain.onnx") == {onnx.TensorProto.FLOAT16}
    np.testing.assert_allclose(outputs("plain.onnx"), outputs("m.onnx"), **LOOSER["half"][0])


def test_a_file_that_lists_its_weights_as_inputs(folder: Path) -> None:
    model = onnx.load("m.onnx")
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    onnx.save(model, "listed.onnx")
    assert run(["convert", "listed.onnx", "--to", "float16", "-o", "h.onnx", "--input", "data.npz"]) == 0
    inputs = [value.name for value in model.graph.input]
    assert [value.name for value in onnx.load("h.onnx").graph.input] == inputs
    x = np.load("data.npz")["input"]
    for given in (
        {},
        {inputs[1]: np.full([n.dim_value for n in model.graph.input[1].type.tensor_type.shape.dim], 0.5, np.float32)},
    ):
        wanted, got = (
            onnxruntime.InferenceSession(path).run(None, {inputs[0]: x, **given})[0]
            for path in ("listed.onnx", "h.onnx")
        )
        np.testing.assert_allclose(got, wanted, **LOOSER["half"][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.onnx"], "convert needs --to or --quantize"),
        (["m.onnx", "--to", "half"], "dtype= takes 'float16' or 'bfloat16', not 'half'"),
        (["nowhere.onnx", "--to", "float16"], "there is no file nowhere.onnx"),
        (["m.py", "--to", "float16"], "m.py"),
        (["m.onnx", "--to", "float16", "--calibrate", "nowhere"], "there is no file nowhere"),
        (["m.onnx", "--to", "float16", "--calibrate", "m.py"], "m.py can't be read"),
        (["m.onnx", "--to", "float16", "--calibrate", "other.npz"], "'y', which is no input of the model"),
        (["m.onnx", "--to", "float16", "--calibrate", "wide.npz"], "is torch.float64, the model takes torch.float32"),
        (["m.onnx", "--to", "float16", "--sizes", "zz=3"], "no input has a dimension 'zz'"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("other.npz", y=np.ones((2, 8), np.float32))
    np.savez("wide.npz", input=np.ones((2, 8)))
    before = sorted(folder.iterdir())
    assert run(["convert", *arguments, "-o", "h.onnx"]) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(folder.iterdir()) == before


def test_weights_of_an_export_are_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", "m.py:make", "-o", "h.onnx", "--dtype", "float16", "--weights", "w.safetensors"]
    assert run(command) == 2
    assert "which has no numbers where --weights gives them" in " ".join(capsys.readouterr().err.split())
