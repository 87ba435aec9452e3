"""Samples by rejection, as torch.distributions draws them: gamma, Dirichlet, Poisson, binomial.

All are computed in double. A Loop draws for every element until each was accepted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.dtypes import DOUBLE, INT64
from onnxplug.converters.helpers.loops import repeat
from onnxplug.converters.helpers.randomness import normal_like, uniform_like
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

#: Rounds of rejection at most. The worst of the methods rejects a fifth: of 2⁶³ elements none is left.
_ROUNDS = 200
#: From this mean on counts are drawn by rejection, below it by adding up probabilities.
_LARGE = 10.0
#: The largest count where the mean is below that: the probability of a larger count is below 1e-28.
_SMALL_COUNTS = 64


def _number(g: GraphBuilder, value: float) -> Value:
    return g.const(value, DOUBLE)


def _first_accepted(g: GraphBuilder, like: Value, draw: Callable[[], tuple[Value, Value]]) -> Value:
    """For each element of ``like`` the first of the drawn values that is accepted.

    Args:
        g: The builder.
        like: The shape, and the values of elements that nothing is accepted for; double.
        draw: Gives values and whether they are accepted.
    """

    def step(_: Value, pending: Value, result: Value) -> list[Value]:
        drawn, accepted = draw()
        result = g.op.Where(g.op.And(pending, accepted), drawn, result)
        pending = g.op.And(pending, g.op.Not(accepted))
        return [_any(g, pending), pending, result]

    pending = g.op.Expand(g.const(True), g.shape(like)) if rank_of(like) else g.const(True)
    return repeat(g, _ROUNDS, step, pending, like, until=True)[1]


def _any(g: GraphBuilder, flags: Value) -> Value:
    return g.op.Greater(reduce(g, "ReduceSum", g.cast(flags, INT64), None, False), g.const(0))


def _gamma(g: GraphBuilder, shape: Value) -> Value:
    """Samples of the gamma distribution with scale 1 (Marsaglia and Tsang, 2000): d v³ with v = 1 + c x of a normal x.

    For a shape below 1, a sample for the shape plus 1 times u^(1 / shape).
    """
    one = _number(g, 1.0)
    below = g.op.Less(shape, one)
    d = g.op.Sub(g.op.Where(below, g.op.Add(shape, one), shape), _number(g, 1 / 3))
    c = g.op.Div(one, g.op.Sqrt(g.op.Mul(d, _number(g, 9.0))))

    def draw() -> tuple[Value, Value]:
        x = normal_like(g, d, DOUBLE)
        root = g.op.Add(one, g.op.Mul(c, x))
        is_positive = g.op.Greater(root, _number(g, 0.0))
        v = g.op.Pow(g.op.Where(is_positive, root, one), _number(g, 3.0))
        bound = g.op.Add(g.op.Sub(one, v), g.op.Log(v))
        bound = g.op.Add(g.op.Mul(g.op.Mul(x, x), _number(g, 0.5)), g.op.Mul(d, bound))
        return g.op.Mul(d, v), g.op.And(is_positive, g.op.Less(g.op.Log(uniform_like(g, d, DOUBLE)), bound))

    sample = _first_accepted(g, d, draw)
    lessened = g.op.Pow(g.op.Sub(one, uniform_like(g, shape, DOUBLE)), g.op.Div(one, g.op.Where(below, shape, one)))
    return g.op.Where(below, g.op.Mul(sample, lessened), sample)


def standard_gamma(g: GraphBuilder, node: FxNode) -> Value:
    """_standard_gamma(Tensor self, Generator? generator=None) -> Tensor

    At least the smallest normal number of the dtype, as in PyTorch.
    """
    sample = _gamma(g, g.cast(node.args[0], DOUBLE))
    least = {"FLOAT": -126, "BFLOAT16": -126, "FLOAT16": -14}.get(node.dtype.name, -1022)
    return g.cast(g.op.Max(sample, _number(g, 2.0**least)), node.dtype)


def sample_dirichlet(g: GraphBuilder, node: FxNode) -> Value:
    """_sample_dirichlet(Tensor self, Generator? generator=None) -> Tensor

    Gamma samples divided by their sum along the last axis.
    """
    sample = _gamma(g, g.cast(node.args[0], DOUBLE))
    sample = g.op.Max(sample, _number(g, 2.0**-1022))
    total = reduce(g, "ReduceSum", sample, [rank_of(sample) - 1], True)
    return g.cast(g.op.Div(sample, total), node.dtype)


def _log_factorial(g: GraphBuilder, k: Value) -> Value:
    """log k! of doubles that are whole numbers of at least 0: a table up to 9, beyond it Stirling's series."""
    known = g.const(np.array([math.lgamma(i + 1) for i in range(10)]), DOUBLE)
    place = g.cast(g.op.Min(g.op.Max(k, _number(g, 0.0)), _number(g, 9.0)), INT64)
    z = g.op.Add(g.op.Max(k, _number(g, 9.0)), _number(g, 1.0))
    inverse = g.op.Reciprocal(z)
    square = g.op.Mul(inverse, inverse)
    tail = g.op.Add(g.op.Mul(square, _number(g, 1 / 1260)), _number(g, -1 / 360))
    tail = g.op.Mul(inverse, g.op.Add(g.op.Mul(square, tail), _number(g, 1 / 12)))
    main = g.op.Sub(g.op.Mul(g.op.Sub(z, _number(g, 0.5)), g.op.Log(z)), z)
    series = g.op.Add(g.op.Add(main, _number(g, 0.5 * math.log(2 * math.pi))), tail)
    return g.op.Where(g.op.Less(k, _number(g, 9.5)), g.op.Gather(known, place), series)


