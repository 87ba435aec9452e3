"""Sums of products by an equation, in steps where ONNX Runtime would lose digits."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.reductions import in_rows, is_long_sum, reduce, reduced
from onnxplug.converters.helpers.runtimes import FUSED_PRODUCTS_STAY_UNWRITTEN, INTEGERS_THROUGH_DOUBLE

#: The most products that are added by Einsum itself where there are too many.
_MOST_INSIDE = 1 << 12


def sum_of_products(g: GraphBuilder, equation: str, tensors: Sequence[Value]) -> Value:
    """A product of matrices where the equation is one, else Einsum; long sums of floats are made in steps, or in double.

    They are made in double with ``exact=True`` where a summed axis is dynamic.

    Args:
        g: The builder.
        equation: With an arrow, without ellipses and spaces.
        tensors: One for each term, of one dtype; a letter has the same size in all of them.
    """
    left, _, right = equation.partition("->")
    terms, matrices = left.split(","), as_matrices(g, equation, tensors)

    def at_once(operands: Sequence[Value]) -> Value:
        if matrices is not None:
            return _product(g, terms, operands, matrices)
        return g.op.Einsum(*operands, equation=equation)

    if tensors[0].dtype == INT64 and matrices is None and INTEGERS_THROUGH_DOUBLE.concerns(g):
        return _of_integers(g, terms, tensors, right)
    if _is_long(g, _summed(g, terms, tensors, right), tensors):
        # A letter that only one operand has is summed there.
        tensors = [_summed_alone(g, x, term, left, right) for x, term in zip(tensors, terms, strict=True)]
    summed = _summed(g, terms, tensors, right)
    if not _is_long(g, summed, tensors):
        return at_once(tensors)
    if not all(isinstance(size, int) for size in summed.values()):
        return g.cast(at_once([g.cast(x, DOUBLE) for x in tensors]), FLOAT)
    return _in_steps(g, terms, tensors, right, summed)


class Matrices(NamedTuple):
    """A product of matrices that computes an equation.

    Attributes:
        operands: The places of the left and the right operand.
        letters: The axes of the left operand, of the right one and of their product: ``("bqd", "bdk", "bqk")``.
        result: The axes of the result.
    """

    operands: tuple[int, int]
    letters: tuple[str, str, str]
    result: str


def as_matrices(g: GraphBuilder, equation: str, tensors: Sequence[Value]) -> Matrices | None:
    """The product of matrices that computes an equation: the product of the fewest Transposes.

    MatMul is faster than ONNX Runtime's Einsum, whose own transposition of an operand without elements ends the process,
    and more runtimes have it.

    Args:
        g: The builder.
        equation, tensors: As of :func:`sum_of_products`.

    Returns:
        The product; ``None`` where the equation has not two operands and one summed letter, where reshapes would be needed,
        as for two letters of each operand that the other one has not, and where ONNX Runtime's MatMul would refuse operands
        without elements that its Einsum takes: a vector, a batch that is broadcast.
    """
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != 2 or any(len(set(term)) != len(term) for term in (*terms, right)):
        return None
    found = [matrices for order in ((0, 1), (1, 0)) if (matrices := _ordered(terms, order, right)) is not None]
    if FUSED_PRODUCTS_STAY_UNWRITTEN.concerns(g):
        found = [matrices for matrices in found if not _may_stay_unwritten(g, matrices, terms, tensors)]
    return min(found, key=lambda matrices: _transposed(terms, matrices), default=None)


def _ordered(terms: Sequence[str], order: tuple[int, int], right: str) -> Matrices | None:
    """The product of the operands in an order."""
    a, b = (terms[place] for place in order)
    batch = "".join(c for c in right if c in a and c in b)
    rows, columns = ("".join(c for c in right if c in one and c not in other) for one, other in ((a, b), (b, a)))
    inner = "".join(c for c in a if c in b and c not in right)
    if not rows or (batch and len(rows) > 1) or len(columns) != 1 or len(inner) != 1:
        return None
    if len(batch + rows) + 1 != len(a) or len(batch) + 2 != len(b):
        return None  # a letter is summed in one operand alone
    outer, row = batch + rows[:-1], rows[-1]
    return Matrices(order, (outer + row + inner, batch + inner + columns, outer + row + columns), right)


def _may_stay_unwritten(g: GraphBuilder, matrices: Matrices, terms: Sequence[str], tensors: Sequence[Value]) -> bool:
    """Whether ONNX Runtime fuses the left operand's Transpose into a MatMul with a batch, and its rows may have no elements."""
    place, (left, _, _) = matrices.operands[0], matrices.letters
    is_static = isinstance(g.dims(tensors[place])[terms[place].index(left[-1])], int)
    return not is_static and len(left) > 2 and terms[place] == left[:-2] + left[:-3:-1]


