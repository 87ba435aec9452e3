"""Equal operator calls are traced once: the program is that of a whole trace, node for node."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode

import onnxplug
from onnxplug.errors import CaptureError
from onnxplug.patches import operator_calls
from onnxplug.patches.operator_calls import can_repeat
from tests.support.patches import without
from tests.support.releases import not_with
from tests.support.sampling import rotated
from tests.support.traces import both, captured, lines
from tests.support.zoo import ZOO

X = torch.randn(2, 5, 4)
DYNAMIC: Any = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)


@pytest.mark.parametrize("name", rotated(ZOO, every=8))
def test_models_of_the_zoo(name: str) -> None:
    case = ZOO[name]()
    result = both(
        lambda: copy.deepcopy(case.module), *case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes
    )
    assert result.repeated > 0


def mlp(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4))


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
    """A layer with a function of its own before it, which is called with the number of the block."""

    def __init__(self, function: Callable[[int, torch.Tensor], torch.Tensor], number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.function = function
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.function(self.number, x))).relu() + x


def blocks(function: Callable[[int, torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """Four blocks: calls of equal kinds come three times more."""
    return lambda: Model(*(Block(function, i) for i in range(4))).eval()


# -- functions of a block ------------------------------------------------------------------------------------------------


def written(i: int, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] = 1.0
    y.mul_(2)
    return y.transpose(0, 1).add_(x.transpose(0, 1)).transpose(0, 1)


def written_through_a_view(i: int, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.view(-1, 4)[1:]
    z.add_(1)
    w = y.t() if y.dim() == 2 else y.transpose(0, 1)
    w += i
    return y + 0


def other_sizes(i: int, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.unsqueeze_(0)
    y.squeeze_(0)
    z = x * 3
    z.transpose_(0, 1)
    return y + z.transpose(0, 1)


def memory_of_inputs(i: int, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.mul(x, float(i), out=out)
    return out


def the_same_or_another(i: int, x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = x + 1
    return torch.cat([y, y if i % 2 else z], 1)[:, : x.shape[1]] * (y * y if i % 2 else y * z)


def views_of_one_or_two(i: int, x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    first, second = y.transpose(0, 1), (y if i % 2 else x + 1).transpose(0, 1)
    first.add_(second)
    return y


def gives_its_operand(i: int, x: torch.Tensor) -> torch.Tensor:
    y = (x if i % 2 else x.transpose(1, 2)).contiguous()
    y = y if i % 2 else y.transpose(1, 2).contiguous()
    return y.to(torch.float32).expand(y.shape).reshape(y.shape)


def branching(i: int, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + x.sin(), lambda x: x.cos() + x.cos(), (x,))


def in_half(i: int, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16 if i % 2 else torch.float16, enabled=i > 0):
        y = x @ x.transpose(1, 2)
    return y.float() @ x


def in_other_default_dtype(i: int, x: torch.Tensor) -> torch.Tensor:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if i % 2 else torch.float32)
        return x + (torch.ones(4, dtype=torch.int64) / 3 + torch.arange(4) * 0.5).float()
    finally:
        torch.set_default_dtype(before)


def with_gradients(i: int, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad() if i % 2 else torch.no_grad():
        y = x.detach().requires_grad_(i % 2 == 1)
        z = (y * 2).sin()
    return z.detach() + int(z.requires_grad)


def inference(i: int, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(i % 2 == 1):
        return x.sin() * 2


def attention(i: int, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH) if i % 2 else contextlib.nullcontext():
        return F.scaled_dot_product_attention(x, x, x, is_causal=i == 2)


def written_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    once, twice, from_data = torch.tensor(2.0), torch.tensor(2.0), torch.tensor(2.0)
    once.add_(1)
    twice.add_(i)
    from_data.copy_(x.sum())
    y = x / once + x / twice + x / from_data
    once.mul_(from_data)
    return y * once + x * twice.item()


def views_of_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    number = torch.tensor(2.0)
    y = x + number.expand_as(x) * number.view(1)
    z = number.unsqueeze(0)
    z.add_(x.mean())
    return y * number + z


def of_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    scale = torch.sqrt(torch.tensor(8, dtype=torch.float) * 3)
    return x / scale.to(x.dtype) + x * scale.to(torch.float64).float() * (scale + scale)


def of_other_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    first = torch.tensor((0.0, -0.0, float("nan"), float("inf"))[i]) * 1
    second = torch.tensor((1, 1.0, True, 2)[i]) * 2
    return x * first + x * second + x * (1 / first).nan_to_num(nan=3.0) * (second == 2)


def of_written_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    number = torch.tensor(2.0) * 3
    before, same = number * 2, number.to(torch.float32)
    number.add_(1)
    after, alias = number * 2, same * 2
    y = x * before + x * after * alias + x * number.item()
    number.copy_(x.mean())
    return y * (number * 2) + (same * 2) * x


def of_views_of_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    number = torch.tensor(2.0) * 1
    view = number.view(1)
    seen = view * 2
    view.add_(i)
    return x * number + x * (view * 2) * seen + x * number.item() + x * (number.reshape(1, 1) * 2)


def of_a_constant_with_others(i: int, x: torch.Tensor) -> torch.Tensor:
    two, one = torch.tensor(2.0) * 1, torch.tensor([1.0])
    both = torch.stack([two, two]).sum() + torch.cat([one, one]).sum() + torch.where(two > one, two, one)
    return x * both + two * x.mean() + x * torch.add(two, one, alpha=i % 2) + x * (two * 2).item()


SHARED = torch.tensor(2.0)


def of_a_constant_of_pythons(i: int, x: torch.Tensor) -> torch.Tensor:
    numbers = np.full((1,), 2.0, np.float32)
    first = torch.tensor(numbers) * 2
    numbers += i
    return x * first + x * (torch.tensor(numbers) * 2) + x * (torch.from_numpy(numbers) * 2) + x * (SHARED * 2)


def branching_on_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    number = torch.tensor(i // 2) * 2 + 1
    return x * 2 if number > 2 else x * int(number.to(torch.int32)) + x * number.float().sqrt().item()


def random_constants(i: int, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(torch.tensor(2.0) * 1) + x * torch.bernoulli(torch.tensor(0.5) * 1)


def deterministic(i: int, x: torch.Tensor) -> torch.Tensor:
    torch.use_deterministic_algorithms(i % 2 == 1)
    try:
        return x.index_add(1, torch.tensor([0, 1]), x[:, :2])
    finally:
        torch.use_deterministic_algorithms(False)


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles what the sine gives."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (torch.sin, torch.Tensor.sin) else result


def in_a_function_mode(i: int, x: torch.Tensor) -> torch.Tensor:
    with Doubling() if i % 2 else contextlib.nullcontext():
        return x.sin()


def vectorised(i: int, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row * (i + 1) + row.sum())(x)


def differentiated(i: int, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: (y.sin() * (i + 1)).sum())(x)


def a_constant(i: int, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor(float(i)) + torch.tensor([1.0, 2.0, 3.0, 4.0]) * torch.tensor(2).item()


FUNCTIONS: dict[str, Callable[[int, torch.Tensor], torch.Tensor]] = {
    "plain": lambda i, x: x * 2,
    "the number": lambda i, x: x * i,
    "-0 and 0": lambda i, x: x * (0.0 if i % 2 else -0.0),
    "NaN": lambda i, x: torch.nan_to_num(x * float("nan"), nan=float("inf") if i % 2 else -float("inf")),
    "True and 1": lambda i, x: x * (True if i % 2 else 1) + torch.full((4,), True if i % 2 else 1),
    "1 and 1.0": lambda i, x: x + torch.full((4,), 1 if i % 2 else 1.0),
    "complex": lambda i, x: (x * (1j if i % 2 else -1j)).real + x,
    "a list of sizes": lambda i, x: x.repeat(*((1, 1, i + 1) if i % 2 else [1, 1, i + 1]))[..., :4],
    "other axes": lambda i, x: x.softmax(i % 3),
    "sizes": lambda i, x: x.reshape(-1, x.shape[1] * 4).view(x.shape) + x.shape[0],
    "sizes of results": lambda i, x: x.flatten(0, 1).relu().view(x.shape) * x.flatten().shape[0] + x.numel(),
    "strides": lambda i, x: x.transpose(0, 1).contiguous().transpose(0, 1) * x.transpose(0, 1).stride(0),
    "sizes of an earlier one": lambda i, x: (lambda y, z: y * y.shape[0] + z * y.flatten().shape[0])(x.sin(), x.cos()),
    "several results": lambda i, x: torch.cat([*x.chunk(2, 2)[::-1], *x.unbind(2)[:0]], 2) + x.max(1)[0].unsqueeze(1),
    "some result alone": lambda i, x: F.layer_norm(x, (4,)) + torch.native_layer_norm(x, [4], None, None, 1e-5)[0],
    "no change": lambda i, x: x,
    "random": lambda i, x: F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(x.shape[1], 4),
    "Python's random numbers": lambda i, x: x * random.Random(i).random(),
    "of a size in data": lambda i, x: x + x.flatten().nonzero().float().sum() + x[x > 0].sum(),
    "written": written,
    "written through a view": written_through_a_view,
    "other sizes in place": other_sizes,
    "given memory": memory_of_inputs,
    "the same or another": the_same_or_another,
    "views of one or two": views_of_one_or_two,
    "gives its operand": gives_its_operand,
    "cond": branching,
    "autocast": in_half,
    "default dtype": in_other_default_dtype,
    "gradients": with_gradients,
    "inference mode": inference,
    "attention": attention,
    "deterministic": deterministic,
    "a function mode": in_a_function_mode,
    "vmap": vectorised,
    "grad": differentiated,
    "a constant": a_constant,
    "constants of one value": lambda i, x: x / torch.tensor(3.0).sqrt() + torch.tensor(2) * x,
    "constants of other values": lambda i, x: x / torch.tensor((0.0, -0.0, 2.0, float("nan"))[i]) + torch.tensor(i) * x,
    "constants of other kinds": lambda i, x: x * torch.tensor((1, 1.0, True, 1)[i]) + x.exp() * torch.tensor([1.0]),
    "written constants": written_constants,
    "views of constants": views_of_constants,
    "of constants": of_constants,
    "of other constants": of_other_constants,
    "of written constants": of_written_constants,
    "of views of constants": of_views_of_constants,
    "of a constant with others": of_a_constant_with_others,
    "of a constant of Python's": of_a_constant_of_pythons,
    "branching on constants": branching_on_constants,
    "random constants": random_constants,
    "branches on constants": lambda i, x: (
        x * 2 if (torch.tensor(i) * torch.tensor(2) > 3).item() else x * torch.tensor(i)
    ),
}


@pytest.mark.parametrize(("name", "sizes"), rotated(FUNCTIONS, ("static", "dynamic"), every=2))
def test_functions_of_blocks(name: str, sizes: str) -> None:
    result = both(blocks(FUNCTIONS[name]), X, dynamic_shapes=DYNAMIC if sizes == "dynamic" else None)
    assert result.repeated > 0 or "below autograd" in result.strategy


@pytest.mark.parametrize(
    "name", ["_get_novelty", "get_novelty", "_is_novelty_enabled", "is_novelty_enabled", "_are_novel"]
)
@pytest.mark.parametrize("values", [(False, True), (0, 1), ("a", "b"), (torch.float16, torch.float32)], ids=str)
def test_a_setting_of_a_later_torch(name: str, values: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call under another value of a setting is no repetition, also where the capture does not know the setting."""
    novelty = list(values)
    monkeypatch.setattr(torch._C, name, lambda: novelty[0], raising=False)
    monkeypatch.setattr(operator_calls, "_SETTINGS", operator_calls._getters())

    def novel(i: int, x: torch.Tensor) -> torch.Tensor:
        novelty[0] = values[i % 2]
        return x.sin()

    assert both(blocks(lambda i, x: x.sin()), X).repeated > both(blocks(novel), X).repeated > 0


