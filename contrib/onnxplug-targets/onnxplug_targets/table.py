"""A provider's answers as a table: what of a node it refuses, for each version of each operator."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

DATA = Path(__file__).parent / "data"
#: What becomes of a node that is taken and computed otherwise.
WRONG = "its result differs from the CPU's"
#: What becomes of a node of which ONNX Runtime's CPU has no kernel either.
NOWHERE = "ONNX Runtime's CPU has no kernel either"
_MOST = 3
_DEEPEST = 3
_TYPES = frozenset(dtype.name.lower() for dtype in ir.DataType)


def condensed(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What answers come to.

    For each version of an operator of which some node was taken, ``known`` are all types and attributes that a taken node had, and
    ``refused`` the least sets of features that none had, with what happens to a node that has them. Operators of which no node
    was taken stand under ``absent``.
    """
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for answer in answers:
        found[answer["op"], answer["since"]].append(answer)
    operators: dict[str, dict[str, Any]] = defaultdict(dict)
    absent: dict[str, dict[str, str]] = defaultdict(dict)
    for (op, since), rows in sorted(found.items()):
        taken = [frozenset(row["features"]) for row in rows if row["outcome"] == "takes"]
        others = [row for row in rows if row["outcome"] != "takes"]
        if taken:
            operators[op][str(since)] = {
                "known": sorted(feature for feature in frozenset().union(*taken) if "=" in feature),
                "refused": _refused(taken, others),
            }
        else:
            absent[op][str(since)] = _consequence(others)
    return {"operators": dict(operators), "absent": dict(absent)}


def _consequence(rows: Collection[Mapping[str, Any]]) -> str:
    """What becomes of nodes: the first thing that breaks, or nothing where all are left to others."""
    return next((row["why"] for row in rows if row["outcome"] == "breaks"), "")


def _refused(taken: Sequence[frozenset[str]], others: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    open_rows = list(others)
    for size in range(1, _MOST + 1):
        while open_rows:
            reasons: dict[tuple[str, ...], int] = defaultdict(int)
            for row in open_rows:
                for reason in itertools.combinations(row["features"], size):
                    if not any(have.issuperset(reason) for have in taken):
                        reasons[reason] += 1
            if not reasons:
                break
            best = max(reasons, key=lambda reason: (reasons[reason], _plainness(reason), reason))
            explained = [row for row in open_rows if set(best) <= set(row["features"])]
            found.append({"features": list(best), "breaks": _consequence(explained)})
            open_rows = [row for row in open_rows if row not in explained]
    found += [{"features": row["features"], "breaks": row["why"]} for row in open_rows]
    return found


def _plainness(reason: Iterable[str]) -> int:
    """Of two explanations the one about attributes is the best, and the one about an element type the last."""
    kinds = {feature.partition("=")[2] in _TYPES for feature in reason if "=" in feature}
    return 0 if True in kinds else 2 if kinds else 1


def text_of(table: Mapping[str, Any]) -> str:
    """A table as JSON, with a line for each version of each operator."""

    def lines(item: Any, depth: int) -> str:
        if not isinstance(item, dict) or depth == _DEEPEST:
            return json.dumps(item)
        inner = ",\n".join(
            f"{' ' * (depth + 1)}{json.dumps(key)}: {lines(value, depth + 1)}" for key, value in item.items()
        )
        return f"{{\n{inner}\n{' ' * depth}}}" if item else "{}"

    return lines(dict(table), 0) + "\n"


def load(target: str) -> dict[str, Any]:
    """The table of a target."""
    found: dict[str, Any] = json.loads((DATA / f"{target}.json").read_text())
    return found
