"""Sums of products by an equation, in steps where ONNX Runtime would lose digits."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.reductions import in_rows, is_long_sum, reduce, reduced
from onnxplug.converters.helpers.runtimes import INTEGERS_THROUGH_DOUBLE

#: The most products that are added by Einsum itself where there are too many.
_MOST_INSIDE = 1 << 12


def sum_of_products(g: GraphBuilder, equation: str, tensors: Sequence[Value]) -> Value:
    """Einsum, with long sums of floats in steps; in double with ``exact=True`` where a summed axis is dynamic.

    Args:
        g: The builder.
        equation: With an arrow, without ellipses and spaces.
        tensors: One for each term, of one dtype; a letter has the same size in all of them.
    """
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if tensors[0].dtype == INT64 and INTEGERS_THROUGH_DOUBLE.concerns(g):
        return _of_integers(g, terms, tensors, right)
    if _is_long(g, _summed(g, terms, tensors, right), tensors):
        # A letter that only one operand has is summed there.
        tensors = [_summed_alone(g, x, term, left, right) for x, term in zip(tensors, terms, strict=True)]
    summed = _summed(g, terms, tensors, right)
    if not _is_long(g, summed, tensors):
        return g.op.Einsum(*tensors, equation=equation)
    if not all(isinstance(size, int) for size in summed.values()):
        return g.cast(g.op.Einsum(*(g.cast(x, DOUBLE) for x in tensors), equation=equation), FLOAT)
    return _in_steps(g, terms, tensors, right, summed)


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
