"""Submodules that can't be captured: named in the error, and captured down to the cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError
from onnxplug.plugins.submodules import Call, capture_pieces, first_calls
from tests.capture.test_failure import Branch, Foreign, Net, X

_EXPORT = torch.export.export
_FAILING = """
def failing(module, *args, **options):
    if module is model:
        raise RuntimeError("no place")
    return export(module, *args, **options)
"""


def fails_to_export(call: Call) -> Exception | None:
    try:
        _EXPORT(call.module, call.args, call.kwargs, strict=False)
    except Exception as error:
        return error
    return None


def _error(monkeypatch: pytest.MonkeyPatch, model: nn.Module, args: Any = (X,)) -> CaptureError:
    """The error of a model whose capture fails without a place; its submodules are captured as they are."""
    namespace = {"model": model, "export": _EXPORT}
    exec(compile(_FAILING, torch.export.__file__, "exec"), namespace)  # so that no frame of the error is the user's
    monkeypatch.setattr(torch.export, "export", namespace["failing"])
    with pytest.raises(CaptureError, match="no place") as info:
        onnxplug.to_onnx(model, args)
    return info.value


def test_the_place_of_an_error_by_capturing_submodules(monkeypatch: pytest.MonkeyPatch) -> None:
    error = _error(monkeypatch, Net(nn.ReLU(), Foreign()).eval())
    assert error.submodule == "heads.main.1"
    assert "can't capture the model in heads.main.1 (Foreign) at " in error.message
    assert "test_failure.py" in str(error.place)


def test_where_every_submodule_can_be_captured_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = _error(monkeypatch, Net(nn.ReLU()).eval())
    assert (error.submodule, error.place) == (None, None)


def test_a_model_that_does_not_run_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _error(monkeypatch, Net(nn.ReLU()).eval(), (torch.ones(2, 5),)).submodule is None


def test_pieces_are_captured_down_to_the_cause() -> None:
    pieces = capture_pieces(Net(Branch(), Branch()).eval(), (X,), {}, fails_to_export)
    causes = {piece.path: piece.is_cause for piece in pieces if piece.error is not None}
    assert causes == {"layers.1": True, "heads.main": False, "heads.main.1": False}
    assert [piece.like for piece in pieces if piece.path == "heads.main.1"] == ["layers.1"]
    assert {piece.path for piece in pieces if piece.error is None} == {"fc", "layers.0", "heads.main.0"}


class Switched(nn.Module):
    """A module whose flag, which its printed form lacks, decides whether it can be captured."""

    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bad and torch.compiler.is_exporting():
            raise RuntimeError("not this one")
        return x + 1


@pytest.mark.parametrize("flags", [(False, True, False), (True, False, True)])
def test_modules_that_look_alike(flags: tuple[bool, ...]) -> None:
    model = nn.Sequential(*(nn.Sequential(Switched(flag)) for flag in flags))
    pieces = {piece.path: piece for piece in capture_pieces(model, (X,), {}, fails_to_export)}
    for number, bad in enumerate(flags):
        assert (pieces[str(number)].error is not None) == bad
    assert pieces["2"].like == "0"


def test_the_number_of_captures_is_limited() -> None:
    captured = []

    def fails(call: Any) -> None:
        captured.append(type(call.module).__name__)

    assert len(capture_pieces(Net(Branch()).eval(), (X,), {}, fails, limit=2)) == 2
    assert captured == ["Linear", "ReLU"]


class Counter(nn.Module):
    """Writes a buffer and its input, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.inner = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x.mul_(2)
        return self.inner(x) + self.calls


def test_the_run_that_records_inputs_leaves_no_trace() -> None:
    model, x = Counter().train(), X.clone()
    state = torch.get_rng_state()
    calls = first_calls(model, (x,), {}, {"inner": model.inner})
    torch.testing.assert_close(calls["inner"].args[0], X * 2)
    torch.testing.assert_close(x, X)
    assert model.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.inner._forward_pre_hooks
