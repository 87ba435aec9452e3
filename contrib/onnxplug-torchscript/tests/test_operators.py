"""The operator set of TorchScript: each operator has a function; functions in Python compute the script's results."""

# ruff: noqa: PT018 (a script has no pytest)
from __future__ import annotations

import math
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from onnxplug_torchscript.interpreter import _SPECIAL
from onnxplug_torchscript.operators import function_of
from onnxplug_torchscript.places import UNKNOWN
from torch import nn
from torch.nn import functional

import onnxplug
from onnxplug import CaptureError
from onnxplug.errors import ConversionError, MissingRuleError
from tests.support.scripts import check_script, scripted, traced

X, Y = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -0.125]]), torch.randn(5, 3)
BATCH = ({0: "batch"},)

#: Operators that no script's graph has: of executors, of remote calls, of training.
NOT_IN_GRAPHS = set(
    "prim::AutogradAllNonZero prim::AutogradAllZero prim::AutogradAnyNonZero prim::BailOut prim::BailoutTemplate "
    "prim::BroadcastSizes prim::ChunkSizes prim::DifferentiableGraph prim::FallbackGraph prim::FusedConcat "
    "prim::FusionGroup prim::Guard prim::IgnoredPythonOp prim::MMBatchSide prim::MMTreeReduce prim::ReductionSizes "
    "prim::RequiresGradCheck prim::StaticRuntimeCopyOuts prim::StaticSubgraph prim::TensorExprDynamicGroup "
    "prim::TensorExprDynamicGuard prim::TensorExprGroup prim::TypeCheck prim::awaitable_nowait prim::awaitable_wait "
    "prim::name prim::oneDNNFusionGroup prim::oneDNNFusionGuard prim::profile prim::profile_ivalue prim::rpc_async "
    "prim::rpc_remote prim::rpc_sync".split()
)


def schemas() -> list[Any]:
    return [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(("aten::", "prim::", "quantized::"))]


def test_every_operator_has_a_function() -> None:
    missing = []
    for schema in schemas():
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if schema.name in _SPECIAL or schema.name in NOT_IN_GRAPHS:
            continue
        step: Any = SimpleNamespace(
            operator=name, kind=schema.name, place=UNKNOWN, node=SimpleNamespace(schema=lambda s=schema: str(s))
        )
        try:
            assert callable(function_of(step))
        except CaptureError:
            missing.append(name)
    assert missing == []
    assert len(schemas()) > 3000


def test_an_operator_that_is_not_there() -> None:
    step: Any = SimpleNamespace(operator="acme::rotate", kind="acme::rotate", place=UNKNOWN, node=None)
    with pytest.raises(CaptureError, match="calls the operator acme::rotate at") as caught:
        function_of(step)
    assert "Import the package" in str(caught.value.hint)


# -- lists, dicts, tuples, strings ---------------------------------------------------------------------------------------


def lists(x: torch.Tensor):
    results = [x * i for i in [1, 2, 3]]
    every = results[::2]
    every.extend([x])
    every.insert(1, x + 1)
    last = every.pop()
    every[0] = last - 1
    every.reverse()
    copied = every.copy()
    copied.append(x)
    numbers = [3, 1, 2]
    numbers.sort()
    numbers.remove(2)
    more = sorted([5, 4]) + numbers * 2
    assert 3 in more and len(every) == 3 and more.count(1) == 2 and more.index(3) == 3
    assert [1, 2] == [1, 2] and [1] != [2]
    every.clear()
    if len(every) == 0:
        return torch.stack(copied), torch.tensor(more), max(more), min(more), sum(more)
    return x, x, 0, 0, 0


