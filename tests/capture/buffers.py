"""Random modules that read numbers from their own buffers, of which some are written: before a read, after it, or through an alias.

``python -m tests.capture.buffers START COUNT`` runs the modules of consecutive seeds.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.capture.adversary import WIDTH, outcome

#: The instructions, common ones several times.
STEPS = """view view view derive derive derive read read read read write write used rebind inner data out foreach norm function input
    held cond made placed settled""".split()
NAMES = ("flag", "count", "table", "twin", "sizes", "plain", "weight")

VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda c: c.view(-1),
    lambda c: c.reshape(-1)[:1],
    lambda c: c.unsqueeze(0),
    lambda c: c.detach(),
    lambda c: c.data,
    lambda c: c.expand(2, *c.shape),
    lambda c: c.reshape(-1).as_strided((1,), (1,)),
    lambda c: c.reshape(-1)[-1],
    lambda c: c.reshape(-1).unbind()[0],
)
RESULTS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda c, d: c * 2,
    lambda c, d: c.float(),
    lambda c, d: c.clone(),
    lambda c, d: c.to(c.dtype),
    lambda c, d: torch.cat([c.reshape(-1).float(), d.reshape(-1).float()]),
    lambda c, d: c > 0,
    lambda c, d: torch.where(c > 0, 1.0, -1.0),
    lambda c, d: c.reshape(-1).float().cumsum(0),
    lambda c, d: c.contiguous(),
    lambda c, d: c.sum(),
)
READS: tuple[Callable[[torch.Tensor, float], float], ...] = (
    lambda c, n: float(c) if c.numel() == 1 else float(c.max()),
    lambda c, n: float(c.sum().item()),
    lambda c, n: float(c.reshape(-1).tolist()[-1]),
    lambda c, n: 1.0 if (c > n).any() else 0.0,
    lambda c, n: float(int(c.reshape(-1)[0])),
    lambda c, n: 1.0 if bool(c.reshape(-1)[-1] > n) else -1.0,
)
#: Writes, each with whether it takes tensors of bools or integers, and tensors of several axes.
WRITES: tuple[tuple[Callable[[torch.Tensor, torch.Tensor, float], Any], bool, bool], ...] = (
    (lambda c, d, n: c.zero_(), True, True),
    (lambda c, d, n: c.copy_(d.sum() > 0), True, True),
    (lambda c, d, n: c.fill_(1), True, True),
    (lambda c, d, n: c.reshape(-1)[:1].fill_(1), True, True),
    (lambda c, d, n: c.add_(1), False, True),
    (lambda c, d, n: c.mul_(n), False, True),
    (lambda c, d, n: c.index_put_((torch.tensor([0]),), torch.ones((), dtype=c.dtype)), True, False),
    (lambda c, d, n: c.scatter_(0, torch.tensor([0]), n), False, False),
)


class Doubled(torch.autograd.Function):
    """Writes its operand."""

    @staticmethod
    def forward(ctx: Any, c: torch.Tensor) -> torch.Tensor:
        c.mul_(2)
        ctx.mark_dirty(c)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


class Inner(nn.Module):
    """A submodule that may share memory with its parent."""

    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("shared", shared)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, y: torch.Tensor, number: float, writes: bool) -> torch.Tensor:
        if writes:
            self.steps += 1
        if self.steps > number:
            y = y * 1.25
        if writes:
            self.shared.add_(number)
        return y


class Buffers(nn.Module):
    """The module of a seed.

    Attributes:
        steps: Its instructions: a name, the places of two tensors, and a number.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.register_buffer("flag", torch.tensor(choose.random() < 0.5))
        self.register_buffer("count", torch.tensor(choose.randrange(3)))
        self.register_buffer("table", torch.tensor([choose.choice([0.0, 1.0, -1.0, 2.5]) for _ in range(4)]))
        self.register_buffer("twin", self.table[1:3], persistent=False)
        self.register_buffer("sizes", torch.tensor([choose.randrange(4) for _ in range(3)]))
        self.plain = torch.tensor([1.0, -1.0])
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.inner = Inner(choose.choice([self.table, self.table[:2], self.sizes.float(), self.twin]))
        self.held = [self.sizes, {"table": self.table}]
        numbers = (1.0, 2.0, 0.0, -1.0, 0.5)
        self.steps = [
            (choose.choice(STEPS), choose.randrange(30), choose.randrange(30), choose.choice(numbers))
            for _ in range(choose.randrange(3, 12))
        ]
        self.order = choose.sample(NAMES, len(NAMES))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, pool = x, [getattr(self, name) for name in self.order]
        for name, a, b, number in self.steps:
            c, d = pool[a % len(pool)], pool[b % len(pool)]
            if name == "read":
                value = READS[b % len(READS)](c, number)
                y = y * 1.5 if value > number else y + (value if value > -number else 1)
            elif name == "used":
                y = y * 0.5 + c.sum() * 0.1
            elif name == "inner":
                y = self.inner(y, number, b % 2 == 0)
            elif name == "cond" and c.dtype == torch.bool and not c.dim():
                y = torch.cond(c, lambda z: z + 1.0, lambda z: z * 2.0, (y,))
            elif name == "norm":
                rows = y.reshape(-1, WIDTH)[:, :4]
                y = y + F.batch_norm(rows, self.table, torch.ones(4), training=True).sum() * 0.01
            else:
                pool += self.found(name, c, d, b, number)
                if not c.requires_grad:
                    pool += self.written(name, c, d, b, number, x)
        return (torch.tanh(y), *[c.detach().clone().float().sum() + y.sum() * 0 for c in pool[:9]])

    def found(self, name: str, c: torch.Tensor, d: torch.Tensor, b: int, number: float) -> list[torch.Tensor]:
        """A view, a result, or another tensor of the module, in whose place the module may keep a result."""
        if name == "rebind":
            rebound = ("table", "flag", "count")[b % 3]
            before = getattr(self, rebound)
            setattr(
                self, rebound, before + number if rebound == "table" else ~before if rebound == "flag" else before + 1
            )
            return [getattr(self, rebound)]
        new: dict[str, Callable[[], Any]] = {
            "view": lambda: VIEWS[b % len(VIEWS)](c),
            "derive": lambda: RESULTS[b % len(RESULTS)](c, d),
            "held": lambda: self.held[0] if b % 2 else self.held[1]["table"],
            "made": lambda: torch.tensor(number),
            "placed": lambda: getattr(self, NAMES[b % 6]),
        }
        return [new[name]()] if name in new else []

    def written(
        self, name: str, c: torch.Tensor, d: torch.Tensor, b: int, number: float, x: torch.Tensor
    ) -> list[torch.Tensor]:
        """Writes a tensor; the result of a function that writes it."""
        is_real = c.is_floating_point()
        if name == "write":
            write, of_all_types, of_all_ranks = WRITES[b % len(WRITES)]
            if (of_all_types or is_real) and (of_all_ranks or c.dim() == 1):
                write(c, d, number)
        elif name == "settled" and not self.flag:
            self.table.fill_(number)
            if b % 2:
                self.flag.fill_(True)
        elif is_real:
            if name == "data":
                c.data.add_(number)
            elif name == "out":
                torch.add(c.detach(), number, out=c)
            elif name == "foreach":
                torch._foreach_add_([c], number)
            elif name == "input":
                c.add_(x.mean() * 0.01) if b % 2 else c.copy_(x.mean() > 0)
            elif name == "function":
                return [Doubled.apply(c)]
        return []


if __name__ == "__main__":
    start, count = int(sys.argv[1]), int(sys.argv[2])
    counts: Counter[str] = Counter()
    for seed in range(start, start + count):
        status, reason = outcome(seed, dynamic=seed % 3 != 0, make=Buffers)
        counts[status] += 1
        if status == "wrong":
            print(f"--- {seed} {reason}\n{Buffers(seed).order}\n{Buffers(seed).steps}", flush=True)
    print(dict(counts))
