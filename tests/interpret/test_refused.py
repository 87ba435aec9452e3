"""Dtypes that do not match: calls that eager PyTorch refuses are refused with its message; other calls are exported."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxplug
from onnxplug import CaptureError, ConversionError, OnnxplugError, OutputMismatchError, Rule
from onnxplug.testing import IsolatedRegistry
from tests.support.check import Call, check

DOUBLE, HALF, LONG = torch.float64, torch.float16, torch.int64


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


class Model(nn.Module):
    """A function of modules and inputs."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *args: Any) -> Any:
        return self.function(*self.parts, *args)


def use(module: nn.Module, *args: Any) -> Any:
    return module(*args)


INDEX = torch.tensor([0, 1])
REFUSED: dict[str, tuple[Callable[..., Any], list[nn.Module], tuple[Any, ...]]] = {
    "linear of half": (use, [nn.Linear(4, 3).half()], (r(2, 4),)),
    "linear without bias": (use, [nn.Linear(4, 3, bias=False).half()], (r(2, 4),)),
    "linear of int64": (use, [nn.Linear(4, 3)], (r(2, 4, dtype=LONG),)),
    "linear of many features": (use, [nn.Linear(4096, 1024)], (r(2, 4096, dtype=DOUBLE),)),
    "float @ double": (lambda x, y: x @ y, [], (r(2, 3), r(3, 2, dtype=DOUBLE))),
    "int64 @ float": (lambda x, y: x @ y, [], (r(2, 3, dtype=LONG), r(3, 2))),
    "matrix @ vector": (lambda x, y: x @ y, [], (r(2, 3), r(3, dtype=DOUBLE))),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y), [], (r(2, 2), r(2, 3), r(3, 2, dtype=DOUBLE))),
    "bias of addmm": (lambda b, x, y: torch.addmm(b, x, y), [], (r(2, 2, dtype=DOUBLE), r(2, 3), r(3, 2))),
    "attention": (lambda m, x: m(x, x, x)[0], [nn.MultiheadAttention(4, 2)], (r(2, 3, 4, dtype=DOUBLE),)),
    "transposed convolution": (use, [nn.ConvTranspose2d(2, 3, 3)], (r(1, 2, 8, 8, dtype=DOUBLE),)),
    "layer_norm": (use, [nn.LayerNorm(4)], (r(2, 4, dtype=DOUBLE),)),
    "group_norm": (use, [nn.GroupNorm(2, 4)], (r(2, 4, 3, dtype=DOUBLE),)),
    "batch_norm": (use, [nn.BatchNorm1d(4).eval()], (r(2, 4, dtype=DOUBLE),)),
    "LSTM cell": (lambda m, x: m(x)[0], [nn.LSTMCell(4, 3)], (r(2, 4, dtype=DOUBLE),)),
    "index_select": (lambda x, i: torch.index_select(x, 0, i), [], (r(5, 3), r(2))),
    "index_add": (lambda x, y: x.index_add(0, INDEX, y), [], (r(5, 3), r(2, 3, dtype=DOUBLE))),
    "index_copy": (lambda x, y: x.index_copy(0, INDEX, y), [], (r(5, 3), r(2, 3, dtype=DOUBLE))),
    "index_put": (lambda x, y: x.index_put((INDEX,), y), [], (r(5, 3), r(2, 3, dtype=DOUBLE))),
    "masked_select": (lambda x, m: torch.masked_select(x, m), [], (r(3), r(3, dtype=LONG))),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), [], (r(2, 4), r(2, dtype=torch.int32))),
    "binary_cross_entropy": (lambda x, t: F.binary_cross_entropy(x / 3, t), [], (r(2, 4), r(2, 4, dtype=DOUBLE) / 3)),
    "grid_sample": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        [],
        (r(1, 2, 4, 4), r(1, 2, 2, 2, dtype=DOUBLE)),
    ),
    "cdist": (lambda x, y: torch.cdist(x, y), [], (r(2, 3), r(2, 3, dtype=DOUBLE))),
    "cross": (lambda x, y: torch.linalg.cross(x, y), [], (r(2, 3), r(2, 3, dtype=DOUBLE))),
    "& of floats": (lambda x, y: x & y, [], (r(2), r(2))),
    "bitwise_not of floats": (lambda x: torch.bitwise_not(x), [], (r(2),)),
    "softmax of int64": (lambda x: torch.softmax(x, 0), [], (r(2, dtype=LONG),)),
    "std of int64": (lambda x: torch.std(x), [], (r(2, dtype=LONG),)),
    "gelu of int64": (lambda x: F.gelu(x), [], (r(2, dtype=LONG),)),
    "interpolate of int64": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        [],
        (r(1, 1, 2, 2, dtype=LONG),),
    ),
    "bincount of floats": (lambda x: torch.bincount(x), [], (r(3),)),
    "one_hot of floats": (lambda x: F.one_hot(x, 4), [], (r(3),)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_eager_refuses_are_refused_with_its_message(name: str) -> None:
    function, modules, args = REFUSED[name]
    model = Model(function, *modules).eval()
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        model(*args)
    with pytest.raises(CaptureError, match=r"PyTorch itself refuses aten::\w+.*test_refused\.py:\d+") as caught:
        onnxplug.to_onnx(model, args)
    if name != "attention":  # whose eager layer takes its projections apart
        assert str(eager.value).splitlines()[0] in str(caught.value)


class Unused(nn.Module):
    """Calls a model, and returns something else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        self.model(*args)
        return args[0].abs()


@pytest.mark.parametrize("name", REFUSED)
def test_also_where_nothing_reads_the_result(name: str) -> None:
    function, modules, args = REFUSED[name]
    with pytest.raises(CaptureError, match=r"PyTorch itself refuses aten::\w+.*test_refused\.py:\d+"):
        onnxplug.to_onnx(Unused(Model(function, *modules)).eval(), args)


def test_a_dynamic_size_changes_nothing() -> None:
    with pytest.raises(
        CaptureError, match=r"aten::linear\.default of float32\[batch, 4\], float16\[3, 4\].*same dtype"
    ):
        onnxplug.to_onnx(nn.Linear(4, 3).half(), (r(2, 4),), dynamic_shapes=({0: "batch"},))


RUN: dict[str, tuple[Callable[..., Any], list[nn.Module], tuple[Any, ...]]] = {
    "layer_norm of half": (use, [nn.LayerNorm(4)], (r(2, 4, dtype=HALF),)),
    "layer_norm without bias": (use, [nn.LayerNorm(4, bias=False)], (r(2, 4, dtype=HALF),)),
    "group_norm of half": (use, [nn.GroupNorm(2, 4)], (r(2, 4, 3, dtype=HALF),)),
    "batch_norm of half": (use, [nn.BatchNorm1d(4).eval()], (r(2, 4, dtype=HALF),)),
    "native_batch_norm of half": (
        lambda x: torch.native_batch_norm(x, *(torch.full((4,), n) for n in (1.5, 0.5, 0.2, 2.0)), False, 0.1, 1e-5)[0],
        [],
        (r(2, 4, 3, dtype=HALF),),
    ),
    "float + double": (lambda x, y: x + y, [], (r(3), r(3, dtype=DOUBLE))),
    "int64 * float": (lambda x, y: x * y, [], (r(3, dtype=LONG), r(3))),
    "cat": (lambda x, y: torch.cat([x, y]), [], (r(3), r(2, dtype=DOUBLE))),
    "where": (lambda c, x, y: torch.where(c > 1, x, y), [], (r(3), r(3), r(3, dtype=DOUBLE))),
    "copy_": (lambda x, y: x.clone().copy_(y), [], (r(3), r(3, dtype=DOUBLE))),
    "slice of double": (lambda x, y: torch.slice_scatter(x, y, 0, 0, 2), [], (r(3), r(2, dtype=DOUBLE))),
    "write of a slice": (lambda x, y: x.clone().index_fill(0, INDEX, 2.0) + y, [], (r(3), r(3, dtype=DOUBLE))),
    "masked_fill by a double": (lambda x, y: x.masked_fill(x > 1, y.sum()), [], (r(3), r(2, dtype=DOUBLE))),
    "mse_loss": (lambda x, y: F.mse_loss(x, y), [], (r(3), r(3, dtype=DOUBLE))),
    "embedding of int32": (use, [nn.Embedding(50_000, 8)], (r(3, 200, dtype=torch.int32),)),
    "gather of int32": (lambda x, i: torch.gather(x, 1, i), [], (r(300, 200), r(300, 2, dtype=torch.int32))),
    "isin": (lambda x, y: torch.isin(x, y), [], (r(3), r(2, dtype=DOUBLE))),
    "mean with a dtype": (lambda x: torch.mean(x, dtype=torch.float32), [], (r(3, dtype=LONG),)),
    "softmax with a dtype": (lambda x: torch.softmax(x, 0, dtype=torch.float32), [], (r(3, dtype=LONG),)),
    "division of int64": (lambda x, y: torch.div(x, y + 1, rounding_mode="floor"), [], (r(3, dtype=LONG),) * 2),
    "remainder of int64": (lambda x, y: torch.remainder(x, y + 2), [], (r(3, dtype=LONG),) * 2),
    "matmul of int64": (lambda x, y: x @ y, [], (r(2, 3, dtype=LONG), r(3, 2, dtype=LONG))),
}


@pytest.mark.parametrize("name", RUN)
def test_calls_that_eager_runs_are_exported(name: str) -> None:
    function, modules, args = RUN[name]
    model = Model(function, *modules).eval()
    check(model, *args, others=[tuple(a.flip(0) for a in args)])
    check(Unused(model), *args)


def test_a_number_is_refused_and_others_are_not() -> None:
    """The refusal of a call does not concern another call of the same dtypes."""
    with pytest.raises(OnnxplugError, match=r"(?i)integers to (a )?negative"):
        onnxplug.to_onnx(Call(lambda x: x**-1), (r(3, dtype=LONG),))
    check(lambda x: x**2, r(3, dtype=LONG), others=[(r(3, dtype=LONG) - 2,)])


def test_autocast_casts_before_the_operator() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x.double().float() @ x.bfloat16().t()).float()

    assert onnxplug.to_onnx(Call(model), (r(2, 3),)).model.graph.num_nodes()


def test_random_numbers_go_on_as_if_nothing_was_run() -> None:
    state = torch.random.get_rng_state()
    onnxplug.to_onnx(Call(lambda x: torch.bernoulli(x.long().float()) + x.bool()), (r(3),))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_rule_that_mixes_dtypes_is_blamed() -> None:
    """PyTorch takes the call, so that the fault is the converter's."""

    def convert(g: Any, node: Any) -> Any:
        return g.op.MatMul(g.cast(node.args[0], DOUBLE), node.args[1])

    with pytest.raises(ConversionError, match="MatMul takes one dtype as inputs 0 and 1") as caught:
        onnxplug.to_onnx(Call(lambda x, y: x @ y), (r(2, 3), r(3, 2)), rules=[Rule("aten::matmul", convert)])
    assert not isinstance(caught.value, OutputMismatchError)
    with pytest.raises(ConversionError, match=r"BitwiseAnd takes .* as input 0, got float: its schema says so"):
        onnxplug.to_onnx(
            Call(lambda x, y: x @ y),
            (r(2, 3), r(3, 2)),
            rules=[Rule("aten::matmul", lambda g, n: g.op.BitwiseAnd(*n.args))],
        )


# -- refusals of a plugin ----------------------------------------------------------------------------------------------

LIB = torch.library.Library("refused_test", "DEF")
LIB.define("root(Tensor x) -> Tensor")
torch.library.register_fake("refused_test::root", torch.empty_like)


@torch.library.impl(LIB, "root", "CompositeExplicitAutograd")
def _root(x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 2:
        raise RuntimeError("root takes a matrix")
    return x.sqrt()


def plugin(*refusals: Any) -> IsolatedRegistry:
    module = ModuleType("onnxplug_root")
    module.onnxplug_refusals = onnxplug.hookimpl(lambda: refusals)  # type: ignore[attr-defined]
    module.onnxplug_rules = onnxplug.hookimpl(  # type: ignore[attr-defined]
        lambda: [Rule("refused_test::root", lambda g, node: g.op.Sqrt(node.args[0]))]
    )
    registry = IsolatedRegistry()
    registry.add_plugin(module, distribution="onnxplug-root")
    return registry


def no_matrix(fx: torch.fx.Node, *, is_doubtful: bool = False, is_unused: bool = False) -> str | None:
    is_root = fx.target is torch.ops.refused_test.root.default
    return "root takes a matrix" if is_root and fx.meta["val"].dim() != 2 else None


def test_refusals_that_a_plugin_declares() -> None:
    model = Model(lambda x: torch.ops.refused_test.root(x) + 1).eval()
    with pytest.raises(RuntimeError, match="root takes a matrix"):
        model(r(3))
    with plugin(no_matrix).active():
        with pytest.raises(
            CaptureError, match=r"PyTorch itself refuses refused_test::root.*test_refused\.py:\d+: root takes a matrix"
        ):
            onnxplug.to_onnx(model, (r(3),))
        with pytest.raises(CaptureError, match="root takes a matrix"):
            onnxplug.to_onnx(Unused(model), (r(3),))
        others = [(r(5, 2),), (r(7, 1) * 0,), (-r(2, 6),)]
        check(lambda x: torch.ops.refused_test.root(x) + 1, r(2, 3), others=others, dynamic=True)


def test_an_object_that_is_no_function_refuses_the_plugin() -> None:
    with (
        plugin(3).active(),
        pytest.warns(UserWarning, match="onnxplug_refusals returned 3, neither a function nor"),
    ):
        onnxplug.to_onnx(nn.Tanh(), (r(2),))


DYNAMIC_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative_slope": lambda x: torch.nn.functional.leaky_relu(x, 1 / x.shape[0]),
    "lambd": lambda x: torch.nn.functional.hardshrink(x, x.shape[0] / 10),
    "min_val, max_val": lambda x: torch.nn.functional.hardtanh(x, -1 / x.shape[0], 1 / x.shape[0]),
    "ord": lambda x: torch.linalg.vector_norm(x, x.shape[0]),
}


@pytest.mark.parametrize("name", DYNAMIC_NUMBERS)
def test_a_number_of_a_size_where_a_rule_takes_plain_numbers_is_named(name: str) -> None:
    x = torch.randn(4, 3)
    with pytest.raises(onnxplug.Unsupported, match=rf"test_refused\.py:\d+ .*: {name} must be known when") as caught:
        onnxplug.to_onnx(DYNAMIC_NUMBERS[name], (x,), dynamic_shapes=({0: "rows"},))
    assert "defect" not in str(caught.value)
    program = onnxplug.to_onnx(DYNAMIC_NUMBERS[name], (x,))
    for values in (x, -x):
        torch.testing.assert_close(program(values)[0], DYNAMIC_NUMBERS[name](values))
