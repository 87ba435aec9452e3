"""The last resort: programs that torch decomposes as a whole, where a node has no other translation or by request."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, jvp, stack_module_state

import onnxplug
from onnxplug import CaptureError, MissingRuleError, Rule, UsageError
from onnxplug.torch_private import decomposition_table
from tests.support.check import Call, check
from tests.support.tolerances import looser

X = torch.randn(3, 4)
W = torch.randn(2, 4)
BATCH = ({0: "batch"},)
OTHERS = [(torch.randn(7, 4) * 3,), (torch.randn(1, 4),)]


class Ensemble(torch.nn.Module):
    """Three networks by one call of vmap over their stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        networks = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)) for _ in "abc"]
        stacked, _ = stack_module_state(networks)
        self.names = list(stacked)
        self.weights = torch.nn.ParameterList([weight.detach().clone() for weight in stacked.values()])
        self.network = [networks[0]]  # no submodule: it is there for its structure alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = dict(zip(self.names, self.weights, strict=True))
        return torch.vmap(lambda w, x: functional_call(self.network[0], w, (x,)), in_dims=(0, None))(weights, x)


def in_dims(x: torch.Tensor) -> Any:
    return torch.vmap(lambda row, other: torch.softmax(row, 0) + other.sum(), in_dims=(1, None), out_dims=0)(x, x)


def nested(x: torch.Tensor) -> Any:
    """Distances of all pairs of rows."""
    pairs = torch.vmap(lambda a: torch.vmap(lambda b: torch.exp(-((a - b) ** 2).sum()))(x))
    return pairs(x)


VMAPS: dict[str, Callable[..., Any]] = {
    "plain": lambda x: torch.vmap(lambda row: row.sin().sum() * row)(x),
    "in_dims": in_dims,
    "nested": nested,
    "an index that depends on data": lambda x: torch.vmap(lambda row: row[row.argmax()])(x),
    "same randomness": lambda x: torch.vmap(lambda row: row + 0 * torch.rand(4), randomness="same")(x),
    "composite operators around it": lambda x: torch.nn.functional.linear(torch.vmap(torch.cos)(x), torch.ones(2, 4)),
    "jvp": lambda x: jvp(lambda z: z.sin() * z, (x,), (torch.ones_like(x),)),
    "functional_call": Ensemble().eval(),
}


_IS_29 = torch.__version__.startswith("2.9.")
_INDEX = "an index that depends on data"
_BY_NUMBERS = pytest.param(
    _INDEX, marks=pytest.mark.xfail(_IS_29, strict=True, reason="torch 2.9 indexes by numbers, of which vmap has none")
)


@pytest.mark.parametrize("name", [_BY_NUMBERS if name == _INDEX else name for name in VMAPS])
def test_transforms(name: str) -> None:
    program = check(VMAPS[name], X, others=OTHERS, dynamic=BATCH, **looser("core"))
    by_torch = any(operator.startswith("torch._functorch") for operator in program.statistics.decomposed)
    assert by_torch != program.statistics.strategy.endswith("below autograd and functorch")


def test_a_program_that_torch_exported() -> None:
    """Verification compares with the program as it was given, not with torch's decomposition of it."""
    exported = torch.export.export(Call(VMAPS["plain"]), (X,), dynamic_shapes=(({0: torch.export.Dim.DYNAMIC},),))
    program = onnxplug.to_onnx(exported)
    assert program.statistics.decomposed
    assert len(program.verify().cases) > 1


def test_composite_operators_keep_their_rules() -> None:
    program = onnxplug.to_onnx(Call(VMAPS["composite operators around it"]), (X,))
    assert any(node.target is torch.ops.aten.linear.default for node in program.exported_program.graph.nodes)


def test_a_program_without_need_is_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("decomposed")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", never)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
    assert onnxplug.to_onnx(model, (X,)).statistics.decomposed == ()


# -- autocast ----------------------------------------------------------------------------------------------------------


class UnderAutocast(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, enabled: bool = True) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.dtype, self.enabled = dtype, enabled

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.enabled):
            y = torch.relu(self.linear(x))
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ y.float().t()
        return y, z


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """Products are of rounded operands: the captured graph has none of the casts."""
    model = UnderAutocast(dtype).eval()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=BATCH)
    assert program.statistics.decomposed == ("wrap_with_autocast",)
    linear = next(n for n in program.exported_program.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert [argument.meta["val"].dtype for argument in linear.args] == [dtype] * 3
    eps = torch.finfo(dtype).eps
    for x in (X, *(other for (other,) in OTHERS)):
        for ours, theirs in zip(program(x), model(x), strict=True):
            assert ours.dtype is theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4 * eps)


