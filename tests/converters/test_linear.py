"""Products of matrices: einsum's ellipses, biases of other dtypes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.check import check

# Equation, shapes of its operands; each first axis is dynamic.
ELLIPSES = [
    ("...chw,kc->...khw", (2, 3, 4, 5), (6, 3)),
    ("...chw,kc->...khw", (3, 4, 5), (6, 3)),
    ("...ij,...jk->...ik", (2, 3, 4, 5), (5, 6)),
    ("...ij,...jk->...ik", (4, 5), (2, 3, 5, 6)),
    ("...ij,...jk->...ik", (3, 4, 5), (2, 1, 5, 6)),
    ("...ij,jk", (2, 3, 4, 5), (5, 6)),
    ("b...,...", (2, 3, 4), (3, 4)),
    ("...i,...i", (2, 3, 5), (5,)),
    ("...i,...i->...", (2, 3, 5), (3, 5)),
    ("i...->...", (2, 3, 5)),
    ("...ij->...ji", (2, 3, 5)),
    ("...ii->...i", (2, 3, 3)),
    ("...ij->ij", (2, 3, 5)),
    ("...,...->...", (2, 3), (4, 2, 3)),
    ("Ba...,...a", (2, 3, 5), (5, 3)),
    ("...a,...b,...c->...abc", (2, 3), (4,), (2, 2, 5)),
    ("...ij,...kj->...ik", (1, 4, 5, 3), (5, 4, 2, 1)),
    ("...ij,...kj->...ik", (5, 4, 5, 1), (4, 2, 3)),
]


def _operand(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("equation", "shapes"), [(e, s) for e, *s in ELLIPSES])
def test_einsum_with_ellipses(equation: str, shapes: list[tuple[int, ...]]) -> None:
    first = [_operand(shape, i) for i, shape in enumerate(shapes)]
    second = [_operand(shape, 10 + i) for i, shape in enumerate(shapes)]
    check(lambda *x: torch.einsum(equation, *x), *first, others=[second])


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("Bi,ij", [(2, 3), (3, 4)]), ("ij,ij", [(1, 3), (4, 3)]), ("ij,jk", [(2, 1), (4, 3)]), ("iA,A", [(2, 3), (1,)])],
    ids=str,
)
def test_einsum_without_an_arrow(equation: str, shapes: list[tuple[int, ...]]) -> None:
    """The result's letters are those that occur once, capitals first; sizes of 1 that are broadcast count."""
    first, second = ([_operand(shape, i + n) for i, shape in enumerate(shapes)] for n in (0, 10))
    check(lambda *x: torch.einsum(equation, *x), *first, others=[second])


#: Equations that are products of matrices, and the number of their Transposes.
PRODUCTS = {
    "ij,jk->ik": 0,
    "ij,kj->ik": 1,
    "ij,kj->ki": 1,
    "ji,jk->ik": 1,
    "bij,jk->bik": 0,
    "jk,bij->bik": 0,
    "abij,kj->abik": 1,
    "bhqd,bhkd->bhqk": 1,
    "bqhd,bkhd->bhqk": 2,
    "bhqk,bkhd->bqhd": 2,
}