def _by_addition(g: GraphBuilder, first: Value, following: Callable[[Value, Value], Value]) -> Value:
    """Counts by inversion: how many probabilities add up to a uniform number.

    Args:
        g: The builder.
        first: The probability of 0.
        following: The probability of k + 1 from k and its probability.
    """
    drawn = uniform_like(g, first, DOUBLE)
    start = g.op.Mul(first, _number(g, 0.0))

    def step(_: Value, count: Value, probability: Value, total: Value) -> list[Value]:
        beyond = g.op.GreaterOrEqual(drawn, total)
        probability = following(count, probability)
        count = g.op.Where(beyond, g.op.Add(count, _number(g, 1.0)), count)
        return [_any(g, beyond), count, probability, g.op.Where(beyond, g.op.Add(total, probability), total)]

    return repeat(g, _SMALL_COUNTS, step, start, first, first, until=True)[0]


def _transformed(
    g: GraphBuilder, a: Value, b: Value, center: Value, quick: Value, accepts: Callable[[Value, Value, Value], Value]
) -> Value:
    """Counts by transformed rejection with squeeze (Hörmann, 1993).

    Args:
        g: The builder.
        a, b, center: A count is floor((2 a / s + b) u + center), u uniform in [-1/2, 1/2) and s = 1/2 - |u|.
        quick: Up to where it is accepted without a look at its probability, if s is at least 0.07.
        accepts: Whether a count is accepted, from it, the second uniform number and s.
    """
    half = _number(g, 0.5)

    def draw() -> tuple[Value, Value]:
        u = g.op.Sub(uniform_like(g, center, DOUBLE), half)
        v = uniform_like(g, center, DOUBLE)
        s = g.op.Sub(half, g.op.Abs(u))
        slope = g.op.Add(g.op.Div(g.op.Add(a, a), s), b)
        k = g.op.Floor(g.op.Add(g.op.Mul(slope, u), center))
        at_once = g.op.And(g.op.GreaterOrEqual(s, _number(g, 0.07)), g.op.LessOrEqual(v, quick))
        possible = g.op.And(g.op.GreaterOrEqual(k, _number(g, 0.0)), g.op.Greater(s, _number(g, 0.0)))
        return k, g.op.And(possible, g.op.Or(at_once, accepts(k, v, s)))

    return _first_accepted(g, center, draw)


def poisson(g: GraphBuilder, node: FxNode) -> Value:
    """poisson(Tensor self, Generator? generator=None) -> Tensor"""
    rate = g.cast(node.args[0], DOUBLE)
    large = g.op.GreaterOrEqual(rate, _number(g, _LARGE))
    low = g.op.Where(large, _number(g, 1.0), rate)
    few = _by_addition(
        g,
        g.op.Exp(g.op.Neg(low)),
        lambda k, p: g.op.Div(g.op.Mul(p, low), g.op.Add(k, _number(g, 1.0))),
    )
    high = g.op.Where(large, rate, _number(g, _LARGE))
    b = _line(g, g.op.Sqrt(high), 2.53, 0.931)
    a = _line(g, b, 0.02483, -0.059)
    inverse_alpha = g.op.Add(g.op.Div(_number(g, 1.1328), _line(g, b, 1.0, -3.4)), _number(g, 1.1239))
    quick = g.op.Sub(_number(g, 0.9277), g.op.Div(_number(g, 3.6224), _line(g, b, 1.0, -2.0)))
    logarithm = g.op.Log(high)

    def accepts(k: Value, v: Value, s: Value) -> Value:
        width = g.op.Add(g.op.Div(a, g.op.Mul(s, s)), b)
        probability = g.op.Sub(g.op.Sub(g.op.Mul(k, logarithm), high), _log_factorial(g, k))
        return g.op.LessOrEqual(g.op.Log(g.op.Div(g.op.Mul(v, inverse_alpha), width)), probability)

    many = _transformed(g, a, b, _line(g, high, 1.0, 0.43), quick, accepts)
    return g.cast(g.op.Where(large, many, few), node.dtype)


