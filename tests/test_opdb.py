"""A fixed part of torch's operator database; `make opdb` runs the whole of it in all dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.opdb.expected import EXPECTED, expected
from tests.opdb.measure import GOOD, UNMEASURABLE, entries, measure, module_of, samples
from tests.opdb.report import OPSETS

ENTRIES = entries()
NAMES = sorted(ENTRIES)


def run(name: str, dtype: torch.dtype, count: int = 2, **options: Any) -> list[Any]:
    """The outcomes of an entry's samples, those that can be measured."""
    op = ENTRIES[name]
    if not op.supports_dtype(dtype, "cpu"):
        pytest.skip(f"torch has no {name} for {dtype}")
    outcomes = [measure(op, dtype, module_of(op, s), name=name, **options) for s in samples(op, dtype, count)]
    measured = [outcome for outcome in outcomes if outcome.status not in UNMEASURABLE]
    if not measured:
        pytest.skip("torch or torch.export refuses every sample")
    return measured


def check(name: str, dtype: torch.dtype, **options: Any) -> None:
    """Every sample passes, or fails as the table of expectations says."""
    measured = run(name, dtype, **options)
    row = expected(name, str(dtype).removeprefix("torch."), options.get("opset"), options.get("dynamic", False))
    bad = [o for o in measured if o.status not in GOOD]
    if row is not None:
        assert bad, f"{name} passes; its row in EXPECTED can go ({row[1]})"
        assert bad[0].status == row[0], bad[0]
    else:
        assert not bad, bad[0]


@pytest.mark.parametrize("name", NAMES[::5])
def test_float32(name: str) -> None:
    check(name, torch.float32)


@pytest.mark.parametrize("name", NAMES[3::40])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64],
    ids=str,
)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@pytest.mark.parametrize("name", NAMES[1::12])
def test_dynamic_dimensions(name: str) -> None:
    check(name, torch.float32, dynamic=True)


@pytest.mark.parametrize("name", NAMES[::40])
@pytest.mark.parametrize("opset", OPSETS)
def test_opsets(name: str, opset: int) -> None:
    check(name, torch.float32, opset=opset)


def test_every_expectation_is_of_an_entry() -> None:
    assert {key.partition("|")[0] for key in EXPECTED} <= set(NAMES)
