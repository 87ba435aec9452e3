"""Attention in models, dense, packed and with a cache, against the formula written out score by score."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from onnxplug_flash_attn import functions as flash_attn
from torch import Tensor

import onnxplug

OPSETS = (13, 18, 23)
DENSE = ({0: "batch", 1: "queries"}, *[{0: "batch", 1: "keys"}] * 2)


@pytest.mark.onnxplug("flash-attn")
@pytest.mark.long
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [L, H, E], k and v [S, a divisor of H, E]; the result and the logarithms [H, L], score by score."""
    (rows, heads, size), columns = q.shape, k.shape[0]
    left, right = (math.inf if n < 0 or n >= columns else n for n in window)
    right = 0 if causal else right
    result, logarithms = torch.zeros(rows, heads, v.shape[2]), torch.full((heads, rows), math.inf)
    q, k, v = q.double(), k.double(), v.double()
    for h in range(heads):
        shared = h // (heads // k.shape[1])
        for i in range(rows):
            place = i + columns - rows
            seen = [j for j in range(columns) if place - left <= j <= place + right]
            if not seen:
                continue
            scores = torch.stack([q[i, h] @ k[j, shared] for j in seen]) * (size**-0.5 if scale is None else scale)
            scores = scores if not softcap else torch.tanh(scores / softcap) * softcap
            if slopes is not None:
                scores = scores - slopes[h] * torch.tensor([abs(place - j) for j in seen])
            weights = scores.exp() / scores.exp().sum()
            result[i, h] = sum(w * v[j, shared] for w, j in zip(weights, seen, strict=True)).float()
            logarithms[h, i] = scores.exp().sum().log()
            if slopes is not None and right == 0 and left == math.inf:  # the kernel adds only slope * j
                logarithms[h, i] += slopes[h] * place
    return result, logarithms


def of_batch(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    every = [
        formula(*x, slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b], **options)
        for b, x in enumerate(zip(q, k, v, strict=True))
    ]
    if not every:
        return q.new_empty(q.shape), q.new_empty((0, q.shape[2], q.shape[1]))
    results, logarithms = zip(*every, strict=True)
    return torch.stack(results), torch.stack(logarithms)


def drawn(
    batch: int, queries: int, keys: int, heads: int = 4, shared: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    rows = ((queries, heads), (keys, shared), (keys, shared))
    return tuple(torch.randn(batch, n, h, 8).to(dtype) for n, h in rows)


def check(
    model: Callable[..., Any],
    expected: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    shapes: Any,
    opsets: Sequence[int] = OPSETS,
    tolerance: float = 1e-5,
) -> None:
    """Exports with the first inputs; the model and the file give the expected results for all inputs."""
    for opset in opsets:
        program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, opset_version=opset)
        for args in inputs:
            wanted = expected(*args)
            for results in (program(*(clone(a) for a in args)), model(*(clone(a) for a in args))):
                both = zip(results, wanted, strict=True)
                for result, value in both:
                    torch.testing.assert_close(result.float(), value.float(), atol=tolerance, rtol=tolerance)


def clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


