"""Makes random chains: Python source, its parameters and two sets of inputs, all decided by one number."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.chains.operators import HELPERS, TEMPLATES

#: Shapes of the inputs, the first axis of the second set being another size; "f" floats of ordinary size and both signs.
SHAPES = ["2,4,6,6", "1,16,5,5", "2,3,4", "3,4", "2,8", "2,2,5,4", "3,6,6", "4,4", "2,16,4,4", "1,3,8,8"]
SLOT = re.compile(r"\{(w|k|k16|d|t|v|c|c4)?(?::)?([0-9]?,)?([a-z])([0-9]?)('?)(?:,([0-9]))?\}")
#: Element types of the inputs; the common one more often.
DTYPES = [torch.float32] * 8 + [torch.float64, torch.float16]
MAX_ELEMENTS = 20_000


@dataclass(frozen=True)
class Chain:
    """A function in source form.

    Attributes:
        number: The seed of the chain; the same number gives the same chain.
        lines: Statements, one operator or more each.
        outputs: Names of the values that it returns.
        inputs: Two sets of inputs, the second of another first size when the chain is dynamic.
        dynamic: Whether the first axis of the inputs is exported as dynamic, or all axes (``tests.chains.run.axes_of``).
        parameters: Weights, by name.
    """

    number: int
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    inputs: tuple[tuple[torch.Tensor, ...], ...]
    dynamic: bool
    parameters: dict[str, torch.Tensor]

    @property
    def source(self) -> str:
        """A function ``forward(self, x0, …)``."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs[0])))
        body = [f"    {name} = self.{name}" for name in self.parameters] + [f"    {line}" for line in self.lines]
        return "\n".join([f"def forward(self, {names}):", *body, f"    return {', '.join(self.outputs)},"])

    def module(self) -> torch.nn.Module:
        """The chain as a module."""
        scope: dict[str, Any] = {"torch": torch, "F": F, **HELPERS}
        exec(compile(self.source, f"<chain {self.number}>", "exec"), scope)
        module = type("Chain", (torch.nn.Module,), {"forward": scope["forward"]})()
        for name, value in self.parameters.items():
            module.register_buffer(name, value)
        return module

    def __str__(self) -> str:
        shapes = [[tuple(x.shape) for x in inputs] for inputs in self.inputs]
        return f"chain {self.number}{', dynamic' if self.dynamic else ''}, inputs {shapes}:\n{self.source}"


