"""Traces of single operators leave torch's knowledge of a program's sizes as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import onnxplug
from onnxplug.interpret.decompose import SomeSizesError, trace_function
from onnxplug.torch_private import FakeTensorMode
from tests.support.check import check


def fake(*shape: int) -> Any:
    """A tensor whose sizes are all dynamic, with these examples."""
    mode = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False, duck_shape=False))
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        return mode.from_tensor(torch.ones(shape), symbolic_context=context)


def branching(size: int) -> Any:
    return lambda x: x * 2 if x.shape[0] == size else x.sum(0)


def test_a_refused_trace_is_forgotten() -> None:
    x = fake(5, 3)
    env = x.fake_mode.shape_env
    before = str(env.guards), dict(env.replacements), dict(env.var_to_range)
    for _ in range(2):  # torch keeps its answers: the second time it would not ask
        with pytest.raises(SomeSizesError, match="Eq"):
            trace_function(branching(5), [x])
        assert (str(env.guards), dict(env.replacements), dict(env.var_to_range)) == before
    assert str(x.shape[0].node.expr).startswith("s")


@pytest.mark.parametrize("size", [0, 1])
def test_an_example_of_0_or_1_stands_for_larger_ones(size: int) -> None:
    x = fake(size, 3)
    env = x.fake_mode.shape_env
    symbol = x.shape[0].node.expr
    module = trace_function(branching(size), [x])
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.sum.dim_IntList
    ]
    assert env.backed_var_to_val[symbol] == size
    assert not env.replacements


@pytest.mark.parametrize("step", [2, 64])
@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, torch.nn.functional.huber_loss])
def test_a_size_that_follows_from_another_may_be_1(loss: Any, step: int) -> None:
    """``x[::2]`` of two rows has one."""

    def quantised(x: torch.Tensor) -> torch.Tensor:
        y = torch.fake_quantize_per_tensor_affine(x[torch.arange(0, x.shape[0], step)].unsqueeze(-1), 0.1, 0, 0, 255)
        return loss(y, y + 1, reduction="none")

    others = [(torch.rand(7, 3, 4),), (torch.rand(130, 3, 4),)]
    check(quantised, torch.rand(2, 3, 4), others=others, dynamic=({0: Dim("n")},))


def test_questions_about_strides_are_kept() -> None:
    """The example's matrix is square, so that its transpose has strides of a kind; later nodes take no size for 3."""
    x = fake(3, 3)
    env = x.fake_mode.shape_env

    def strides_are_equal(x: torch.Tensor) -> bool:
        return bool(x.shape[0] == x.shape[1])

    def function(x: torch.Tensor) -> Any:
        same = 1 if strides_are_equal(x) else 2
        return x.new_ones(x.shape[1]) * same, x.new_zeros(x.shape[0])

    module = trace_function(function, [x])
    assert not [guard for guard in env.guards if "Eq" in str(guard.expr)]
    assert not env.replacements
    sizes = [value.meta["val"].shape[0].node.expr for value in module.graph.output_node().args[0]]
    assert sizes == [x.shape[1].node.expr, x.shape[0].node.expr]
    assert sizes[0] != sizes[1]


def test_the_kernel_of_a_convolution_is_not_taken_for_granted() -> None:
    """torch asks whether a batch is smaller than 16, for a kernel's memory format."""
    x = fake(2, 5)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x.unsqueeze(1).expand(-1, 3, -1), x.new_ones(3, 1, 2), groups=3)

    module = trace_function(function, [x])
    assert module.graph.output_node().args[0].meta["val"].shape[0].node.expr == x.shape[0].node.expr
    assert not [guard for guard in x.fake_mode.shape_env.guards if "16" in str(guard.expr)]


def test_the_line_of_another_question() -> None:
    x = fake(4, 3)

    def function(x: torch.Tensor) -> Any:
        return x * 2 if x.shape[0] != 9 else x

    trace_function(function, [x])
    guard = next(guard for guard in x.fake_mode.shape_env.guards if ", 9)" in str(guard.expr))
    assert guard.sloc.framework_loc.filename == __file__


def test_later_nodes_are_converted_for_every_size() -> None:
    """Sizes stay dynamic after a split, whose pieces torch.export knows for the example's sizes alone."""

    def model(x: torch.Tensor) -> Any:
        a, b, c = torch.hsplit(x, (1, 2))
        return a + b, c, torch.arange(x.shape[1]) * 2, x.new_ones(x.shape[1] * x.shape[0])

    dynamic: Any = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    check(model, torch.randn(5, 3), others=[(torch.randn(4, 6),), (torch.randn(1, 2),)], dynamic=dynamic)


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("name", ["logdet", "inv", "svdvals", "binary_cross_entropy", "diff", "grid_sample"])
def test_examples_of_every_size(name: str, size: int) -> None:
    functions: dict[str, Any] = {
        "logdet": torch.logdet,
        "inv": torch.linalg.inv,
        "svdvals": torch.linalg.svdvals,
        "binary_cross_entropy": lambda x: torch.nn.functional.binary_cross_entropy(x.sigmoid(), x.cos().abs()),
        "diff": lambda x: torch.diff(x, dim=1),
        "grid_sample": lambda x: torch.nn.functional.grid_sample(x[:, None], x[..., :2].tanh()[:, None]),
    }
    if size == 0 and name in ("grid_sample", "binary_cross_entropy"):
        pytest.skip("torch refuses it, or gives NaN")
    eye = torch.eye(3) * 4
    x, others = torch.rand(size, 3, 3) + eye, [(torch.rand(n, 3, 3) + eye,) for n in (3, 4)]
    program = check(functions[name], x, others=others, dynamic=({0: Dim.DYNAMIC},))
    assert not isinstance(program.model.graph.inputs[0].shape[0], int)
    assert isinstance(program, onnxplug.OnnxProgram)
