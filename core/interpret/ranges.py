"""The ranges of sizes, as the user declared them or the model states them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from onnxplug.capture.signature import Captured
from onnxplug.capture.size_guards import Condition

_LARGEST = 2**62


@dataclass(frozen=True)
class Range:
    """The sizes that a dimension may have; ``high`` is ``None`` for an open range."""

    low: int
    high: int | None

    def text(self) -> str:
        """In words, after the dimension's name."""
        return f"at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"


def ranges(captured: Captured) -> dict[str, Range]:
    """The ranges that were declared, or that the model states by ``torch._check``, by the user's names for the sizes."""
    names = captured.dim_names
    at_least = {c.expr.lhs for c in captured.conditions if is_at_least_two(c)}
    by_name = {}
    # A graph of torch.compile comes without a program.
    for symbol, allowed in getattr(captured.program, "range_constraints", {}).items():
        if not getattr(symbol, "is_Symbol", False):
            continue
        # torch writes 2 where nothing is declared: it treats the size 1 as a special case.
        low = int(allowed.lower) if allowed.lower.is_Integer else 0
        low = low if low > 2 or symbol in at_least else 0
        high = int(allowed.upper) if allowed.upper.is_Integer and int(allowed.upper) < _LARGEST else None
        if low or high is not None:
            by_name[names.get(str(symbol), str(symbol))] = Range(low, high)
    return by_name


def metadata(captured: Captured) -> dict[str, str]:
    """The ranges as an entry of the model's metadata, ``onnxplug.dimensions``; empty where there are none."""
    bounds = {
        name: {"min": r.low} | ({} if r.high is None else {"max": r.high}) for name, r in ranges(captured).items()
    }
    return {"onnxplug.dimensions": json.dumps(bounds)} if bounds else {}


def is_at_least_two(condition: Condition) -> bool:
    """Whether a condition is that a size is 2 or more."""
    expr = condition.expr
    return type(expr).__name__ == "GreaterThan" and expr.lhs.is_Symbol and expr.rhs == 2
