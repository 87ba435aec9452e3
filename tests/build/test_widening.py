"""Operators without a kernel for an element type: computed in a wider type, rounded where PyTorch's rounding shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplemented_
from torch.nn import functional as F

import onnxplug
from onnxplug import ConversionError, GraphBuilder, PluginInfo, Rule, TargetInfo, hookimpl
from onnxplug.build.kernels import Kernels
from onnxplug.build.spec import onnx_spec
from onnxplug.testing import IsolatedRegistry
from tests.support.halves import MODELS
from tests.support.tolerances import looser

import onnx_ir as ir  # isort: skip

CPU = "onnxruntime:cpu"
FLOAT, HALF, BRAIN = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
INT8, INT32, INT64, UINT8 = ir.DataType.INT8, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8


def counts(program: Any) -> Counter[str]:
    return Counter(n.op_type for n in program.model.graph.all_nodes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"exact": True}, {"optimize": False}, {"opset_version": 13}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_halves_run(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, args, dynamic_shapes = MODELS[name]()
    model = model.eval().to(dtype)
    args = tuple(a.to(dtype) for a in args)
    program = onnxplug.to_onnx(model, args, dynamic_shapes=dynamic_shapes, target=CPU, **options)
    # A few units in the last place of the results, which are about 1 in size.
    tolerance = {torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    report = program.verify(rtol=tolerance, atol=tolerance)
    assert len(report.cases) > 1
    assert {case.runtime for case in report.cases} == {"onnxruntime"}


@pytest.mark.parametrize("name", MODELS)
def test_without_it_they_do_not_run(name: str) -> None:
    """ONNX Runtime's CPU has no bfloat16 kernels for these operators: otherwise the target would not be needed."""
    model, args, dynamic_shapes = MODELS[name]()
    args = tuple(a.bfloat16() for a in args)
    program = onnxplug.to_onnx(model.eval().bfloat16(), args, dynamic_shapes=dynamic_shapes)
    with pytest.raises(NotImplemented_, match="Could not find an implementation"):
        onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])


