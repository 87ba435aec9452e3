"""Tolerances looser than torch.testing's stand in one table, with their reasons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.tolerances import LOOSER

TESTS = Path(__file__).resolve().parent
#: torch.testing's own for float32.
OWN = {"rtol": 1.3e-6, "atol": 1e-5}
#: EXEMPT: the tables themselves, and the tests of the comparison.
#: SCRIPTS: programs as others write them, with tolerances of their own.
SCRIPTS = "contrib/onnxplug-torch-onnx/tests/scripts/"
EXEMPT = {
    "support/tolerances.py",
    "opdb/tolerances.py",
    "verification/test_compare.py",
    "contrib/onnxplug-tools/tests/inspection/test_compare_runs.py",
}
#: The tests of the packages in contrib, which run without this folder: each file has its own table, LOOSER.
CONTRIB = sorted((TESTS.parent / "contrib").glob("*/tests/**/*.py"))


def number(node: ast.expr) -> float | None:
    """The value of a constant expression."""
    try:
        return float(eval(compile(ast.Expression(node), "tolerance", "eval"), {"__builtins__": {}}))
    except Exception:
        return None


def loose() -> Iterator[str]:
    for path in [*sorted(TESTS.rglob("*.py")), *CONTRIB]:
        name = path.relative_to(TESTS if path.is_relative_to(TESTS) else TESTS.parent).as_posix()
        if name in EXEMPT or name.startswith(SCRIPTS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in OWN:
                value = number(node.value)
                if value is not None and value > OWN[node.arg]:
                    yield f"{name}:{node.value.lineno}: {node.arg}={value}"


def test_no_test_loosens_a_tolerance_by_itself() -> None:
    assert list(loose()) == []


def test_every_row_is_used_and_says_why() -> None:
    paths = [*TESTS.rglob("*.py"), *CONTRIB]
    texts = "".join(path.read_text(encoding="utf-8") for path in paths if path.name != "tolerances.py")
    assert [name for name in LOOSER if f'"{name}"' not in texts] == []
    assert all(row.reason for row in LOOSER.values())
    assert all(row.rtol > OWN["rtol"] or row.atol > OWN["atol"] for row in LOOSER.values())


def test_the_tables_of_contrib_are_used_and_say_why() -> None:
    result = 0
    for path in CONTRIB:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and target.id == "LOOSER":
                assert node.value is not None
                for name, (values, reason) in ast.literal_eval(node.value).items():
                    result += 1
                    by_variable = re.search(r"LOOSER\[\w+\]", text) is not None and text.count(f'"{name}"') > 1
                    assert f'LOOSER["{name}"]' in text or by_variable, f"{path}: {name} is not used"
                    assert reason, f"{path}: {name} has no reason"
                    assert set(values) == set(OWN), f"{path}: {name}"
                    assert any(values[key] > OWN[key] for key in OWN), f"{path}: {name} is not looser"
    assert result
