"""Both evaluators against onnx's own backend test suite. The tables list exactly the tests that they don't pass."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnxplug_reference import ExtendedReferenceEvaluator, TorchReferenceEvaluator
from onnxplug_reference.torch_ops.arrays import to_array

from tests.support.onnx_suite import model_cases, node_cases, passes

_RANDOM = "the numbers are random, and the test has those of one run of onnx's own generator"
_GRADIENT = "ai.onnx.preview.training: an operator that differentiates the graph around it"
#: Tests that the evaluator in NumPy does not pass, with the reason.
NUMPY = {
    "test_bernoulli": _RANDOM,
    "test_bernoulli_double": _RANDOM,
    "test_bernoulli_double_expanded": _RANDOM,
    "test_bernoulli_expanded": _RANDOM,
    "test_bernoulli_seed": _RANDOM,
    "test_bernoulli_seed_expanded": _RANDOM,
    "simple/test_gradient_of_add": _GRADIENT,
    "simple/test_gradient_of_add_and_mul": _GRADIENT,
}
if onnx.__version__.startswith("1.21."):
    NUMPY["test_adam_multiple"] = "the test's node lacks the epsilon of its results"
#: Tests that the evaluator by PyTorch's operators does not pass.
TORCH = NUMPY
PARTS = pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])


class TorchEvaluator(TorchReferenceEvaluator):
    """The evaluator with arrays as results, which the comparison takes; it records the operators computed in NumPy."""

    elsewhere: ClassVar[set[str]] = set()

    def run(self, *args: Any, **options: Any) -> Any:
        results = super().run(*args, **options)
        self.elsewhere.update(name for _, name in self.in_numpy)
        return [to_array(value) for value in results]


def check(evaluator: type, cases: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """All tests pass except the known tests, all of which fail."""
    failing = {name: why for name, case in cases.items() if (why := passes(evaluator, case)) is not None}
    assert {name: why for name, why in failing.items() if name not in known} == {}
    # A random test may pass by chance, once in a thousand runs.
    fixed = [name for name, why in known.items() if name in cases and name not in failing and why != _RANDOM]
    assert fixed == [], "these pass; their rows can go"


def some_nodes(part: int) -> dict[str, Any]:
    """A quarter of the cases, by a hash of their names; tests/test_standard.py has every operator."""
    return {name: case for name, case in node_cases().items() if zlib.crc32(name.encode()) % 4 == part}


@PARTS
def test_nodes_in_numpy(part: int) -> None:
    assert len(some_nodes(part)) > 300
    check(ExtendedReferenceEvaluator, some_nodes(part), NUMPY)


def test_models_in_numpy() -> None:
    assert len(model_cases()) > 100
    check(ExtendedReferenceEvaluator, model_cases(), NUMPY)


@PARTS
def test_nodes_in_torch(part: int) -> None:
    check(TorchEvaluator, some_nodes(part), TORCH)


def test_models_in_torch() -> None:
    check(TorchEvaluator, model_cases(), TORCH)
    assert {"Conv", "MatMul", "Reshape"} & TorchEvaluator.elsewhere == set()


@pytest.mark.parametrize("cases", [node_cases, model_cases])
def test_no_fewer_than_onnx(cases: Any) -> None:
    """onnx's own evaluator passes none of the tests that ours doesn't pass."""
    fixed = {name: case for name, case in cases().items() if NUMPY.get(name, _RANDOM) != _RANDOM}
    assert [name for name, case in fixed.items() if passes(ReferenceEvaluator, case) is None] == []
