"""One dataclass has the options of an export, for ``to_onnx``, ``as_torch_onnx`` and the command line."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch

import onnxplug
from onnxplug.cli.app import run
from onnxplug.options import CommonOptions, ExportOptions

X = torch.ones(2, 3)


def test_the_signature_and_the_docstring_name_every_option() -> None:
    parameters = inspect.signature(onnxplug.to_onnx).parameters
    fields = dataclasses.fields(ExportOptions)
    assert list(parameters) == ["model", "args", "f", *(item.name for item in fields)]
    text = onnxplug.to_onnx.__doc__ or ""
    for item in fields:
        assert parameters[item.name].default is item.default
        assert f"\n        {item.name}: " in text


def test_as_torch_onnx_takes_the_common_options() -> None:
    parameters = inspect.signature(onnxplug.as_torch_onnx).parameters
    assert list(parameters) == [item.name for item in dataclasses.fields(CommonOptions)]
    with pytest.raises(onnxplug.UsageError, match="as_torch_onnx has no option 'opset_version'"):
        onnxplug.as_torch_onnx(opset_version=21).__enter__()  # type: ignore[call-arg]


def test_the_command_line_has_every_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["export", "--help"]) == 0
    text = capsys.readouterr().out
    flags = [item.metadata["option"].flag for item in dataclasses.fields(ExportOptions)]
    for flag in filter(None, flags):
        assert flag.names.partition("/")[0] in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": 1}, "verify= takes True or False, got 1"),
        ({"exact": None}, "exact= takes True or False, got None"),
        ({"strict": "yes"}, "strict= takes True, False or None, got 'yes'"),
        ({"kwargs": [X]}, "kwargs= takes a dict, got"),
        ({"plugins": "acme"}, "plugins= takes a list, got 'acme'"),
        ({"report": 3}, "report= takes True, False or a folder, got 3"),
        ({"mutations": []}, r"mutations= takes 'outputs' \(.*\) or 'ignore' \(.*\), not \[\]"),
        ({"pieces": ["a"], "input_names": ["x"]}, "can't be given together with pieces="),
        ({"optimise": True}, r"to_onnx has no argument 'optimise'[\s\S]*Did you mean 'optimize'"),
        ({"dynamic_axes": {}}, r"Use dynamic_shapes[\s\S]*onnxplug.export takes every argument"),
    ],
)
def test_values_of_another_kind_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(onnxplug.UsageError, match=message):
        onnxplug.to_onnx(torch.nn.Identity(), (X,), **options)


def test_a_bool_of_numpy_is_accepted() -> None:
    assert ExportOptions.of({"verify": np.bool_(True)}).verify
