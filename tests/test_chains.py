"""Random chains of operators; ``make chains`` runs 20,000 of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.chains.generate import Chain, make
from tests.chains.run import compare, run_chain, summary

GOOD = {"right", "not captured", "no kernel"}


@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(50, 300, 50))])
def test_chains(start: int) -> None:
    """Most chains are measured, and agree with PyTorch with ONNX Runtime's optimisations on and off."""
    outcomes = {number: run_chain(make(number)) for number in range(start, start + 50)}
    bad = {number: outcome for number, outcome in outcomes.items() if outcome.status not in GOOD}
    assert not bad, "\n\n".join(
        f"{make(number)}\n{outcome.status}: {outcome.detail}" for number, outcome in bad.items()
    )
    assert sum(outcome.status == "right" for outcome in outcomes.values()) >= 45


def test_a_number_makes_one_chain() -> None:
    assert str(make(7)) == str(make(7)) != str(make(8))


def chain(line: str, x: torch.Tensor) -> Chain:
    return Chain(0, (f"y0 = {line}",), ("y0",), ((x,), (x * 2,)), False, {})


def test_a_fault_of_onnx_runtime_is_seen() -> None:
    pool = chain("F.max_pool2d(F.pad(x0, [1, 1, 1, 1]), 3, 2)", -torch.rand(1, 2, 6, 6) - 0.5)
    assert run_chain(pool).status == "right"
    result = run_chain(pool, target=None)
    assert result.status == "wrong"
    assert result.detail.startswith("optimisations on, (1, 2, 6, 6): output 0: ")


def test_only_differences_by_rounding_pass() -> None:
    """Midway between two levels either level is right, also inside of a line; elsewhere only PyTorch's level is."""
    x = torch.tensor([0.015, 0.3])
    halves = chain("u8(u8(x0) * 0.5) * 4", x)
    (expected,) = halves.module()(x)

    def problem(index: int, change: float) -> str:
        result = expected.clone()
        result[index] += change
        return compare(halves, (x,), (expected,), [result.numpy()])

    assert compare(halves, (x,), (expected,), [expected.numpy()]) == ""
    assert problem(0, 0.12) == ""
    assert "1 of 2 differ, at (1,)" in problem(1, 0.12)
    other = compare(halves, (x,), (expected,), [expected.numpy().astype(np.float64)])
    assert other == "output 0 is torch.float64(2,), not torch.float32(2,)"


def test_the_summary_counts_every_chain() -> None:
    line = summary(100, Counter({"right": 7, "no kernel": 2, "wrong": 1}), 3.2)
    assert line == (
        "chains 100 to 109 (10): 7 right, 0 not captured, 2 no kernel, 0 refused, 1 wrong, 0 does not load; 3 s"
    )


@pytest.mark.parametrize("number", [2447, 11472])
def test_decompositions_that_ask_for_sizes(number: int) -> None:
    """torch asks whether ``s**2 >= s``, and whether ``6*s > 6`` to sort axes by strides: no size is excluded."""
    outcome = run_chain(make(number))
    assert (outcome.status, outcome.detail) == ("right", "")