def _line(g: GraphBuilder, x: Value, slope: float, start: float) -> Value:
    return g.op.Add(g.op.Mul(x, _number(g, slope)), _number(g, start))


def binomial(g: GraphBuilder, node: FxNode) -> Value:
    """binomial(Tensor count, Tensor prob, Generator? generator=None) -> Tensor

    Samples of the rarer outcome; the other outcome has the rest of the count.
    """
    n, p = (g.cast(x, DOUBLE) for x in node.args[:2])
    n, p = g.op.Add(n, g.op.Mul(p, _number(g, 0.0))), g.op.Add(p, g.op.Mul(n, _number(g, 0.0)))
    frequent = g.op.Greater(p, _number(g, 0.5))
    rare = g.op.Where(frequent, g.op.Sub(_number(g, 1.0), p), p)
    mean = g.op.Mul(n, rare)
    large = g.op.GreaterOrEqual(mean, _number(g, _LARGE))
    few = _few_successes(g, g.op.Where(large, _number(g, 1.0), n), rare)
    many = _many_successes(g, g.op.Where(large, n, _number(g, 2 * _LARGE)), g.op.Where(large, rare, _number(g, 0.5)))
    successes = g.op.Where(large, many, few)
    return g.cast(g.op.Where(frequent, g.op.Sub(n, successes), successes), node.dtype)


def _few_successes(g: GraphBuilder, n: Value, p: Value) -> Value:
    rest = g.op.Sub(_number(g, 1.0), p)
    odds = g.op.Div(p, rest)

    def following(k: Value, probability: Value) -> Value:
        return g.op.Mul(g.op.Mul(probability, odds), g.op.Div(g.op.Sub(n, k), g.op.Add(k, _number(g, 1.0))))

    return g.op.Min(_by_addition(g, g.op.Pow(rest, n), following), n)


def _many_successes(g: GraphBuilder, n: Value, p: Value) -> Value:
    rest = g.op.Sub(_number(g, 1.0), p)
    deviation = g.op.Sqrt(g.op.Mul(g.op.Mul(n, p), rest))
    b = _line(g, deviation, 2.53, 1.15)
    a = g.op.Add(_line(g, b, 0.0248, -0.0873), g.op.Mul(p, _number(g, 0.01)))
    center = _line(g, g.op.Mul(n, p), 1.0, 0.5)
    quick = g.op.Sub(_number(g, 0.92), g.op.Div(_number(g, 4.2), b))
    alpha = g.op.Mul(g.op.Add(g.op.Div(_number(g, 5.1), b), _number(g, 2.83)), deviation)
    odds = g.op.Log(g.op.Div(p, rest))
    mode = g.op.Floor(g.op.Mul(g.op.Add(n, _number(g, 1.0)), p))

    def ways(k: Value) -> Value:
        return g.op.Add(_log_factorial(g, k), _log_factorial(g, g.op.Sub(n, k)))

    most = ways(mode)

    def accepts(k: Value, v: Value, s: Value) -> Value:
        width = g.op.Add(g.op.Div(a, g.op.Mul(s, s)), b)
        probability = g.op.Add(g.op.Sub(most, ways(k)), g.op.Mul(g.op.Sub(k, mode), odds))
        likely = g.op.LessOrEqual(g.op.Log(g.op.Div(g.op.Mul(v, alpha), width)), probability)
        return g.op.And(g.op.LessOrEqual(k, n), likely)

    return g.op.Min(_transformed(g, a, b, center, quick, accepts), n)


RULES: list[Rule] = [
    Rule("aten::_standard_gamma.default", standard_gamma),
    Rule("aten::_sample_dirichlet.default", sample_dirichlet),
    Rule("aten::poisson.default", poisson),
    Rule("aten::binomial.default", binomial),
]
