"""Expressions of sizes computed by the graph, held against Python's integers: negative and large ones too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import sympy
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch.utils._sympy import functions as sizes

from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import Unsupported
from onnxplug.finish.finish import finish
from tests.support.check import check

A, B = sympy.Symbol("a", integer=True), sympy.Symbol("b", integer=True)
S = sympy.Symbol("s", integer=True, positive=True)
ONE = sympy.Integer(1)

Pair = tuple[Any, Callable[[int, int, int], int]]
"""An expression, and the same in Python."""


def expressions() -> st.SearchStrategy[Pair]:
    leaves: st.SearchStrategy[Pair] = st.one_of(
        st.sampled_from([(A, lambda a, b, s: a), (B, lambda a, b, s: b), (S, lambda a, b, s: s)]),
        st.integers(-9, 9).map(lambda n: (sympy.Integer(n), lambda a, b, s, n=n: n)),
    )
    two: list[Callable[[Pair, Pair], Pair]] = [
        lambda x, y: (x[0] + y[0], lambda *v: x[1](*v) + y[1](*v)),
        lambda x, y: (x[0] - y[0], lambda *v: x[1](*v) - y[1](*v)),
        lambda x, y: (x[0] * y[0], lambda *v: x[1](*v) * y[1](*v)),
        lambda x, y: (sizes.FloorDiv(x[0], y[0]), lambda *v: x[1](*v) // y[1](*v)),
        lambda x, y: (sizes.PythonMod(x[0], y[0]), lambda *v: x[1](*v) % y[1](*v)),
        lambda x, y: (sizes.Max(x[0], y[0]), lambda *v: max(x[1](*v), y[1](*v))),
        lambda x, y: (sizes.Min(x[0], y[0]), lambda *v: min(x[1](*v), y[1](*v))),
    ]

    def extend(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
        return st.builds(lambda how, x, y: _combined(two[how], x, y), st.integers(0, len(two) - 1), inner, inner)

    return st.recursive(leaves, extend, max_leaves=7)


def _combined(how: Callable[[Pair, Pair], Pair], x: Pair, y: Pair) -> Pair:
    try:
        return how(x, y)
    except ZeroDivisionError:
        return x


def graph_of(expr: Any, optimize: bool) -> bytes:
    g = GraphBuilder({"": 21}, optimize=optimize, expressions={str(expr): expr})
    inputs = [ir.Value(name=n, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([])) for n in "abs"]
    for value in inputs:
        g.sizes.add(str(value.name), value)
    result = g.size(ir.SymbolicDim(str(expr)))
    assert g.size(ir.SymbolicDim(str(expr))) is result
    return ir.to_proto(finish(g, *assemble(g, inputs, [("result", g.op.Identity(result))], {}))).SerializeToString()


NUMBERS = st.one_of(st.integers(-7, 7), st.integers(-(2**20), 2**20))


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(pair=expressions(), values=st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(1, 2**20)), min_size=4, max_size=4))
def test_an_expression_of_sizes_agrees_with_python(pair: Pair, values: list[tuple[int, int, int]]) -> None:
    expr, function = pair
    assume(not expr.has(sympy.zoo, sympy.nan))
    session = None
    for a, b, s in [*values, (-7, 2, 3), (7, -2, 1)]:
        try:
            expected = function(a, b, s)
        except ZeroDivisionError:
            continue
        if abs(expected) >= 2**40 or not _in_range(expr, {A: a, B: b, S: s}):
            continue
        session = session or onnxruntime.InferenceSession(graph_of(expr, True), providers=["CPUExecutionProvider"])
        feeds = {i.name: np.array({"a": a, "b": b, "s": s}[i.name], dtype=np.int64) for i in session.get_inputs()}
        assert int(session.run(None, feeds)[0]) == expected, f"{expr} of a={a}, b={b}, s={s}"


def _in_range(expr: Any, at: dict[Any, int]) -> bool:
    """Whether no part of an expression leaves int64 or divides by 0: sympy may have rewritten it."""
    for part in sympy.preorder_traversal(expr):
        try:
            value = part.xreplace({k: sympy.Integer(v) for k, v in at.items()})
        except ZeroDivisionError:
            return False
        if value.has(sympy.zoo, sympy.nan) or (value.is_number and abs(value) >= 2**62):
            return False
    return True


FIXED: list[tuple[Any, Callable[[int, int, int], int]]] = [
    (sizes.FloorDiv(-S, 2), lambda a, b, s: -s // 2),
    (sizes.FloorDiv(A, -3), lambda a, b, s: a // -3),
    (sizes.PythonMod(A, -3), lambda a, b, s: a % -3),
    (sizes.CeilToInt(sizes.IntTrueDiv(A, 2)), lambda a, b, s: math.ceil(a / 2)),
    (sizes.FloorToInt(sizes.IntTrueDiv(A, 4)), lambda a, b, s: math.floor(a / 4)),
    (sizes.TruncToInt(1.7 * sizes.ToFloat(A)), lambda a, b, s: int(1.7 * a)),
    (sizes.RoundToInt(0.5 * sizes.ToFloat(A)), lambda a, b, s: round(0.5 * a)),
    (sizes.PowByNatural(A, sympy.Integer(3)), lambda a, b, s: a**3),
    (S**2 // 1, lambda a, b, s: s**2),
    (sizes.ModularIndexing(S, 3, 5), lambda a, b, s: s // 3 % 5),
    (sizes.CleanDiv(6 * S, 3), lambda a, b, s: 2 * s),
    (6 * S * A / 2, lambda a, b, s: 3 * s * a),
    (sizes.Where(sympy.Gt(A, B), A, B * 2), lambda a, b, s: a if a > b else b * 2),
    (sizes.Where(sympy.Eq(A, 7), ONE, A), lambda a, b, s: 1 if a == 7 else a),
    (sizes.LShift(S, 3), lambda a, b, s: s << 3),
    (sizes.RShift(S, 2), lambda a, b, s: s >> 2),
    (sizes.Max(A, B, S), lambda a, b, s: max(a, b, s)),
    (S + 2**40, lambda a, b, s: s + 2**40),
]


@pytest.mark.parametrize("optimize", [True, False], ids=["optimized", "plain"])
@pytest.mark.parametrize(("expr", "function"), FIXED, ids=[str(e) for e, _ in FIXED])
def test_every_function_of_sizes(expr: Any, function: Callable[[int, int, int], int], optimize: bool) -> None:
    session = onnxruntime.InferenceSession(graph_of(expr, optimize), providers=["CPUExecutionProvider"])
    for a, b, s in [(7, 2, 5), (-7, 3, 1), (0, -4, 12), (1, 1, 2**31 + 1), (-(2**20) - 1, 2**33, 3)]:
        feeds = {i.name: np.array({"a": a, "b": b, "s": s}[i.name], dtype=np.int64) for i in session.get_inputs()}
        assert int(session.run(None, feeds)[0]) == function(a, b, s)


def test_a_size_that_nothing_holds_is_named() -> None:
    g = GraphBuilder({"": 21}, expressions={"2*q": 2 * sympy.Symbol("q", integer=True)})
    with pytest.raises(Unsupported, match="no value in the graph has the dynamic size 'q'"):
        g.size(ir.SymbolicDim("2*q"))


def test_a_size_is_solved_for_where_an_input_has_a_multiple_of_it() -> None:
    half = torch.export.Dim("half", min=2, max=100)
    check(
        lambda x: x.reshape(2, -1)[:, : x.shape[0] // 2 + 1].repeat(x.shape[0] // 2, 1),
        torch.randn(8),
        others=[(torch.randn(6),), (torch.randn(20),)],
        dynamic=({0: 2 * half},),
    )


def test_a_size_computed_in_a_branch_is_computed_again_after_it() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def yes(x: torch.Tensor) -> torch.Tensor:
            return x.flatten().new_zeros(2) + torch.zeros(x.shape[0] * 3).shape[0]

        picked = torch.cond(y.sum() > 0, yes, lambda x: x.flatten()[:2].clone(), (x,))
        return torch.zeros(x.shape[0] * 3) + picked.sum()

    dim = torch.export.Dim.DYNAMIC
    others = [(torch.randn(5, 2), -torch.ones(1)), (torch.randn(2, 2), torch.ones(1))]
    check(function, torch.randn(3, 2), torch.ones(1), others=others, dynamic=({0: dim}, None))