def _transposed(terms: Sequence[str], matrices: Matrices) -> int:
    """The number of Transposes of a product."""
    given = (*(terms[place] for place in matrices.operands), matrices.result)
    return sum(one != other for one, other in zip(given, matrices.letters, strict=True))


def _product(g: GraphBuilder, terms: Sequence[str], tensors: Sequence[Value], matrices: Matrices) -> Value:
    a, b = (_moved(g, tensors[p], terms[p], axes) for p, axes in zip(matrices.operands, matrices.letters, strict=False))
    return _moved(g, g.op.MatMul(a, b), matrices.letters[2], matrices.result)


def _moved(g: GraphBuilder, x: Value, before: str, after: str) -> Value:
    """A tensor with its axes in another order."""
    return x if before == after else g.op.Transpose(x, perm=[before.index(c) for c in after])


def _of_integers(g: GraphBuilder, terms: Sequence[str], tensors: Sequence[Value], right: str) -> Value:
    """A letter that only one operand has is summed there, so that the sum wraps: Einsum sums it through double, unlike products."""
    kept, results = [], []
    for place, (term, x) in enumerate(zip(terms, tensors, strict=True)):
        others = {*right, *"".join([*terms[:place], *terms[place + 1 :]])}
        if not set(term) <= others:
            letters = "".join(dict.fromkeys(term))
            x = x if letters == term else g.op.Einsum(x, equation=f"{term}->{letters}")
            axes = [axis for axis, c in enumerate(letters) if c not in others]
            x = reduced(g, "ReduceSum", x, axes, False, INT64, exact=True)
            term = "".join(c for c in letters if c in others)
        kept.append(term)
        results.append(x)
    return results[0] if kept == [right] else g.op.Einsum(*results, equation=f"{','.join(kept)}->{right}")


def _summed(g: GraphBuilder, terms: Sequence[str], tensors: Sequence[Value], right: str) -> dict[str, Any]:
    """The letters that are summed, and their sizes."""
    sizes = {c: size for term, x in zip(terms, tensors, strict=True) for c, size in zip(term, g.dims(x), strict=True)}
    return {c: size for c, size in sizes.items() if c not in right}


def _is_long(g: GraphBuilder, summed: dict[str, Any], tensors: Sequence[Value]) -> bool:
    return is_long_sum(g, tensors[0].dtype, list(summed.values()))


def _summed_alone(g: GraphBuilder, x: Value, term: str, left: str, right: str) -> Value:
    """An operand with the axes summed to size 1 that no other operand has, nor the result."""
    axes = [axis for axis, c in enumerate(term) if left.count(c) == 1 and c not in right]
    return reduce(g, "ReduceSum", x, axes, True) if axes else x


def _in_steps(
    g: GraphBuilder, terms: Sequence[str], tensors: Sequence[Value], right: str, summed: dict[str, int]
) -> Value:
    """The sum over the longest letter, or over rows of it, and then over the others, whose axes the Einsum keeps."""
    longest = max(summed, key=summed.__getitem__)
    unused = next((c for c in string.ascii_letters if not any(c in term for term in terms)), None)
    kept = [c for c in summed if c != longest and summed[c] > 1]
    terms, tensors = list(terms), list(tensors)
    if summed[longest] > _MOST_INSIDE and unused is not None:
        kept.append(longest)
        for place, term in enumerate(terms):
            for axis in reversed([i for i, c in enumerate(term) if c == longest]):
                tensors[place] = in_rows(g, tensors[place], axis, summed[longest])
            terms[place] = term.replace(longest, longest + unused)
    sizes = {c: size for term, x in zip(terms, tensors, strict=True) for c, size in zip(term, g.dims(x), strict=True)}
    static = [size for c in (*kept, *right) if isinstance(size := sizes[c], int)]
    memory = sum(math.prod(size for size in g.dims(x) if isinstance(size, int)) for x in tensors)
    if math.prod(static) > memory:  # the Einsum's intermediate result would be larger than the operands
        kept = []
    result = g.op.Einsum(*tensors, equation=f"{','.join(terms)}->{''.join(kept)}{right}")
    for _ in kept:
        result = reduce(g, "ReduceSum", result, [0], False)
    return result
