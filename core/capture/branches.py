"""Branches in a model's Python code that only the size 1 would decide otherwise: ``if x.shape[1] > 1``.

Unless an example's size is 1, torch takes every dynamic size to be at least 2, and records no guard for what follows from
that. The graph has the branch of the larger sizes, and at size 1 too. Often both compute the same there, as with the
causal mask of one token, so that this is a warning where the branch is in the user's own code, and a hint of verification
in every other case. Branches at size 0 go unnoticed: torch decides them when the comparison is made.

The text of a size (``str(n)``) is recorded too: while a model is captured, it is torch's name of the size.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import uninteresting_files

from onnxplug.capture.guards import Condition, discards_its_value, holds_for_all, only_raises, python_guards
from onnxplug.capture.locations import is_core_file, is_torch_file

_local = threading.local()
_lock = threading.Lock()
_depth = 0
_bool, _repr = torch.SymBool.__bool__, torch.SymInt.__repr__
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


@dataclass
class Recorded:
    """What code outside torch asked of dynamic sizes.

    Attributes:
        branches: Conditions, in the order asked.
        texts: ``file:line`` where the text of a size was taken.
    """

    branches: list[Branch] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[Recorded]:
    """Records what code outside torch asks of dynamic sizes while it holds, in this thread."""
    global _depth
    # torch names the place of a guard by the innermost frame that is in none of these files.
    uninteresting_files().add(__file__)
    before = getattr(_local, "recorded", None)
    _local.recorded = result = Recorded()
    with _lock:
        _depth += 1
        torch.SymBool.__bool__ = _recording_bool  # type: ignore[method-assign]
        torch.SymInt.__repr__ = _recording_repr  # type: ignore[method-assign]
    try:
        yield result
    finally:
        _local.recorded = before
        with _lock:
            _depth -= 1
            if not _depth:
                torch.SymBool.__bool__ = _bool  # type: ignore[method-assign]
                torch.SymInt.__repr__ = _repr  # type: ignore[method-assign]


def _recording_bool(self: torch.SymBool) -> bool:
    answer = _bool(self)
    result, place = getattr(_local, "recorded", None), _caller()
    if result is not None and place is not None:
        result.branches.append(Branch(self, answer, place))
    return answer


def _recording_repr(self: torch.SymInt) -> str:
    result, place = getattr(_local, "recorded", None), _caller()
    if result is not None and place is not None:
        result.texts.append(place)
    return _repr(self)


def _caller() -> str | None:
    """The line of the caller's caller; ``None`` where it is in torch or onnxplug."""
    frame = sys._getframe(2)
    file = frame.f_code.co_filename
    return None if is_torch_file(file) or is_core_file(file) else f"{file}:{frame.f_lineno}"


def text_warnings(texts: Sequence[str]) -> list[str]:
    """A warning for each line of the user's own code that takes a size's text and does not only print it."""
    return [
        f"the model's code at {place} takes the text of a dynamic size. While the model is captured, that is torch's name of "
        "the size ('s77'), and what is computed from it is the same in the exported model at every size."
        for place in dict.fromkeys(texts)
        if is_own(place) and not discards_its_value(place)
    ]


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