class _Maker:
    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.values: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.lines: list[str] = []

    def tensor(self, shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, with exact ties and zeros here and there."""
        x = torch.randn(tuple(shape), generator=self.generator) * scale
        return torch.where(torch.rand(tuple(shape), generator=self.generator) < 0.05, x.round(), x)

    def inputs(self, shape: Sequence[int], dtypes: Sequence[torch.dtype], scale: float) -> tuple[torch.Tensor, ...]:
        """One input a dtype; integers are of both signs."""
        return tuple(self.tensor(shape, scale if d.is_floating_point else 3 * scale).to(d) for d in dtypes)

    def pick(self, kind: str, rank: str) -> str | None:
        """The name of a value of this kind, a late one more often."""

        def fits(x: torch.Tensor) -> bool:
            if rank and x.dim() != int(rank):
                return False
            if kind == "f":
                return x.is_floating_point()
            if kind == "b":
                return x.dtype == torch.bool
            return kind == "x" or (not x.dtype.is_floating_point and x.dtype != torch.bool)

        names = [name for name, x in self.values.items() if fits(x)]
        if not names:
            return None
        return names[-1] if self.random.random() < 0.6 else self.random.choice(names)

    def parameter(self, role: str, x: torch.Tensor, size: str | None) -> torch.Tensor:
        k = (int(size or 1),) * max(x.dim() - 2, 0)
        shape = {
            "w": lambda: (x.shape[-1], 5),
            "k": lambda: (4, x.shape[1], *k),
            "k16": lambda: (16, x.shape[1], *k),
            "d": lambda: (x.shape[1], 1, *k),
            "t": lambda: (x.shape[1], 3, *k),
            "v": lambda: (x.shape[-1],),
            "c": lambda: (x.shape[1],),
            "c4": lambda: (x.shape[1], 1, 1),
        }[role]()
        return self.tensor(shape, 0.5).to(x.dtype)

    def fill(self, template: str) -> tuple[str, dict[str, torch.Tensor]] | None:
        """The template with values and parameters in its slots."""
        chosen: dict[str, str] = {}
        fresh: dict[str, torch.Tensor] = {}
        missing = False

        def replace(match: re.Match[str]) -> str:
            nonlocal missing
            role, _, kind, rank, prime, size = match.groups()
            if kind == "p":
                return str(self.random.choice([0.125, 0.3, 0.5, 0.7, 1.5, 2.0, 3.0]))
            if kind == "g":
                return str(self.random.choice([-2.0, -1.5, -0.5, 0.0, 0.25, 1.0, 1.7]))
            if kind == "q":
                return str(self.random.choice([-3, -1, 1, 2, 7]))
            key = f"{kind}{rank}{prime}"
            if key not in chosen:
                name = self.pick(kind, rank)
                if name is None:
                    missing = True
                    return ""
                chosen[key] = name
            if not role:
                return chosen[key]
            name = f"p{len(self.parameters) + len(fresh)}"
            fresh[name] = self.parameter(role, self.values[chosen[key]], size)
            return name

        try:
            text = SLOT.sub(replace, template)
        except IndexError:
            return None
        return None if missing else (text, fresh)

    def step(self) -> bool:
        """Adds one line that eager PyTorch runs; false when a few tries give no such line."""
        for _ in range(30):
            family = self.random.choice(list(TEMPLATES))
            filled = self.fill(self.random.choice(TEMPLATES[family]))
            if filled is None:
                continue
            text, fresh = filled
            try:
                with sdpa_kernel(
                    SDPBackend.MATH
                ):  # which refuses keys and values of different lengths, unlike the others
                    result = eval(
                        text, {"torch": torch, "F": F, **HELPERS}, {**self.values, **self.parameters, **fresh}
                    )
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError):
                continue
            if not isinstance(result, torch.Tensor) or not 0 < result.numel() <= MAX_ELEMENTS or result.dim() > 6:
                continue
            if result.is_floating_point() and not result.isfinite().all():
                continue
            name = f"y{len(self.lines)}"
            self.parameters.update(fresh)
            self.values[name] = result
            self.lines.append(f"{name} = {text}")
            return True
        return False


def make(number: int) -> Chain:
    """The chain of this number: two to seven lines over one or two inputs, the second maybe of integers; one to three outputs."""
    maker = _Maker(number)
    shape = [int(n) for n in maker.random.choice(SHAPES).split(",")]
    count = maker.random.choice([1, 1, 2])
    dtype = maker.random.choice(DTYPES)
    dtypes = [dtype, torch.int64 if maker.random.random() < 0.3 else dtype][:count]
    inputs = maker.inputs(shape, dtypes, 1.0)
    maker.values.update({f"x{i}": x for i, x in enumerate(inputs)})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(maker.random.randint(2, 7)):
            if not maker.step():
                break
    if not maker.lines:
        return make(number + 10_000_019)
    names = [line.partition(" ")[0] for line in maker.lines]
    outputs = dict.fromkeys([names[-1], *maker.random.sample(names, maker.random.randint(0, min(2, len(names))))])
    dynamic = maker.random.random() < 0.5
    other = [n + dynamic * (axis == 0) for axis, n in enumerate(shape)]
    second = maker.inputs(other, dtypes, maker.random.choice([1.0, 2.0]))
    # Lines whose values reach no output are dead code: they are left out, from the last to the first.
    kept: list[str] = []
    wanted = set(outputs)
    for name, line in reversed(list(zip(names, maker.lines, strict=True))):
        if name in wanted:
            kept.insert(0, line)
            wanted.update(re.findall(r"\by\d+\b", line.partition("=")[2]))
    used = {name: x for name, x in maker.parameters.items() if any(re.search(rf"\b{name}\b", line) for line in kept)}
    return Chain(number, tuple(kept), tuple(outputs), (inputs, second), dynamic, used)
