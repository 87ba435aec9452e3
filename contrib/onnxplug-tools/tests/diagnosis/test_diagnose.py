"""What ``diagnose`` finds out about models that can't be exported."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import Diagnosis, UsageError, diagnose
from tests.support.contrib import installed

X = torch.arange(6.0).reshape(2, 3)


class Branch(nn.Module):
    """Branches on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


@torch.library.custom_op("diagnosed::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@unknown.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Unknown(nn.Module):
    """Has an operator that nobody translates."""

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


def found_in(model: Any, *args: Any, **options: Any) -> Diagnosis:
    found = diagnose(model, args or (X,), **options)
    json.dumps(found.to_dict())
    return found


def test_of_a_model_that_exports_nothing_is_said() -> None:
    found = found_in(Net(nn.ReLU()).eval(), dynamic_shapes=({0: "batch"},))
    assert found.exports
    assert (found.error, found.pieces, found.draft, found.hints) == (None, [], [], [])
    assert "Nothing is wrong" in str(found)


def test_a_model_that_does_not_run_is_not_exported() -> None:
    found = found_in(Net().eval(), torch.ones(2, 5))
    assert not found.runs
    assert "mat1 and mat2" in str(found.error)
    assert "does not run in PyTorch" in str(found)


def test_submodules_of_a_model_that_is_not_captured() -> None:
    found = found_in(Net(Branch(), nn.Linear(3, 3)).eval())
    assert (found.runs, found.captured, found.exports) == (True, False, False)
    assert found.submodule == "encoder.1"
    assert {p.path: (p.captured, p.is_cause, p.like) for p in found.pieces} == {
        "encoder": (False, False, None),
        "encoder.0": (True, False, None),
        "encoder.1": (False, True, None),
        "encoder.2": (True, False, "encoder.0"),
        "head": (True, False, None),
    }
    assert all(p.converted for p in found.pieces if p.captured)
    assert any("All others can be exported" in hint for hint in found.hints)
    assert "test_diagnose.py" in str(found.place)


def test_draft_export_names_the_line() -> None:
    found = found_in(Net(Branch()).eval())
    assert found.draft_error is None
    finding = next(f for f in found.draft if f.kind == "DATA_DEPENDENT_ERROR")
    assert "test_diagnose.py" in str(finding.place)
    assert str(finding) in str(found)


def test_operators_without_a_rule_are_found_beside_a_failure_of_capture() -> None:
    found = found_in(Net(Branch(), Unknown()).eval())
    assert list(found.missing) == ["diagnosed::unknown.default"]
    (piece,) = [p for p in found.pieces if p.path == "encoder.2"]
    assert (piece.captured, piece.converted) == (True, False)
    assert "diagnosed::unknown" in str(piece.error)
    hints = [hint for hint in found.hints if "encoder.1" in hint]
    assert hints == [
        "Change encoder.1, which torch.export can't capture. Of the others encoder.2 can't be converted: the list says why."
    ]


def test_a_model_that_is_captured_and_does_not_convert() -> None:
    found = found_in(Net(Unknown()).eval())
    assert (found.captured, found.converted) == (True, False)
    assert list(found.missing) == ["diagnosed::unknown.default"]
    assert found.pieces == []
    assert str(found).startswith("The model does not convert")


def fixed(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(3, 2) if x.shape[0] == 2 else x


def test_a_dimension_that_is_fixed() -> None:
    found = found_in(fixed, dynamic_shapes=({0: "batch"},))
    assert found.captured_static is True
    assert any("static" in hint for hint in found.hints)
    assert any(f.kind == "GUARD_ADDED" and "test_diagnose.py" in str(f.place) for f in found.draft)
    assert found.pieces == []


def test_a_dict_at_the_end_holds_keyword_inputs_as_in_to_onnx() -> None:
    assert found_in(Net(nn.ReLU()).eval(), X, {"scale": 2.0}).exports
    assert found_in(Net(nn.ReLU()).eval(), X, kwargs={"scale": 2.0}).exports


def test_an_exported_program_is_converted_alone() -> None:
    assert diagnose(torch.export.export(Net(nn.ReLU()).eval(), (X,))).exports
    found = diagnose(torch.export.export(Net(Unknown()).eval(), (X,)))
    assert (found.captured, found.converted) == (True, False)


def test_a_script_that_is_not_captured() -> None:
    class Script(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: list[torch.Tensor] = []
            for _ in range(int(x.sum())):
                found.append(x)
            return torch.stack(found)

    with installed("onnxplug-torchscript"):
        found = found_in(torch.jit.script(Script()))
    assert found.runs
    assert not found.captured


def test_the_number_of_submodules_is_limited() -> None:
    assert len(found_in(Net(Branch()).eval(), limit=1).pieces) == 1


def test_the_model_and_its_inputs_stay_as_they_were() -> None:
    model, x = Net(nn.BatchNorm1d(3), Branch()).train(), X.clone()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = found_in(model, x)
    assert not found.captured
    assert any("training mode" in text for text in found.warnings)
    torch.testing.assert_close(dict(model.state_dict()), before)
    torch.testing.assert_close(x, X)
    assert model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": True}, "no verify="),
        ({"f": "model.onnx"}, "no f="),
        ({"dynamic_shapes": {"y": {0: "batch"}}}, "y"),
        ({"capture": "twice"}, "capture"),
    ],
)
def test_malformed_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxplug.diagnose(Net().eval(), (X,), **options)
