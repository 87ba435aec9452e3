"""Results that the operands' sizes prove are of the kind that torch's own path gives them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from torch import nn

import onnxplug
from tests.support.traces import captured

D = torch.export.Dim.DYNAMIC


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], *held: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ModuleList(held)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(*self.held, x)


def kinds(program: torch.export.ExportedProgram) -> list[tuple[Any, ...]]:
    """Target, sizes, strides and dtype of each operator's result; symbols are numbered as they appear."""
    names: dict[str, str] = {}

    def named(size: Any) -> Any:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        order = sorted(expression.free_symbols, key=str)
        return str(expression.subs({s: names.setdefault(str(s), f"n{len(names)}") for s in order}))

    return [
        (str(n.target), [named(s) for s in v.shape], [named(s) for s in v.stride()], v.dtype)
        for n in program.graph.nodes
        if isinstance(v := n.meta.get("val"), torch.Tensor) and n.op != "placeholder"
    ]


def check(model: nn.Module, args: tuple[Any, ...], shapes: Any, others: tuple[Any, ...]) -> None:
    """Compares the kinds of all results with torch.export's, and the exported model with PyTorch on two inputs."""
    traced, _ = captured(lambda: model, args, True, dynamic_shapes=shapes)
    with torch.no_grad():
        assert kinds(traced.program) == kinds(torch.export.export(model, args, dynamic_shapes=shapes))
        program = onnxplug.to_onnx(model, args, dynamic_shapes=shapes)
        for inputs in (args, others):
            torch.testing.assert_close(program(*inputs)[0], model(*inputs))


