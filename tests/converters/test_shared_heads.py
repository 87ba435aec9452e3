"""Attention whose keys and values several heads share: they aren't copied for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import onnxplug

AUTO = torch.export.Dim.AUTO
Repeat = Callable[[torch.Tensor], torch.Tensor]


def expanded(x: torch.Tensor) -> torch.Tensor:
    """As transformers repeats them."""
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, 3, length, size).reshape(batch, 3 * heads, length, size)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(3, 1)


def tiled(x: torch.Tensor) -> torch.Tensor:
    """Not each head three times, but all heads three times."""
    batch, heads, length, size = x.shape
    return x[:, None].expand(batch, 3, heads, length, size).reshape(batch, 3 * heads, length, size)


def twice_as_heads(x: torch.Tensor) -> torch.Tensor:
    """Both heads twice in turn: the sizes are those of each head repeated twice."""
    return x[:, None].expand(x.shape[0], 2, *x.shape[1:]).reshape(x.shape[0], 4, *x.shape[2:])


def twice_as_keys(x: torch.Tensor) -> torch.Tensor:
    """Two keys, each repeated twice: they become heads."""
    batch, heads, _, size = x.shape
    return x[:, :, :, None].expand(batch, heads, 2, 2, size).reshape(batch, 2 * heads, 2, size)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return expanded(x) * 0.5


class Attention(nn.Module):
    """Six heads, which share two heads of keys and values that ``repeat`` makes as many."""

    def __init__(self, keys: Repeat | None, values: Repeat | None = None, **options: Any) -> None:
        super().__init__()
        self.keys, self.values, self.options = keys, values or keys, options

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        key, value = self.keys(key) if self.keys else key, self.values(value) if self.values else value
        return scaled_dot_product_attention(query, key, value, mask, **self.options)


def inputs(batch: int, length: int, keys: int, mask: bool = False) -> tuple[torch.Tensor, ...]:
    query, key, value = torch.randn(batch, 6, length, 8), *(torch.randn(batch, 2, keys, 8) for _ in range(2))
    seen = torch.rand(batch, 1, length, keys) > 0.3
    seen[:, :, length - 1] = False
    return (query, key, value, seen) if mask else (query, key, value)


#: The module, and how often an Expand repeats heads.
CASES: dict[str, tuple[Attention, int]] = {
    "expanded": (Attention(expanded), 0),
    "torch's own": (Attention(None, enable_gqa=True), 0),
    "causal": (Attention(expanded, is_causal=True), 0),
    "scale": (Attention(expanded, scale=0.3), 0),
    "all heads in turn": (Attention(tiled), 2),
    "keys alone": (Attention(expanded, tiled), 1),
    "changed afterwards": (Attention(scaled), 2),
    "interleaved": (Attention(interleaved), 0),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", CASES)
def test_shared_heads(name: str, opset: int, masked: bool) -> None:
    torch.manual_seed(1)
    module, expands = CASES[name]
    if masked and name == "causal":
        pytest.skip("torch takes no mask with is_causal")
    sizes = [{0: AUTO, 2: AUTO} for _ in range(3)] + [{0: AUTO, 2: AUTO, 3: AUTO}] * masked
    program = onnxplug.to_onnx(
        module, inputs(2, 5, 7, masked), dynamic_shapes=tuple(sizes), opset_version=opset, plugins=[]
    )
    assert Counter(node.op_type for node in program.model.graph)["Expand"] == expands
    for shape in ((2, 5, 7), (3, 4, 4), (1, 1, 9), (2, 1, 1)):
        args = inputs(*shape, masked)
        torch.testing.assert_close(program(*args)[0], module(*args))
    query, key, value, *rest = inputs(2, 3, 4, masked)
    # The first key is seen by every query, also by causal ones.
    key[0, 1, 0], value[1, 0, 0] = float("nan"), float("inf")
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel gives other rows NaN.
        expected = module(query, key, value, *rest)
    torch.testing.assert_close(program(query, key, value, *rest)[0], expected, equal_nan=True)


def test_static_sizes_and_the_plain_form() -> None:
    module = Attention(expanded)
    args = inputs(2, 5, 7)
    for optimize, expands in ((True, 0), (False, 2)):
        program = onnxplug.to_onnx(module, args, optimize=optimize, plugins=[])
        assert Counter(node.op_type for node in program.model.graph)["Expand"] == expands
        torch.testing.assert_close(program(*args)[0], module(*args))


@pytest.mark.parametrize("repeat", [twice_as_heads, twice_as_keys])
def test_another_axis_repeated_as_often_as_there_are_heads(repeat: Repeat) -> None:
    def args(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(batch, 4, length, 8), *(torch.randn(batch, 2, 2, 8) for _ in range(2))

    module, first = Attention(repeat), args(2, 5)
    sizes = ({0: AUTO, 2: AUTO}, {0: AUTO}, {0: AUTO})
    program = onnxplug.to_onnx(module, first, dynamic_shapes=sizes, plugins=[])
    for inputs_of in (first, args(3, 1), args(1, 4)):
        torch.testing.assert_close(program(*inputs_of)[0], module(*inputs_of))