SIZES = ((2, 5, 7), (1, 1, 4), (3, 6, 2), (2, 1, 1), (1, 4, 4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (2, 1)},
        {"window": (3, -1)},
        {"window": (-1, 2)},
        {"causal": True, "window": (2, 5)},
        {"scale": 0.1, "softcap": 2.0},
        {"causal": True, "softcap": 2.0},
    ],
    ids=str,
)
def test_dense(options: dict[str, Any]) -> None:
    """Any number of queries and keys: masks end in the lower right corner, rows without a visible key are 0."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        given = {"softmax_scale": options.get("scale"), "window_size": options.get("window", (-1, -1))}
        given |= {name: options[name] for name in ("causal", "softcap") if name in options}
        return flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **given)[:2]

    check(model, lambda *args: of_batch(*args, **options), [drawn(*size) for size in SIZES], DENSE)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (2, 0)}, {"causal": True, "window": (4, 0)}], ids=str
)
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.long
def test_slopes(options: dict[str, Any], each: bool) -> None:
    """ALiBi, with a slope for each head, or each head of each element of the batch."""

    def model(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        causal, window = options.get("causal", False), options.get("window", (-1, -1))
        return flash_attn.flash_attn_func(
            q, k, v, causal=causal, window_size=window, alibi_slopes=slopes, return_attn_probs=True
        )[:2]

    inputs = [(*drawn(*size), torch.rand(size[0], 4) if each else torch.rand(4)) for size in SIZES]
    check(model, lambda *args: of_batch(*args, **options), inputs, (*DENSE, {0: "batch"} if each else None), (18,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.long
def test_halves(dtype: torch.dtype, softcap: float) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn.flash_attn_func(q, k, v, causal=True, softcap=softcap, return_attn_probs=True)[:2]

    inputs = [drawn(*size, dtype=dtype) for size in SIZES]
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    check(model, lambda *args: of_batch(*args, causal=True, softcap=softcap), inputs, DENSE, (18, 23), tolerance)


EMPTY = pytest.mark.xfail(
    strict=True,
    reason="ONNX Runtime's Attention refuses no queries and no keys; before opset 23 the rule of scaled_dot_product_attention reshapes the scores "
    "of shared heads, which a size 0 leaves open",
)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("shared", [2, 4])
@pytest.mark.parametrize("empty", [(2, 3, 0), (1, 0, 4)], ids=["no keys", "no queries"])
@pytest.mark.long
def test_empty(
    request: pytest.FixtureRequest, empty: tuple[int, int, int], shared: int, opset: int, options: dict[str, Any]
) -> None:
    """Without keys the result is 0; without queries it is empty."""
    if "softcap" not in options and (opset == 23 or (empty[2] == 0 and shared == 2)):
        request.applymarker(EMPTY)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (flash_attn.flash_attn_func(q, k, v, **options),)

    inputs = [drawn(*size, shared=shared) for size in ((2, 5, 7), empty)]
    check(model, lambda *args: of_batch(*args, **options)[:1], inputs, DENSE, (opset,))


@pytest.mark.long
def test_static_sizes_and_heads(expect_graph: Callable[..., None]) -> None:
    """One head of keys, or as many as queries; with equal lengths, attention stays one operator with a causal mask."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (flash_attn.flash_attn_func(q, k, v, causal=True),)

    for shared in (1, 4):
        inputs = [drawn(2, 5, 5, shared=shared), drawn(3, 9, 9, shared=shared)]
        shapes = ({0: "batch", 1: "rows"},) * 3
        check(model, lambda *args: of_batch(*args, causal=True)[:1], inputs, shapes)
        program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, opset_version=23)
        expect_graph(program, "Transpose Transpose Transpose Attention Transpose")
    check(
        model,
        lambda *args: of_batch(*args, causal=True)[:1],
        [drawn(2, 1, 5), drawn(2, 1, 9)],
        (None, *[{1: "keys"}] * 2),
    )


@pytest.mark.long
def test_packed_heads() -> None:
    def model(qkv: Tensor) -> Any:
        first = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
        return first, flash_attn.flash_attn_kvpacked_func(first, qkv[:, :, 1:])

    def expected(qkv: Tensor) -> Any:
        first = of_batch(*qkv.unbind(2), causal=True)[0]
        return first, of_batch(first, *qkv[:, :, 1:].unbind(2))[0]

    check(model, expected, [(torch.randn(b, n, 3, 2, 8),) for b, n in ((2, 5), (1, 1), (3, 7))], ({0: "b", 1: "n"},))


def test_dropout_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn.flash_attn_func(q, k, v, dropout_p=0.1)

    with pytest.raises(onnxplug.OnnxplugError, match="dropout"):
        onnxplug.to_onnx(model, drawn(2, 5, 7))


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("flash_attn")
    library.__version__ = "1.0.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    with pytest.raises(onnxplug.OnnxplugError, match=r"flash_attn>=2.8,<2.9 are translated; 1.0.9 is installed"):
        onnxplug.to_onnx(flash_attn.flash_attn_func, drawn(2, 5, 7))
