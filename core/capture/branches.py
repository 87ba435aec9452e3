"""Branches in a model's Python code that only the size 1 would decide otherwise: ``if x.shape[1] > 1``.

Unless an example's size is 1, torch takes every dynamic size to be at least 2, and records no guard for what follows from
that. The graph has the branch of the larger sizes, and at size 1 too. Often both compute the same there, as with the
causal mask of one token, so that this is a warning where the branch is in the user's own code, and a hint of verification
in every other case. Branches at size 0 go unnoticed: torch decides them when the comparison is made.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import uninteresting_files

from onnxplug.capture.guards import Condition, holds_for_all, only_raises, python_guards
from onnxplug.capture.locations import is_torch_file

_local = threading.local()
_lock = threading.Lock()
_depth = 0
_original = torch.SymBool.__bool__
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


class Branch(NamedTuple):
    """A condition on sizes that Python code asked for.

    Attributes:
        asked: torch's condition.
        answer: What it was.
        place: ``file:line``.
    """

    asked: torch.SymBool
    answer: bool
    place: str


@contextlib.contextmanager
def recorded_branches() -> Iterator[list[Branch]]:
    """Records the conditions on sizes that code outside torch asks for while it holds, in this thread."""
    global _depth
    uninteresting_files().add(
        __file__
    )  # torch names the place of a guard by the innermost frame that is in none of these
    before = getattr(_local, "branches", None)
    _local.branches = branches = []
    with _lock:
        _depth += 1
        torch.SymBool.__bool__ = _recording  # type: ignore[method-assign]
    try:
        yield branches
    finally:
        _local.branches = before
        with _lock:
            _depth -= 1
            if not _depth:
                torch.SymBool.__bool__ = _original  # type: ignore[method-assign]


def _recording(self: torch.SymBool) -> bool:
    answer = _original(self)
    branches = getattr(_local, "branches", None)
    frame = sys._getframe(1)
    if branches is not None and not is_torch_file(frame.f_code.co_filename):
        branches.append(Branch(self, answer, f"{frame.f_code.co_filename}:{frame.f_lineno}"))
    return answer


def assumptions(
    branches: Sequence[Branch], program: torch.export.ExportedProgram, allowed: Mapping[Any, tuple[int, int]]
) -> list[Condition]:
    """The conditions that hold for every allowed size but 1.

    Args:
        branches: What was recorded. Strict mode runs no code of the user's; what it asks is in the program's guards.
        program: The captured program.
        allowed: Symbol to the smallest and largest size that the user declared for it.
    """
    import sympy

    asked = [
        (b.asked.node.shape_env.replace(b.asked.node.expr if b.answer else sympy.Not(b.asked.node.expr)), b.place)
        for b in branches
    ]
    found: dict[tuple[Any, str | None], Condition] = {}
    for expr, place in [*asked, *python_guards(program)]:
        if (expr, place) in found or len(expr.free_symbols) != 1:
            continue
        symbol = next(iter(expr.free_symbols))
        condition = Condition(expr, place, fixed=False)
        apart = allowed.get(symbol, (0, 0))[0] <= 1 and not condition.allows({symbol: sympy.Integer(1)})
        if apart and holds_for_all(expr, allowed) and not only_raises(place):
            found[expr, place] = condition
    return list(found.values())


def is_own(place: str | None) -> bool:
    """Whether a line is in the user's own code, and not in an installed package."""
    return place is not None and not is_torch_file(place) and not _INSTALLED.search(place)