def test_a_batch_norm_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*args: Any) -> Any:
        raise AssertionError("the decomposition is traced")

    monkeypatch.setattr("torch._decomp.decompositions.native_batch_norm_helper", ask)
    model = nn.BatchNorm2d(3).eval()
    onnxplug.to_onnx(model, (torch.randn(2, 3, 4, 4),), dynamic_shapes=({0: D, 2: D, 3: D},))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_image_may_be_resized_to_a_single_pixel(mode: str) -> None:
    class Resized(nn.Module):
        def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x, [side // 2 for side in like.shape[2:]], mode=mode, align_corners=True)

    def images(*sides: int) -> torch.Tensor:
        return torch.randn(2, 3, *sides)

    axes = {2: D, 3: D}
    program = onnxplug.to_onnx(Resized(), (images(2, 3), images(5, 7)), dynamic_shapes=(axes, axes))
    assert "onnxplug.dimensions" not in program.model.graph.metadata_props
    for x, like in ((images(4, 4), images(2, 3)), (images(1, 1), images(6, 2)), (images(1, 5), images(2, 9))):
        program.verify(args=(x, like), seeds=())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pointwise": lambda: Of(lambda x: F.gelu(x).clamp(-1, 1) * 2 + torch.where(x > 0, x, x.exp())),
    "of an axis": lambda: Of(lambda x: x * x[:, :, :1] + x[:, :1] - x[:1]),
    "outer": lambda: Of(lambda x: x[:, :, 0].unsqueeze(1) * x[:, :, 1].unsqueeze(2)),
    "lower rank": lambda: Of(lambda x: x * x[0, 0] + x[0]),
    "promotion": lambda: Of(lambda x: (x > 0) * 2 + (x.to(torch.int8) + 1.5) / 2 + x.half().float() * x.double()),
    "constants": lambda: Of(
        lambda x: (
            x * torch.tensor([1.0, 2.0, 3.0, 4.0])
            + torch.tensor(2) * torch.tensor([[0.5], [1.5]]).T.sum()
            + torch.tensor(x.shape[0]).sqrt()
            + torch.tensor([1, 2, 3])[1:].double().mean()
        )
    ),
    "a constant and its view": lambda: Of(
        lambda x: (lambda c, v: v.add_(1).sum() + c + x)(*(lambda c: (c, c[1:]))(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    ),
    "a scalar": lambda: Of(lambda x: x * x.sum() + x.int() * torch.tensor(2.5) + x.sum() * 2),
    "transposed": lambda: Of(lambda x: x.transpose(0, 1) * 2 + x.transpose(1, 2).exp().transpose(0, 2).sum(0)[0, 0]),
    "expanded": lambda: Of(lambda x: x[:, :1].expand_as(x) * 2 + x[:, :1].expand_as(x) + x[:, ::2][:, :1]),
    "complex": lambda: Of(lambda x: (torch.complex(x, x * 2).conj() * 1j).imag + x),
    "a size": lambda: Of(lambda x: x * x.shape[0] + x.clamp(max=x.shape[1])),
    "linear": lambda: Of(lambda m, x: m(x), nn.Linear(4, 5)),
    "linear without bias": lambda: Of(lambda m, x: m(x[:, 0]) + m(x.transpose(0, 1))[0], nn.Linear(4, 5, bias=False)),
    "linear of one row": lambda: Of(lambda m, x: m(x[0, 0]) + x.sum(), nn.Linear(4, 5)),
    "layer norm": lambda: Of(lambda m, x: m(x) + m(x.transpose(0, 1)).transpose(0, 1), nn.LayerNorm(4)),
    "layer norm without weights": lambda: Of(lambda x: F.layer_norm(x, (4,)) + F.layer_norm(x[0], [4])),
    "batch norm": lambda: Of(lambda m, x: m(x.transpose(1, 2).contiguous()), nn.BatchNorm1d(4)),
    "batch norm of a transposed": lambda: Of(lambda m, x: m(x.transpose(1, 2)), nn.BatchNorm1d(4, affine=False)),
    "batch norm of rows": lambda: Of(lambda m, x: m(x[:, 0]) * 2, nn.BatchNorm1d(4)),
    "batch norm of images": lambda: Of(
        lambda m, x: m(x.unsqueeze(1).contiguous(memory_format=torch.channels_last)), nn.BatchNorm2d(1)
    ),
    "in double": lambda: Of(lambda m, x: m(x.double()), nn.Linear(4, 5).double()),
}


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_results(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean, module.running_var = (
                torch.randn_like(module.running_mean),
                torch.rand(1) + torch.rand_like(module.running_var),
            )
    check(model, (torch.randn(2, 3, 4),), ({0: D, 1: D},), (torch.randn(5, 7, 4),))


UNARY: tuple[Callable[[Any], Any], ...] = (
    torch.sin, torch.exp, torch.isnan, torch.neg, torch.logical_not, torch.sigmoid, F.relu, F.silu, torch.floor,
    lambda x: x + 1, lambda x: 2 - x, lambda x: x > 0, lambda x: x.to(torch.float64), lambda x: x.to(torch.int32),
    lambda x: x.transpose(0, 1), lambda x: x[:, :1], lambda x: x[:1], lambda x: x[0], lambda x: x.unsqueeze(-2),
    lambda x: x.transpose(0, 1).contiguous(), lambda x: x[:, ::2], lambda x: x.sum(-1, keepdim=True), lambda x: x * x.shape[0],
)  # fmt: skip
BINARY = (torch.add, torch.mul, torch.maximum, torch.eq, torch.atan2, lambda x, y: torch.where(x > 0, x, y))


@settings(deadline=None)
@given(st.data())
@pytest.mark.long
def test_chains_of_pointwise_operators(data: st.DataObject) -> None:
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from(UNARY), st.sampled_from((None, *BINARY)), st.integers(0, 9)), max_size=7)
    )
    tensors: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for unary, binary, other in steps:
            value = values[-1]
            if value.dim() < 2:
                break
            value = unary(value)
            if binary is not None:
                value = binary(value, values[other % len(values)])
            values.append(value)
        return values[1:] or [x + 0]

    x = torch.randn(4, 4, 3)
    try:
        tensors = run(x)
    except (RuntimeError, IndexError):
        tensors = []  # PyTorch refuses the chain
    assume(tensors)
    model, shapes = Of(lambda x: run(x)), ({0: D},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = kinds(torch.export.export(model, (x,), dynamic_shapes=shapes))
        except Exception:
            expected = []  # torch.export refuses it: it takes 4 for a constant, for example
        assume(expected)
        traced, _ = captured(lambda: model, (x,), True, dynamic_shapes=shapes)
    assert kinds(traced.program) == expected


@pytest.mark.parametrize(
    ("name", "model", "x"),
    [
        ("a weight of another size", lambda: Of(lambda m, x: m(x), nn.Linear(5, 4)), torch.randn(2, 3, 4)),
        ("a weight of another dtype", lambda: Of(lambda m, x: m(x), nn.Linear(4, 4)), torch.randn(2, 3, 4).double()),
        ("other channels", lambda: Of(lambda m, x: m(x), nn.BatchNorm1d(5)), torch.randn(2, 3, 4)),
        ("a norm of another size", lambda: Of(lambda m, x: m(x), nn.LayerNorm(5)), torch.randn(2, 3, 4)),
    ],
)
def test_operands_that_do_not_fit_are_refused(name: str, model: Callable[[], nn.Module], x: torch.Tensor) -> None:
    with pytest.raises(onnxplug.errors.OnnxplugError):
        onnxplug.to_onnx(model().eval(), (x,), dynamic_shapes=({0: D},))
