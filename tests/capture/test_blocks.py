"""Repeated modules are traced once: the program is that of a whole trace, node for node."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import onnxplug
from onnxplug.capture.capture import capture
from onnxplug.errors import CaptureError
from tests.support.sampling import rotated
from tests.support.zoo import ZOO


def is_layout_of_torch(node: torch.fx.Node) -> bool:
    """A copy into another memory layout, which torch 2.15 makes in one of two equal layers.

    With symbolic sizes that may be 0 or 1, its first scaled_dot_product_attention has a result of other strides than a later one of
    equal inputs, so that ``contiguous`` is a node after the first alone, without blocks too.
    """
    return torch.__version__ >= "2.15" and node.target is torch.ops.aten.contiguous.default


def lines(program: torch.export.ExportedProgram) -> list[Any]:
    """Every node with what it says of itself; nodes are numbers, for their names count intermediate results that are gone."""
    nodes_that_count = [node for node in program.graph.nodes if not is_layout_of_torch(node)]
    numbers = {node.name: f"%{i}" for i, node in enumerate(nodes_that_count)}
    for node in program.graph.nodes:
        if is_layout_of_torch(node):
            numbers[node.name] = numbers[node.args[0].name]

    def numbered(value: Any) -> str:
        return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: numbers.get(m[0], m[0]), str(value))

    def noted(value: Any) -> str:
        return re.sub(r"<eval_with_key>\.\d+", "<eval_with_key>", str(value))

    notes = ("val", "nn_module_stack", "stack_trace", "torch_fn")
    nodes = [
        (
            n.op,
            str(n.target) if n.op == "call_function" else "",
            numbered((n.args, n.kwargs)),
            *tuple(noted(n.meta.get(note)) for note in notes),
        )
        for n in nodes_that_count
    ]
    return [*nodes, numbered(program.graph_signature), str(program.range_constraints)]


def both(module: nn.Module, *args: Any, **options: Any) -> dict[str, int]:
    """Captures a model both ways and compares the programs.

    Returns:
        Class to how many of its modules are copies.
    """
    whole = capture(copy.deepcopy(module), args, blocks=False, **options)
    found = capture(module, args, blocks=True, **options)
    assert not whole.blocks
    expected = lines(whole.program)
    for line, other in zip(lines(found.program), expected, strict=True):
        assert line == other
    return found.blocks


@pytest.mark.parametrize("name", rotated(ZOO, every=4))
def test_models_of_the_zoo(name: str) -> None:
    case = ZOO[name]()
    assert both(case.module, *case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes)


X = torch.randn(2, 5, 4)
DYNAMIC: Any = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)


class Model(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """A layer with a function of its own before it."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.function(self, x))).relu() + x


def written(block: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] = 1.0
    y.mul_(2)
    return y.transpose(0, 1).add_(x.transpose(0, 1)).transpose(0, 1)