def test_a_dispatch_mode_of_the_model() -> None:
    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    def watched(i: int, x: torch.Tensor) -> torch.Tensor:
        with Seen():
            return x.sin()

    both(blocks(watched), X)
    assert names.count("aten.sin.default") == 8  # in each block of both captures


def test_a_kernel_of_somebody_elses_may_look_at_anything() -> None:
    op, key = torch.ops.aten.erfinv.default, torch._C.DispatchKey.CompositeImplicitAutograd
    assert can_repeat(op)
    op.py_kernels[key] = lambda x: x * random.random()
    try:
        assert not can_repeat(op)
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()


def test_custom_operators_are_called_each_time() -> None:
    calls = []

    @torch.library.custom_op("operator_calls::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @counted.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.new_empty((*x.shape, len(calls)))

    traced, _ = captured(blocks(lambda i, x: x * counted(x).shape[-1]), (X,), True)
    sizes = [n.meta["val"].shape[-1] for n in traced.program.graph.nodes if "counted" in str(n.target)]
    assert sizes == [sizes[0] + i for i in range(4)]


def test_results_are_tensors_of_their_own() -> None:
    checked: list[int] = []

    def keep(i: int, x: torch.Tensor) -> torch.Tensor:
        results = [x.sin() for _ in range(3)]
        results[0].number = i  # type: ignore[attr-defined]
        assert not any(hasattr(y, "number") for y in results[1:])
        assert len({y.untyped_storage()._cdata for y in (x, *results)}) == 4
        assert not any(torch._C._is_alias_of(a, b) for a in results for b in results if a is not b)
        checked.append(i)
        return results[1]

    captured(blocks(keep), (X,), True)
    assert checked == [0, 1, 2, 3]


def test_numbers_are_those_of_each_block() -> None:
    model = Model(*(Block(lambda i, x: x * 2, i) for i in range(4))).eval()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=DYNAMIC, verify=True)
    assert program.statistics.repeated > 10
    assert {f"blocks.{i}.norm.weight" for i in range(4)} <= set(program.model.graph.initializers)
    whole = onnxplug.to_onnx(model, (X,), dynamic_shapes=DYNAMIC, capture="whole")
    assert not whole.statistics.repeated
    assert [n.op_type for n in whole.model.graph] == [n.op_type for n in program.model.graph]


