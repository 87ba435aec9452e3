"""The findings of ``diagnose`` on models that can't be exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import Diagnosis, UsageError, diagnose
from tests.support.contrib import installed
from tests.support.distributions import run_python

X = torch.arange(6.0).reshape(2, 3)


class Branch(nn.Module):
    """Branches on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0) if x.sum() > 0 else x


@torch.library.custom_op("diagnosed::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@unknown.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Unknown(nn.Module):
    """Has an operator that no rule translates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unknown(x)


class Net(nn.Module):
    """Encoder and head."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 3), *inner)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.head(self.encoder(x)) * scale


def diagnosis_of(model: Any, *args: Any, **options: Any) -> Diagnosis:
    diagnosis = diagnose(model, args or (X,), **options)
    json.dumps(diagnosis.to_dict())
    return diagnosis


def test_a_model_that_exports_has_no_diagnosis() -> None:
    diagnosis = diagnosis_of(Net(nn.ReLU()).eval(), dynamic_shapes=({0: "batch"},))
    assert diagnosis.exports
    assert (diagnosis.error, diagnosis.pieces, diagnosis.draft, diagnosis.hints) == (None, [], [], [])
    assert "Nothing is wrong" in str(diagnosis)


def test_a_model_that_does_not_run_is_not_exported() -> None:
    diagnosis = diagnosis_of(Net().eval(), torch.ones(2, 5))
    assert not diagnosis.runs
    assert "mat1 and mat2" in str(diagnosis.error)
    assert "does not run in PyTorch" in str(diagnosis)


def test_submodules_of_a_model_that_is_not_captured() -> None:
    diagnosis = diagnosis_of(Net(Branch(), nn.Linear(3, 3)).eval())
    assert (diagnosis.runs, diagnosis.captured, diagnosis.exports) == (True, False, False)
    assert diagnosis.submodule == "encoder.1"
    assert {p.path: (p.captured, p.is_cause, p.like) for p in diagnosis.pieces} == {
        "encoder": (False, False, None),
        "encoder.0": (True, False, None),
        "encoder.1": (False, True, None),
        "encoder.2": (True, False, "encoder.0"),
        "head": (True, False, None),
    }
    assert all(p.converted for p in diagnosis.pieces if p.captured)
    assert any("All others can be exported" in hint for hint in diagnosis.hints)
    assert "test_diagnose.py" in str(diagnosis.place)


def test_draft_export_names_the_line() -> None:
    diagnosis = diagnosis_of(Net(Branch()).eval())
    assert diagnosis.draft_error is None
    finding = next(f for f in diagnosis.draft if f.kind == "DATA_DEPENDENT_ERROR")
    assert "test_diagnose.py" in str(finding.place)
    assert str(finding) in str(diagnosis)


def test_operators_without_a_rule_beside_a_failure_of_capture() -> None:
    diagnosis = diagnosis_of(Net(Branch(), Unknown()).eval())
    assert list(diagnosis.missing) == ["diagnosed::unknown.default"]
    (piece,) = [p for p in diagnosis.pieces if p.path == "encoder.2"]
    assert (piece.captured, piece.converted) == (True, False)
    assert "diagnosed::unknown" in str(piece.error)
    hints = [hint for hint in diagnosis.hints if "encoder.1" in hint]
    assert hints == [
        "Change encoder.1, which torch.export can't capture. Of the others encoder.2 can't be converted: the list says why."
    ]


def test_a_model_that_is_captured_and_does_not_convert() -> None:
    diagnosis = diagnosis_of(Net(Unknown()).eval())
    assert (diagnosis.captured, diagnosis.converted) == (True, False)
    assert list(diagnosis.missing) == ["diagnosed::unknown.default"]
    assert diagnosis.pieces == []
    assert str(diagnosis).startswith("The model does not convert")


def fixed(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(3, 2) if x.shape[0] == 2 else x


def test_a_dimension_that_is_fixed() -> None:
    diagnosis = diagnosis_of(fixed, dynamic_shapes=({0: "batch"},))
    assert diagnosis.captured_static is True
    assert any("static" in hint for hint in diagnosis.hints)
    assert any(f.kind == "GUARD_ADDED" and "test_diagnose.py" in str(f.place) for f in diagnosis.draft)
    assert diagnosis.pieces == []


def test_a_dict_at_the_end_holds_keyword_inputs_as_in_to_onnx() -> None:
    assert diagnosis_of(Net(nn.ReLU()).eval(), X, {"scale": 2.0}).exports
    assert diagnosis_of(Net(nn.ReLU()).eval(), X, kwargs={"scale": 2.0}).exports


def test_an_exported_program_is_converted_alone() -> None:
    assert diagnose(torch.export.export(Net(nn.ReLU()).eval(), (X,))).exports
    diagnosis = diagnose(torch.export.export(Net(Unknown()).eval(), (X,)))
    assert (diagnosis.captured, diagnosis.converted) == (True, False)


def test_a_script_that_is_not_captured() -> None:
    class Script(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results: list[torch.Tensor] = []
            for _ in range(int(x.sum())):
                results.append(x)
            return torch.stack(results)

    with installed("onnxplug-torchscript"):
        results = diagnosis_of(torch.jit.script(Script()))
    assert results.runs
    assert not results.captured


def test_the_number_of_submodules_is_limited() -> None:
    diagnosis = diagnosis_of(Net(Branch()).eval(), limit=1)
    assert len(diagnosis.pieces) == 1
    assert "All others can be exported" not in str(diagnosis)
    assert "1 submodule was looked at, and no more (limit=)" in str(diagnosis)


class Optional(Branch):
    """Branches on data if it is told to."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.branches else x


def test_submodules_that_differ_in_a_flag_are_not_alike() -> None:
    pieces = diagnosis_of(nn.Sequential(*map(Optional, (True, False, True))), X).pieces
    assert [(piece.captured, piece.like) for piece in pieces] == [(False, None), (True, None), (False, "0")]


def test_the_model_and_its_inputs_stay_as_they_were() -> None:
    model, x = Net(nn.BatchNorm1d(3), Branch()).train(), X.clone()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    diagnosis = diagnosis_of(model, x)
    assert not diagnosis.captured
    assert any("training mode" in text for text in diagnosis.warnings)
    torch.testing.assert_close(dict(model.state_dict()), before)
    torch.testing.assert_close(x, X)
    assert model.training


class Remembering(Branch):
    """Remembers its calls, beside branching on data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x)
        return super().forward(x)


def test_attributes_of_the_model_stay_as_they_were() -> None:
    model = Net(Remembering()).eval()
    with pytest.raises(onnxplug.CaptureError):
        onnxplug.to_onnx(model, (X,))
    assert not diagnosis_of(model).captured
    assert (model.encoder[1].calls, model.encoder[1].seen) == (0, [])


def test_options_of_the_whole_model_are_not_the_submodules() -> None:
    """A submodule has no module of the class, nor as many inputs."""
    model = Net(Branch()).eval()
    options: dict[str, Any] = {"functions": [Net], "input_names": ["input", "scale"]}
    diagnosis = diagnosis_of(model, X, 2.0, **options)
    assert [piece.path for piece in diagnosis.pieces if not piece.captured] == ["encoder", "encoder.1"]


@pytest.mark.parametrize("args", [(), (X,)])
def test_examples_are_the_inputs(args: Any) -> None:
    examples = [(X,), (torch.ones(4, 3),)]
    assert diagnose(Net().eval(), args, examples=examples).exports
    fixed = diagnose(lambda x: x.view(2, 3) * 2, args, examples=[(X,), (X[:1],)])
    assert not fixed.captured
    assert fixed.captured_static
    branching = diagnose(Net(Branch()).eval(), args, examples=examples)
    assert branching.runs
    assert [piece.path for piece in branching.pieces if piece.is_cause] == ["encoder.1"]


def test_torch_logs_nothing(tmp_path: Path) -> None:
    code = (
        "import torch, onnxplug; print(onnxplug.diagnose(lambda x: x if x.sum() > 0 else -x, (torch.ones(2),)).draft)"
    )
    printed = run_python(tmp_path, "-c", code)
    assert "DATA_DEPENDENT_ERROR" in printed
    assert "issue(s) found during export" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": True}, "no verify="),
        ({"f": "model.onnx"}, "no f="),
        ({"pieces": ["head"]}, "no pieces="),
        ({"dynamic_shapes": {"y": {0: "batch"}}}, "y"),
        ({"capture": "twice"}, "capture"),
    ],
)
def test_malformed_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.diagnose(Net().eval(), (X,), **options)
