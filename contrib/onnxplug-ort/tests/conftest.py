"""The fixtures that the tests of fused operators share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "fused": (
        {"rtol": 1e-5, "atol": 1e-5},
        "a fused operator sums in another order than the operators that it replaces",
    ),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def fused(onnx_check: Callable[..., Any]) -> Any:
    """Compares a fused model with torch and with the plain form; returns its operators of com.microsoft, counted.

    ``fused.program`` is the fused model afterwards, and ``fused.tolerances`` are the tolerances of the comparison.
    """

    def run(
        function: Any,
        *args: torch.Tensor,
        others: Any = (),
        dynamic: Any = None,
        opset: int = 21,
        target: str = "onnxruntime",
    ) -> Counter[str]:
        def export(version: Any) -> Any:
            """Compares on these inputs alone: random masks and lengths would be invalid."""
            return onnx_check(
                function,
                args,
                dynamic_shapes=dynamic,
                opsets=(version,),
                inputs=others,
                **LOOSER["fused"][0],
                optimize=(True,),
                seeds=(),
                target=target,
            )

        program, plain = export({"": opset, "com.microsoft": 1}), export(opset)
        assert {**program.model.opset_imports, "com.microsoft": 1} == {"": opset, "com.microsoft": 1}
        assert not [n for n in plain.model.graph.all_nodes() if n.domain]
        for inputs in (args, *others):
            for mine, unfused in zip(program(*inputs), plain(*inputs), strict=True):
                torch.testing.assert_close(mine, unfused, **LOOSER["fused"][0], equal_nan=True)
        run.program, run.tolerances = program, LOOSER["fused"][0]
        return Counter(n.op_type for n in program.model.graph.all_nodes() if n.domain == "com.microsoft")

    return run
