"""Scripts as modules: names, inputs, state, and sources of scripts."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError, UsageError
from tests.support.scripts import check_script, scripted, traced
from tests.support.tolerances import looser

X, Y = torch.randn(2, 3), torch.randn(5, 3)
BATCH = ({0: "batch"},)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.second = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.second[1].weight = self.second[0].weight
        self.register_buffer("scale", torch.randn(4))
        self.shift = torch.randn(4)

    def forward(self, x: torch.Tensor):
        x = self.first(x)
        for layer in self.second:
            x = layer(x)
        return x * self.scale + self.shift


def loaded(script: Any) -> Any:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(script, buffer)
        buffer.seek(0)
        return torch.jit.load(buffer)


def frozen(script: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.freeze(script)


def optimized(script: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.optimize_for_inference(script)


WAYS = {
    "scripted": scripted,
    "traced": lambda module: traced(module, X),
    "loaded": lambda module: loaded(scripted(module)),
    "traced and loaded": lambda module: loaded(traced(module, X)),
    "frozen": lambda module: frozen(scripted(module)),
    "frozen and loaded": lambda module: loaded(frozen(traced(module, X))),
    "optimized": lambda module: optimized(scripted(module)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_script(way: str) -> None:
    module = Layers().eval()
    script = WAYS[way](module)
    state = copy.deepcopy({name: tensor.clone() for name, tensor in script.state_dict().items()})
    program = check_script(script, (X,), (Y,), dynamic=BATCH)
    torch.testing.assert_close(program(Y)[0], module(Y).detach())
    assert all(tensor.equal(script.state_dict()[name]) for name, tensor in state.items()), "the script was changed"
    names = set(program.model.graph.initializers)
    if way in ("scripted", "traced", "loaded", "traced and loaded"):
        # A trace has no attributes beside parameters and buffers.
        assert {"first.0.bias", "second.1.bias", "scale", *(() if "traced" in way else ("shift",))} <= names
        wanted = {**module.state_dict(), "shift": module.shift}
        for name in wanted.keys() & names:
            torch.testing.assert_close(
                torch.tensor(program.model.graph.initializers[name].const_value.numpy()), wanted[name]
            )
    elif way == "frozen":
        assert "second.1.bias" in names


def test_a_frozen_script_with_submodules() -> None:
    """The weights that only one branch of the layer's attention reads stay in a submodule."""
    script = frozen(scripted(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()))
    cases = [(torch.randn(batch, time, 6),) for batch, time in ((2, 3), (1, 5), (4, 1))]
    program = check_script(script, *cases, dynamic=({0: "batch", 1: "time"},))
    assert any(name.startswith("self_attn.in_proj_weight") for name in program.model.graph.initializers)


def test_paths_of_modules_and_lines() -> None:
    program = onnxplug.to_onnx(scripted(Layers().eval()), (X,), optimize=False)
    nodes = [fx for fx in program.exported_program.graph.nodes if fx.op == "call_function"]
    paths = [next(reversed(fx.meta["nn_module_stack"].values()))[0] for fx in nodes]
    assert {"first.0", "first.1", "first.2", "second.0", "second.1", ""} == set(paths)
    assert f"{__file__}" in nodes[-1].meta["stack_trace"]


def test_optimized_convolutions() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
            self.linear = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor):
            return self.linear(self.conv(x).flatten(1))

    x, y = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    script = optimized(scripted(Model().eval()))
    program = onnxplug.to_onnx(script, (x,))
    for case in (x, y):
        torch.testing.assert_close(program(case)[0], script(case).detach(), **looser("fast forms"))


class Point(NamedTuple):
    a: torch.Tensor
    b: int


def many_inputs(
    x: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor],
    more: list[torch.Tensor],
    named: dict[str, torch.Tensor],
    optional: torch.Tensor | None = None,
    factor: float = 2.0,
    mode: str = "a",
):
    y = x + pair[0] * pair[1]
    for item in more:
        y = y * item
    if "b" in named:
        y = y - named["b"]
    if optional is not None:
        y = y + optional
    if mode == "a":
        y = y * factor
    return {"y": [y], "all": [pair[0], pair[1]]}, Point(y + 1, len(more))


@pytest.mark.parametrize(
    "rest", [(None,), (X,), (None, 3, "b"), (X, 0.5, "a")], ids=["none", "a tensor", "plain values", "all kinds"]
)
def test_inputs_of_every_kind(rest: tuple[Any, ...]) -> None:
    first = (X, (X, X + 1), [X, X * 2], {"a": X, "b": X * 3})
    second = (X * 2, (X - 1, X + 1), [X + 3, X * 2], {"a": X, "b": X - 3})
    program = check_script(scripted(many_inputs), (*first, *rest), (*second, *rest))
    names = [value.name for value in program.model.graph.inputs]
    assert names[:3] == ["x", "pair_0", "pair_1"]


