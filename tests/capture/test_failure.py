"""The error about a model that can't be captured: submodule, line, and each attempt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError

X = torch.arange(6.0).reshape(2, 3)


class Branch(nn.Module):
    """Branches on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x.flip(0)
        return x


class Foreign(nn.Module):
    """Raises while it is traced, in any mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            raise RuntimeError("it reads a file here")
        return x * 2


class Net(nn.Module):
    """Modules in lists, dicts and sequences."""

    def __init__(self, first: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.ReLU(), first])
        self.heads = nn.ModuleDict({"main": nn.Sequential(nn.Linear(3, 3), second or nn.Tanh())})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        for layer in self.layers:
            x = layer(x)
        return self.heads["main"](x)


@pytest.mark.parametrize("dynamic", [None, ({0: "batch"},)], ids=["static", "dynamic"])
@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize(
    ("model", "path"),
    [
        (Net(Branch()), "layers.1 (Branch)"),
        (Net(Foreign()), "layers.1 (Foreign)"),
        (Net(nn.ReLU(), Foreign()), "heads.main.1 (Foreign)"),
        (nn.Sequential(Net(nn.ReLU(), Branch())), "0.heads.main.1 (Branch)"),
    ],
)
def test_the_submodule_and_the_line_are_named(model: nn.Module, path: str, strict: Any, dynamic: Any) -> None:
    with pytest.raises(CaptureError, match=r"test_failure\.py:\d+") as caught:
        onnxplug.to_onnx(model.eval(), (X,), dynamic_shapes=dynamic, strict=strict)
    assert f" in {path} at " in caught.value.message
    assert caught.value.submodule == path.partition(" ")[0]
    assert caught.value.place is not None
    assert "test_failure.py" in caught.value.place


@pytest.mark.parametrize("model", [Branch(), Branch().forward, Foreign()])
def test_of_a_model_that_is_one_module_the_line_alone_is_named(model: Any) -> None:
    with pytest.raises(CaptureError, match=r"can't capture the model at .*test_failure\.py:\d+") as caught:
        onnxplug.to_onnx(model, (X,))
    assert not caught.value.submodule


def test_each_attempt_has_a_line() -> None:
    with pytest.raises(CaptureError) as caught:
        onnxplug.to_onnx(Net(Foreign()).eval(), (X,))
    assert len(caught.value.tries) == 2
    for text, mode in zip(caught.value.tries, ("non-strict", "strict"), strict=True):
        assert text.startswith(f"{mode}: ")
        assert "\n" not in text
        assert f"\n  {text}" in caught.value.message


def test_an_attempt_is_not_reported_twice() -> None:
    with pytest.raises(CaptureError) as caught:
        onnxplug.to_onnx(Net(Branch()).eval(), (X,))
    assert len(caught.value.tries) == 1
    assert "Tried" not in caught.value.message


def test_torchs_notes_for_its_developers_are_left_out() -> None:
    with pytest.raises(CaptureError) as caught:
        onnxplug.to_onnx(Net(Branch()).eval(), (X,))
    assert "TORCHDYNAMO" not in str(caught.value)
    assert "docs.google" not in str(caught.value)


@torch.library.custom_op("capture_failure::unfaked", mutates_args=())
def unfaked(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.fixture
def library() -> Iterator[str]:
    """An operator of ``torch.library.Library`` without a fake kernel."""
    made = torch.library.Library("capture_failure_lib", "DEF")
    made.define("plain(Tensor x) -> Tensor")
    made.impl("plain", lambda x: x + 1, "CPU")
    yield "capture_failure_lib::plain"
    made._destroy()


@pytest.mark.parametrize("strict", [None, True])
def test_an_operator_without_a_fake_kernel(library: str, strict: bool | None) -> None:
    cases = {"capture_failure::unfaked": unfaked, library: torch.ops.capture_failure_lib.plain}
    for name, operator in cases.items():
        with pytest.raises(CaptureError) as info:
            onnxplug.to_onnx(lambda x, operator=operator: operator(x) * 2, (X,), strict=strict)
        if strict is None:  # torch's strict mode doesn't name the operator
            assert f"the operator {name} has no fake kernel" in info.value.message
            assert info.value.hint == f'Register one with @torch.library.register_fake("{name}").'


class StrictAt(nn.Module):
    """Raises for negative numbers where it is strict, and asks for the numbers first or last."""

    def __init__(self, numbers_first: bool) -> None:
        super().__init__()
        self.strict, self.numbers_first = True, numbers_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.numbers_first:
            if (x < 0).any():  # noqa: SIM102
                if self.strict:
                    raise ValueError("negative numbers")
        elif self.strict:  # noqa: SIM102
            if (x < 0).any():
                raise ValueError("negative numbers")
        return x.abs().sqrt()


def test_a_raise_under_another_condition_is_named() -> None:
    with pytest.raises(onnxplug.CaptureError) as caught:
        onnxplug.to_onnx(StrictAt(True), (torch.rand(3),))
    text = str(caught.value)
    line = StrictAt.forward.__code__.co_firstlineno + 4
    assert f"test_failure.py:{line} (ValueError: negative numbers)" in text
    assert "torch._check" in text


def test_the_way_that_it_names_works() -> None:
    x, other = torch.rand(3), torch.rand(3) + 2
    with pytest.warns(UserWarning, match="the model raises at"):
        program = onnxplug.to_onnx(StrictAt(False), (x,))
    for inputs in (x, other):
        torch.testing.assert_close(program(inputs)[0], StrictAt(False)(inputs))

    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check((x >= 0).all().item(), lambda: "negative numbers")
            return x.sqrt()

    program = onnxplug.to_onnx(Checked(), (x,))
    for inputs in (x, other):
        torch.testing.assert_close(program(inputs)[0], inputs.sqrt())
