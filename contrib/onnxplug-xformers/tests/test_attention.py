"""Attention with xformers' biases, against the formula with the mask that the library makes of a bias."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from onnxplug_xformers import library, stand_in
from torch import Tensor

import onnxplug

xops = pytest.importorskip("xformers.ops")
biases = pytest.importorskip("xformers.ops.fmha.attn_bias")
#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {"attention": ({"rtol": 1e-5, "atol": 1e-5}, "the formula is computed in float64, attention in float32")}
QUERIES, KEYS = {0: "batch", 1: "queries"}, {0: "batch", 1: "keys"}
SIZES = ((2, 5, 7), (1, 1, 4), (3, 6, 2))


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """[batch, rows, heads, K], in float64; a row that sees nothing is 0."""
    q, k, v = (x.double().movedim(1, -2) for x in (q, k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1).nan_to_num(0.0) @ v).movedim(-2, 1).float(), scores.logsumexp(-1).float()


def drawn(batch: int, queries: int, keys: int, heads: tuple[int, ...] = (4,), width: int = 8) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, n, *heads, w) for n, w in ((queries, 8), (keys, 8), (keys, width)))


def check(
    model: Callable[..., Any], expected: Callable[..., Any], inputs: Sequence[Any], shapes: Any, opsets: Any = (16, 23)
) -> None:
    for opset in opsets:
        program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, opset_version=opset)
        for args in inputs:
            for results in (program(*(x.clone() for x in args)), model(*(x.clone() for x in args))):
                for result, value in zip(results, expected(*args), strict=True):
                    torch.testing.assert_close(result, value, **LOOSER["attention"][0])


@pytest.mark.parametrize(
    "bias",
    [
        None,
        biases.LowerTriangularMask(),
        biases.LowerTriangularFromBottomRightMask(),
        biases.LowerTriangularFromBottomRightLocalAttentionMask(3),
        biases.LocalAttentionFromBottomRightMask(window_left=2, window_right=1),
    ],
    ids=lambda bias: type(bias).__name__,
)
def test_biases_of_any_size(bias: Any) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (xops.memory_efficient_attention(q, k, v, bias, scale=0.2),)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = None if bias is None else bias.materialize((q.shape[1], k.shape[1]))
        return formula(q, k, v, mask, 0.2)[:1]

    check(model, expected, [drawn(*size) for size in SIZES], (QUERIES, KEYS, KEYS))


@pytest.mark.parametrize("causal", [False, True])
def test_a_tensor_as_the_bias(causal: bool) -> None:
    """With values of another width than the keys'."""

    def model(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        mask = biases.LowerTriangularMaskWithTensorBias(bias) if causal else bias
        return (xops.memory_efficient_attention(q, k, v, mask),)

    def expected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        lower = biases.LowerTriangularMask().materialize((q.shape[1], k.shape[1]))
        return formula(q, k, v, bias + lower if causal else bias)[:1]

    inputs = [(*drawn(*size, width=6), torch.randn(size[0], 4, *size[1:])) for size in SIZES]
    check(model, expected, inputs, (QUERIES, KEYS, KEYS, {0: "batch", 2: "queries", 3: "keys"}))


SEQUENCES = {
    "BlockDiagonal": lambda: biases.BlockDiagonalMask.from_seqlens([2, 3], [4, 1]),
    "BlockDiagonalCausal": lambda: biases.BlockDiagonalMask.from_seqlens([2, 3], [2, 3]).make_causal(),
    "BlockDiagonalCausal, unequal": lambda: biases.BlockDiagonalMask.from_seqlens([2, 3], [4, 1]).make_causal(),
    "from the corner": lambda: biases.BlockDiagonalMask.from_seqlens([2, 3], [4, 8]).make_causal_from_bottomright(),
    "local": lambda: biases.BlockDiagonalMask.from_seqlens([2, 3], [2, 3]).make_local_attention(2),
    "local, unequal": lambda: biases.BlockDiagonalMask.from_seqlens([2, 3], [4, 8]).make_local_attention(2),
    "padded keys": lambda: biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[2, 3], kv_padding=6, kv_seqlen=[4, 3]
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_concatenated_sequences(name: str) -> None:
    """The lengths are the mask's own; heads in one dimension, and in two."""
    columns = 12 if name in ("padded keys", "from the corner", "local, unequal") else 5

    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return (xops.memory_efficient_attention(q, k, v, SEQUENCES[name]()),)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return formula(q, k, v, SEQUENCES[name]().materialize((5, columns)))[:1]

    for heads in ((4,), (2, 2)):
        check(model, expected, [drawn(1, 5, columns, heads), drawn(1, 5, columns, heads)], None, (18,))


def test_logarithms() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return xops.memory_efficient_attention_forward_requires_grad(
            q, k, v, biases.LowerTriangularFromBottomRightMask()
        )

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return formula(q, k, v, biases.LowerTriangularFromBottomRightMask().materialize((q.shape[1], k.shape[1])))

    check(model, expected, [drawn(*size) for size in SIZES[:2]], (QUERIES, KEYS, KEYS), (18,))


def test_norms() -> None:
    norm = xops.RMSNorm(8)
    torch.nn.init.normal_(norm.weight)

    def model(x: Tensor, y: Tensor) -> Any:
        first, x = norm(x), x.clone()
        return first, norm.increment_and_forward_(x, y), x

    def expected(x: Tensor, y: Tensor) -> Any:
        def of(x: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

        return of(x), of(x + y), x + y

    with torch.no_grad():
        inputs = [tuple(torch.randn(2, n, 3, 8)) for n in (2, 1, 5)]
        check(model, expected, inputs, ({0: "rows"},) * 2, (13, 23))


def test_dropout_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return xops.memory_efficient_attention(q, k, v, p=0.1)

    with pytest.raises(onnxplug.OnnxplugError, match="dropout"):
        onnxplug.to_onnx(model, drawn(2, 5, 7))


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block, {"__name__": "readme"})


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xformers.__version__", "0.0.20")
    with pytest.raises(onnxplug.PluginError, match=r"xformers>=0.0.34,<0.0.36 are translated; 0.0.20 is installed"):
        stand_in()


def test_schema() -> None:
    """The schema is that of the library's own function, which its module registers where there is a GPU."""
    source = inspect.getsource(xops.fmha.flash)
    begin = source.index("    def _flash_fwd(")
    code = textwrap.dedent(source[begin : source.index("        softcap = 0.0")]) + "    ..."
    names: dict[str, Any] = {"torch": torch, "Optional": Optional, "Tuple": tuple}
    exec(code, names)
    inferred = torch.library.infer_schema(names["_flash_fwd"], mutates_args=())
    assert inferred == library.SCHEMA