def test_autocast_that_is_off_costs_nothing() -> None:
    program = onnxplug.to_onnx(UnderAutocast(torch.bfloat16, enabled=False).eval(), (X,), dynamic_shapes=BATCH)
    assert program.statistics.decomposed == ()
    assert program.verify().cases


class BranchUnderAutocast(UnderAutocast):
    """torch's pass leaves a region whose graph begins with the graphs of a branch or a loop as a pair of calls."""

    def forward(self, x: torch.Tensor) -> Any:
        def doubled(y: torch.Tensor) -> torch.Tensor:
            return self.linear(y) * 2

        with torch.autocast("cpu", dtype=self.dtype, enabled=self.enabled):
            y = torch.cond(x.sum() > 0, doubled, self.linear, (x,))
        return y, self.linear(x)


@pytest.mark.parametrize("enabled", [True, False])
def test_branch_under_autocast(enabled: bool) -> None:
    model = BranchUnderAutocast(torch.float16, enabled).eval()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=BATCH)
    for x in (X, -X, *(other for (other,) in OTHERS)):
        for ours, theirs in zip(program(x), model(x), strict=True):
            assert ours.dtype is theirs.dtype
            eps = 4 * torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps)


# -- operators whose own decomposition fails ---------------------------------------------------------------------------


LIBRARY = torch.library.Library("lastresort", "FRAGMENT")
LIBRARY.define("unknown(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "unknown", "CompositeExplicitAutograd")
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.register_fake("lastresort::unknown", lib=LIBRARY)
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """Its decomposition pads an odd number of rows, or not, by the example's size."""
    return torch.ops.aten._chunk_cat([x, x + 1], 0, 2)


ROWS = torch.randn(4, 6)


class Recurrent(torch.nn.Module):
    """A recurrent layer after a transform, which only a decomposition of the whole program removes."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(torch.vmap(lambda row: row * 2 + 1)(x))


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(4, 5, num_layers=2, batch_first=True),
        torch.nn.GRU(4, 5, bidirectional=True, batch_first=True),
        torch.nn.RNN(4, 5, batch_first=True),
        torch.nn.RNN(4, 5, nonlinearity="relu", batch_first=True),
        torch.nn.MaxPool1d(3),
    ],
    ids=["lstm", "gru", "tanh", "relu", "pool"],
)
def test_a_decomposition_keeps_composite_operators_of_dynamic_sizes(layer: torch.nn.Module) -> None:
    """torch computes the shapes of their results step by step, or by a kernel that knows plain sizes alone."""
    axes = {0: "batch", 2: "length"} if isinstance(layer, torch.nn.MaxPool1d) else {0: "batch", 1: "length"}
    x = torch.randn(2, 4, 7) if isinstance(layer, torch.nn.MaxPool1d) else torch.randn(2, 7, 4)
    program = onnxplug.to_onnx(Recurrent(layer).eval(), (x,), dynamic_shapes=(axes,))
    assert program.statistics.decomposed
    assert len(program.statistics.operators.keys() & {"Loop", "Scan"}) == 0
    lengths = {case.sizes["length"] for case in program.verify().cases}
    assert len(lengths) > 2


@pytest.mark.xfail(_IS_29, strict=True, reason="torch 2.9's decomposition of an LSTM gives states of four axes")
def test_a_recurrent_layer_of_a_table_is_decomposed() -> None:
    """A recurrent layer is also decomposed into steps, where the caller asks for it."""
    steps = torch.export.default_decompositions()[torch.ops.aten.lstm.input]
    table = {torch.ops.aten.lstm.input: steps}
    model = Recurrent(torch.nn.LSTM(4, 5, batch_first=True)).eval()
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, 4),), decompositions=table, verify=True)
    assert "LSTM" not in program.statistics.operators


def test_conditions_of_the_decomposition_on_sizes_are_reported() -> None:
    """A single decomposition is refused; the whole program's is right where the condition holds, and verified there."""
    with pytest.warns(UserWarning, match="right only where .*batch.*: torch's decomposition"):
        program = onnxplug.to_onnx(in_halves, (ROWS,), dynamic_shapes=BATCH)
    assert program.statistics.decomposed == ("aten::_chunk_cat.default",)
    sizes = [case.sizes["batch"] for case in program.verify().cases]
    assert len(set(sizes)) > 1
    assert not any(size % 2 for size in sizes)


def test_a_dimension_that_the_decomposition_fixes() -> None:
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] == 3 else x - 1

    table = {torch.ops.aten.cos.default: by_size}
    with pytest.raises(CaptureError, match=r"'batch' came out static.*batch == 3"):
        onnxplug.to_onnx(lambda x: x.cos(), (X,), dynamic_shapes=BATCH, decompositions=table)


