"""Random chains of operators; ``make chains`` runs 20,000 of them."""

from __future__ import annotations

import pytest

from tests.chains.generate import make
from tests.chains.run import run_chain

GOOD = {"right", "not captured", "no kernel"}


@pytest.mark.parametrize("start", range(0, 300, 50))
def test_chains(start: int) -> None:
    """Most are measured, and those that are agree with PyTorch, with ONNX Runtime's optimisations on and off."""
    outcomes = {number: run_chain(make(number)) for number in range(start, start + 50)}
    bad = {number: outcome for number, outcome in outcomes.items() if outcome.status not in GOOD}
    assert not bad, "\n\n".join(
        f"{make(number)}\n{outcome.status}: {outcome.detail}" for number, outcome in bad.items()
    )
    assert sum(outcome.status == "right" for outcome in outcomes.values()) >= 35


def test_a_number_makes_one_chain() -> None:
    assert str(make(7)) == str(make(7)) != str(make(8))


@pytest.mark.xfail(
    strict=True,
    reason="ONNX Runtime rounds the activations of a MatMul with a transposed weight that is quantised in the graph: 1e-4 off",
)
def test_a_product_with_a_transposed_quantised_weight() -> None:
    assert run_chain(make(11_931)).status == "right"