def dicts(x: torch.Tensor):
    named: dict[str, torch.Tensor] = {"a": x}
    named["b"] = x + 1
    named.update({"c": x * 2})
    total = torch.zeros(3)
    for name in list(named.keys()):
        total = total + named[name].sum(0)
    for name, value in named.items():
        if name != "a":
            total = total - value[0]
    del named["a"]
    kept = named.pop("b")
    other = named.setdefault("d", x)
    absent = named.get("nothing")
    assert absent is None and "c" in named
    numbered = {1: 2, 3: 4}
    return total, kept, other, len(named), numbered[3], list(named.values())


def strings(x: torch.Tensor, mode: str = "a-b"):
    parts = mode.split("-")
    text = "{}:{}".format(parts[0].upper(), len(parts)) + "%s" % parts[1]  # noqa: UP031, UP032
    assert text.startswith("A:") and text.endswith("b") and "b" in text
    if "-".join(parts).replace("a", "c") == "c-b" and text[0] == "A" and text[-1:] == "b":
        x = x + 1
    if mode.find("b") == 2 and ord("a") == 97 and int("3") == 3 and float("0.5") == 0.5:
        x = x * 2
    return x, len(str(3))


def texts_of_numbers(x: torch.Tensor):
    results = [x]
    wanted = ["0.10000000000000001", "2.", "0.", "12345678901234.", "1.0000000000000001e+300", "inf"]
    for i, number in enumerate([0.1, 2.0, -0.0, 12345678901234.0, 1e300, math.inf]):
        number = number * float(x.dim()) / 2
        if f"{number}" == wanted[i] and str(number) == wanted[i]:
            results.append(x * i)
    whole = 1.0 * x.dim()
    percent = "%s %d %f" % (whole, whole, whole)  # noqa: UP031
    if percent == "2. 2 2.000000" and f"{[whole]}" == "[2.]" and str(("a", x.dim())) == "(a, 2)":
        results.append(x + 1)
    return torch.stack(results)


def oldest_items(x: torch.Tensor):
    named = {"a": x, "b": x + 1}
    _, first = named.popitem()
    named["c"] = x * 3
    return first, list(named.values())


def bits_of_sizes(x: torch.Tensor):
    n, m = x.size(0), int(x.sum())
    return torch.tensor([n ^ 5, m ^ n, -n ^ 3, n << 2, n >> 1, -m >> 1, n & 3, n | 8]), (n > 2) ^ (x.numel() > 7)


class Point(NamedTuple):
    at: torch.Tensor
    weight: int


def tuples(x: torch.Tensor):
    pair: tuple[torch.Tensor, int] = (x + 1, 2)
    value, factor = pair
    point = Point(value, factor)
    three = (1, 2, 3)
    return point.at * point.weight, three[1:], point, pair[0]


class Color(Enum):
    RED = 1
    BLUE = 2


def unions(x: torch.Tensor | list[torch.Tensor], y: tuple[int, float] | None = None):
    scale = 1.0
    if y is not None:
        scale = y[0] * y[1]
    if isinstance(x, torch.Tensor):
        return x * scale
    return x[0] + x[1]


@torch.jit.script
class Accumulator:
    def __init__(self, start: torch.Tensor):
        self.total = start
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        self.total = self.total + x
        self.count += 1

    @property
    def mean(self) -> torch.Tensor:
        return self.total / self.count


def classes(x: torch.Tensor):
    container = Accumulator(x)
    for i in range(3):
        container.add(x * i)
    if x.sum() > 0:
        y = container.mean + 1
    else:
        y = container.mean
    return y, container.count