def test_a_condition_of_a_table() -> None:
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 2 else x - 1

    table = {torch.ops.aten.cos.default: by_size}
    with pytest.warns(UserWarning, match="right only where batch > 2"):
        program = onnxplug.to_onnx(lambda x: x.cos(), (X,), dynamic_shapes=BATCH, decompositions=table)
    assert [str(condition.expr).partition(" ")[2] for condition in program.captured.conditions] == ["> 2"]


def test_a_range_in_which_a_condition_holds() -> None:
    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x.cos().exp() if x.shape[0] > 2 else x - 1

    dims = ({0: torch.export.Dim("batch", min=3, max=64)},)
    table = {torch.ops.aten.sin.default: by_size}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = onnxplug.to_onnx(lambda x: x.sin(), (X,), dynamic_shapes=dims, decompositions=table)
    torch.testing.assert_close(program(torch.ones(5, 4))[0], torch.ones(5, 4).cos().exp())


def test_operators_that_nothing_translates_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's decomposition is not tried where it can't help."""
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    with pytest.raises(MissingRuleError) as raised:
        onnxplug.to_onnx(lambda x: torch.ops.lastresort.unknown(in_halves(x)), (ROWS,), dynamic_shapes=BATCH)
    assert set(raised.value.missing) == {"aten::_chunk_cat.default", "lastresort::unknown.default"}


def test_a_failing_decomposition_leaves_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no way")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", failing)
    with pytest.raises(MissingRuleError, match="_chunk_cat") as raised:
        onnxplug.to_onnx(in_halves, (ROWS,), dynamic_shapes=BATCH)
    assert any("no way" in note for note in raised.value.__notes__)


def test_a_refused_decomposition_leaves_no_condition_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next decomposition would find the condition true, and be taken with the example's branch."""

    def by_size(x: torch.Tensor) -> torch.Tensor:
        return x.exp() if x.shape[0] > 2 else x.sin()

    monkeypatch.setattr("onnxplug.interpret.interpreter.find_decompositions", lambda *_: [by_size, by_size])
    with pytest.raises(MissingRuleError, match=r"holds only where .* > 2; .*holds only where .* > 2"):
        onnxplug.to_onnx(lambda x: torch.ops.lastresort.unknown(x), (X,), dynamic_shapes=BATCH)


# -- decompositions= ---------------------------------------------------------------------------------------------------


