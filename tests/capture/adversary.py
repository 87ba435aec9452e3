"""Random programs of everything that a memo of operator calls or a guard on a size may mistake.

A program is a list of instructions on a few tensors: operators on tensors that share memory, chains of views that are written, the
same layers called again with one difference, functions with gradients of their own, tensors of a subclass, and branches on sizes
with random constants. Eager PyTorch runs the same instructions.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import onnxplug
from tests.support.tolerances import looser

Registers = list[torch.Tensor]
WIDTH = 8


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own, which keeps a number of its call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor + x.tanh()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


class Scaled:
    """Holds a tensor, and has each sum scaled."""

    def __init__(self, held: torch.Tensor, factor: float) -> None:
        self.held, self.factor = held, factor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factor = next(x.factor for x in args if isinstance(x, cls))
        made = func(*[x.held if isinstance(x, cls) else x for x in args], **(kwargs or {}))
        return made * factor if func is torch.add else made


class Layer(nn.Module):
    """A layer whose instances differ here and there."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=choose.random() < 0.7)
        self.norm = nn.LayerNorm(WIDTH, eps=choose.choice([1e-5, 1e-5, 1e-2]))
        self.slope = choose.choice([0.1, 0.1, 0.3])
        self.register_buffer("shift", torch.full((WIDTH,), choose.choice([0.0, 0.5])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(self.norm(self.linear(x)) + self.shift, self.slope)


def _put(registers: Registers, place: int, value: torch.Tensor) -> None:
    registers[place % len(registers)] = value


def _view(x: torch.Tensor, kind: int, at: int) -> torch.Tensor:
    """A view of a tensor ``[b, t, 8]``, of any rank."""
    views: list[Callable[[], torch.Tensor]] = [
        lambda: x[:, at % 2 :],
        lambda: x[..., at : at + 3],
        lambda: x.transpose(0, 1),
        lambda: x.flatten(0, 1),
        lambda: x.view(*x.shape[:-1], 2, 4)[..., at % 2, :],
        lambda: x.unsqueeze(0).expand(1, *x.shape),
        lambda: x.select(1, 0),
        lambda: x.chunk(2, -1)[at % 2],
        lambda: x.unfold(-1, 2, 2),
        lambda: x.diagonal(dim1=-1, dim2=1),
        lambda: x.detach(),
        lambda: x[::2],
    ]
    return views[kind % len(views)]()


def _write(x: torch.Tensor, kind: int, number: float) -> None:
    writes: list[Callable[[], Any]] = [
        lambda: x.add_(number),
        lambda: x.mul_(number),
        lambda: x.copy_(x * number + 1),
        lambda: x.zero_(),
        lambda: x.masked_fill_(x > number, number),
        lambda: x.clamp_(max=number),
        lambda: x.relu_(),
        lambda: x.tanh_().sub_(number),
    ]
    writes[kind % len(writes)]()


@dataclass(frozen=True)
class Step:
    """An instruction: a method's name, the places of its tensors, and numbers that the method uses in its own way."""

    name: str
    a: int
    b: int
    c: int
    kind: int
    at: int
    number: float
    constant: int
    other: int
    axis: int
    relation: int
    layer: int

    @classmethod
    def chosen(cls, choose: random.Random, count: int) -> Step:
        """A random instruction on ``count`` tensors."""
        return cls(
            choose.choice(STEPS),
            *(choose.randrange(count) for _ in range(3)),
            choose.randrange(24),
            choose.randrange(5),
            choose.choice([0.5, 0.5, 2.0, -1.0]),
            choose.randrange(1, 9),
            choose.randrange(1, 9),
            choose.randrange(2),
            choose.randrange(6),
            choose.randrange(3),
        )

    def ask(self, x: torch.Tensor) -> bool:
        """The condition on sizes of a branch."""
        n, m = x.shape[self.axis], x.shape[1 - self.axis]
        answers: list[Callable[[], Any]] = [
            lambda: n == self.constant,
            lambda: n > self.constant,
            lambda: n % (self.constant + 1) == self.other % (self.constant + 1),
            lambda: n * m == self.constant * self.other,
            lambda: n in (self.constant, self.other),
            lambda: n + self.constant < m * self.other,
        ]
        return bool(answers[self.relation]())

    def elements(self, p: Program, r: Registers) -> None:
        _put(
            r,
            self.c,
            [
                r[self.a] + r[self.b],
                r[self.a] * r[self.b],
                torch.add(r[self.a], r[self.b], alpha=self.number),
                torch.maximum(r[self.a], r[self.b]),
            ][self.kind % 4],
        )

    def same(self, p: Program, r: Registers) -> None:
        _put(
            r,
            self.c,
            [
                r[self.a] * r[self.a],
                torch.add(r[self.a], r[self.a]),
                r[self.a] - r[self.a].detach(),
                torch.where(r[self.a] > 0, r[self.a], r[self.b]),
            ][self.kind % 4],
        )

    def layered(self, p: Program, r: Registers) -> None:
        _put(r, self.c, p.layers[self.layer](r[self.a]))

    def alias(self, p: Program, r: Registers) -> None:
        _put(r, self.c, r[self.a])

    def copy(self, p: Program, r: Registers) -> None:
        _put(r, self.c, r[self.a].clone() if self.kind % 2 else r[self.a].contiguous())

    def written(self, p: Program, r: Registers) -> None:
        _write(r[self.a], self.kind, self.number)

    def written_view(self, p: Program, r: Registers) -> None:
        view = _view(r[self.a], self.kind, self.at)
        _write(view, self.at, self.number)
        _put(r, self.c, r[self.b] + view.mean())

    def view_of_view(self, p: Program, r: Registers) -> None:
        first = r[self.a][:, :, self.at % 4 :]
        second = first.transpose(1, 2)[:, 1:3]
        _write(second if self.kind % 2 else first, self.kind, self.number)
        _put(r, self.c, r[self.c] * (first.sum() + second.sum()).tanh())

    def gradient(self, p: Program, r: Registers) -> None:
        _put(r, self.c, Doubled.apply(r[self.a], self.number))  # type: ignore[no-untyped-call]

    def subclass(self, p: Program, r: Registers) -> None:
        _put(r, self.c, torch.add(Scaled(r[self.a], self.number), r[self.b]))  # type: ignore[call-overload]

    def branch(self, p: Program, r: Registers) -> None:
        _put(r, self.c, r[self.a] * 3 + 1 if self.ask(r[self.a]) else r[self.b] - 2)

    def sizes(self, p: Program, r: Registers) -> None:
        n = r[self.a].shape[self.axis]
        _put(
            r,
            self.c,
            r[self.a] * (n + self.constant)
            if self.kind % 2
            else r[self.a] + torch.arange(n).sum() / (self.constant + n),
        )

    def settings(self, p: Program, r: Registers) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(self.kind % 2)):
            _put(r, self.c, (r[self.a] @ torch.eye(WIDTH)).float())

    def no_grad(self, p: Program, r: Registers) -> None:
        with torch.set_grad_enabled(bool(self.kind % 2)):
            _put(r, self.c, p.layers[self.layer](r[self.a]).detach())

    def reduced(self, p: Program, r: Registers) -> None:
        _put(r, self.c, r[self.a] - r[self.a].mean(self.at % 3, keepdim=True))

    def buffers(self, p: Program, r: Registers) -> None:
        p.state.add_(self.number)
        _put(r, self.c, r[self.a] * p.state[:WIDTH])

    def kept(self, p: Program, r: Registers) -> None:
        p.kept.append(r[self.a] + self.number)
        _put(r, self.c, p.kept[-1 - self.at % len(p.kept)] * 1)


#: The instructions, common ones several times.
STEPS = """elements elements same layered layered alias copy written written written_view written_view view_of_view gradient subclass
    branch sizes settings no_grad reduced buffers kept""".split()


class Program(nn.Module):
    """The program of a seed.

    Attributes:
        text: Its instructions, in words.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        choose = random.Random(seed)
        self.layers = nn.ModuleList(Layer(choose) for _ in range(3))
        self.register_buffer("state", torch.ones(WIDTH))
        self.kept: list[torch.Tensor] = []
        self.steps = [Step.chosen(choose, 4) for _ in range(choose.randrange(4, 14))]
        self.text = "\n".join(map(str, self.steps))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.kept = []
        registers = [x, x * 2, x + 1, x.tanh()]
        for step in self.steps:
            getattr(step, step.name)(self, registers)
        return tuple(registers)


class Constants(nn.Module):
    """A module that computes with constants of its code, whose values torch knows while it traces, in layers that differ here and there.

    Attributes:
        layers: The instructions of each layer: a name, the places of two constants, and a number.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)

        def step() -> tuple[str, int, int, float]:
            number = choose.choice([1.0, 2.0, 4.5, -1.0, 0.0])
            return choose.choice(CONSTANT_STEPS), choose.randrange(9), choose.randrange(9), number

        first = [step() for _ in range(choose.randrange(3, 10))]
        second, place = list(first), choose.randrange(len(first))
        second[place] = step() if choose.random() < 0.5 else (*first[place][:3], choose.choice([1.0, 3.0]))
        self.layers = [first, second, first, second][: choose.randrange(2, 5)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x
        for steps in self.layers:
            pool = [torch.tensor(2.0), torch.tensor([1.0, 3.0])]
            for name, a, b, number in steps:
                c, d = pool[a % len(pool)], pool[b % len(pool)]
                if name == "item":
                    if c.numel() == 1:
                        y = y * 1.5 if c.item() > number else y + 1
                elif name == "used":
                    y = y * 0.5 + c.sum()
                else:
                    self.change(name, c, d, number, x, pool)
            y = torch.tanh(y + sum(c.sum() * (i + 1) * 0.1 for i, c in enumerate(pool)))
        return (y,)

    @staticmethod
    def change(name: str, c: torch.Tensor, d: torch.Tensor, number: float, x: torch.Tensor, pool: Registers) -> None:
        """Adds a constant to the others, or writes some of them."""
        new: dict[str, Callable[[], torch.Tensor]] = {
            "scalar": lambda: torch.tensor(number),
            "vector": lambda: torch.as_tensor([number, 1.0]),
            "product": lambda: c * number,
            "flat": lambda: c.view(-1),
            "slice": lambda: c.reshape(-1)[:1],
            "axis": lambda: c.unsqueeze(0),
            "detached": c.detach,
            "dtype": lambda: c.to(torch.float32),
            "whole": lambda: c.to(torch.int64).to(torch.float32),
            "copy": c.clone,
            "root": lambda: c.abs().sqrt(),
            "joined": lambda: torch.cat([c.reshape(-1), d.reshape(-1)]),
        }
        if name in new:
            pool.append(new[name]())
        elif name == "detach_":
            if not c._is_view():
                c.detach_()
        else:
            _write(c, int(number), number) if name == "written" else c.add_(x.sum() * 0.01)


#: The instructions on constants.
CONSTANT_STEPS = """scalar vector product flat slice axis detached dtype whole copy root joined detach_ detach_ item used written written
    input""".split()
#: Other sizes that each program runs at.
SIZES = ((3, 4), (1, 7), (5, 2), (4, 9))


def outcome(seed: int, dynamic: bool = True, make: Callable[[int], nn.Module] = Program) -> tuple[str, str]:
    """The outcome of a program: ``right``, ``said`` where a warning names sizes, ``refused``, ``eager`` where PyTorch
    itself fails, or ``wrong``; and the reason.

    Args:
        seed: The program's.
        dynamic: Both sizes are dynamic.
        make: Makes the module of a seed, anew for each run; its results are a tuple of tensors.
    """
    inputs = [torch.randn(*sizes, WIDTH, generator=torch.Generator().manual_seed(seed)) for sizes in ((2, 6), *SIZES)]
    expected: list[Any] = []
    for x in inputs:
        try:
            with torch.no_grad():
                results = make(seed)(sample := x.clone())
            expected.append((*[r.clone() for r in results], sample))
        except Exception as error:
            if not expected:
                return "eager", str(error)
            expected.append(None)
    auto, model = torch.export.Dim.AUTO, make(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            shapes = ({0: auto, 1: auto},) if dynamic else None
            program = onnxplug.to_onnx(model, (inputs[0].clone(),), dynamic_shapes=shapes)
        except onnxplug.OnnxplugError as error:
            return "refused", f"{type(error).__name__}: {error}"
    messages = "; ".join(str(w.message) for w in caught if issubclass(w.category, UserWarning))
    names = [slot.name for slot in program.slots]
    for n, (x, wanted) in enumerate(zip(inputs, expected, strict=True)):
        if wanted is None or (n and not dynamic):
            continue
        try:
            result = dict(zip(names, program(x.clone()), strict=True))
        except onnxplug.OnnxplugError as error:
            if n and (messages or "does not run" not in str(error)):
                messages = messages or str(error)
                continue
            return "wrong", f"at {tuple(x.shape)} {error}"
        for slot, value in zip(program.slots, result.values(), strict=True):
            at = names.index(slot.name)
            right = wanted[at] if at < len(wanted) - 1 else wanted[-1] if slot.kind.name == "INPUT_MUTATION" else None
            if right is None or torch.allclose(value, right, **looser("random programs"), equal_nan=True):
                continue
            if (value - right).abs().max() <= _rounding(make, seed, x, at):
                continue
            if n and messages:
                return "said", messages
            return "wrong", f"at {tuple(x.shape)}: {slot.name} differs by {float((value - right).abs().max())}"
    return "right", messages


def _rounding(make: Callable[[int], nn.Module], seed: int, x: torch.Tensor, at: int) -> float:
    """How far a result moves where the input moves by some units in the last place: normalized rows may be nearly constant."""
    results = []
    for units in (0, 1, 2, 4, 8):
        with torch.no_grad():
            moved = make(seed)(sample := x * (1 + units * torch.finfo(x.dtype).eps))
        results.append((*moved, sample)[at].clone())
    return max(float((result - results[0]).abs().max()) for result in results)


if __name__ == "__main__":
    start, count = int(sys.argv[1]), int(sys.argv[2])
    counts: Counter[str] = Counter()
    for seed in range(start, start + count):
        try:
            status, reason = outcome(seed, dynamic=seed % 3 != 0)
        except Exception as error:
            status, reason = "crashed", f"{type(error).__name__}: {error}"
        counts[status] += 1
        if status in ("wrong", "crashed", *sys.argv[3:]):
            print(f"--- {seed} {status}: {reason[:600]}\n{Program(seed).text}", flush=True)
        if (seed - start) % 100 == 99:
            print(seed - start + 1, dict(counts), flush=True)
