"""Wrong models: one node of an exported model is changed, and ``verify`` must refuse it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxplug
from onnxplug import VerificationError
from tests.support.zoo import ZOO

LOWEST = torch.finfo(torch.float32).min
HIDDEN = torch.arange(12).reshape(3, 4) % 3 == 0

#: Operator to the operator that takes its place.
SWAPPED = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Add",
    "Div": "Mul",
    "Relu": "Neg",
    "Sigmoid": "Neg",
    "Tanh": "Sigmoid",
    "Erf": "Tanh",
    "Gelu": "Relu",
    "Softmax": "LogSoftmax",
    "LogSoftmax": "Softmax",
    "Sqrt": "Exp",
    "Exp": "Sqrt",
    "ReduceMean": "ReduceSum",
    "ReduceSum": "ReduceMean",
    "GlobalAveragePool": "GlobalMaxPool",
    "Pow": "Mul",
    "Clip": "Max",
    "HardSwish": "HardSigmoid",
    "HardSigmoid": "HardSwish",
}
ORDERED = {"Sub", "Div", "Concat", "MatMul", "Pow", "Greater", "Less"}


class Residual(nn.Module):
    """Convolutions with batch norm, one of them skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)
        nn.init.normal_(self.norm.running_mean)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        return self.head((x + self.second(x)).mean((2, 3)))


class Attention(nn.Module):
    """One head, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (self.q(x) @ self.k(x).mT / 8**0.5).masked_fill(hidden, LOWEST)
        return self.norm(x + scores.softmax(-1) @ self.v(x))


def masked(fill: float, *more: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Scores of which a third are hidden by a fill."""
    return lambda x: torch.cat([torch.sigmoid(x).masked_fill(HIDDEN, fill), *more])


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Half of the results are of size 1e-3, half of size 10."""
    return torch.cat([torch.tanh(x) * 1e-3, 10 + torch.sigmoid(x)])


SMALL: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3), nn.Softmax(-1)), (4, 6)),
    "residual": (Residual, (2, 3, 6, 6)),
    "attention": (Attention, (2, 5, 8)),
    "recurrent": (lambda: nn.LSTM(5, 4, batch_first=True), (2, 6, 5)),
    "lowest": (lambda: masked(LOWEST), (3, 4)),
    "fill": (lambda: masked(-1e9), (3, 4)),
    "infinite": (lambda: masked(float("-inf")), (3, 4)),
    "outlier": (lambda: masked(0.0, torch.tensor([[1.0, 1e6, 0.5, 2.0]])), (3, 4)),
    "extremes": (lambda: masked(-1e9, torch.tensor([[1e30, 1e6, LOWEST, float("nan")]])), (3, 4)),
    "magnitudes": (lambda: magnitudes, (6, 4)),
    "norms": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.SiLU(), nn.LayerNorm(8)), (5, 8)),
    "scalar": (lambda: lambda x: F.log_softmax(x, -1)[:, 0].mean(), (5, 8)),
    "double": (lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double(), (4, 6)),
    "half": (lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).half(), (4, 6)),
}
#: The default run tries few changes of two models, `make zoo` more changes of all models.
WHOLE = [
    *[(name, 6) for name in ("mobilenetv3_small_050", "bert")],
    *[
        pytest.param(name, 40, marks=pytest.mark.long)
        for name in ("mobilenetv3_small_050", "bert", "gpt2", "llama", "vit", "t5")
    ],
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silences ONNX Runtime, which would warn of the right model's shapes in a changed model."""
    monkeypatch.setattr("onnxplug.run.session.LOG_SEVERITY", 3)


def small(name: str) -> onnxplug.OnnxProgram:
    torch.manual_seed(0)
    make, shape = SMALL[name]
    model = make()
    x = torch.randn(shape, dtype={"double": torch.float64, "half": torch.float16}.get(name))
    return onnxplug.to_onnx(model.eval() if isinstance(model, nn.Module) else model, (x,))