class _Scaled(nn.Module):
    def forward(self, x, y):
        return x * 2 + y


class _Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Scaled(), _Scaled()

    def forward(self, *args):
        return self.first(args[0], args[1]) - self.second(args[3], args[2])


def test_inputs_that_have_the_same_name() -> None:
    """torch.jit.trace of ``*args`` names the inputs as the submodules do."""
    example, args = (tuple(torch.randn(2, 3) for _ in range(4)) for _ in range(2))
    program = onnxplug.to_onnx(torch.jit.trace(_Difference(), example), example, verify=True)
    assert [value.name for value in program.model.graph.inputs] == ["x", "y", "y_1", "x_1"]
    torch.testing.assert_close(program(*args)[0], _Difference()(*args))


def test_inputs_by_name() -> None:
    def add(x: torch.Tensor, y: torch.Tensor, factor: float = 1.0):
        return x + y * factor

    program = onnxplug.to_onnx(
        scripted(add),
        (X,),
        kwargs={"y": Y[:2], "factor": 3.0},
        dynamic_shapes={"x": {0: "n"}, "y": {0: "n"}, "factor": None},
    )
    assert [value.name for value in program.model.graph.inputs] == ["x", "y"]
    torch.testing.assert_close(program(Y, y=Y * 2, factor=3.0)[0], Y + Y * 2 * 3.0)


def sizes(x: torch.Tensor, y: torch.Tensor):
    return x.view(-1, x.shape[1] * 2), y.view(y.shape[0], -1), x.shape[0] * 2


@pytest.mark.parametrize("way", [scripted, lambda f: traced(f, X.repeat(2, 1), Y)], ids=["scripted", "traced"])
def test_shapes_are_as_dynamic_as_requested(way: Any) -> None:
    def two(x: torch.Tensor, y: torch.Tensor):
        return x.view(-1, x.shape[1] * 2) + x.shape[0] / 2, y.view(y.shape[0] * 3, -1)

    first, second = (X.repeat(2, 1), Y), (torch.randn(6, 3), torch.randn(5, 3))
    program = check_script(way(two), first, second, dynamic={"x": {0: "n"}, "y": None})
    x, y = program.model.graph.inputs
    assert [str(d) for d in x.shape] == ["n", "3"]
    assert list(y.shape) == [5, 3]
    assert all(isinstance(d, int) for v in onnxplug.to_onnx(way(two), first).model.graph.outputs for d in v.shape)


# -- state -------------------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.hidden = torch.zeros(3)
        self.history = [torch.zeros(3), torch.ones(3)]
        self.named = {"a": torch.zeros(3)}
        self.calls = 2
        self.inner = Inner()

    def forward(self, x: torch.Tensor):
        before = self.hidden
        self.hidden = before * 0.5 + x.mean(0)
        self.count += 1
        if x.sum() > 0:
            self.history[0] = self.history[1] + 2
        else:
            self.hidden = self.hidden * 2
        self.history = [self.history[1], self.history[0] + self.hidden]
        self.named["a"] = self.named["a"] + self.history[1]
        self.calls = 2
        return before, self.hidden + self.count, self.inner(x)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.zeros(3)
        self.second = torch.ones(3)

    def forward(self, x: torch.Tensor):
        for _ in range(x.size(0)):
            self.first = self.first * 0.5 + x.sum()
        self.first, self.second = self.second, self.first
        return self.first


def test_state_goes_in_and_out() -> None:
    script = scripted(Stateful())
    with torch.no_grad():
        script(X)
    program = check_script(script, (X,), (X.abs(),), (-Y.abs(),), dynamic=BATCH)
    outputs = [value.name for value in program.model.graph.outputs]
    assert outputs[3:] == [
        f"{name}_out"
        for name in ("count", "hidden", "history.0", "history.1", "inner.first", "inner.second", "named.0")
    ] or set(outputs[3:]) == {
        f"{name}_out"
        for name in ("count", "hidden", "history.0", "history.1", "inner.first", "inner.second", "named.0")
    }
    live = copy.deepcopy(script)
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(seed + 1, 3)
        results = program(x)
        torch.testing.assert_close(list(results[:3]), list(live(x)))
        program.apply_weights(
            {name.removesuffix("_out"): value for name, value in zip(outputs[3:], results[3:], strict=True)}
        )


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor):
        self.calls += 1
        return x * self.calls


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(0, 3)

    def forward(self, x: torch.Tensor):
        self.cache = torch.cat([self.cache, x])
        return self.cache.sum(0)


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(3)]

    def forward(self, x: torch.Tensor):
        self.seen.append(x[0])
        return x


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Counter, "changes its attribute 'calls' from 0 to 1"),
        (Grows, r"changes its attribute 'cache' from a tensor of shape \[0, 3\] .* to a tensor of shape \[2, 3\]"),
        (Appends, "changes its attribute 'seen' from a list of 1 to a list of 2"),
    ],
)
def test_state_that_a_graph_cannot_hold(module: Any, words: str) -> None:
    script = scripted(module())
    before = {name: getattr(script, name) for name in ("calls", "cache", "seen") if hasattr(script, name)}
    with pytest.raises(CaptureError, match=words) as caught:
        onnxplug.to_onnx(script, (X,))
    assert caught.value.hint
    for name, value in before.items():
        assert str(getattr(script, name)) == str(value), "the script was changed"