def gelu_by_sigmoid(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def test_a_table() -> None:
    """The given function is exported, and the operator's rule is not used."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
    table = {torch.ops.aten.gelu.default: gelu_by_sigmoid}
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=BATCH, decompositions=table)
    assert program.statistics.decomposed == ("aten::gelu.default",)
    assert "Sigmoid" in program.statistics.operators
    for x in (X, *(other for (other,) in OTHERS)):
        torch.testing.assert_close(program(x)[0], gelu_by_sigmoid(model[0](x)).detach())


def test_core() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Hardswish(), torch.nn.LayerNorm(4)).eval()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=BATCH, decompositions="core")
    assert {"aten::linear.default", "aten::hardswish.default"} <= set(program.statistics.decomposed)
    targets = {node.target for node in program.exported_program.graph.nodes}
    assert not targets & {torch.ops.aten.linear.default, torch.ops.aten.layer_norm.default}
    assert program.verify().cases


def test_torchs_own_table() -> None:
    table = torch.export.default_decompositions()
    check(lambda x: torch.nn.functional.hardswish(x), X, others=OTHERS, dynamic=BATCH, decompositions=table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("all", "decompositions='all' is unknown"),
        ([torch.ops.aten.gelu.default], "must be a table from operators to functions or 'core', got a list"),
        ({torch.ops.aten.gelu: gelu_by_sigmoid}, "no overload of an operator"),
        ({"aten::gelu": gelu_by_sigmoid}, "no overload of an operator"),
        ({torch.ops.aten.gelu.default: "sigmoid"}, "'sigmoid' for aten.gelu.default, which is no function"),
    ],
)
def test_tables_that_are_refused(table: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the model is captured."""
    monkeypatch.setattr("onnxplug.pipeline.capture_model", None)
    with pytest.raises(UsageError, match=message):
        onnxplug.to_onnx(lambda x: x, (X,), decompositions=table)


def test_a_rule_of_the_call_is_not_decomposed_away() -> None:
    """torch's whole table, tried last, leaves alone the operators of rules from outside."""

    def convert(g: Any, node: Any) -> Any:
        return g.op.HardSwish(node.args[0])

    program = onnxplug.to_onnx(
        lambda x: torch.vmap(torch.exp)(torch.nn.functional.hardswish(x)),
        (X,),
        rules=[Rule("aten::hardswish", convert)],
        verify=True,
    )
    assert "HardSwish" in program.statistics.operators


def _broadcast_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.broadcast_tensors(x, y)[0] + 1


def test_a_decomposition_that_holds_for_a_size_of_1_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has words of our own: torch's ranges refuse to be empty."""
    library = torch.library.Library("last_resort", "FRAGMENT")
    library.define("first(Tensor x, Tensor y) -> Tensor")
    library.impl("first", _broadcast_first, "CompositeExplicitAutograd")
    first = torch.ops.last_resort.first
    monkeypatch.setitem(decomposition_table, first.default, _broadcast_first)
    dynamic = ({0: "rows", 1: "columns"}, {0: "rows", 1: torch.export.Dim.AUTO})
    inputs = torch.randn(5, 1), torch.randn(5, 5)
    with pytest.raises(MissingRuleError, match=r"last_resort::first.*decomposition raised"):
        onnxplug.to_onnx(lambda x, y: first(x, y), inputs, dynamic_shapes=dynamic)


def _written(operator: Callable[..., Any], x: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    tensors = [x * 3, x[0] * 2]
    operator(tensors, *args)
    return tensors


#: Operators of lists, each computed item by item.
LISTS: dict[str, Callable[..., Any]] = {
    "a number": lambda x: torch._foreach_add([x, x[0] * 2], 1.5),
    "numbers": lambda x: torch._foreach_mul([x, x[0] * 2], [2.0, -3.0]),
    "lists": lambda x: torch._foreach_sub([x, x * 2], [x.sin(), x], alpha=3),
    "a tensor": lambda x: torch._foreach_div([x, x * 2], x.abs().sum()),
    "unary": lambda x: torch._foreach_exp([x, x[0] * 2]),
    "maximum": lambda x: torch._foreach_maximum([x, x * 2], [-x, x * x]),
    "a value": lambda x: torch._foreach_addcmul([x, x * 2], [x, x], [x * 3, -x], 2.0),
    "values": lambda x: torch._foreach_addcdiv([x, x * 2], [x, x], [x.exp(), -x.exp()], [2.0, 3.0]),
    "a weight": lambda x: torch._foreach_lerp([x, x * 2], [-x, x], 0.25),
    "norms": lambda x: torch._foreach_norm([x, x[0] * 2], 1),
    "norms of another dtype": lambda x: torch._foreach_norm([x, x[0] * 2], 3, dtype=torch.float64),
    "maximum of a number": lambda x: torch._foreach_maximum([x, x * 2], 0.5),
    "minimum of numbers": lambda x: torch._foreach_minimum([x, x * 2], [0.5, -0.5]),
    "maximum of a number, in place": lambda x: _written(torch._foreach_maximum_, x, 0.5),
    "zeros, in place": lambda x: _written(torch._foreach_zero_, x),
    "powers of a number": lambda x: torch._foreach_pow(2.5, [x, x[0] * 2]),
}


@pytest.mark.parametrize("name", LISTS)
def test_operators_of_lists(name: str) -> None:
    check(LISTS[name], X, dynamic=BATCH, others=OTHERS)
