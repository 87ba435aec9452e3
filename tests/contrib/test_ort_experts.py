"""onnxplug-ort: mixtures of experts by ONNX Runtime's MoE, against torch and against the plain form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import check
from tests.support.contrib import plugged
from tests.support.experts import compare, experts_program, ids, mask, mixture
from tests.support.tolerances import looser

REGISTRY = plugged("onnxplug-ort")
WITH_TRANSFORMERS = plugged("onnxplug-transformers", "onnxplug-ort")
DYNAMIC = torch.export.Dim.DYNAMIC


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    pass


class Experts(nn.Module):
    """Five of them, two halves of 6 features each."""

    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float32, **how: Any) -> None:
        super().__init__()
        shapes = [(5, 8, 12), (5, 6, 8)] if how.get("transposed") else [(5, 12, 8), (5, 8, 6)]
        self.first, self.second = (nn.Parameter((torch.randn(s) * 0.5).to(dtype)) for s in shapes)
        biases = [torch.randn(5, n).to(dtype) for n in (12, 8)] if bias else [None, None]
        self.register_buffer("both", biases[0])
        self.register_buffer("single", biases[1])
        self.how = how

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        from onnxplug_ort.experts import experts

        return experts(x, index, weights, self.first, self.second, self.both, self.single, **self.how)


def routed(tokens: int, chosen: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Tokens, their experts in no order, and weights that don't sum to 1."""
    index = torch.stack([torch.randperm(5)[:chosen] for _ in range(tokens)])
    return torch.randn(tokens, 8).to(dtype), index, (torch.rand(tokens, chosen) * 3).to(dtype)


def operators(model: nn.Module, args: Any, others: Any, opset: Any, **options: Any) -> Counter[str]:
    program = check(model, *args, others=others, dynamic=({0: DYNAMIC},) * 3, opset=opset, registry=REGISTRY, **options)
    return Counter(node.op_type for node in program.model.graph.all_nodes())


CASES: dict[str, dict[str, Any]] = {
    "plain": {"bias": False},
    "with_biases": {},
    "interleaved": {"interleaved": True},
    "transposed": {"transposed": True, "bias": False},
    "gpt_oss": {"interleaved": True, "transposed": True, "alpha": 1.702, "beta": 1.0, "limit": 0.5},
    "limited": {"alpha": 0.5, "beta": -1.0, "limit": 1.0},
}


@pytest.mark.parametrize("opset", [13, 18, 21, 24])
@pytest.mark.parametrize("name", CASES)
def test_experts(name: str, opset: int) -> None:
    model, others = Experts(**CASES[name]), [routed(1), routed(9)]
    result = operators(model, routed(4), others, {"": opset, "com.microsoft": 1}, **looser("experts"))
    assert result["MoE"] == 1
    assert operators(model, routed(4), others, opset, **looser("experts"))["MoE"] == 0


def test_weights() -> None:
    """Weights that are zero, tiny, huge or NaN, a token with all weights zero, and one or all of the experts."""
    opset = {"": 21, "com.microsoft": 1}
    x, index, weights = routed(6)
    weights[0], weights[1, 0], weights[2] = 0.0, 0.0, 1e-30
    weights[3, 1], weights[4], weights[5, 0] = 1e-20, 1e6, float("nan")
    assert operators(Experts(), routed(3), [(x, index, weights)], opset, **looser("experts"))["MoE"] == 1
    for chosen in (1, 5):
        others = [routed(1, chosen), routed(7, chosen)]
        assert operators(Experts(), routed(3, chosen), others, opset, **looser("experts"))["MoE"] == 1


def test_nodes_that_stay_plain() -> None:
    opset = {"": 21, "com.microsoft": 1}
    args, others = routed(4, dtype=torch.float64), [routed(2, dtype=torch.float64)]
    assert operators(Experts(dtype=torch.float64), args, others, opset)["MoE"] == 0

    def given(x: Any, index: Any, weights: Any, first: Any, second: Any) -> torch.Tensor:
        from onnxplug_ort.experts import experts

        return experts(x, index, weights, first, second)

    own = (*routed(3), torch.randn(5, 12, 8), torch.randn(5, 8, 6))
    program = check(given, *own, others=[(*routed(3), -own[3], own[4] * 2)], opset=opset, registry=REGISTRY)
    assert "MoE" not in program.statistics.operators


def test_replaced_weights() -> None:
    model, other, args = Experts(transposed=True), Experts(transposed=True), routed(3)
    program = onnxplug.to_onnx(model, args, opset_version={"": 21, "com.microsoft": 1}, registry=REGISTRY)
    program.apply_weights(other.state_dict())
    torch.testing.assert_close(program(*args)[0], other(*args), **looser("experts"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
@pytest.mark.long
def test_transformers(name: str, vision: None) -> None:
    from onnxplug_ort import set_experts

    model = mixture(name)
    inputs = {"input_ids": ids(3, 9), "attention_mask": mask(3, 9)}
    with torch.no_grad():
        before = model(**inputs).logits
        after = set_experts(model)(**inputs).logits
    torch.testing.assert_close(after, before, **looser("experts"))
    set_experts(model)
    options = {"opset_version": {"": 21, "com.microsoft": 1}, "registry": WITH_TRANSFORMERS}
    program = experts_program(model, **options)
    assert program.statistics.operators["MoE"] == 2
    for batch, length in ((2, 5), (1, 1), (3, 9)):
        compare(program, input_ids=ids(batch, length), attention_mask=mask(batch, length))
    if name == "Mixtral":
        plain = experts_program(model, registry=WITH_TRANSFORMERS)
        assert "MoE" not in plain.statistics.operators
        compare(plain, **inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_other_gates_are_computed_by_group(vision: None) -> None:
    from onnxplug_ort import set_experts

    model = set_experts(mixture("Mixtral"))
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.GELU()
    program = experts_program(model, opset_version={"": 21, "com.microsoft": 1}, registry=WITH_TRANSFORMERS)
    assert "MoE" not in program.statistics.operators
    compare(program, input_ids=ids(3, 4), attention_mask=mask(3, 4))