def numbers(x: torch.Tensor):
    a, b = 7, -2
    n = x.size(1)
    values = [a // b, a % b, -a // 2, a - b, abs(b), int(a / b), int(3.7), n * 2]
    reals = [
        float(a**2),
        float(round(2.5)),
        a / b,
        2.5 // 2,
        float(a),
        math.sqrt(2.0),
        float(math.floor(2.7)),
        math.pi * 2,
        2.0**-1,
        max(1.5, 2.0),
    ]
    values.append(math.ceil(2.1))
    mixed = divmod(7, 3)[0] + (a & 3) + (a | 8) + (a ^ 1) + (1 << 4) + (a >> 1)
    truths = [a > b, not a > b, a > 1 and b > 1, a > 1 or b > 1, bool(n)]
    return x + mixed, torch.tensor(values), torch.tensor(reals), torch.tensor(truths), math.isnan(1.0)


def empty_lists(x: torch.Tensor):
    whole: list[int] = []
    truths: list[bool] = []
    reals: list[float] = []
    rows: list[list[int]] = []
    joined = torch.cat([torch.tensor(whole), x.flatten().to(torch.int64)])
    return (
        joined,
        torch.tensor(truths),
        torch.tensor(reals),
        torch.tensor(rows),
        torch.as_tensor(truths, dtype=torch.int8),
    )


def sizes(x: torch.Tensor):
    n = x.size(0)
    half = (n + 1) // 2
    rest = max(n - 3, 1)
    root = float(n) ** 0.5
    y = torch.zeros(n, 2) + n / 2 + root
    z = torch.cat([x[:half], x[half:]]) if n != 17 else x
    filled = torch.full([rest, n % 4 + 1], float(n))
    shape = x.shape
    assert len(shape) == 2 and shape[-1] == 3 and x.numel() == n * 3 and len(x) == n
    return y, z, filled.sum(), torch.arange(n), torch.tensor([n, 2]), torch.tensor(n), x.new_ones(shape), int(n * 1.5)


def tensors(x: torch.Tensor):
    y = x.clone()
    y[0] = 5.0
    y[:, 1] += x[:, 0]
    y[y > 2] = 0.0
    index = torch.tensor([0, 2])
    z = y[:, index]
    z[torch.tensor([0])] = 1.0
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.is_floating_point() and not x.is_cuda:
        x = x.double()
    a, b = x.chunk(2, 1)
    first = x.unbind(1)[0]
    return (
        z,
        x.to(torch.float16),
        torch.zeros(x.size(0), dtype=torch.int64, device=x.device),
        torch.ones_like(x, dtype=torch.bool),
        x.type_as(y),
        a.t() @ x,
        b,
        first,
        x.T,
        torch.as_tensor([1.5, 2.0]),
    )


def functions(x: torch.Tensor):
    wide = functional.interpolate(x[None, None], scale_factor=2.0, mode="bilinear", align_corners=False)
    return (
        wide,
        functional.softmax(x, -1),
        functional.layer_norm(x, [3]),
        torch.einsum("ij,kj->ik", x, x),
        functional.pad(x, [1, 1]),
        functional.max_pool1d(x.unsqueeze(0), 2),
        functional.gelu(x),
        functional.dropout(x, 0.5, training=False),
        x.std(0, unbiased=False),
        torch.meshgrid([x[:, 0], x[0]], indexing="ij"),
    )


def lists_sum(xs: list[torch.Tensor]) -> torch.Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def forks(x: torch.Tensor):
    with torch.no_grad():
        y = x * 2
    print("printed", x.size(0))
    future = torch.jit.fork(lists_sum, [x, y])
    return torch.jit.wait(future)


def enums(x: torch.Tensor):
    color = Color.BLUE
    if color == Color.RED:
        x = x + 1
    return x * color.value


def lists_of_numbers(x: torch.Tensor):
    result: list[list[float]] = x[:1, :2].tolist()
    return x + result[0][1] * 2


FUNCTIONS: list[tuple[Any, tuple[Any, ...], tuple[Any, ...], Any]] = [
    (lists, (X,), (Y,), BATCH),
    (dicts, (X,), (Y,), BATCH),
    (strings, (X,), (Y,), BATCH),
    (strings, (X, "a-bb"), (Y, "a-bb"), ({0: "batch"}, None)),
    (texts_of_numbers, (X,), (Y,), BATCH),
    (oldest_items, (X,), (Y,), BATCH),
    (bits_of_sizes, (X,), (Y,), BATCH),
    (tuples, (X,), (Y,), BATCH),
    (unions, (X,), (X + 1,), None),
    (unions, ([X, X * 2], (2, 0.5)), ([X + 3, X], (2, 0.5)), None),
    (unions, (X, (2, 0.5)), (X - 1, (2, 0.5)), None),
    (classes, (X,), (Y,), BATCH),
    (numbers, (X,), (Y,), BATCH),
    (empty_lists, (X,), (Y,), BATCH),
    (sizes, (X,), (Y,), BATCH),
    (tensors, (X,), (Y,), BATCH),
    (functions, (X,), (Y,), BATCH),
    (forks, (X,), (Y,), BATCH),
    (enums, (X,), (Y,), BATCH),
    (lists_of_numbers, (X,), (Y,), BATCH),
]


@pytest.mark.parametrize(
    ("function", "first", "second", "dynamic"), FUNCTIONS, ids=lambda v: getattr(v, "__name__", "")
)
def test_constructs(function: Any, first: tuple[Any, ...], second: tuple[Any, ...], dynamic: Any) -> None:
    check_script(scripted(function), first, second, dynamic=dynamic)


def test_a_trace_computes_with_sizes() -> None:
    def model(x: torch.Tensor) -> Any:
        n, m = x.shape
        y = x.reshape(n * m // 3, 3) + n / 2
        z = x.unsqueeze(0).expand(n + 1, n, m)[:, : n - 1]
        half = torch.div(torch.as_tensor(n), 2, rounding_mode="trunc")
        return y, z, torch.arange(n * 2), x[: (n + 1) // 2], x.view(-1, m), x[: int(half)], x * (m / 7)

    check_script(traced(model, X), (X,), (Y,), (X.repeat(4, 1),), dynamic=BATCH)


@pytest.mark.parametrize(
    ("module", "cases"),
    [
        (nn.MultiheadAttention(8, 2, batch_first=True), [[torch.randn(2, 5, 8)] * 3, [torch.randn(2, 5, 8)] * 3]),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
            [[torch.randn(2, 5, 8)], [torch.randn(2, 5, 8)]],
        ),
        (nn.GRUCell(4, 3), [[torch.randn(2, 4)], [torch.randn(2, 4)]]),
        (nn.LSTMCell(4, 3), [[torch.randn(2, 4)], [torch.randn(2, 4)]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers(module: nn.Module, cases: list[list[torch.Tensor]]) -> None:
    check_script(scripted(module.eval()), *cases)


def test_an_lstm_in_a_script() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None):
            return self.lstm(x, state)

    first, second = torch.randn(2, 5, 4), torch.randn(3, 5, 4)
    check_script(scripted(Model().eval()), (first,), (second,), dynamic=({0: "batch"},))


@torch.jit.interface
class Transforms(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = Projects()
        self.listed = nn.ModuleList([Doubles(), Projects()])
        self.named = nn.ModuleDict({"u": Doubles(), "v": Projects()})

    def forward(self, x: torch.Tensor):
        for module in self.listed:
            x = module(x)
        for name, module in self.named.items():
            if name == "v":
                x = x + module(x)
        if x.sum() > 0:
            x = self.transform.forward(x)
        return x


Holds.__annotations__ = {"transform": Transforms}  # torch does not read a name in quotes


def test_interfaces_and_containers_of_modules() -> None:
    check_script(scripted(Holds().eval()), (X,), (Y,), (-X,), dynamic=BATCH)


def test_an_operator_without_a_rule_names_the_line_of_the_script() -> None:
    def hashed(x: torch.Tensor):
        y = x.t() @ x
        return torch.hash_tensor(y)

    with pytest.raises((MissingRuleError, ConversionError), match=rf"{__file__}:{hashed.__code__.co_firstlineno + 2}"):
        onnxplug.to_onnx(scripted(hashed), (X,))