def branching(block: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def in_half(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.transpose(1, 2)
    return y.float() @ x


def counted(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.calls = block.calls + 1
    return x * block.calls


def listed(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.seen.append(1)
    return x * len(block.seen)


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles what the ReLU gives."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (torch.relu, torch.Tensor.relu) else result


class OfClass(nn.Module):
    """Reads data of its class, or of its dict of attributes, or counts its calls there."""

    scale = 1.0
    calls = 0

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.body = mlp()
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            OfClass.calls += 1
            return self.body(x) * OfClass.calls
        return self.body(x) * self.scale


class OfDict(nn.Module):
    """Reads an attribute past ``__getattribute__``."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.body = mlp()
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * vars(self)["index"]


def scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
    for i, block in enumerate((model.a, model.b)):
        OfClass.scale = float(i + 2)
        x = block(x)
    OfClass.scale = 1.0
    return x


def in_a_mode(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.a(x)
    with Doubling():
        x = model.b(x)
    return model.c(x)


SEEN: list[int] = []
ITERATOR: Iterator[int] = iter(range(10**6))


#: Name to a function of a block, the attributes of the blocks, and whether the later ones can be copies.
FUNCTIONS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], list[dict[str, Any]], bool]] = {
    "plain": (lambda block, x: x * 2, [{}] * 3, True),
    "unread": (lambda block, x: x * 2, [{"layer_idx": i} for i in range(3)], True),
    "read": (lambda block, x: x * block.layer_idx, [{"layer_idx": i} for i in range(3)], False),
    "read, equal": (lambda block, x: x * block.scale, [{"scale": 0.5}] * 3, True),
    "read, -0 and 0": (lambda block, x: x * block.scale, [{"scale": 0.0}, {"scale": -0.0}], False),
    "read, True and 1": (lambda block, x: x * block.scale, [{"scale": True}, {"scale": 1}], False),
    "a list": (lambda block, x: x * block.scales[0], [{"scales": [2.0, i]} for i in (1, 1)], True),
    "another list": (lambda block, x: x * block.scales[1], [{"scales": [2.0, i]} for i in (1, 3)], False),
    "one object": (lambda block, x: x * len(block.seen), [{"seen": SEEN}] * 2, True),
    "an iterator": (lambda block, x: x * next(block.numbers), [{"numbers": ITERATOR}] * 2, False),
    "a tensor": (lambda block, x: x * block.tensor[0], [{"tensor": [torch.ones(4) * i]} for i in (1, 2)], False),
    "calls are counted": (counted, [{"calls": 0}] * 2, False),
    "a list grows": (listed, [{"seen": SEEN}] * 2, False),
    "Python's random numbers": (lambda block, x: x * random.random(), [{}] * 2, False),
    "written": (written, [{}] * 3, True),
    "random": (lambda block, x: F.dropout(x, 0.5) + torch.rand_like(x), [{}] * 3, True),
    "cond": (branching, [{}] * 2, False),
    "autocast": (in_half, [{}] * 3, True),
    "sizes": (lambda block, x: x.reshape(-1, x.shape[1] * 4).view(x.shape) + x.shape[0], [{}] * 3, True),
    "a constant": (lambda block, x: x + torch.tensor(0.5), [{}] * 3, True),
    "no change": (lambda block, x: x, [{}] * 3, True),
}


@pytest.mark.parametrize("dynamic", [None, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_block_reads_and_writes(name: str, dynamic: Any) -> None:
    function, attributes, same = FUNCTIONS[name]
    SEEN.clear()
    random.seed(0)
    model = Model(*(Block(function, **given) for given in attributes)).eval()
    if name in ("calls are counted", "a list grows", "an iterator", "Python's random numbers"):
        found = capture(model, (X,), dynamic_shapes=dynamic)  # a second capture is of another state
        assert not found.blocks
        return
    copied = both(model, X, dynamic_shapes=dynamic)
    assert copied.get("Block", 0) == (len(attributes) - 1 if same else 0)


def test_numbers_of_a_copy_are_its_own() -> None:
    model = Model(*(Block(lambda block, x: x * 2) for _ in range(4))).eval()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=DYNAMIC, verify=True, capture="blocks")
    assert program.statistics.blocks == {"Block": 3}
    names = set(program.model.graph.initializers)
    assert {f"blocks.{i}.norm.weight" for i in range(4)} <= names
    whole = onnxplug.to_onnx(model, (X,), dynamic_shapes=DYNAMIC, capture="whole")
    assert not whole.statistics.blocks
    assert [n.op_type for n in whole.model.graph] == [n.op_type for n in program.model.graph]


class Sequence(nn.Module):
    """Calls its parts as told."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def mlp(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4))


class Pair(nn.Module):
    """Takes and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor | None = None, scale: float = 1.0, sizes: Any = ()) -> Any:
        y = self.body(x) * scale
        y = y if bias is None else y + bias
        return {"y": y.reshape(*sizes) if sizes else y, "x": x, "none": None, "scale": scale}


def shared() -> Any:
    first, second = mlp(), mlp()
    second[0].weight = first[0].weight
    return Model(first, second, mlp())


def tied(x: torch.Tensor, block: Any) -> Any:
    return block(x)


def with_hook() -> Any:
    blocks = [mlp(), mlp(), mlp()]
    blocks[1].register_forward_hook(lambda module, args, result: result * 2)
    return Model(*blocks)


def shadowed() -> Any:
    blocks = [mlp(), mlp(), mlp()]
    blocks[1].forward = lambda x: x * 3  # type: ignore[method-assign]
    return Model(*blocks)


def normalised() -> Any:
    return Model(*(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(4, 4), nn.ReLU(), nn.Tanh()) for _ in range(3))).train()


def outer(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The first block's argument is also read by the blocks past their arguments."""
    model.first.seen["x"] = model.second.seen["x"] = x
    return model.second(model.first(x))


class Reader(nn.Module):
    """Reads a tensor that is no argument."""

    def __init__(self, seen: dict[str, Any]) -> None:
        super().__init__()
        self.body = mlp()
        object.__setattr__(self, "seen", seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.seen["x"] * 2


class Collecting(nn.Module):
    """Adds to a list, a dict or a cache that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor, seen: Any) -> torch.Tensor:
        y = self.body(x)
        if isinstance(seen, dict):
            seen["last"] = y + seen.get("last", 0)
        else:
            seen.append(y)
        return y


class Cache(list[torch.Tensor]):
    """A list of another class."""


def collecting(seen: Callable[[], Any]) -> nn.Module:
    def run(model: Any, x: torch.Tensor) -> Any:
        found = seen()
        y = model.b(model.a(x, found), found)
        return [y, *(found.values() if isinstance(found, dict) else found)]

    return Sequence(run, a=Collecting(), b=Collecting())


SHARED: dict[str, Any] = {}

#: Name to a model and how many modules are copies.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "sequential": (lambda: nn.Sequential(mlp(), mlp(), mlp()), {"Sequential": 2}),
    "stages": (lambda: nn.Sequential(*(nn.Sequential(mlp(), mlp()) for _ in range(3))), {"Sequential": 3}),
    "two widths": (lambda: Model(mlp(), mlp(8), mlp(), mlp(8)), {"Sequential": 2}),
    "one instance, twice": (lambda: Sequence(lambda m, x: m.a(m.a(x)), a=mlp(), b=mlp()), {"Sequential": 1}),
    "shared weights": (shared, {"Sequential": 2}),
    "a hook": (with_hook, {"Sequential": 1}),
    "a forward of its own": (shadowed, {"Sequential": 1}),
    "batch norm in training": (normalised, {"Sequential": 2}),
    "other training modes": (lambda: Model(mlp(), mlp().eval(), mlp()), {"Sequential": 1}),
    "keywords and results": (
        lambda: Sequence(
            lambda m, x: m.b(m.a(x, bias=x.sum(0), scale=2.0)["y"], bias=x.mean(0), scale=2.0), a=Pair(), b=Pair()
        ),
        {"Pair": 1},
    ),
    "other keywords": (
        lambda: Sequence(lambda m, x: m.b(m.a(x, scale=2.0)["y"], scale=3.0)["y"], a=Pair(), b=Pair()),
        {"Sequential": 1},
    ),
    "an argument more": (
        lambda: Sequence(lambda m, x: m.b(m.a(x)["y"], bias=x)["y"], a=Pair(), b=Pair()),
        {"Sequential": 1},
    ),
    "a view of the argument": (
        lambda: Sequence(lambda m, x: m.b(m.a(x, bias=x[0])["y"], bias=x[0])["y"], a=Pair(), b=Pair()),
        {"Sequential": 1},
    ),
    "arguments that are one": (
        lambda: Sequence(lambda m, x: m.b(m.a(x, bias=x)["y"], bias=x)["y"], a=Pair(), b=Pair()),
        {"Sequential": 1},
    ),
    "a tensor that is no argument": (
        lambda: Sequence(outer, first=Reader(SHARED), second=Reader(SHARED)),
        {"Sequential": 1},
    ),
    "a list that grows": (lambda: collecting(list), {}),
    "a dict that grows": (lambda: collecting(dict), {}),
    "a cache that grows": (lambda: collecting(Cache), {"Sequential": 1}),
    "data of the class": (lambda: Model(OfClass(), OfClass(), OfClass()), {"OfClass": 2}),
    "data of the class that changes": (lambda: Sequence(scaled, a=OfClass(), b=OfClass()), {"Sequential": 1}),
    "attributes by their dict": (lambda: Model(OfDict(1), OfDict(2)), {"Sequential": 1}),
    "a mode around one": (
        lambda: Sequence(in_a_mode, **{n: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for n in "abc"}),
        {"Sequential": 1},
    ),
    "another dtype": (
        lambda: Sequence(lambda m, x: m.b(m.a(x).double()), a=mlp(), b=mlp().double()),
        {},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_kinds_of_models(name: str) -> None:
    make, expected = MODELS[name]
    assert (
        both(make().eval() if name not in ("batch norm in training", "other training modes") else make(), X) == expected
    )


def test_calls_counted_in_the_class() -> None:
    OfClass.calls = 0
    program = onnxplug.to_onnx(Model(OfClass(True), OfClass(True)).eval(), (X,), capture="blocks")
    assert program.statistics.blocks == {"Sequential": 1}
    assert OfClass.calls == 2


def test_a_hook_of_all_modules() -> None:
    model = Model(mlp(), mlp(), mlp()).eval()
    called = []
    with nn.modules.module.register_module_forward_hook(lambda module, args, result: called.append(type(module))):
        program = onnxplug.to_onnx(model, (X,), capture="blocks")
    assert called.count(nn.Sequential) == 3
    assert not program.statistics.blocks


def test_a_tensor_that_blocks_share_outside_of_the_model() -> None:
    shared = torch.randn(4)
    model = Model(*(Block(lambda block, x: x + shared) for _ in range(3))).eval()
    assert both(model, X) == {"Block": 2}


def test_stochastic_depth_that_does_nothing() -> None:
    from timm.layers import DropPath

    class Residual(nn.Module):
        def __init__(self, probability: float) -> None:
            super().__init__()
            self.body, self.drop = mlp(), DropPath(probability)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.body(x))

    model = Model(*(Residual(0.1 * i) for i in range(1, 4)))
    assert both(model.eval(), X) == {"Residual": 2}
    assert both(model.train(), X) == {"Sequential": 2}


def test_a_model_that_cannot_be_captured_says_what_it_says_whole() -> None:
    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Model(mlp(), mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks(x)
            return x if x.sum().item() > 0 else -x

    with pytest.raises(CaptureError) as blocks:
        onnxplug.to_onnx(Refused(), (X,), capture="blocks")
    with pytest.raises(CaptureError) as whole:
        onnxplug.to_onnx(Refused(), (X,), capture="whole")
    assert str(blocks.value) == str(whole.value)


def test_classes_are_left_as_they_were() -> None:
    model = Model(mlp(), mlp()).eval()
    capture(model, (X,))
    for cls in (nn.Sequential, nn.Linear, nn.GELU):
        assert "__getattribute__" not in vars(cls)


def test_another_way_to_capture_is_refused() -> None:
    with pytest.raises(onnxplug.UsageError, match=r"capture= takes 'blocks'.* or 'whole', not 'twice'"):
        onnxplug.to_onnx(Model(mlp()), (X,), capture="twice")