def test_a_hook_of_all_modules() -> None:
    called = []
    with nn.modules.module.register_module_forward_hook(lambda module, args, result: called.append(type(module))):
        onnxplug.to_onnx(Model(mlp(), mlp(), mlp()).eval(), (X,))
    assert called.count(nn.Sequential) == 3


def test_stochastic_depth(vision: None) -> None:
    from timm.layers import DropPath

    class Residual(nn.Module):
        def __init__(self, probability: float) -> None:
            super().__init__()
            self.body, self.drop = mlp(), DropPath(probability)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.body(x))

    both(lambda: Model(*(Residual(0.1 * i) for i in range(1, 4))).eval(), X)
    both(lambda: Model(*(Residual(0.1 * i) for i in range(1, 4))).train(), X)


class Gated(nn.Module):
    """Half the rows and columns, each of them times its share of a context, as in FocalNet."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.linear = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Linear(4, 7)
        self.focal = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context, gates = self.linear(self.down(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous().split((4, 3), 1)
        total = torch.zeros(())
        for level, focal in enumerate(self.focal):
            context = focal(context)
            total = total + context * gates[:, level : level + 1]
        return total + context.mean(2, keepdim=True).mean(3, keepdim=True) * gates[:, 2:]


@not_with("2.9", "asks in a convolution whether its height is 1")
@pytest.mark.filterwarnings("error:the exported model is right only where")
def test_the_layout_of_a_repeated_result_fixes_no_size() -> None:
    """A repeated slice is asked for its layout, and its height of 1 in the example is then no guard."""
    model = nn.Sequential(Gated(), Gated()).eval()
    program = onnxplug.to_onnx(model, (torch.randn(2, 4, 4, 6),), dynamic_shapes=({0: "b", 2: "h", 3: "w"},))
    for height in (4, 8, 13):
        x = torch.randn(3, 4, height, 5)
        torch.testing.assert_close(program(x)[0], model(x))


class Turned(nn.Module):
    """Scales rows and columns by a factor that may depend on their layout: with one row they are contiguous when turned."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.conv, self.asks = nn.Conv2d(4, 4, 3, padding=1), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.conv(x).transpose(1, 2)
        factor = 2 if self.asks and turned.is_contiguous() else 3
        return (turned * factor).transpose(1, 2)


