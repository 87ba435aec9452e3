"""onnxplug-ort on whole models, and each of its rewrites by itself. Each operator: the package's own tests."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import onnxplug
from tests.support.check import Call
from tests.support.contrib import plugged
from tests.support.tolerances import looser
from tests.support.zoo import ZOO

REGISTRY = plugged("onnxplug-ort")
#: Rewrites of decoders with a cache are tested with decoders, in test_fused_decoders.py.
REWRITES = [n for r in REGISTRY[1].rewrites() if (n := r.name).startswith("ort_") and not n.endswith("_of_decoders")]


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    pass


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 2


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


MODELS = {
    "llama": {"SkipSimplifiedLayerNormalization": 4, "RotaryEmbedding": 4, "MultiHeadAttention": 2},
    "bert": {"SkipLayerNormalization": 4, "MultiHeadAttention": 2, "BiasGelu": 2},
    "gpt2": {"SkipLayerNormalization": 4, "MultiHeadAttention": 2, "FusedMatMul": 1},
    "vit": {"SkipLayerNormalization": 4, "MultiHeadAttention": 2, "BiasGelu": 2},
}


#: Operators for other devices: on the CPU a sum and a norm are faster apart.
ELSEWHERE = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
#: On the CPU, heads that share keys are one matrix, and keys are not copied; masked self-attention projects its rows.
CPU = {
    "llama": {"RotaryEmbedding": 4, "FusedMatMul": 2},
    "bert": {"Attention": 2, "BiasGelu": 2},
    "vit": {"Attention": 2, "BiasGelu": 2},
    "gpt2": {"Attention": 2, "FusedMatMul": 1},
}


@pytest.mark.parametrize("target", ["onnxruntime", "onnxruntime:cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_whole_model(name: str, target: str) -> None:
    case = ZOO[name]()
    program = onnxplug.to_onnx(
        case.module,
        case.args,
        kwargs=case.kwargs,
        dynamic_shapes=case.dynamic_shapes,
        opset_version={"": 21, "com.microsoft": 1},
        registry=REGISTRY,
        target=target,
    )
    nodes = Counter(n.op_type for n in program.model.graph if n.domain)
    expected = MODELS[name]
    if target == "onnxruntime":
        expected = CPU.get(name) or {op: n for op, n in expected.items() if op not in ELSEWHERE}
    assert nodes == expected
    assert len(program.verify().cases) >= 3


@pytest.mark.parametrize("name", REWRITES)
def test_each_rewrite_alone(name: str) -> None:
    """Each rewrite alone leaves a model that agrees with PyTorch, and at least one of these models has a use for it."""
    from onnxplug.plugins.manager import PluginManager

    class One(PluginManager):
        def rewrites(self) -> list[Any]:
            return [r for r in super().rewrites() if r.name == name]

    host = copy.copy(REGISTRY[1])
    host.__class__ = One
    gelu_before_20 = name == "ort_bias_gelu_before_20"
    options: dict[str, Any] = {
        "opset_version": {"": 18 if gelu_before_20 else 21, "com.microsoft": 1},
        "registry": (REGISTRY[0], host),
    }
    options["target"] = "onnxruntime:cuda" if name.startswith("ort_skip") else "onnxruntime"
    layers, norm, rms = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.LayerNorm(8), Rms()

    def mixed(x: torch.Tensor, h: torch.Tensor) -> Any:
        angles = torch.arange(h.shape[2])[None, :, None] * torch.arange(1, 5) * 0.1
        angles = torch.cat([angles, angles], -1)
        turned = h * angles.cos()[:, None] + rotated(h) * angles.sin()[:, None]
        # Written out, as the layers themselves are a product and its bias in one operator.
        sums = [x @ layer.weight.mT + layer.bias for layer in layers]
        y = gelu(sums[0]) + gelu(sums[1], approximate="tanh")
        return norm(x + y), rms(x - 1 + y), turned, (x @ x) * 0.5, (x @ (x + 1)) / 3.0, x @ y.mT

    def apart(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x @ matrix).unflatten(-1, (2, 4)).transpose(1, 2) for matrix in matrices]

    def self_attention(x: torch.Tensor, h: torch.Tensor) -> Any:
        q, k, v = apart(x)
        return [scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)]

    def written_out(x: torch.Tensor, h: torch.Tensor) -> Any:
        q, k, v = apart(x)
        return [((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)]

    matrices = [nn.Parameter(draw(8, 8) / 4) for _ in range(3)]
    model = {"ort_self_attention": self_attention, "ort_written_out_attention": written_out}.get(name, mixed)
    x, h = draw(2, 8, 8), draw(2, 3, 5, 8)
    program = onnxplug.to_onnx(Call(model), (x, h), **options)
    plain = onnxplug.to_onnx(Call(model), (x, h), **{**options, "optimize": False})
    made = {n.op_type for n in program.model.graph if n.domain} - {n.op_type for n in plain.model.graph if n.domain}
    with_bias = [n for n in program.model.graph if n.op_type == "FastGelu" and len(n.inputs) > 1]
    if name == "ort_bias_fast_gelu":  # FastGelu is there without the rewrite too, with the bias in a node of its own
        assert len(with_bias) == 1
    else:
        assert made != set()
    for mine, theirs in zip(program(x, h), model(x, h), strict=True):
        torch.testing.assert_close(mine, theirs, **looser("fused"))


def test_a_gathered_product_computes_the_columns_that_are_gathered() -> None:
    """The columns are cut before the product is fused with its transposition, which would hide it."""

    def model(x: torch.Tensor, places: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x @ places.mT).gather(-1, index)

    args = draw(2, 5, 8), draw(2, 96, 8), torch.randint(40, 60, (2, 5, 5))
    opsets = {"": 21, "com.microsoft": 1}
    program = onnxplug.to_onnx(Call(model), args, opset_version=opsets, registry=REGISTRY)
    assert "ReduceMin" in {node.op_type for node in program.model.graph}
    torch.testing.assert_close(program(*args)[0], model(*args), **looser("fused"))
