"""Random modules that return early where nothing was found: with the results of the rest of the model, or with other results.

``python -m tests.capture.returns START COUNT`` runs the modules of consecutive seeds.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import onnxplug

Tensor = torch.Tensor
#: Rows of x that are found, by a threshold.
_FOUND: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda x, at: x[x[:, 0] > at],
    lambda x, at: x[(x[:, 0] > at).nonzero()[:, 0]],
    lambda x, at: x[torch.where(x[:, 0] > at)[0]],
    lambda x, at: torch.masked_select(x, x > at).unsqueeze(-1).expand(-1, 4),
    lambda x, at: x[x.amax(1) > at] * 2,
)
_IS_EMPTY: tuple[Callable[[Tensor], Any], ...] = (
    lambda y: len(y) == 0,
    lambda y: y.numel() == 0,
    lambda y: not y.shape[0],
    lambda y: y.shape[0] < 1,
    lambda y: not y.shape[0] > 0,
    lambda y: y.size(0) * 2 == 0,
    lambda y: len(y) < 2,
    lambda y: len(y) == 1,
)


def _shifted(x: Tensor) -> Tensor:
    copy = x.clone()
    copy[:, :2] = x[:, 2:] * 2
    return copy


def _written(y: Tensor, x: Tensor) -> Tensor:
    y[:, :1].mul_(3)
    return x * 2


def _part_written(x: Tensor) -> Tensor:
    parts = x.unbind(1)
    parts[1].mul_(2)
    return parts[0] + 1


def _written_through(x: Tensor) -> Tensor:
    copy = x * 2
    kept = torch.dropout(copy, 0.5, False)
    copy[:1].add_(1)
    return kept


#: Results of the rest of the model: of x, of the rows that were found, and of the threshold.
_RESULTS: tuple[Callable[[Tensor, Tensor, float], Tensor], ...] = (
    lambda x, y, at: y * 2,
    lambda x, y, at: y[:, :2],
    lambda x, y, at: y.sum(1),
    lambda x, y, at: y.sum(0),
    lambda x, y, at: y / y.max(),
    lambda x, y, at: y.sort(0)[0],
    lambda x, y, at: y[y[:, 1] > at],
    lambda x, y, at: y[0],
    lambda x, y, at: torch.arange(len(y)),
    lambda x, y, at: y.cumsum(0).T,
    lambda x, y, at: torch.cat([y, y + 1]),
    lambda x, y, at: torch.cat([y, x]),
    lambda x, y, at: x.mean(0) + at,
    lambda x, y, at: x[x[:, 2] > at],
    lambda x, y, at: y[y[:, 0].argsort()].unsqueeze(1).expand(-1, 2, -1),
    lambda x, y, at: torch.full((len(y), 3), at),
    lambda x, y, at: (y @ y.T).softmax(-1) @ y,
    lambda x, y, at: y[:, 0] > at,
    lambda x, y, at: _shifted(y),
    lambda x, y, at: _shifted(x),
    lambda x, y, at: _written(y, y),
    lambda x, y, at: _written(y, x),
    lambda x, y, at: x[(x[:, 2] > at).nonzero()[:, 0]].mul_(2),
    lambda x, y, at: _written(x, x),
    lambda x, y, at: _part_written(x),
    lambda x, y, at: _part_written(y),
    lambda x, y, at: _written_through(x),
)
#: Results of an early return: of x, and of the rest's result at the same place for no rows.
_RETURNED: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, r: x.new_zeros(r.shape, dtype=r.dtype),
    lambda x, r: torch.empty(r.shape, dtype=r.dtype),
    lambda x, r: torch.zeros(tuple(r.shape), dtype=r.dtype),
    lambda x, r: x.new_ones(1, *r.shape[1:]),
    lambda x, r: torch.zeros(0, 7),
    lambda x, r: torch.zeros(r.shape, dtype=torch.float64),
    lambda x, r: x[:0],
    lambda x, r: x,
    lambda x, r: torch.zeros(r.shape if x.shape[0] > 4 else (0, 9), dtype=r.dtype),
    lambda x, r: torch.zeros(r.shape if x.shape[0] == 12 else (0, 9), dtype=r.dtype),
)


class Returns(nn.Module):
    """A module of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random_ = random.Random(seed)
        self.at = random_.choice((0.3, 0.6, 0.9))
        self.found, self.is_empty = random_.choice(_FOUND), random_.choice(_IS_EMPTY)
        self.results = random_.choices(_RESULTS, k=random_.choice((1, 1, 2, 3)))
        kept = random_.random() < 0.6  # what the rest has
        self.returned = [None if kept else random_.choice(_RETURNED) for _ in self.results]
        self.constructor = random_.choice(_RETURNED[:3])
        self.early_writes = random_.random() < 0.15
        self.is_nested, self.goes_on = random_.random() < 0.3, random_.random() < 0.2
        self.writes = random_.choice((0, 0, 0, 0, 1, 2))
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(2))

    def _rest(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [result(x, y, self.at) for result in self.results]

    def _early(self, x: Tensor, y: Tensor) -> list[Tensor]:
        if self.writes == 1:
            self.counts.add_(1)
        if self.early_writes:
            y.add_(1)
        early = []
        for result, returned in zip(self.results, self.returned, strict=True):
            shaped = result(x, y, self.at)
            early.append(
                returned(x, shaped) if returned else self.constructor(x, shaped) if 0 in shaped.shape else shaped
            )
        return early

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.found(x, self.at)
        if self.is_empty(y):
            if not self.goes_on:
                return tuple(self._early(x, y))
            results = self._early(x, y)
        else:
            if self.writes == 2:
                self.counts.add_(1)
            results = self._rest(x, y)
        if self.is_nested:
            z = y[y[:, 1] > self.at]
            if len(z) == 0:
                return (*results, z)
            results = [*results, z * 2]
        return tuple(results)


def inputs() -> list[Tensor]:
    """Inputs of which some, none, one and all rows are found, at any threshold; the second column may differ."""
    torch.manual_seed(0)
    none, one = torch.rand(6, 4) * 0.2, torch.rand(5, 4) * 0.2
    one[2] = 0.95
    first = one.clone()
    first[2, 1] = 0.1
    return [torch.rand(12, 4), none, one, first, torch.rand(3, 4) * 0.05 + 0.92, none[:1], torch.zeros(2, 4)]


def outcome(seed: int) -> str:
    """``right``, ``loud`` where a run fails, ``refused``, ``no model`` where eager fails, or the difference."""
    module, examples = Returns(seed), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module(examples[0].clone())
        except Exception:
            return "no model"
        module.counts.zero_()
        try:
            program = onnxplug.to_onnx(module, (examples[0].clone(),), dynamic_shapes=({0: "rows"},))
        except onnxplug.OnnxplugError:
            return "refused"
        loud = False
        for x in examples:
            try:
                module(x.clone())
            except Exception:
                continue
            try:
                program.verify(args=(x.clone(),), seeds=())
            except onnxplug.VerificationError as error:
                if "does not run" not in str(error):
                    return f"wrong for {len(x)} rows: {error}"
                loud = True
    return "loud" if loud else "right"


def main() -> None:
    """Prints the counts of outcomes, and the wrong modules."""
    start, count = map(int, sys.argv[1:])
    counts: Counter[str] = Counter()
    for seed in range(start, start + count):
        found = outcome(seed)
        counts[found.partition(" for ")[0]] += 1
        if found.startswith("wrong") or found == "loud":
            print(seed, found, flush=True)
    print(counts)


if __name__ == "__main__":
    main()