# -- refused scripts ---------------------------------------------------------------------------------------------------


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"don't fit forward\(x\)"):
        onnxplug.to_onnx(scripted(Counter()), (X, X))
    with pytest.raises(UsageError, match="non-strict"):
        onnxplug.to_onnx(scripted(Layers()), (X,), strict=True)


def test_a_script_in_training_mode_warns() -> None:
    with pytest.warns(UserWarning, match="the model is in training mode"):
        onnxplug.to_onnx(scripted(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), (X,))


def test_an_error_names_the_line_of_the_script() -> None:
    def wrong(x: torch.Tensor):
        y = x + 1
        return y.view(7, 5)

    with pytest.raises(CaptureError, match=rf"{__file__}:{wrong.__code__.co_firstlineno + 2}"):
        onnxplug.to_onnx(scripted(wrong), (X,))


def test_a_frozen_script_that_fails_has_its_own_error() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level = torch.ones(2)

        def forward(self, x: torch.Tensor):
            return x.sum(1) + self.level

    frozen = torch.jit.freeze(scripted(Adds().eval()))
    with pytest.raises(CaptureError, match="was declared dynamic, but aten::add fixes it at 2"):
        onnxplug.to_onnx(frozen, (X,), dynamic_shapes=({0: "batch"},))


def test_a_script_without_forward() -> None:
    with pytest.raises(CaptureError, match="has no forward, only"):
        onnxplug.to_onnx(scripted(nn.LSTM(3, 4)), (torch.randn(2, 5, 3),))


def adds_one(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor):
    return output + 1


def test_hooks_of_parts_are_in_the_graph_and_those_of_the_whole_are_not() -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor):
            return x * 2

    class Whole(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor):
            return self.part(x)

    part = Part()
    part.register_forward_hook(adds_one)
    check_script(scripted(Whole(part)), (X,), (Y,), dynamic=BATCH)
    with pytest.raises(CaptureError, match="Part has forward hooks, which are not in its graph"):
        onnxplug.to_onnx(scripted(part), (X,))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.mean = torch.zeros(3)
        self.seen = {"last": [torch.zeros(3), torch.ones(3)]}

    def forward(self, x: torch.Tensor):
        for i in range(x.size(0)):
            if x[i].sum() > 0:
                self.total.add_(x[i])
                self.mean = self.mean * 0.5 + x[i]
        if x.sum() > 0:
            self.seen["last"] = [self.seen["last"][1], self.total]
        return self.total * self.mean + self.seen["last"][0]


@pytest.mark.long
def test_state_that_a_branch_in_a_loop_writes() -> None:
    check_script(scripted(Nested()), (X,), (Y,), (Y.abs(),), dynamic=BATCH)


class _Prepacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(weight, None)

    def forward(self, x: torch.Tensor):
        return torch.ops.quantized.linear_dynamic(x, self.packed)


def test_object_of_a_class_in_cpp() -> None:
    with pytest.raises(onnxplug.UsageError, match=r"uses an object of a class in C\+\+") as caught:
        onnxplug.to_onnx(scripted(_Prepacked()), (torch.randn(2, 4),))
    assert "linear_prepack" in str(caught.value.hint)


@torch.jit.script
def scaled_rows(x: torch.Tensor, n: int, factor: float, negate: bool):
    y = x[:n] * factor + n
    if negate:
        y = -y
    return y


def test_tensors_for_numbers_are_inputs() -> None:
    args = (torch.randn(6, 3), torch.tensor(4), torch.tensor(0.5), torch.tensor(True))
    program = onnxplug.to_onnx(scaled_rows, args, verify=True)
    assert [value.name for value in program.model.graph.inputs] == ["x", "n", "factor", "negate"]
    for n, factor, negate in ((4, 0.5, True), (0, -2.0, False), (-1, float("inf"), True), (9, 3.0, False)):
        inputs = (args[0], torch.tensor(n), torch.tensor(factor), torch.tensor(negate))
        torch.testing.assert_close(program(*inputs)[0], scaled_rows(*inputs))


def test_a_tensor_beside_numbers() -> None:
    x = torch.randn(6, 3)
    program = onnxplug.to_onnx(scaled_rows, (x, torch.tensor(4), 2, False))
    assert [value.name for value in program.model.graph.inputs] == ["x", "n"]
    for n in (2, 6):
        torch.testing.assert_close(program(x, torch.tensor(n), 2, False)[0], scaled_rows(x, n, 2.0, False))
