"""Batch norms folded into convolutions, with the weights of the export and others."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.errors import WeightsError
from tests.support.forms import AUTO, compare
from tests.support.tolerances import looser
from tests.support.zoo import stirred


class Frozen(nn.Module):
    """A batch norm that is written out, of buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean"):
            self.register_buffer(name, torch.randn(channels))
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, variance, mean = (
            v.reshape(1, -1, 1, 1) for v in (self.weight, self.bias, self.running_var, self.running_mean)
        )
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Twice(nn.Module):
    """A convolution that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(self.layer(x)))


class ReadTwice(Twice):
    """A result that is read beside its norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.norm(y) + y.relu()


def _affine_free() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6, affine=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), {"Conv": 1, "Relu": 1}),
    "without bias": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), {"Conv": 1}),
    "without weights": (_affine_free, {"Conv": 1}),
    "by group": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)), {"Conv": 1}),
    "frozen": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), Frozen(6)), {"Conv": 1}),
    "frozen, with bias": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), Frozen(6)), {"Conv": 1}),
    "called twice": (Twice, {"Conv": 2, "BatchNormalization": 1}),
    "read twice": (ReadTwice, {"Conv": 1, "BatchNormalization": 1, "Relu": 1, "Add": 1}),
}
X = torch.randn(2, 4, 6, 6)
INPUTS = (X, torch.randn(1, 4, 9, 7) * 10)


def exported(model: nn.Module, **options: object) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(model, (X,), plugins=[], dynamic_shapes=({0: AUTO, 2: AUTO, 3: AUTO},), **options)


