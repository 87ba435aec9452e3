"""Names of outputs that are new values of inputs, and exports that leave the new values out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools.verification import verify_file
from torch import nn

import onnxplug
from onnxplug import UsageError
from onnxplug.capture.signature import present_name


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values_key_0", "present_key_0"),
        ("cache_params_conv_0", "present_conv_0"),
        ("past0", "present0"),
        ("past", "present"),
        ("pasta", "present_pasta"),
        ("state", "present_state"),
    ],
)
def test_present_names(past: str, present: str) -> None:
    assert present_name(past) == present


class Counting(nn.Module):
    """Returns a new cache under the old one's name, writes an input and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor, state: torch.Tensor, past: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.count += 1
        state.mul_(2)
        return {"y": self.norm(x) + state, "past": {"a": past["a"] + x, "b": past["b"]}, "x": x * self.count}


def args(rows: int = 4) -> tuple[Any, ...]:
    return torch.randn(rows, 3), torch.randn(3), {"a": torch.randn(rows, 3), "b": torch.randn(2)}


def names(program: Any) -> list[str]:
    return [value.name for value in program.model.graph.outputs]


WRITTEN = ["state_out", "count_out", "norm.running_mean_out", "norm.running_var_out", "norm.num_batches_tracked_out"]


@pytest.mark.filterwarnings("ignore:the model is in training mode")
@pytest.mark.parametrize("mutations", ["outputs", "ignore"])
@pytest.mark.parametrize("sample", ["module", "program", "decomposed"])
def test_tensors_that_the_model_writes(sample: str, mutations: str) -> None:
    model: Any = Counting().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if sample != "module":
        model = torch.export.export(model, args(), dynamic_shapes=None)
    if sample == "decomposed":
        model = model.run_decompositions()
    program = onnxplug.to_onnx(model, args(), mutations=mutations)
    program.verify()
    assert sorted(names(program)[4:]) == (sorted(WRITTEN) if mutations == "outputs" else [])
    if sample == "module":  # verification leaves the model as it is
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    inputs = args()
    with torch.no_grad():
        x, state, _ = inputs
        norm = nn.BatchNorm1d(3).train()
        expected = norm(x) + state * 2
    torch.testing.assert_close(program(*inputs)[0], expected)


@pytest.mark.filterwarnings("ignore:the model is in training mode")
def test_outputs_called_after_the_inputs_that_they_renew() -> None:
    model = Counting()
    program = onnxplug.to_onnx(model, args(), present_names=True, mutations="outputs")
    assert names(program)[:4] == ["y", "present_a", "present_b", "present_x"]
    assert "present_state" in names(program)[4:]
    program = onnxplug.to_onnx(
        model,
        args(),
        input_names=["x", "state", "past.0.a", "past.0.b"],
        output_names=["result"],
        present_names=True,
        mutations="ignore",
        dynamic_shapes={"x": {0: "n"}, "state": None, "past": {"a": {0: "n"}, "b": None}},
        verify=True,
    )
    assert names(program) == ["result", "present.0.a", "present.0.b", "present_x"]


def test_a_file_with_present_names_is_verified(tmp_path: Path) -> None:
    """The command line recognises by the names the outputs that are new values of inputs."""

    def model(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(2)
        return x + state

    path = tmp_path / "model.onnx"
    inputs = (torch.randn(3), torch.randn(3))
    onnxplug.to_onnx(model, inputs, path, present_names=True)
    assert len(verify_file(str(path), model, inputs, {}).cases) == 4
    onnxplug.to_onnx(model, inputs, path, mutations="ignore")
    assert len(verify_file(str(path), model, inputs, {}).cases) == 4


def test_a_value_in_the_way_of_a_present_name() -> None:
    """No name stands twice: the input keeps its name."""
    program = onnxplug.to_onnx(
        lambda past, present: {"past": past + present}, (torch.ones(2), torch.ones(2)), present_names=True, verify=True
    )
    assert [value.name for value in program.model.graph.inputs] == ["past", "present"]
    assert names(program) == ["present_1"]


def test_mutations_of_another_kind() -> None:
    with pytest.raises(UsageError, match=r"mutations= takes 'outputs' .* or 'ignore' .*, not True"):
        onnxplug.to_onnx(nn.Linear(2, 2), (torch.ones(2),), mutations=True)  # type: ignore[arg-type]
