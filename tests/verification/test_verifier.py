"""The hook ``onnxplug_verifier``: a plugin verifies programs of its kind in a way of its own."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import VerificationCase, VerificationReport, VerificationRequest
from onnxplug.testing import IsolatedRegistry


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def compare_means(program: onnxplug.OnnxProgram, request: VerificationRequest) -> VerificationReport:
    assert program.captured is not None
    args = request.args or program.captured.args
    expected, (actual,) = program.captured.reference(*args), program(*args)
    difference = (actual.mean() - expected.mean()).abs().item()
    if difference > (request.atol or 0.1):
        raise onnxplug.VerificationError(f"the means differ by {difference:.3f}")
    return VerificationReport([VerificationCase({}, None, difference, str(program.runtime))])


def isolated(verifier: object) -> IsolatedRegistry:
    plugin = ModuleType("onnxplug_means")
    plugin.onnxplug_verifier = verifier  # type: ignore[attr-defined]
    registry = IsolatedRegistry()
    registry.add_plugin(plugin, name="means", distribution="onnxplug-means", version="1")
    return registry


@onnxplug.hookimpl
def onnxplug_verifier(program: onnxplug.OnnxProgram) -> object:
    draws = any(node.op_type.startswith("Random") for node in program.model.graph)
    return compare_means if draws else None


def test_a_plugin_verifies_its_programs_and_onnxplug_the_others() -> None:
    x = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    with isolated(onnxplug_verifier).active():
        program = onnxplug.to_onnx(Noisy(), (x,), verify=True)
        (case,) = program.verify(args=(x - 5,)).cases
        assert 0 < case.max_abs_difference < 0.1
        with pytest.raises(onnxplug.VerificationError, match="the means differ by"):
            program.verify(atol=1e-9)
        assert len(onnxplug.to_onnx(nn.Tanh(), (x[:2],)).verify().cases) == 4
    with pytest.raises(onnxplug.VerificationError, match="output"):
        onnxplug.to_onnx(Noisy(), (x,)).verify()


def test_an_object_that_is_no_function_is_an_error_of_the_plugin() -> None:
    text = onnxplug.hookimpl(lambda program: "no function")
    with isolated(text).active(), pytest.raises(onnxplug.PluginError, match="onnxplug_verifier returned 'no function'"):
        onnxplug.to_onnx(nn.Tanh(), (torch.randn(2),), verify=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rtol": -1.0}, "rtol= takes a number of at least 0"),
        ({"atol": "small"}, "atol= takes a number"),
        ({"seeds": ["x"]}, "seeds= takes a list of integers"),
        ({"intermediates": 1}, "intermediates= takes True or False"),
        ({"kwargs": [1]}, "kwargs= takes a dict"),
    ],
)
def test_arguments_are_checked_before_anything_runs(options: dict[str, object], message: str) -> None:
    program = onnxplug.to_onnx(nn.Tanh(), (torch.randn(2),))
    with pytest.raises(onnxplug.OnnxplugError, match=message):
        program.verify(**options)  # type: ignore[arg-type]