def test_between_operators_nothing_is_rounded() -> None:
    """The input, the output and each stored weight have a Cast: there is none between operators."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval().bfloat16()
    args = (torch.randn(3, 8).bfloat16(),)
    program = onnxplug.to_onnx(model, args, target=CPU)
    assert counts(program)["Cast"] == 6
    exactly = onnxplug.to_onnx(model, args, target=CPU, exact=True)
    assert counts(exactly)["Cast"] > 8
    # With exact=True rounded after each operator, as PyTorch does; without it, at most as far from float32 as PyTorch.
    want, wide = model(*args).float(), model.float()(args[0].float())
    rounded, islands = exactly(*args)[0].float(), program(*args)[0].float()
    assert (islands - wide).abs().max() <= (want - wide).abs().max()
    assert torch.allclose(rounded, want, **looser("widened, one operator"))


JUMPS = {
    "floor": lambda x, y: torch.floor(x * y),
    "comparison": lambda x, y: (x * y) >= y,
    "argmax": lambda x, y: torch.argmax(x * y, dim=1),
    "floor_divide": lambda x, y: (x * y) // y,
    "to int": lambda x, y: (x * y).to(torch.int32),
    "to float": lambda x, y: (x * y).float() * 1000,
    "promotion": lambda x, y: (x * y) + torch.ones(8),
    "sort": lambda x, y: torch.sort(x * y, stable=True)[1],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", JUMPS)
def test_functions_with_jumps_read_the_rounded_value(case: str, dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return JUMPS[case](x, y)

    torch.manual_seed(0)
    program = onnxplug.to_onnx(Model(), tuple(torch.randn(64, 8).to(dtype) * 4 for _ in range(2)), target=CPU)
    for seed in range(3):
        torch.manual_seed(seed)
        args = tuple(torch.randn(64, 8).to(dtype) * 4 for _ in range(2))
        assert torch.equal(program(*args)[0], Model()(*args))


#: Functions of a product near 1, and of a product whose numbers float16 has no number above 0 for.
JUMPS_NEAR_ONE = {
    "threshold": lambda near, tiny: F.threshold(near, 1.0, -5),
    "div, trunc": lambda near, tiny: torch.div(near, 0.5, rounding_mode="trunc"),
    "div, floor": lambda near, tiny: torch.div(near, 0.5, rounding_mode="floor"),
    "max_pool1d": lambda near, tiny: F.max_pool1d(near[0], 4, return_indices=True)[1],
    "max_pool2d": lambda near, tiny: F.max_pool2d(near, 4, return_indices=True)[1],
    "max_pool2d, padded": lambda near, tiny: F.max_pool2d(near, 4, 2, 1, return_indices=True)[1],
    "max_pool3d": lambda near, tiny: F.max_pool3d(near, 2, return_indices=True)[1],
    "adaptive_max_pool2d": lambda near, tiny: F.adaptive_max_pool2d(near, 4, return_indices=True)[1],
    "max_unpool2d": lambda near, tiny: F.max_unpool2d(*F.max_pool2d(near, 4, return_indices=True), 4),
    "frac": lambda near, tiny: near.frac(),
    "histc": lambda near, tiny: torch.histc(near, 10, 0.9, 1.1),
    "histc, own range": lambda near, tiny: torch.histc(near, 10),
    "vector_norm": lambda near, tiny: torch.linalg.vector_norm(tiny, 0),
    "norm": lambda near, tiny: torch.norm(tiny, p=0, dim=1),
    "dist": lambda near, tiny: torch.dist(tiny, torch.zeros_like(tiny), 0),
    "xlogy": lambda near, tiny: torch.xlogy(tiny, near * 0),
    "grid_sample": lambda near, tiny: F.grid_sample(
        torch.arange(64.0).view(1, 1, 8, 8).to(near.dtype),
        near[:, :2].permute(0, 2, 3, 1),
        mode="nearest",
        align_corners=False,
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", JUMPS_NEAR_ONE)
def test_jumps_near_one(case: str, dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return JUMPS_NEAR_ONE[case](x * y, x * 1e-8)

    torch.manual_seed(0)
    middle = 0.88 if case == "grid_sample" else 1  # of 8 numbers, the last two meet at 0.75
    x, y = ((middle + torch.randn(1, 4, 16, 16) * 0.02).to(dtype) for _ in range(2))
    program = onnxplug.to_onnx(Model(), (x, y), target=CPU)
    want = Model()(x, y)
    if case.startswith(("histc", "grid_sample")):  # PyTorch counts, and finds places, in 16 bits
        want = JUMPS_NEAR_ONE[case]((x * y).float(), x).to(dtype)
    torch.testing.assert_close(program(x, y)[0], want, rtol=0, atol=0, equal_nan=True)


def test_norms_and_grids_without_jumps_read_the_unrounded_value() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            grid = (x * y)[:, :2].permute(0, 2, 3, 1)
            return torch.linalg.vector_norm(x * y), F.grid_sample(x, grid, align_corners=False)

    args = tuple(torch.randn(1, 4, 8, 8).half() for _ in range(2))
    # The two inputs, and the two results.
    assert counts(onnxplug.to_onnx(Model(), args, target=CPU))["Cast"] == 4


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_where_torch_rounds_them(dtype: torch.dtype, exact: bool) -> None:
    """PyTorch scales by 0.1 in float, not rounded to 16 bits; numbers that it adds or compares with are rounded."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [x * 0.1, 8.396 - x, x / 0.3, x.clamp(-0.1, 0.3), torch.where(x > 0.1, x, 0.7), x > 0.1]

    x = torch.cat([torch.randn(100), torch.tensor([0.1, 0.3])]).to(dtype)
    program = onnxplug.to_onnx(Model(), (x,), target=CPU, exact=exact)
    for got, expected in zip(program(x), Model()(x), strict=True):
        assert torch.equal(got, expected)


