"""A fixed part of torch's operator database; `make opdb` runs the whole of it in all dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.opdb.expected import EXPECTED, ONLY, UNCAPTURED, expected, uncaptured
from tests.opdb.measure import GOOD, UNMEASURABLE, entries, measure, module_of, samples
from tests.opdb.report import OPSETS
from tests.support.sampling import rotated

ENTRIES = entries()
NAMES = sorted(ENTRIES)


def run(name: str, dtype: torch.dtype, count: int = 2, **options: Any) -> list[Any]:
    """The outcomes of an entry's measurable samples; none where ``UNCAPTURED`` has a row."""
    op = ENTRIES[name]
    if not op.supports_dtype(dtype, "cpu"):
        pytest.skip(f"torch has no {name} for {dtype}")
    outcomes = [measure(op, dtype, module_of(op, s), name=name, **options) for s in samples(op, dtype, count)]
    measured = [outcome for outcome in outcomes if outcome.status not in UNMEASURABLE]
    why = uncaptured(name, str(dtype).removeprefix("torch."), options.get("dynamic", False))
    if why is None:
        assert measured, f"torch or torch.export refuses every sample, and UNCAPTURED has no row: {outcomes[0]}"
    else:
        assert not measured, f"{name} can be captured; its row in UNCAPTURED can go ({why})"
    return measured


def check(name: str, dtype: torch.dtype, **options: Any) -> None:
    """Every sample passes, or fails as the table of expectations says."""
    measured = run(name, dtype, **options)
    row = expected(name, str(dtype).removeprefix("torch."), options.get("opset"), options.get("dynamic", False))
    if not measured:
        return
    bad = [o for o in measured if o.status not in GOOD]
    if row is not None:
        assert bad, f"{name} passes; its row in EXPECTED can go ({row[1]})"
        assert bad[0].status == row[0], bad[0]
    else:
        assert not bad, bad[0]


@pytest.mark.parametrize("name", rotated(NAMES[::5], every=2))
def test_float32(name: str) -> None:
    check(name, torch.float32)


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), rotated(NAMES[3::40], DTYPES, every=3))
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@pytest.mark.parametrize("name", rotated(NAMES[1::12], every=2))
def test_dynamic_dimensions(name: str) -> None:
    check(name, torch.float32, dynamic=True)


@pytest.mark.parametrize(("name", "opset"), rotated(NAMES[::40], OPSETS, every=3))
def test_opsets(name: str, opset: int) -> None:
    check(name, torch.float32, opset=opset)


def test_every_expectation_is_of_an_entry() -> None:
    of_others = {name for name, release in ONLY.items() if not torch.__version__.startswith(f"{release}.")}
    assert set(ONLY) - set(NAMES) == of_others
    assert {key.partition("|")[0] for key in (*EXPECTED, *UNCAPTURED)} <= set(NAMES) | of_others


@pytest.mark.parametrize("key", UNCAPTURED)
def test_entries_that_torch_cannot_capture(key: str) -> None:
    """For every row, torch or torch.export still refuses the samples."""
    name, _, rest = key.partition("|")
    dtype, dynamic = rest.partition("|")[0] or "float32", key.endswith("|dynamic")
    assert run(name, getattr(torch, dtype), dynamic=dynamic) == []


def test_an_entry_that_is_not_captured_needs_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(UNCAPTURED, "equal")
    with pytest.raises(AssertionError, match="has no row"):
        run("equal", torch.float32)
    monkeypatch.setitem(UNCAPTURED, "abs", "it can be captured")
    with pytest.raises(AssertionError, match="its row in UNCAPTURED can go"):
        run("abs", torch.float32)
