"""A provider's answers as a table: the features of nodes that it refuses, for each version of each operator."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxplug_targets.features import must_be_known

DATA = Path(__file__).parent / "data"
#: The failure of a node that is taken and computed otherwise.
WRONG = "its result differs from the CPU's"
#: The failure of a node for which ONNX Runtime's CPU has no kernel either.
NOWHERE = "ONNX Runtime's CPU has no kernel either"
_MOST = 3
_DEEPEST = 3
_TYPES = frozenset(dtype.name.lower() for dtype in ir.DataType)


def condensed(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The operators of a table, from a provider's answers.

    For each version of an operator of which a node was taken, ``known`` are all types and attributes, and features of
    :data:`~onnxplug_targets.features.STRICT`, of taken nodes, ``refused`` the smallest sets of features that no taken
    node had, and ``breaks`` the sets of features that only breaking nodes had, each with the failure. Versions of which
    no node was taken are under ``absent``, with their ``breaks``.
    """
    by_operator: dict[tuple[str, int], dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        by_operator[answer["op"], answer["since"]][answer["outcome"]].append(answer)
    operators: dict[str, dict[str, Any]] = defaultdict(dict)
    absent: dict[str, dict[str, Any]] = defaultdict(dict)
    for (op, since), rows in sorted(by_operator.items()):
        taken, left, broken = (_sets(rows[outcome]) for outcome in ("takes", "leaves", "breaks"))
        breaks = [
            [*reason, next(row["why"] for row in rows["breaks"] if reason <= set(row["features"]))]
            for reason in _reasons(broken, taken + left)
        ]
        if not taken:
            absent[op][str(since)] = breaks
            continue
        operators[op][str(since)] = {
            "known": sorted(feature for feature in frozenset().union(*taken) if must_be_known(feature)),
            "refused": [sorted(reason) for reason in [*_reasons(left + broken, taken), *_both(left + broken, taken)]],
            "breaks": breaks,
        }
    return {"operators": dict(operators), "absent": dict(absent)}


def _sets(rows: Iterable[Mapping[str, Any]]) -> list[frozenset[str]]:
    return [frozenset(row["features"]) for row in rows]


def _reasons(some: Iterable[frozenset[str]], others: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Few small sets of features: nodes of ``some`` have all features of a set, nodes of ``others`` do not."""
    smallest: list[frozenset[str]] = []
    open_rows = list(dict.fromkeys(some))
    for size in range(1 if others else 0, _MOST + 1):
        while open_rows:
            reasons: dict[tuple[str, ...], int] = defaultdict(int)
            for row in open_rows:
                for reason in itertools.combinations(sorted(row), size):
                    if not any(have.issuperset(reason) for have in others):
                        reasons[reason] += 1
            if not reasons:
                break
            most = max(reasons, key=lambda reason: (reasons[reason], _plainness(reason), reason))
            best = frozenset(most)
            smallest.append(best)
            open_rows = [row for row in open_rows if not best <= row]
    return smallest + [row for row in open_rows if row not in others]


def _both(some: Iterable[frozenset[str]], others: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Features that do not decide: nodes with the same features are in ``some`` and in ``others``."""
    return [row for row in dict.fromkeys(some) if row in others]


def _plainness(reason: Iterable[str]) -> int:
    """The rank of an explanation: 2 by attributes alone, 1 without types and attributes, 0 with an element type."""
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
    table: dict[str, Any] = json.loads((DATA / f"{target}.json").read_text())
    return table
