"""Weights as they are stored, and the names of a model's values."""

from __future__ import annotations

import pytest
import torch
from onnx_ir.tensor_adapters import TorchTensor

import onnxplug
from onnxplug.build import stored
from onnxplug.build.dtypes import TORCH_TO_ONNX
from onnxplug.build.names import Names
from onnxplug.build.stored import WeightTensor
from onnxplug.strings import STRING

_SHAPES = {"whole": (3, 4, 5), "one": (), "empty": (0, 2)}


@pytest.mark.parametrize("dtype", [dtype for dtype in TORCH_TO_ONNX if dtype != STRING], ids=str)
def test_bytes_are_those_of_onnx_ir(dtype: torch.dtype) -> None:
    for shape in _SHAPES.values():
        bits = torch.randint(-128, 128, (*shape, dtype.itemsize), dtype=torch.int8)
        tensor = (bits % 2 == 1).any(-1) if dtype == torch.bool else bits.view(dtype).reshape(shape)
        views = [tensor, tensor.permute(tuple(range(len(shape)))[::-1]), tensor[1:] if shape else tensor]
        for view in views:
            # onnx_ir 1.1 has no float4, whose pairs are bytes here.
            plain = view.view(torch.uint8) if dtype == torch.float4_e2m1fn_x2 else view
            assert WeightTensor(view).tobytes() == TorchTensor(plain).tobytes()
            assert len(WeightTensor(view).tobytes()) == view.numel() * dtype.itemsize


def test_a_fake_tensor_has_no_bytes() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        tensor = torch.zeros(3)
    for fake in (tensor, tensor.to("meta"), torch.zeros(3, device="meta")):
        for read in (WeightTensor.tobytes, WeightTensor.numpy):
            with pytest.raises(onnxplug.WeightsError, match="the weight 'w' has no numbers"):
                read(WeightTensor(fake, "w"))


def test_names_are_unique() -> None:
    names = Names()
    names.take(["x", None, "y_1"])
    assert [names.unique(stem) for stem in ("x", "x", "y", "y", "x_1", "z")] == ["x_1", "x_2", "y", "y_2", "x_1_1", "z"]


def test_a_weight_that_the_model_returns_in_another_form_keeps_its_name() -> None:
    """A value that a converter derives from a weight at export is no result of a node: it is named after the weight."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.t()

    def t(g: onnxplug.GraphBuilder, node: onnxplug.FxNode) -> object:
        return g.weights.permuted(node.args[0], (1, 0))

    model = Model()
    program = onnxplug.to_onnx(model, (torch.randn(4, 3),), rules=[onnxplug.Rule("aten::t.default", t)])
    assert list(program.model.graph.initializers) == ["weight.transposed"]
    program.verify()
    other = {"weight": torch.randn(3, 4)}
    program.apply_weights(other)
    torch.testing.assert_close(program(torch.ones(4, 3))[0], other["weight"].T)


def test_a_large_copy_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large copy derived from a weight, or from such a copy, is computed again at each read; a view is not."""
    monkeypatch.setattr(stored, "_LARGE_COPY_BYTES", 64)
    made: list[str] = []

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        made.append("doubled")
        return tensor * 2

    def mul(g: onnxplug.GraphBuilder, node: onnxplug.FxNode) -> object:
        x, weight = node.args
        twice = g.derive(weight, doubled, "doubled", form="doubled")
        assert g.is_weight(twice)
        turned = g.weights.permuted(g.derive(twice, lambda t: t + 1, "more", form="more"), (1, 0))
        return g.op.Mul(g.op.Add(x, twice), g.op.Transpose(turned, perm=[1, 0]))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x + weight * 2) * (weight * 2 + 1)

    model, x = Model(), torch.randn(8, 8)
    program = onnxplug.to_onnx(model, (x,), rules=[onnxplug.Rule("aten::mul.Tensor", mul)], optimize=False)
    kinds = {name: type(v.const_value).__name__ for name, v in program.model.graph.initializers.items()}
    assert kinds == {"weight.doubled": "LazyTensor", "weight.transposed": "LazyTensor"} | {
        name: kind for name, kind in kinds.items() if name.startswith("constant")
    }
    made.clear()
    torch.testing.assert_close(program(x)[0], expected(x, model.weight.detach()))
    assert made
    other = torch.randn(8, 8)
    program.apply_weights({"weight": other})
    torch.testing.assert_close(program(x)[0], expected(x, other))
