"""Errors and warnings of ``onnxplug.export`` for wrong arguments, before the model is captured."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_torch_onnx.request import ExportWarning
from torch import nn
from torch.onnx import OperatorExportTypes, TrainingMode

import onnxplug
from onnxplug import OnnxplugError, OpsetError, SaveError, UsageError, as_torch_onnx
from tests.support.torch_onnx_calls import X, exported, files, net


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"f": "/nowhere/at/all.onnx"}, SaveError, "there is no folder /nowhere/at"),
        ({"f": 3}, UsageError, "f must be the path of a file, got 3"),
        ({"dynamo": False}, UsageError, "f= names no file to write"),
        ({"args": 3}, UsageError, "args must be a tuple of inputs, got an int"),
        ({"kwargs": [1]}, UsageError, "kwargs must be a dict of the model's keyword inputs, got a list"),
        ({"verbose": "yes"}, UsageError, "verbose must be True or False, got 'yes'"),
        ({"dynamo": 1}, UsageError, "dynamo must be True or False, got 1"),
        ({"report": "report.md"}, UsageError, "report must be True or False, got 'report.md'"),
        ({"profile": None}, UsageError, "profile must be True or False, got None"),
        ({"optimize": "all"}, UsageError, "optimize must be True or False"),
        ({"verify": []}, UsageError, "verify must be True or False"),
        ({"external_data": "w.data"}, UsageError, "external_data must be True or False, got 'w.data'"),
        ({"dump_exported_program": "p.pt2"}, UsageError, "dump_exported_program must be True or False"),
        ({"export_params": "no"}, UsageError, "export_params must be True or False"),
        ({"keep_initializers_as_inputs": ["w"]}, UsageError, "keep_initializers_as_inputs must be True or False"),
        ({"do_constant_folding": 0}, UsageError, "do_constant_folding must be True or False, got 0"),
        ({"autograd_inlining": "off"}, UsageError, "autograd_inlining must be True or False"),
        ({"artifacts_dir": 3}, UsageError, "artifacts_dir must be the path of a folder, got 3"),
        ({"artifacts_dir": "a-file/deep", "report": True}, SaveError, "is no folder that can be made"),
        ({"artifacts_dir": "a-file", "dump_exported_program": True}, SaveError, "is no folder that can be made"),
        ({"input_names": "x"}, UsageError, "input_names must be a list of names, got 'x'"),
        ({"input_names": ["y"], "output_names": ["y"]}, UsageError, "'y' is in input_names and in output_names"),
        ({"output_names": ["y", "y"]}, UsageError, "output_names has 'y' twice"),
        ({"opset_version": "21"}, UsageError, "opset_version must be a version of ai.onnx, got '21'"),
        ({"opset_version": {"": 21}}, UsageError, "custom_opsets= has those of other domains"),
        ({"opset_version": 0}, OpsetError, "there is no opset 0"),
        ({"opset_version": 99}, OpsetError, "opset 99 is not supported"),
        ({"custom_opsets": ["com.acme"]}, UsageError, "custom_opsets must be a dict from domains to versions"),
        ({"custom_opsets": {"com.acme": "1"}}, UsageError, "custom_opsets has 'com.acme': '1'"),
        ({"custom_opsets": {"": 18}}, UsageError, "opset_version= has the version of ai.onnx"),
        ({"custom_translation_table": [1]}, UsageError, "custom_translation_table must be a dict"),
        ({"custom_translation_table": {"aten::rellu": print}}, UsageError, "torch does not know|can't be determined"),
        ({"dynamic_shapes": ({0: "n"}, None)}, UsageError, "dynamic_shapes has 2 entries for 1 inputs"),
        ({"dynamic_axes": ["x"]}, UsageError, "dynamic_axes must be a dict from names of inputs and outputs"),
        ({"dynamic_axes": {"x": 0}}, UsageError, r"dynamic_axes\['x'\] must be a dict or a list, got an int"),
        ({"dynamic_axes": {"x": {"0": "n"}}}, UsageError, "has the axis '0', which is no number"),
        ({"dynamic_axes": {"x": {0: 7}}}, UsageError, "calls axis 0 7, which is no name"),
        ({"dynamic_axes": {0: {0: "n"}}}, UsageError, "has the key 0, which is no name"),
        ({"dynamic_axes": {"x": [2]}}, UsageError, "dynamic_axes names axis 2 of x, a tensor of rank 2"),
        ({"training": "eval"}, UsageError, "training must be a torch.onnx.TrainingMode, got 'eval'"),
        ({"operator_export_type": "ONNX"}, UsageError, "must be a torch.onnx.OperatorExportTypes, got 'ONNX'"),
        ({"export_modules_as_functions": "Linear"}, UsageError, "must be True, False or classes of modules"),
        ({"export_modules_as_functions": [nn.ReLU()]}, UsageError, r"has ReLU\(\), which is no class of modules"),
        (
            {"export_modules_as_functions": True, "opset_version": 14},
            UsageError,
            "a model of opset 14 has no functions",
        ),
        ({"model": 3}, UsageError, "can't export an int"),
        ({"model": nn.DataParallel(nn.Linear(4, 2))}, UsageError, "Export that one: model.module"),
    ],
)
def test_wrong_arguments(
    options: dict[str, Any], error: type[Exception], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxplug.capture.capture.export_program", lambda *a, **k: pytest.fail("capture was entered"))
    (folder / "a-file").touch()
    arguments = {"model": net(), "args": (X,), **options}
    with pytest.raises(error, match=message) as caught:
        onnxplug.export(**arguments)
    assert isinstance(caught.value, torch.onnx.OnnxExporterError | OnnxplugError)
    assert isinstance(caught.value, torch.onnx.OnnxExporterError)
    assert [name for name in files(folder) if not name.endswith(".md")] == ["a-file"]


def test_an_error_goes_to_another_process() -> None:
    with pytest.raises(SaveError) as caught:
        onnxplug.export(net(), (X,), "/nowhere/at/all.onnx")
    assert isinstance(caught.value, torch.onnx.OnnxExporterError)
    there = pickle.loads(pickle.dumps(caught.value))
    assert type(there) is SaveError
    assert (there.message, there.hint) == (caught.value.message, caught.value.hint)


@pytest.mark.long
def test_warnings_name_the_line_of_the_call() -> None:
    for options in (
        {"opset_version": 8},
        {"input_names": ["a", "b"]},
        {"dynamic_axes": {"y": {1: "m"}}, "output_names": ["y"]},
    ):
        with pytest.warns(ExportWarning) as caught:
            onnxplug.export(net(), (X,), **options)  # type: ignore[arg-type]
        with as_torch_onnx(), pytest.warns(ExportWarning) as within:
            torch.onnx.export(net(), (X,), **options)  # type: ignore[arg-type]
        assert {w.filename for w in (*caught, *within)} == {__file__}


def test_an_unknown_argument_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'example_outputs'"):
        onnxplug.export(net(), (X,), example_outputs=None)  # type: ignore[call-arg]


def test_an_opset_that_is_too_old(folder: Path) -> None:
    with pytest.warns(ExportWarning, match="the model has opset 13, not 8, which is older than the oldest, 9"):
        program = exported(net(), (X,), opset_version=8)
    assert program.model.opset_imports[""] == 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training": TrainingMode.TRAINING}, "training has no effect with dynamo=True"),
        ({"operator_export_type": OperatorExportTypes.ONNX_ATEN}, "ONNX_ATEN has no effect"),
    ],
)
def test_options_without_effect_warn(options: dict[str, Any], message: str) -> None:
    with pytest.warns(ExportWarning, match=message):
        program = exported(net(), (X,), **options)
    assert [node.op_type for node in program.model.graph] == ["Gemm", "BatchNormalization"]


def test_the_hint_of_to_onnx() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)no argument 'dynamic_axes'.*Use dynamic_shapes.*onnxplug.export takes every"
    ):
        onnxplug.to_onnx(net(), (X,), dynamic_axes={"x": {0: "n"}})  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"(?s)'export_modules_as_functions'.*Use functions. onnxplug.export"):
        onnxplug.to_onnx(net(), (X,), export_modules_as_functions=True)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"Did you mean 'optimize'\?$"):
        onnxplug.to_onnx(net(), (X,), optimise=True)  # type: ignore[call-overload]
