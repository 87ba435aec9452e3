"""docs/numerics.md: the table of the costs of exactness has a row for every rule that states them, and no other."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """``benchmarks/exact.py``, which writes the table."""
    spec = importlib.util.spec_from_file_location("benchmark_exact", ROOT / "benchmarks" / "exact.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows(benchmark: Any) -> list[list[str]]:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    table = text.partition(benchmark.BEGIN)[2].partition(benchmark.END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_rule_that_states_exactness_has_a_row(benchmark: Any) -> None:
    listed = [name for row in rows(benchmark) for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) == benchmark.exact_operators()
    assert listed == [name for case in benchmark.CASES for name in benchmark.names_of(case)]


def test_rules_with_a_condition_say_why() -> None:
    from onnxplug.plugins.manager import registry_for

    registry, _ = registry_for(plugins=[])
    silent = [rule for _, rule in registry.rules() if (rule.exact is not None or rule.target) and not rule.reason]
    assert silent == []


def test_tables_of_kernels_are_those_of_the_code(benchmark: Any) -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(benchmark.KERNELS_BEGIN)
    written = rest.partition(benchmark.KERNELS_END)[0].strip().splitlines()
    assert written == benchmark.kernel_tables(), "python benchmarks/exact.py --kernels writes them"