def _sized(equation: str, sizes: Any, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """An equation's operands; the sizes of its letters, in the order of the alphabet, go round."""
    letters = sorted(set(equation) - set(",->"))
    size = {letter: sizes[place % len(sizes)] for place, letter in enumerate(letters)}
    terms = equation.partition("->")[0].split(",")
    return [(_operand(tuple(size[c] for c in term), seed + i) * 9).to(dtype) for i, term in enumerate(terms)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize(("equation", "transposes"), PRODUCTS.items())
def test_einsum_as_a_product_of_matrices(equation: str, transposes: int, dtype: torch.dtype) -> None:
    """Of any sizes, none too: ONNX Runtime's Einsum ends the process where it transposes an operand without elements."""
    first, second = _sized(equation, (2, 3, 4), 0, dtype), _sized(equation, (5, 1), 9, dtype)
    batch = equation.partition("->")[2][0]  # is summed in no equation
    terms = equation.partition("->")[0].split(",")
    empty = [x.narrow(t.index(batch), 0, 0) if batch in t else x for x, t in zip(first, terms, strict=True)]
    program = check(lambda *x: torch.einsum(equation, *x), *first, others=[second, empty], dynamic=True)
    counts = Counter(node.op_type for node in program.model.graph)
    assert (counts["MatMul"], counts["Transpose"], counts["Einsum"]) == (1, transposes, 0)


@pytest.mark.parametrize(
    "equation",
    [
        "ij,ij->i",
        "ij,jk,kl->il",
        "ij,kl->ik",
        "ij,kj->i",
        "bij,bij->b",
        "i,j->ij",
        "ijk,ljk->il",
        "kj,j->k",
        "bhwc,hkc->bhwk",
    ],
)
def test_einsum_that_is_no_product_of_matrices(equation: str) -> None:
    first, second = _sized(equation, (2, 3, 4), 0), _sized(equation, (5, 1), 9)
    program = check(lambda *x: torch.einsum(equation, *x), *first, others=[second], dynamic=True)
    assert [node.op_type for node in program.model.graph] == ["Einsum"]


def test_einsum_over_an_axis_without_elements() -> None:
    """ONNX Runtime fuses the Transpose into the MatMul, which leaves the result unwritten where there is nothing to add."""

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bij,bik->bjk", x, y)

    first, second, empty = ([torch.randn(2, n, 3), torch.randn(2, n, 4)] for n in (5, 7, 0))
    check(model, *first, others=[second, empty, first, empty], dynamic=({1: N}, {1: N}))
    program = check(model, *first, others=[[torch.randn(3, 5, 3), torch.randn(3, 5, 4)]], dynamic=({0: N}, {0: N}))
    assert [node.op_type for node in program.model.graph] == ["Transpose", "MatMul"]


@pytest.mark.parametrize(
    "shapes",
    [[(3,), (4, 2, 3)], [(2, 3), (4, 2, 3)], [(2, 5, 3), (4, 2, 2, 3)], [(2, 5, 3), (3,)], [(), (4, 2, 3)]],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_inner(shapes: Any, dtype: torch.dtype) -> None:
    first, second = ([(_operand(s, i + n) * 9).to(dtype) for i, s in enumerate(shapes)] for n in (0, 10))
    check(torch.inner, *first, others=[second])


def _integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**62), 2**62, shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    "equation", ["ij->", "ij->ji", "ii->", "iij->j", "i,j->", "bij,bjk->", "ij,jk,kl->i", "ijk,jl->k"]
)
def test_einsum_of_integers_wraps(equation: str) -> None:
    terms = equation.partition("->")[0].split(",")
    first, second, ones = (
        [_integers((size,) * len(term), seed + i) for i, term in enumerate(terms)]
        for size, seed in ((3, 0), (5, 10), (1, 20))
    )
    check(lambda *x: torch.einsum(equation, *x), *first, others=[second, ones], dynamic=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_sums_of_integer_products_wrap(dtype: torch.dtype) -> None:
    def call(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.addbmm(bias, a, b, beta=3, alpha=5), torch.baddbmm(bias, a, b)

    first, second = (
        [_integers(shape, i, dtype) for i, shape in enumerate(((m, n), (batch, m, k), (batch, k, n)))]
        for batch, m, k, n in ((4, 3, 5, 2), (1, 6, 1, 7))
    )
    check(call, *first, others=[second], dynamic=True)


@pytest.mark.parametrize("axes", [([1, 2], [1, 0]), ([1], [1]), 0], ids=str)
def test_tensordot_of_every_size(axes: Any) -> None:
    """Sizes of 0 stay 0: ONNX's Reshape copies a size for 0, and infers none beside it."""
    pairs = [
        ((1, 3, 2), (2, 3, 7)),
        ((0, 3, 2), (2, 3, 1)),
        ((2, 1, 5), (5, 1, 0)),
        ((2, 0, 5), (5, 0, 3)),
        ((2, 4, 0), (0, 4, 3)),
    ]
    others = [(_operand(a, 1), _operand(b, 2)) for a, b in pairs]
    check(
        lambda a, b: torch.tensordot(a, b, axes),
        _operand((2, 3, 4), 0),
        _operand((4, 3, 5), 9),
        others=others,
        dynamic=True,
    )


N, M = torch.export.Dim("n"), torch.export.Dim("m")


@pytest.mark.parametrize(
    ("equation", "shapes", "others", "dynamic"),
    [
        ("...chw,kc->...khw", [(2, 3, 4, 5), (6, 3)], [(1, 3, 4, 9), (6, 3)], [{0: N, 3: M}, None]),
        ("...c,kc->...k", [(2, 7, 3), (6, 3)], [(5, 1, 3), (6, 3)], [{0: N, 1: M}, None]),
        ("...ac,...c->...a", [(2, 5, 4, 3), (2, 5, 3)], [(1, 3, 4, 3), (1, 3, 3)], [{0: N, 1: M}, {0: N, 1: M}]),
        ("...ac,...c->...a", [(2, 5, 4, 3), (5, 3)], [(1, 3, 4, 3), (3, 3)], [{0: N, 1: M}, {0: M}]),
    ],
)
def test_einsum_with_ellipses_of_dynamic_sizes(equation: str, shapes: Any, others: Any, dynamic: Any) -> None:
    first, second = ([_operand(shape, 10 * n + i) for i, shape in enumerate(s)] for n, s in enumerate((shapes, others)))
    check(lambda *x: torch.einsum(equation, *x), *first, others=[second], dynamic=(*dynamic,))


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float16)])
def test_linear_with_a_bias_of_another_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """torch takes such a bias where the operand is not contiguous, and the result has the product's dtype."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", _operand((5, 4), 1).to(dtypes[0]))
            self.register_buffer("bias", _operand((5,), 2).to(dtypes[1]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x.movedim(0, -1), self.weight, self.bias)

    first, second = (_operand((4, n, 3), n).to(dtypes[0]) for n in (2, 6))
    check(Model(), first, others=[(second,)], dynamic=[{1: N}])


@pytest.mark.parametrize("dynamic", [None, ({0: "batch"},)])
def test_cross_entropy_in_chunks(dynamic: Any) -> None:
    """The loss that torch computes chunk by chunk; the chunks are of the rows of the example."""
    weight, bias, classes = torch.randn(5, 4), torch.randn(5), torch.rand(5)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def loss(x: torch.Tensor) -> torch.Tensor:
        target = (x.sum(1) > 0).long()
        return torch.nn.functional.linear_cross_entropy(
            x, weight, target, linear_bias=bias, weight=classes, label_smoothing=0.1, options=options
        )

    others = [(torch.randn(6, 4) * 3,)] if dynamic is None else [(torch.randn(9, 4),), (torch.randn(3, 4),)]
    check(loss, torch.randn(6, 4), others=others, dynamic=dynamic)


def test_trilinear() -> None:
    """Axes that a tensor lacks, sums over none, one and several, an axis that all of them lack, and sizes of 1."""
    aten = torch.ops.aten

    def products(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return (
            aten._trilinear(a, b, c, [1, 3], [0], [1, 2], [2, 3]),
            aten._trilinear(a, b[:1, :, :1], c, [1, 3], [0], [1, 2], [2], 0),
            aten._trilinear(a, a, a * 2, [2], [2], [2], [0]),
            aten._trilinear(a, a, a, [], [], [], []),
            aten._trilinear(a.long(), a.long(), a.long(), [], [], [], [1]),
        )

    noise = torch.Generator().manual_seed(0)
    for rows in (3, 1):  # torch fixes the sizes: its implementation reads them
        args, other = (
            tuple(torch.randn(s, generator=noise) for s in ((rows, 5), (4, 5, 7), (rows, 7))) for _ in range(2)
        )
        check(products, *args, others=[other])
