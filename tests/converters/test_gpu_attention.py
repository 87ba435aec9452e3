"""Attention operators with kernels on a GPU alone, in programs captured there. They are exported from fake tensors.

Compared with scaled_dot_product_attention, and with the logarithms of the sums by their definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from onnxplug.errors import OutputMismatchError
from tests.support.check import Call
from tests.support.tolerances import looser

pytestmark = pytest.mark.filterwarnings("error:ONNX Runtime can't run")
aten = torch.ops.aten
AUTO = torch.export.Dim.AUTO
Inputs = tuple[torch.Tensor, ...]


def inputs(batch: int, queries: int, keys: int, shared: int = 4, masked: bool = False, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(4, queries, 8), (shared, keys, 8), (shared, keys, 8), *([(1, queries, keys)] if masked else [])]
    return tuple(torch.randn(batch, *size, generator=generator) for size in sizes)


def exported(function: Callable[..., Any], args: Inputs, opset: int | None = None) -> onnxplug.OnnxProgram:
    """An export with dynamic batch and lengths."""
    shapes = {"args": tuple({0: AUTO, 2: AUTO, **({3: AUTO} if i == 3 else {})} for i in range(len(args)))}
    return onnxplug.to_onnx(torch.export.export(Call(function), args, dynamic_shapes=shapes), opset_version=opset)


def lower_right(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    queries, keys = x.shape[-2], y.shape[-2]
    return torch.ones(queries, keys).tril(keys - queries).log()


def upper_left(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[-2], y.shape[-2]).tril().log()


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the logarithms of the sums in double; a row without keys has 0 and infinity."""
    heads = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(heads, -3) for x in (k, v))
    output = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    total = (scores if mask is None else scores + mask).logsumexp(-1).float()
    return output, torch.where(total == -math.inf, math.inf, total)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    plain = aten._scaled_dot_product_flash_attention(q, k, v)
    causal = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=0.3)
    return *plain[:2], *causal[:2]


def efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    plain = aten._scaled_dot_product_efficient_attention(q, k, v, None, False)
    causal = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True, scale=0.3)
    masked = aten._scaled_dot_product_efficient_attention(q, k, v, mask.expand(-1, 4, -1, -1), True)
    return *plain[:2], *causal[:2], *masked[:2]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    plain = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    causal = aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, True, False, scale=0.3)
    return *plain[:2], *causal[:2]


def overrideable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    plain = aten._scaled_dot_product_fused_attention_overrideable(q[0], k[0], v[0])
    causal = aten._scaled_dot_product_fused_attention_overrideable(q, k, v, mask, 0.0, True, False, scale=0.3)
    return *plain[:2], *causal[:2]


SIZES = [(2, 5, 7), (3, 40, 9), (1, 32, 32), (2, 1, 3)]


Results = Callable[..., list[torch.Tensor]]


def check_at_all_sizes(function: Callable[..., Any], opset: int, results: Results, **options: Any) -> None:
    """Compares an export with ``results`` for the same inputs; ``options`` are those of :func:`inputs`."""
    program = exported(function, inputs(2, 5, 7, **options), opset)
    for seed, sizes in enumerate(SIZES):
        args = inputs(*sizes, **options, seed=seed)
        torch.testing.assert_close(list(program(*args)), results(*args), **looser("attention of GPUs"))


@pytest.mark.parametrize("opset", [13, 21, 23])
@pytest.mark.parametrize("shared", [4, 2, 1])
def test_flash(shared: int, opset: int) -> None:
    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [*expected(q, k, v, None, None), *expected(q, k, v, lower_right(q, k), 0.3)]

    check_at_all_sizes(flash, opset, results, shared=shared)


@pytest.mark.parametrize("opset", [13, 21, 23])
def test_efficient(opset: int) -> None:
    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        plain, causal = expected(q, k, v, None, None), expected(q, k, v, upper_left(q, k), 0.3)
        masked = expected(q, k, v, mask, None)
        end = (0, -q.shape[2] % 32)
        collected = [plain[0], plain[1][..., :0], causal[0], F.pad(causal[1], end, value=math.inf)]
        return [*collected, masked[0], F.pad(masked[1], end, value=math.inf)]

    check_at_all_sizes(efficient, opset, results, masked=True)


@pytest.mark.parametrize("opset", [13, 21, 23])
def test_cudnn(opset: int) -> None:
    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        plain, causal = expected(q, k, v, None, None), expected(q, k, v, mask + upper_left(q, k), 0.3)
        return [plain[0], plain[1].unsqueeze(-1), causal[0], causal[1].unsqueeze(-1)]

    check_at_all_sizes(cudnn, opset, results, masked=True)


@pytest.mark.parametrize("opset", [13, 21, 23])
def test_overrideable(opset: int) -> None:
    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        plain = expected(q[:1], k[:1], v[:1], None, None)
        return [plain[0][0], plain[1], *expected(q, k, v, mask + upper_left(q, k), 0.3)]

    check_at_all_sizes(overrideable, opset, results, masked=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(dtype: torch.dtype) -> None:
    args = tuple(x.to(dtype) for x in inputs(2, 5, 7))
    program = exported(flash, args)
    q, k, v = (x.float() for x in args)
    collected = [*expected(q, k, v, None, None), *expected(q, k, v, lower_right(q, k), 0.3)]
    results = program(*args)
    assert [x.dtype for x in results] == [dtype, torch.float32] * 2
    torch.testing.assert_close([x.float() for x in results], collected, **looser("attention, 16 bits"))


@pytest.mark.filterwarnings("ignore:.*training mode")
def test_dropout() -> None:
    q, k, v = inputs(2, 50, 70)
    program = exported(lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0], (q, k, v))
    first, second = (program(q, k, torch.ones_like(v))[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(first.mean() - 1) < 0.05


def test_states_of_random_numbers_are_refused() -> None:
    with pytest.raises(OutputMismatchError, match="returned None as result 2"):
        exported(lambda *x: aten._scaled_dot_product_efficient_attention(*x, None, True)[2], inputs(2, 5, 7))
