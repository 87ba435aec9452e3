"""Random trees of modules that look alike and are not, each compared with eager PyTorch.

The blocks of a tree have the same code. They differ in attributes (present, absent, of the class or of the instance), in what
they share (counters, tables, buffers, weights, one another), in methods, hooks and properties that only some have, and in how their
parent calls them. ``python -m tests.capture.trees START COUNT`` runs the trees of consecutive seeds.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
import sys
import types
import weakref
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tests.capture.adversary import WIDTH, outcome


class Both(NamedTuple):
    """Two results of a block."""

    first: torch.Tensor
    second: torch.Tensor


class Marked(nn.Parameter):
    """A weight of a class of its own."""


class Shared:
    """The state that all blocks of a tree share, in containers of several kinds."""

    __slots__ = ("array", "count", "kept", "queue", "table", "tables", "views")

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.views: dict[str, torch.Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Begins all but the tensors of the model anew."""
        self.count, self.queue, self.table = 0, collections.deque([1.0]), None
        self.array, self.tables = np.ones(2), dict[str, Any]()


CALLS: list[float] = []


@functools.cache
def ramp(size: int) -> tuple[float, ...]:
    """Numbers that are computed once."""
    return tuple(1 + 0.1 * n for n in range(size))


class Block(nn.Module):
    """A block of a tree; see :meth:`vary` for what an instance may have."""

    gain = 1.0
    window: int | None = None

    def __init__(self, choose: random.Random, shared: Shared, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.shared = shared
        self.register_buffer("steps", torch.zeros(2))
        self.keep(choose)
        count = choose.randrange(1, 4) if depth else 0
        self.inner = nn.ModuleList(Block(choose, shared, depth - 1) for _ in range(count))
        if count > 1 and choose.random() < 0.3:
            self.inner[-1] = choose.choice([self.inner[0], copy.deepcopy(self.inner[0])])
            self.inner[-1].shared = shared
        for child in self.inner:
            object.__setattr__(child, "parent", weakref.ref(self))
        self.asks = [choose.choice(ASKS) for _ in range(choose.randrange(4))]
        for _ in range(choose.randrange(3)):
            self.vary(choose)

    def keep(self, choose: random.Random) -> None:
        """Keeps tensors of the block where its code finds them too: themselves, and views of their memory."""
        kept, steps, weight = self.shared.kept, self.steps, self.linear.weight
        match choose.randrange(8):
            case 0:
                kept.append(steps)
            case 1:
                self.kept = (steps, {"weight": weight})
            case 2:
                kept.append(steps[:1])
            case 3:
                self.shared.views["steps"] = steps.view(1, 2)[0, 1:]
            case 4:
                self.kept = {weight: 1.5, str(id(weight)): 2.0}
            case 5:
                self.find = lambda: steps
            case 6:
                kept.append(weakref.ref(steps)())
                self.register_buffer("again", steps.flip(0) if choose.random() < 0.5 else steps[1:])

    def vary(self, choose: random.Random) -> None:
        """Gives the instance what others lack."""
        number = choose.choice([0.5, 2.0, 3.0])
        match choose.randrange(12):
            case 0:
                self.gain = number
            case 1:
                self.window = choose.randrange(1, 3)
            case 2:
                self.scale = number
            case 3:
                self.linear.weight.scale = number  # type: ignore[assignment]
            case 4:
                self.linear.weight = Marked(self.linear.weight.detach() * number)
            case 5:
                self.mixed = types.MethodType(lambda block, x: x.roll(1, -1) * number, self)  # type: ignore[method-assign]
            case 6:
                self.linear.register_forward_hook(lambda module, args, result: result * number)
            case 7:
                self.norm.register_forward_pre_hook(lambda module, args: (args[0] + number,))
            case 8:
                self.norm = nn.Identity() if number < 1 else nn.LayerNorm(WIDTH, eps=1e-2, bias=False)  # type: ignore[assignment]
            case 9:
                if type(self.linear) is nn.Linear:  # once
                    nn.utils.parametrizations.weight_norm(self.linear)
            case 10:
                self.train(not self.training)
            case _:
                self.options = {"alpha": number, **({"beta": 2.0} if number > 1 else {})}

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        """The method that some instances replace."""
        return x.tanh()

    @property
    def depth(self) -> float:
        """How far the block is from the root."""
        parent = getattr(self, "parent", lambda: None)()
        return 1.0 if parent is None else 1.0 + parent.depth

    def forward(self, x: torch.Tensor, times: float = 1.0, *, pair: bool = False) -> Any:
        y = self.norm(self.linear(x)) * self.gain * times
        if self.window is not None:
            y = y - y.roll(self.window, 1)
        if hasattr(self, "scale"):
            y = y * self.scale
        y = y * getattr(self.linear.weight, "scale", 1.0) + (0.5 if isinstance(self.linear.weight, Marked) else 0.0)
        y = self.mixed(y) * (1.1 if self.training else 1.0)
        for name, value in vars(self).get("options", {}).items():
            y = y + value * len(name)
        for ask in self.asks:
            y = getattr(self, f"ask_{ask}")(y)
        for place, child in enumerate(self.inner):
            result = child(y, 1.0 + place / 4, pair=place == 1)
            y = y + (result.first - result.second if isinstance(result, Both) else result)
        return Both(y, x) if pair else y

    def ask_count(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.count += 1
        return x * (1 + self.shared.count / 8)

    def ask_queue(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.queue.append(self.shared.queue[-1] * 0.9)
        return x * self.shared.queue[-1]

    def ask_array(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.array[0] += 0.25
        return x * float(self.shared.array[0])

    def ask_table(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that the first block makes and the others find."""
        if self.shared.table is None:
            self.shared.table = torch.linspace(0, 1, WIDTH) * self.gain
        return x + self.shared.table

    def ask_tables(self, x: torch.Tensor) -> torch.Tensor:
        """The last result of a block, which a later one finds."""
        before = self.shared.tables.get("last")
        self.shared.tables["last"] = x
        return x if before is None else x + before.mean()

    def ask_steps(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return x + self.steps.sum()

    def ask_kept(self, x: torch.Tensor) -> torch.Tensor:
        """Tensors of the model that the block finds elsewhere, some of them written before."""
        result = self.find() if hasattr(self, "find") else x
        for tensor in (*self.shared.kept, *self.shared.views.values(), result, *self.buffers()):
            x = x * (1.25 if any(tensor is buffer for buffer in self.buffers()) else 0.75) + tensor.sum() / 8
        kept, weight = vars(self).get("kept", ()), self.linear.weight
        if isinstance(kept, dict):
            x = x * kept.get(weight, 0.5) * kept.get(str(id(weight)), 0.5)
        elif kept:
            x = x * (2 if kept[0] is self.steps and kept[1]["weight"] is weight else 3)
        return x

    def ask_kept_write(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in self.shared.kept:
            tensor.mul_(1.5)
        return x

    def ask_class(self, x: torch.Tensor) -> torch.Tensor:
        match x.shape[0]:
            case int() as size:
                return x * (2 if x.__class__ is torch.Tensor and size.__class__ is int else 3)
            case _:
                return x

    def ask_calls(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(self.gain)
        return x * (sum(CALLS) / len(CALLS))

    def ask_ramp(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(ramp(WIDTH))

    def ask_depth(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.depth

    def ask_kind(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if type(x) is torch.Tensor and isinstance(x.shape[0], int) else 3)

    def ask_siblings(self, x: torch.Tensor) -> torch.Tensor:
        parent = getattr(self, "parent", lambda: None)()
        return x + (0 if parent is None else sum(child.gain for child in parent.inner))

    def ask_names(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + len(list(self.named_modules())) / 8 + len(vars(self)) / 64)

    def ask_write(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] += 1
        return x


ASKS = [name.removeprefix("ask_") for name in vars(Block) if name.startswith("ask_")]


class Tree(nn.Module):
    """The tree of a seed; its state begins anew in each call."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        choose = random.Random(seed)
        self.shared = Shared()
        self.eval()
        self.blocks = nn.ModuleList(Block(choose, self.shared, choose.randrange(1, 3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.shared.begin()
        CALLS.clear()
        y = self.blocks[0](x)
        return y, self.blocks[1](y), y.mean()


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for number in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        status, reason = outcome(number, dynamic=number % 3 != 0, make=Tree)
        counts[status] += 1
        if status in ("wrong", *sys.argv[3:]):
            print(f"--- {number} {status}: {reason[:600]}\n{Tree(number)}", flush=True)
    print(dict(counts))