def test_overflow_of_float16_shows_with_exact() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x) / x

    x = torch.tensor([1000.0, 2.0], dtype=torch.float16)
    assert Model()(x).tolist() == [float("inf"), 2.0]
    assert onnxplug.to_onnx(Model(), (x,), target=CPU, exact=True)(x)[0].tolist() == [float("inf"), 2.0]
    assert onnxplug.to_onnx(Model(), (x,), target=CPU)(x)[0].tolist() == [1000.0, 2.0]


def test_branches_of_halves() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return torch.cond(x.sum() > 0, lambda a: (a + 1).tanh() - a, lambda a: a * a, (y,)) + y

    x = torch.randn(3, 4).bfloat16()
    program = onnxplug.to_onnx(Model(), (x,), target=CPU)
    for value in (x.abs(), -x.abs()):
        assert torch.allclose(program(value)[0], Model()(value), **looser("widened, models"))


def test_integers_without_a_kernel(isolated_registry: IsolatedRegistry) -> None:
    def plain_product(g: Any, node: Any) -> Any:
        return g.op.MatMul(node.args[0], node.args[1])

    rule = Rule("aten::mm.default", plain_product)
    for dtype in (torch.int8, torch.int16, torch.uint8):
        args = tuple(torch.randint(0, 100, (4, 4)).to(dtype) for _ in range(2))
        program = onnxplug.to_onnx(torch.mm, args, rules=[rule], target=CPU)
        assert torch.equal(program(*args)[0], torch.mm(*args))


def test_kernels() -> None:
    table = {"Add": "7-13 T=f; 14- T=fdl", "Pow": "15- T=f T1=fl; 15- T=l T1=l"}
    kernels = Kernels(table)
    assert kernels.wider(onnx_spec("Add", 13), {"T": BRAIN}) == {"T": FLOAT}
    assert kernels.wider(onnx_spec("Add", 14), {"T": INT64}) is None
    assert kernels.wider(onnx_spec("Add", 13), {"T": INT64}) is None, "there is nothing wider with a kernel"
    assert kernels.wider(onnx_spec("Add", 21), {"T": INT8}) == {"T": INT64}
    assert kernels.wider(onnx_spec("Pow", 21), {"T": BRAIN, "T1": INT64}) == {"T": FLOAT}
    assert kernels.wider(onnx_spec("Pow", 21), {"T": BRAIN, "T1": UINT8}) == {"T": FLOAT, "T1": INT64}
    assert kernels.wider(onnx_spec("Pow", 21), {"T": INT64, "T1": FLOAT}) is None
    # An operator for which a body of other operators stands.
    assert kernels.wider(onnx_spec("Gelu", 21), {"T": HALF}) == {"T": FLOAT}
    assert kernels.wider(onnx_spec("Gelu", 21), {"T": FLOAT}) is None


def test_a_builder_without_kernels_emits_the_operator_itself() -> None:
    g = GraphBuilder({"": 21})
    x = ir.Value(name="x", type=ir.TensorType(INT8), shape=ir.Shape([2]))
    assert g.op.Relu(x).dtype == INT8
    assert g.op.Add(x, x).producer().op_type == "Add"
    with pytest.raises(ConversionError, match=r"MatMul takes .* as input 0, got int8: its schema says so"):
        g.op.MatMul(x, x)


def test_a_plugin_says_which_kernels_its_runtime_has(isolated_registry: IsolatedRegistry) -> None:
    class Chip:
        @hookimpl
        def onnxplug_info(self) -> PluginInfo:
            return PluginInfo(targets=["chip", TargetInfo("chip:v2", kernels={"Relu": "14- T=f", "Abs": "13- T=fh"})])

    isolated_registry.add_plugin(Chip(), name="chip")
    x = (torch.randn(3).half(),)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs().relu()

    for target in (None, "onnxruntime", "chip"):
        assert counts(onnxplug.to_onnx(Model(), x, target=target)) == {"Abs": 1, "Relu": 1}
    for target in ("chip:v2", "chip:v2:b"):
        program = onnxplug.to_onnx(Model(), x, rules=[Rule("aten::neg", abs, target="chip:v2:b")], target=target)
        assert counts(program) == {"Abs": 1, "Relu": 1, "Cast": 2}
        assert torch.equal(program(*x)[0], Model()(*x))