def whole(name: str) -> onnxplug.OnnxProgram:
    case = ZOO[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return onnxplug.to_onnx(case.module, case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes)


@contextmanager
def swapped_operator(node: ir.Node) -> Iterator[None]:
    before = node.op_type
    node.op_type = SWAPPED[before]
    yield
    node.op_type = before


@contextmanager
def replaced(node: ir.Node, inputs: dict[int, ir.Value | None]) -> Iterator[None]:
    before = {index: node.inputs[index] for index in inputs}
    for index, value in inputs.items():
        node.replace_input_with(index, value)
    yield
    for index, value in before.items():
        node.replace_input_with(index, value)


@contextmanager
def perturbed(weight: ir.Value) -> Iterator[None]:
    """One element of a weight is moved by half the size of the weight's elements."""
    before = weight.const_value
    assert before is not None
    array = before.numpy().copy()
    array.reshape(-1)[array.size // 2] += 0.5 * abs(array).mean() + 0.01
    weight.const_value = ir.tensor(array, name=weight.name)
    yield
    weight.const_value = before


def mutations(model: ir.Model) -> list[tuple[str, Any]]:
    """Every change of one node or weight: its name, and a function whose context manager holds the change."""
    results: list[tuple[str, Any]] = []
    for node in model.graph:
        name = f"{node.op_type} {node.name}"
        if node.op_type in SWAPPED:
            results.append((f"{name} becomes {SWAPPED[node.op_type]}", lambda n=node: swapped_operator(n)))
        if node.op_type in ORDERED and len(node.inputs) == 2:
            exchanged = {0: node.inputs[1], 1: node.inputs[0]}
            results.append((f"operands of {name}", lambda n=node, e=exchanged: replaced(n, e)))
        if node.op_type in ("Gemm", "Conv") and len(node.inputs) > 2 and node.inputs[2] is not None:
            results.append((f"bias of {name}", lambda n=node: replaced(n, {2: None})))
    floats = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)
    for weight in model.graph.initializers.values():
        if weight.dtype in floats and weight.const_value is not None and weight.const_value.size > 1:
            results.append((f"weight {weight.name}", lambda w=weight: perturbed(w)))
    return results


def outputs(program: onnxplug.OnnxProgram) -> list[torch.Tensor] | None:
    """The model's results on the export's inputs, from a new session; ``None`` where it does not run."""
    assert program.captured is not None
    program.release()
    try:
        return list(program(*program.captured.args, **program.captured.kwargs))
    except VerificationError:
        return None


def visible(before: list[torch.Tensor], after: list[torch.Tensor] | None) -> bool:
    """Whether a change shows: no results, other shapes or NaNs, or an error of 1 % of element plus median size."""
    if after is None:
        return True
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape or not bool((a.isnan() == b.isnan()).all()):
            return True
        x, y = a.double(), b.double()
        size = x.abs()[(x.abs() < 1e3) & (x != 0)]
        bound = 0.01 * (x.abs() + (float(size.median()) if size.numel() else 0.0))
        if bool(((x - y).abs() > bound).any()):
            return True
    return False


def refused(program: onnxplug.OnnxProgram, count: int) -> tuple[list[str], int]:
    """The visible changes that ``verify`` accepted, and the number of visible changes that were tried."""
    before = outputs(program)
    assert before is not None
    assert program.verify().cases
    candidates = mutations(program.model)
    random.Random(0).shuffle(candidates)
    unnoticed, tried = [], 0
    for name, change in candidates:
        if tried == count:
            break
        with change():
            if not visible(before, outputs(program)):
                continue  # the same function: the bias of keys, which softmax takes out again
            tried += 1
            try:
                program.verify(seeds=())
                unnoticed.append(name)
            except VerificationError:
                pass
    program.release()
    assert visible(before, outputs(program)) is False
    return unnoticed, tried


@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if number % 2 else ()) for number, name in enumerate(SMALL)]
)
def test_small_models(name: str, count: int) -> None:
    unnoticed, tried = refused(small(name), count)
    assert unnoticed == []
    assert tried > 0


@pytest.mark.long
@pytest.mark.timeout(3600)  # 40 of MobileNet take eight minutes on a quiet machine
@pytest.mark.parametrize(("name", "count"), WHOLE)
def test_whole_models(name: str, count: int) -> None:
    unnoticed, tried = refused(whole(name), count)
    assert unnoticed == []
    assert tried == count


@pytest.mark.parametrize("fill", [LOWEST, -1e9, -1e4])
def test_an_activation_before_a_masked_fill(fill: float) -> None:
    """Verification once accepted a Neg in the place of Sigmoid before a mask's fill."""
    wrong = onnxplug.Rule("aten::sigmoid", lambda g, node: g.op.Neg(node.args[0]))
    program = onnxplug.to_onnx(masked(fill), (torch.randn(3, 4),), rules=[wrong])
    with pytest.raises(VerificationError, match="8 of 12 elements differ"):
        program.verify()
    with pytest.raises(VerificationError, match="8 of 12 elements differ"):
        program.verify(seeds=(), args=(torch.randn(3, 4),))


def test_an_error_of_small_elements_beside_large_ones() -> None:
    wrong = onnxplug.Rule("aten::tanh", lambda g, node: g.op.Neg(g.op.Tanh(node.args[0])))
    with pytest.raises(VerificationError, match="24 of 48 elements differ"):
        onnxplug.to_onnx(magnitudes, (torch.randn(6, 4),), rules=[wrong]).verify()


def test_outputs_that_nothing_tells_of() -> None:
    """An output too many, an output too few, a mutated buffer or input that the eager model does not have."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x.sum(0))
            x.mul_(2)
            return x + self.count

    program = onnxplug.to_onnx(Counter(), (torch.randn(3, 2),), input_names=["given"], output_names=["sum"])
    assert [value.name for value in program.model.graph.outputs] == ["sum", "count_out", "x_out"]
    assert program.verify().cases
    for node in program.model.graph:
        for index, value in enumerate(program.model.graph.outputs):
            assert value is not None
            if index and node is value.producer() and node.op_type in SWAPPED:
                with swapped_operator(node), pytest.raises(VerificationError):
                    program.verify()
    slot = next(s for s in program.slots if s.target == "count")
    slot.target = "nothing"
    with pytest.raises(VerificationError, match="'count_out' holds the new value of 'nothing'"):
        program.verify()
    slot.target = "count"
    extra = program.model.graph.outputs.pop()
    with pytest.raises(VerificationError, match=r"2 outputs .*, PyTorch 3"):
        program.verify()
    program.model.graph.outputs.extend([extra, program.model.graph.inputs[0]])
    with pytest.raises(VerificationError, match=r"4 outputs .*, PyTorch 3"):
        program.verify()