@not_with("2.9", "asks no question for a branch on a layout: nothing warns")
def test_a_branch_on_the_layout_of_a_repeated_result() -> None:
    """The first block asks for no layout; the answer for the others is that of the example, with a warning."""
    first = nn.Conv2d(4, 4, 3, stride=(4, 1), padding=1)
    model = nn.Sequential(first, Turned(False), Turned(True), Turned(True)).eval()
    x = torch.randn(2, 4, 4, 9)
    with pytest.warns(UserWarning, match=r"right only where \(\(h \+ 3\)//4\) == 1"):
        program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "b", 2: "h", 3: "w"},))
    torch.testing.assert_close(program(x)[0], model(x))


def test_training() -> None:
    def make() -> nn.Module:
        layers = (
            nn.Sequential(nn.BatchNorm1d(5), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout()) for _ in range(3)
        )
        return Model(*layers).train()

    assert both(make, X, dynamic_shapes=({0: Dim.DYNAMIC},)).repeated > 4


def test_recurrent_layers() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.GRU(4, 4, batch_first=True) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x, _ = layer(x)
            return x

    both(lambda: Layers().eval(), X, dynamic_shapes=({0: Dim.DYNAMIC},))


def test_traces_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares captures with equal calls repeated and stack traces written once, and with torch.export as it is."""
    make = blocks(lambda i, x: x.flatten(0, 1).relu().view(x.shape) * x.shape[0])
    traced, _ = captured(make, (X,), True, dynamic_shapes=DYNAMIC)
    without(monkeypatch, "lean tracing")
    plain, _ = captured(make, (X,), False, dynamic_shapes=DYNAMIC)
    for line, other in zip(lines(traced.program), lines(plain.program), strict=True):
        assert line == other


def test_an_unsupported_torch_traces_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxplug.patches.operator_calls as operator_calls

    monkeypatch.setattr(operator_calls, "_is_supported", lambda: False)
    traced, _ = captured(blocks(FUNCTIONS["plain"]), (X,), True)
    assert traced.repeated == 0


def test_the_error_of_a_model_is_as_without_repeated_calls() -> None:
    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Model(mlp(), mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks(x)
            return x if x.sum().item() > 0 else -x

    texts = []
    for how in ("calls", "whole"):
        with pytest.raises(CaptureError) as caught:
            onnxplug.to_onnx(Refused(), (X,), capture=how)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_another_way_to_capture_is_refused() -> None:
    with pytest.raises(onnxplug.UsageError, match=r"capture= takes 'calls'.* or 'whole' .*, not 'twice'"):
        onnxplug.to_onnx(Model(mlp()), (X,), capture="twice")
