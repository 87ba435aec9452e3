"""The builtin rules without their modules: ``converters/_index.py`` lists them, and a test holds it equal to the tables.

``python -m onnxplug.plugins.index`` writes the list anew after a change to a ``RULES`` table.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxplug.registry.rule import Converter, Rule

PACKAGE = "onnxplug.converters"


class IndexedRule(Rule):
    """A rule known by its place in a family's table; the family is imported when the rule is first used."""

    __slots__ = ("module", "position")

    def __init__(
        self,
        op: str,
        module: str,
        position: int,
        function: str,
        since: int | None,
        until: int | None,
        conditional: bool,
        domains: Mapping[str, int],
        priority: int,
        named: Mapping[str, Any] | None = None,
    ) -> None:
        self.module = f"{PACKAGE}.{module}"
        self.position = position
        when = self._condition if conditional else None
        super().__init__(
            op,
            f"{self.module}:{function}",
            opset=(since, until),
            domains=domains,
            when=when,
            priority=priority,
            **(named or {}),
        )

    def _rule(self) -> Rule:
        rule: Rule = importlib.import_module(self.module).RULES[self.position]
        return rule

    def _condition(self, node: Any) -> bool:
        condition = self._rule().when
        return condition is None or bool(condition(node))

    def resolve(self) -> Converter:
        """The converter, its module imported at first use."""
        if self._function is None:
            self._function = self._rule().resolve()
        return self._function


def families() -> list[str]:
    """Names of the modules that hold a ``RULES`` table."""
    package = importlib.import_module(PACKAGE)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg and not m.name.startswith("_"))


def rows() -> list[tuple[Any, ...]]:
    """What the index must say, read from the tables themselves."""
    found: list[tuple[Any, ...]] = []
    for family in families():
        for position, rule in enumerate(importlib.import_module(f"{PACKAGE}.{family}").RULES):
            function = rule.name.partition(":")[2]
            since, until = rule.opset
            conditional = rule.when is not None
            row = (rule.op, family, position, function, since, until, conditional, rule.domains, rule.priority)
            named = {"target": rule.target, "exact": rule.exact, "reason": rule.reason}
            named = {name: value for name, value in named.items() if value not in ((), None, "")}
            found.append((*row, named) if named else row)
    return found


def indexed_rules() -> list[Rule]:
    """The builtin rules, none of their modules imported."""
    index = importlib.import_module(f"{PACKAGE}._index")
    return [IndexedRule(*row) for row in index.ROWS]


def render(found: list[tuple[Any, ...]]) -> str:
    """The text of ``converters/_index.py``."""
    lines = [
        '"""The builtin rules by operator: written by `python -m onnxplug.plugins.index`, not by hand."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Any",
        "",
        "# ruff: noqa: E501",
        "# fmt: off",
        "# op, family, position in its table, function, since, until, conditional, domains, priority, other conditions",
        "ROWS: list[tuple[Any, ...]] = [",
        *(_line(row) for row in found),
        "]",
        "",
    ]
    return "\n".join(lines)


def _line(row: tuple[Any, ...]) -> str:
    plain = ", ".join(repr(item) for item in row[:9]).replace("'", '"')
    return f"    ({plain}, {row[9]!r})," if len(row) > 9 else f"    ({plain}),"


def main() -> None:
    """Writes the index into the source tree."""
    package = importlib.import_module(PACKAGE)
    path = Path(package.__path__[0]) / "_index.py"
    found = rows()
    path.write_text(render(found), encoding="utf-8")
    sys.stdout.write(f"{path}: {len(found)} rules of {len(families())} families\n")


if __name__ == "__main__":
    main()
