"""The patches of torch during capture: only those that the model needs, and only while it is captured."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import fake_impls

import onnxplug
from onnxplug.errors import CaptureError
from tests.support.check import check
from tests.support.child import run_fork
from tests.support.patches import PATCHES, VARIABLE
from tests.support.sampling import LONG

AUTO = torch.export.Dim.AUTO
ATEN = torch.ops.aten
torch.manual_seed(0)
LAYER = nn.GRU(3, 4)


# Named here, not in a function: capture patches the names in functions of the model.
OWNERS = (torch.nn.modules.rnn.RNNBase, nn.LSTM, nn.GRU, nn.RNN, torch._VF)
NAMES = (
    *("forward", "get_expected_hidden_size", "get_expected_cell_size"),
    *("_pack_padded_sequence", "_pad_packed_sequence"),
)
OPERATORS = (ATEN.lstm.input, ATEN.gru.data, ATEN.fake_quantize_per_tensor_affine_cachemask.default)
PACK = ATEN._pack_padded_sequence.default


def torchs_state() -> list[Any]:
    """The present values of the names that capture may patch."""
    results: list[Any] = [vars(owner).get(name) for owner in OWNERS for name in NAMES]
    shapes = [function.__name__ for op, function in fake_impls.op_implementations_dict.items() if op is PACK]
    return [*results, shapes, *(dict(op.py_kernels) for op in OPERATORS)]


def state_during_capture(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """torch's state while a model is captured."""
    seen: list[Any] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> Any:
            seen.append(torchs_state())
            return self.inner(x)

    onnxplug.to_onnx(Watched().eval(), (x,))
    return list(seen[0])


def test_no_patch_without_a_recurrent_layer() -> None:
    before = torchs_state()
    plain = nn.Sequential(nn.Conv1d(3, 4, 1), nn.LayerNorm(5), nn.TransformerEncoderLayer(5, 1, 8))
    assert state_during_capture(plain, torch.randn(2, 3, 5)) == before
    assert state_during_capture(nn.GRU(3, 4), torch.randn(2, 2, 3)) != before
    assert torchs_state() == before


def test_torch_is_as_before_after_an_error() -> None:
    before = torchs_state()

    def fails(x: torch.Tensor) -> Any:
        raise RuntimeError("no")

    model = nn.Sequential(nn.LSTM(3, 4))
    model.forward = fails  # type: ignore[method-assign]
    with pytest.raises(CaptureError):
        onnxplug.to_onnx(model, (torch.randn(2, 2, 3),))
    assert torchs_state() == before


def run_global(x: torch.Tensor) -> Any:
    return LAYER(x)[0]


def run_operator(x: torch.Tensor) -> Any:
    weights = [w.detach() for w in LAYER._flat_weights]
    return torch.gru(x, x.new_zeros(1, x.shape[1], 4), weights, True, 1, 0.0, False, False, False)[0]


class InList(nn.Module):
    """A layer outside of the module tree."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [LAYER]

    def forward(self, x: torch.Tensor) -> Any:
        return self.first()(x)[0]

    def first(self) -> nn.Module:
        return self.layers[0]


class Base(nn.Module):
    """The layer is named by a method of a base class."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(x)

    def run(self, x: torch.Tensor) -> Any:
        return run_global(x)


class Derived(Base):
    def run(self, x: torch.Tensor) -> Any:
        return super().run(x) * 2


class Helper:
    """A plain object with a layer."""

    def __init__(self) -> None:
        self.layer = LAYER

    def run(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


class WithHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"helper": Helper()}

    def forward(self, x: torch.Tensor) -> Any:
        return self.settings["helper"].run(x)


HELPER = Helper()


class Caller:
    def __call__(self, x: torch.Tensor) -> Any:
        return run_global(x)

    def method(self, x: torch.Tensor) -> Any:
        return run_operator(x)


def _closed_over(layer: nn.Module) -> Callable[..., Any]:
    return lambda x: layer(x)[0]


WAYS: dict[str, Any] = {
    "submodule": nn.Sequential(LAYER),
    "closure": _closed_over(LAYER),
    "closure of a lambda": lambda x: _closed_over(LAYER)(x),
    "global": run_global,
    "operator": run_operator,
    "list": InList(),
    "base class": Derived(),
    "global helper": lambda x: HELPER.run(x),
    "helper of a module": WithHelper(),
    "callable object": Caller(),
    "bound method": Caller().method,
    "partial": functools.partial(lambda layer, x: layer(x)[0], LAYER),
    "default": lambda x, layer=LAYER: layer(x)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_recurrent_layer_is_found_wherever_the_model_holds_it(way: str) -> None:
    """Without the patch, torch would trace the layer step by step and make the number of steps static."""
    dynamic = ({0: AUTO, 1: AUTO},)
    check(WAYS[way], torch.randn(5, 2, 3), others=[(torch.randn(7, 3, 3),)], dynamic=dynamic)


def pytest_of(*arguments: str, **environment: str) -> int:
    """The exit status of pytest."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.support.patches",
        *arguments,
    ]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False).returncode


@pytest.mark.long
def test_the_tests_of_the_patches_are_there() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    options = ["-q", "-p", "no:cacheprovider", "--collect-only"]
    done = run_fork("-m", "pytest", *options, *(patch.test for patch in PATCHES), env=dict(os.environ), cwd=Path.cwd())
    assert done.returncode == pytest.ExitCode.OK, done.stdout


@pytest.mark.parametrize("patch", [pytest.param(patch, id=patch.name, marks=LONG) for patch in PATCHES])
def test_a_patch_is_needed(patch: Any) -> None:
    assert pytest_of(patch.test) == pytest.ExitCode.OK
    assert pytest_of(patch.test, **{VARIABLE: patch.name}) == pytest.ExitCode.TESTS_FAILED