@pytest.mark.parametrize("target", [None, "onnxruntime", "onnxruntime:cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_folded(name: str, target: str | None) -> None:
    torch.manual_seed(0)
    build, expected = MODELS[name]
    model = stirred(build()).eval()
    program = exported(model, target=target)
    assert Counter(node.op_type for node in program.model.graph) == expected
    assert not {*program.model.graph.initializers} & {"0.weight", "0.bias"} or name in ("called twice", "read twice")
    for x in INPUTS:
        compare(program, model, x)
    other = stirred(copy.deepcopy(model))
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.5)
    program.apply_weights(other.state_dict())
    for x in INPUTS:
        compare(program, other, x)


def test_some_weights_after_others(tmp_path: Path) -> None:
    model = stirred(MODELS["batch norm"][0]()).eval()
    program, other = exported(model), copy.deepcopy(model)
    state = {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    for names in (["0.weight", "1.running_mean"], ["1.bias"], ["1.running_var", "0.bias"]):
        some = {name: state[name] for name in names}
        program.apply_weights(some)
        other.load_state_dict({**other.state_dict(), **some})
        compare(program, other, X)
    torch.save(state, tmp_path / "weights.pt")
    program.save(tmp_path / "model.onnx", weights=tmp_path / "weights.pt")
    other.load_state_dict(state)
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (result,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), other(X).detach(), **looser("fast forms"))


def test_weights_that_do_not_fit() -> None:
    model = stirred(MODELS["batch norm"][0]()).eval()
    program = exported(model)
    with pytest.raises(WeightsError, match=r"'1.running_var' has the shape \[6\], got \[5\]"):
        program.apply_weights({"1.running_var": torch.ones(5)})
    with pytest.raises(WeightsError, match=r"missing, .*'0\.weight'"):
        program.apply_weights({"1.bias": torch.ones(6)}, strict=True)
    compare(program, model, X)


def test_a_model_without_numbers() -> None:
    model = stirred(MODELS["frozen"][0]()).eval()
    with onnxplug.fake_weights():
        fake = MODELS["frozen"][0]().eval()
    program = exported(fake)
    assert [node.op_type for node in program.model.graph] == ["Conv"]
    state = model.state_dict()
    program.apply_weights({name: tensor for name, tensor in state.items() if name != "0.weight"})
    with pytest.raises(WeightsError, match=r"1 weight has no numbers, '0\.weight'"):
        program(X)
    program.apply_weights({"0.weight": state["0.weight"]})
    compare(program, model, X)


class Padded(nn.Module):
    """A convolution after a padding."""

    def __init__(self, layer: nn.Module, widths: list[int], mode: str = "constant", value: float = 0.0) -> None:
        super().__init__()
        self.layer, self.widths, self.mode, self.value = layer, widths, mode, value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        filling = {"value": self.value} if self.mode == "constant" else {}
        return self.layer(nn.functional.pad(x, self.widths, mode=self.mode, **filling))


class PaddedAndRead(Padded):
    """A padding that is read beside the convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(x, self.widths)
        return self.layer(padded) + padded.sum()


ONE_NODE = {
    "one axis": lambda: (Padded(nn.Conv1d(3, 4, 3), [2, 0]), (7,)),
    "below": lambda: (Padded(nn.Conv2d(3, 4, 3, stride=2), [0, 1, 0, 1]), (8, 9)),
    "around": lambda: (Padded(nn.Conv2d(3, 6, 3, groups=3, dilation=2), [1, 2, 3, 4]), (8, 9)),
    "wider than the kernel": lambda: (Padded(nn.Conv2d(3, 4, 1), [2, 1, 0, 3]), (8, 9)),
    "added up": lambda: (Padded(nn.Conv2d(3, 4, 3, padding=1), [1, 0, 0, 2]), (8, 9)),
    "same": lambda: (Padded(nn.Conv2d(3, 4, (2, 3), padding="same"), [1, 1, 0, 0]), (8, 9)),
    "three axes": lambda: (Padded(nn.Conv3d(3, 4, 2), [1, 0, 0, 1, 2, 0]), (4, 5, 6)),
    "a norm after it": lambda: (nn.Sequential(Padded(nn.Conv2d(3, 4, 3), [0, 1, 0, 1]), nn.BatchNorm2d(4)), (8, 9)),
}


@pytest.mark.parametrize("opset", [13, 18, 23])
@pytest.mark.parametrize("name", ONE_NODE)
def test_zeros_around_an_image_are_padding_of_the_convolution(name: str, opset: int) -> None:
    model, sides = ONE_NODE[name]()
    program = onnxplug.to_onnx(
        stirred(model.eval()), (torch.randn(2, 3, *sides),), dynamic_shapes=({0: "batch"},), opset_version=opset
    )
    assert [node.op_type for node in program.model.graph] == ["Conv"]
    program.verify()


OTHERS = {
    "reflected": lambda: Padded(nn.Conv2d(3, 4, 3), [1, 1, 1, 1], mode="reflect"),
    "ones": lambda: Padded(nn.Conv2d(3, 4, 3), [1, 1, 1, 1], value=1.0),
    "cut": lambda: Padded(nn.Conv2d(3, 4, 3), [1, -1, 0, 1]),
    "of the channels": lambda: Padded(nn.Conv2d(5, 4, 3), [1, 1, 1, 1, 1, 1]),
    "read twice": lambda: PaddedAndRead(nn.Conv2d(3, 4, 3), [0, 1, 0, 1]),
    "transposed": lambda: Padded(nn.ConvTranspose2d(3, 4, 3), [0, 1, 0, 1]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_padding_stays(name: str) -> None:
    program = onnxplug.to_onnx(OTHERS[name]().eval(), (torch.randn(2, 3, 8, 9),), dynamic_shapes=({0: "batch"},))
    assert sum(node.op_type == "Pad" for node in program.model.graph) == 1
    program.verify()


class Same(nn.Module):
    """A convolution of images of any size, after padding that is computed from the size."""

    def __init__(self, layer: nn.Conv2d, total: Callable[..., int], is_lower: bool = False, more: int = 0) -> None:
        super().__init__()
        self.layer, self.total, self.is_lower, self.more = layer, total, is_lower, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widths: list[int] = []
        for axis in (1, 0):
            total = self.total(x.shape[2 + axis], self.layer.kernel_size[axis], self.layer.stride[axis]) + self.more
            less, more = total // 2, total - total // 2
            widths += (more, less) if self.is_lower else (less, more)
        return self.layer(nn.functional.pad(x, widths))


TOTALS: dict[str, Callable[[int, int, int], int]] = {
    "of timm": lambda n, k, s: max((math.ceil(n / s) - 1) * s + k - n, 0),
    "of a quotient": lambda n, k, s: (-(-n // s) - 1) * s + k - n,
    "of a negative remainder": lambda n, k, s: k - s + -n % s,
}
SIDES = ((1, 1), (5, 8), (12, 7), (9, 9), (10, 4))


def _of_any_size(model: nn.Module) -> onnxplug.OnnxProgram:
    axes = {0: AUTO, 2: AUTO, 3: AUTO}
    program = onnxplug.to_onnx(stirred(model.eval()), (torch.randn(2, 3, 11, 14),), dynamic_shapes=(axes,))
    for height, width in SIDES:
        program.verify(args=(torch.randn(3, 3, height, width),), seeds=())
    return program


@pytest.mark.parametrize("is_lower", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride"), [(3, 2), (5, 2), (2, 2), (7, 4), (3, 1), ((3, 5), (2, 3)), ((4, 1), (4, 1))], ids=str
)
@pytest.mark.parametrize("form", ["of timm", "of a quotient", "of a negative remainder"])
def test_padding_to_the_same_size_is_that_of_the_operator(form: str, kernel: Any, stride: Any, is_lower: bool) -> None:
    program = _of_any_size(Same(nn.Conv2d(3, 4, kernel, stride), TOTALS[form], is_lower))
    (node,) = program.model.graph
    assert node.op_type == "Conv"
    if stride == 1:  # the padding is of one width
        assert "auto_pad" not in node.attributes
    else:
        assert node.attributes["auto_pad"].as_string() == ("SAME_LOWER" if is_lower else "SAME_UPPER")


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "a kernel below the stride": lambda: Same(nn.Conv2d(3, 4, 1, 2), TOTALS["of a quotient"]),
    "dilation": lambda: Same(nn.Conv2d(3, 4, 3, 2, dilation=2), lambda n, k, s: TOTALS["of timm"](n, 2 * k - 1, s)),
    "more": lambda: Same(nn.Conv2d(3, 4, 3, 2), TOTALS["of timm"], more=2),
    "of another stride": lambda: Same(nn.Conv2d(3, 4, 3, 2), lambda n, k, s: TOTALS["of timm"](n, k, 3)),
    "own padding": lambda: Same(nn.Conv2d(3, 4, 3, 2, padding=1), TOTALS["of timm"]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_padding_of_any_size_stays(name: str) -> None:
    program = _of_any_size(DIFFERENT[name]())
    assert sum(node.op_type == "Pad" for node in program.model.graph) == 1


def test_a_shift_in_bfloat16() -> None:
    """The zeros in place of the bias that is not there have the dtype of the weight."""
    x, weight = torch.randn(1, 2, 5, 5).bfloat16(), nn.Parameter(torch.randn(4, 2, 3, 3).bfloat16())

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = weight, nn.Parameter(torch.randn(4, 1, 1).bfloat16())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.conv2d(x, self.weight) + self.shift

    program = onnxplug.to_onnx(Shifted(), (x,), opset_version=22)
    assert dict(program.statistics.operators) == {"Conv": 1}
