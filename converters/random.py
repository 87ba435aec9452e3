"""Random numbers: another sample at each run."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT
from onnxplug.converters.helpers.fill import filled, sizes_of
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def uniform_like(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """Numbers from [0, 1) in the shape of ``x``."""
    shaped = g.cast(x, dtype)
    return g.op.RandomUniformLike(shaped, dtype=int(dtype))


def normal_like(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """Standard normal numbers of the shape of ``x``."""
    return g.op.RandomNormalLike(g.cast(x, dtype), dtype=int(dtype))


def _drawn_in(g: GraphBuilder, dtype: ir.DataType) -> ir.DataType:
    """The dtype to draw in: for integers and bools float."""
    return computed_in(g, "RandomUniformLike RandomNormalLike", dtype if dtype.is_floating_point() else FLOAT)


def _like(g: GraphBuilder, node: FxNode, sizes: list[Any]) -> Value:
    return filled(g, 0, sizes, _drawn_in(g, node.dtype))


def rand_like(normal: bool) -> Converter:
    """rand_like, randn_like."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        draw = normal_like if normal else uniform_like
        return g.cast(draw(g, node.args[0], _drawn_in(g, node.dtype)), node.dtype)

    convert.__name__ = convert.__qualname__ = "randn_like" if normal else "rand_like"
    return convert


def rand(normal: bool) -> Converter:
    """rand, randn."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        draw = normal_like if normal else uniform_like
        return g.cast(draw(g, _like(g, node, sizes_of(node, 0)), _drawn_in(g, node.dtype)), node.dtype)

    convert.__name__ = convert.__qualname__ = "randn" if normal else "rand"
    return convert


def _integers(g: GraphBuilder, node: FxNode, shaped: Value, low: Any, high: Any) -> Value:
    """Integers from [low, high), each as likely: the floor of a uniform double."""
    first, last = (operand(g, v, DOUBLE) for v in (low, high))
    drawn = uniform_like(g, shaped, DOUBLE)
    whole = g.op.Floor(g.op.Add(first, g.op.Mul(drawn, g.op.Sub(last, first))))
    return g.cast(g.op.Min(whole, g.op.Sub(last, g.const(1.0, DOUBLE))), node.dtype)


def randint(g: GraphBuilder, node: FxNode) -> Value:
    """randint(SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return _integers(g, node, filled(g, 0, sizes_of(node, 1), DOUBLE), 0, node.args[0])


def randint_low(g: GraphBuilder, node: FxNode) -> Value:
    """randint.low(SymInt low, SymInt high, SymInt[] size, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return _integers(g, node, filled(g, 0, sizes_of(node, 2), DOUBLE), *node.args[:2])


def randint_like(g: GraphBuilder, node: FxNode) -> Value:
    """randint_like(Tensor self, SymInt high, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"""  # noqa: E501
    return _integers(g, node, node.args[0], 0, node.args[1])


def randint_like_low(g: GraphBuilder, node: FxNode) -> Value:
    """randint_like.low_dtype(Tensor self, SymInt low, SymInt high, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"""  # noqa: E501
    return _integers(g, node, node.args[0], *node.args[1:3])


def randperm(g: GraphBuilder, node: FxNode) -> Value:
    """randperm(SymInt n, *, ScalarType? dtype=4, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor

    A random permutation: the order of uniform random numbers.
    """
    size = g.as_vector(node.args[0])
    drawn = uniform_like(g, g.op.Expand(g.const(0.0), size), FLOAT)
    _, order = g.op.TopK(drawn, size, axis=0, _outputs=2)
    return g.cast(order, node.dtype)


def normal(g: GraphBuilder, node: FxNode) -> Value:
    """normal.Tensor_Tensor(Tensor mean, Tensor std, *, Generator? generator=None) -> Tensor"""
    mean, deviation = node.args[:2]
    dtype = _drawn_in(g, node.dtype)
    mean, deviation = operand(g, mean, dtype), operand(g, deviation, dtype)
    shape: list[Any] = [d if isinstance(d, int) else g.symbol(d) for d in node.shape]
    drawn = normal_like(g, filled(g, 0, shape, dtype), dtype)
    return g.cast(g.op.Add(mean, g.op.Mul(drawn, deviation)), node.dtype)


def normal_functional(g: GraphBuilder, node: FxNode) -> Value:
    """normal_functional(Tensor self, float mean=0., float std=1., *, Generator? generator=None) -> Tensor"""
    x, mean, deviation = node.args[:3]
    dtype = _drawn_in(g, node.dtype)
    drawn = g.op.Mul(normal_like(g, x, dtype), g.const(float(deviation), dtype))
    return g.cast(g.op.Add(drawn, g.const(float(mean), dtype)), node.dtype)


def prims_normal(g: GraphBuilder, node: FxNode) -> Value:
    """normal(SymInt[] shape, *, Scalar mean, Scalar std, ScalarType dtype, Device device, bool requires_grad, Generator? generator=None) -> Tensor"""  # noqa: E501
    named = node.kwargs
    dtype = _drawn_in(g, node.dtype)
    drawn = normal_like(g, _like(g, node, sizes_of(node, 0)), dtype)
    scaled = g.op.Mul(drawn, operand(g, named["std"], dtype))
    return g.cast(g.op.Add(scaled, operand(g, named["mean"], dtype)), node.dtype)


def uniform(g: GraphBuilder, node: FxNode) -> Value:
    """uniform(Tensor self, float from=0., float to=1., *, Generator? generator=None) -> Tensor"""
    x, low, high = node.args[:3]
    return _uniform(g, node, g.cast(x, _drawn_in(g, node.dtype)), low, high)


def prims_uniform(g: GraphBuilder, node: FxNode) -> Value:
    """uniform(SymInt[] shape, *, Scalar low, Scalar high, ScalarType dtype, Device device, SymInt[] stride, Generator? generator=None) -> Tensor"""  # noqa: E501
    named = node.kwargs
    return _uniform(g, node, _like(g, node, sizes_of(node, 0)), named["low"], named["high"])


def _uniform(g: GraphBuilder, node: FxNode, shaped: Value, low: Any, high: Any) -> Value:
    dtype = _drawn_in(g, node.dtype)
    first, last = operand(g, low, dtype), operand(g, high, dtype)
    drawn = g.op.Mul(uniform_like(g, shaped, dtype), g.op.Sub(last, first))
    return g.cast(g.op.Add(drawn, first), node.dtype)


def bernoulli(g: GraphBuilder, node: FxNode) -> Value:
    """bernoulli(Tensor self, *, Generator? generator=None) -> Tensor

    1 with the element as the probability, else 0.
    """
    x = node.args[0]
    dtype = _drawn_in(g, x.dtype)
    drawn = uniform_like(g, x, dtype)
    return g.cast(g.op.Less(drawn, g.cast(x, dtype)), node.dtype)


def bernoulli_p(g: GraphBuilder, node: FxNode) -> Value:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    x, p = node.args[:2]
    return g.cast(g.op.Less(uniform_like(g, x, DOUBLE), operand(g, p, DOUBLE)), node.dtype)


def multinomial(g: GraphBuilder, node: FxNode) -> Value:
    """multinomial(Tensor self, SymInt num_samples, bool replacement=False, *, Generator? generator=None) -> Tensor

    The largest of log p + Gumbel noise (Efraimidis and Spirakis, 2006); with replacement, with new noise for each
    sample.
    """
    x, count, replacement = node.args[:3]
    dtype = _drawn_in(g, x.dtype)
    rank = rank_of(x)
    logits = g.op.Log(g.cast(x, dtype))
    if replacement:
        sizes = [*g.dims(x)]
        shape = g.vector([*sizes[:-1], count, sizes[-1]])
        logits = g.op.Expand(unsqueeze(g, logits, rank - 1), shape)
    drawn = uniform_like(g, logits, dtype)
    tiny = g.const(1e-30, dtype)
    noise = g.op.Neg(g.op.Log(g.op.Neg(g.op.Log(g.op.Max(drawn, tiny)))))
    keys = g.op.Add(logits, noise)
    if replacement:
        return g.op.ArgMax(keys, axis=rank, keepdims=0)
    _, places = g.op.TopK(keys, g.as_vector(count), axis=rank - 1, _outputs=2)
    result = places
    return result


def exponential(g: GraphBuilder, node: FxNode) -> Value:
    """exponential(Tensor self, float lambd=1., *, Generator? generator=None) -> Tensor"""
    x, rate = node.args[:2]
    dtype = _drawn_in(g, node.dtype)
    rest = g.op.Sub(g.const(1.0, dtype), uniform_like(g, x, dtype))
    return g.cast(g.op.Div(g.op.Neg(g.op.Log(rest)), g.const(float(rate), dtype)), node.dtype)


def rrelu(g: GraphBuilder, node: FxNode) -> Value:
    """rrelu(Tensor self, Scalar lower=0.125, Scalar upper=0.33333333333333331, bool training=False, Generator? generator=None) -> Tensor

    In training the slope of each negative element is drawn from [lower, upper); otherwise it is the mean of the two
    bounds.
    """  # noqa: E501
    x, lower, upper, training = node.args[:4]
    return _leaky(g, node, x, lower, upper, training)[0]


def rrelu_with_noise(g: GraphBuilder, node: FxNode) -> list[Value] | Value:
    """rrelu_with_noise(Tensor self, Tensor(b!) noise, Scalar lower=0.125, Scalar upper=0.33333333333333331, bool training=False, Generator? generator=None) -> Tensor

    Writes to ``noise`` the slopes that were drawn, and 1 elsewhere.
    """  # noqa: E501
    x, noise, lower, upper, training = node.args[:5]
    result, slopes = _leaky(g, node, x, lower, upper, training)
    return result if len(node.outputs) < 2 else [result, slopes if training else noise]


def _leaky(g: GraphBuilder, node: FxNode, x: Value, lower: float, upper: float, training: bool) -> tuple[Value, Value]:
    """A leaky ReLU and its slopes."""
    inner = _drawn_in(g, node.dtype)
    x = g.cast(x, inner)
    if training:
        width = g.const(float(upper) - float(lower), inner)
        slope = g.op.Add(g.op.Mul(uniform_like(g, x, inner), width), g.const(float(lower), inner))
    else:
        slope = g.const((float(lower) + float(upper)) / 2, inner)
    below = g.op.Less(x, g.const(0.0, inner))
    slopes = g.op.Where(below, slope, g.const(1.0, inner))
    return g.cast(g.op.Where(below, g.op.Mul(x, slope), x), node.dtype), g.cast(slopes, node.dtype)


def alpha_dropout(g: GraphBuilder, node: FxNode) -> Value:
    """alpha_dropout(Tensor input, float p, bool train) -> Tensor"""
    return _special_dropout(g, node, channels=False, alpha=True)


def feature_dropout(g: GraphBuilder, node: FxNode) -> Value:
    """feature_dropout(Tensor input, float p, bool train) -> Tensor"""
    return _special_dropout(g, node, channels=True, alpha=False)


def feature_alpha_dropout(g: GraphBuilder, node: FxNode) -> Value:
    """feature_alpha_dropout(Tensor input, float p, bool train) -> Tensor"""
    return _special_dropout(g, node, channels=True, alpha=True)


def _special_dropout(g: GraphBuilder, node: FxNode, *, channels: bool, alpha: bool) -> Value:
    """Dropout of single elements or of whole channels.

    With ``alpha`` what is dropped takes SELU's lower limit; the result is scaled and shifted so that mean and variance
    stay (Klambauer et al., 2017). Else it is 0.
    """
    x, p, train = node.args
    if not train or p == 0:
        return x
    if p == 1:
        return g.op.Mul(x, g.const(0.0, node.dtype))
    dtype = node.dtype
    source = x
    if channels:
        rank = rank_of(x)
        if rank < 2:
            raise Unsupported("feature dropout of fewer than two dimensions")
        shape: list[Any] = [*g.dims(x)[:2], *([1] * (rank - 2))]
        source = filled(g, 0, shape, FLOAT)
    drawn = g.op.Less(uniform_like(g, source, FLOAT), g.const(1.0 - p, FLOAT))
    keep = g.cast(drawn, dtype)
    if not alpha:
        return g.op.Mul(g.op.Mul(x, keep), g.const(1.0 / (1.0 - p), dtype))
    limit = -1.7580993408473766  # -scale * alpha of SELU
    a = 1.0 / ((limit * limit * p + 1.0) * (1.0 - p)) ** 0.5
    shift = g.const(-a * p * limit, dtype)
    lower = g.op.Mul(g.op.Sub(g.const(1.0, dtype), keep), g.const(limit * a, dtype))
    kept = g.op.Mul(g.op.Mul(x, keep), g.const(a, dtype))
    return g.op.Add(g.op.Add(kept, lower), shift)


RULES: list[Rule] = [
    Rule("aten::rand_like.default", rand_like(normal=False)),
    Rule("aten::randn_like.default", rand_like(normal=True)),
    Rule("aten::rand.default", rand(normal=False)),
    Rule("aten::randn.default", rand(normal=True)),
    Rule("aten::randint.default", randint),
    Rule("aten::randint.low", randint_low),
    Rule("aten::randint_like.default", randint_like),
    Rule("aten::randint_like.low_dtype", randint_like_low),
    Rule("aten::randperm.default", randperm),
    *[Rule(f"aten::normal.{overload}", normal) for overload in ("Tensor_Tensor", "Tensor_float", "float_Tensor")],
    Rule("aten::normal.float_float", normal),
    Rule("aten::normal_functional.default", normal_functional),
    Rule("prims::normal.default", prims_normal),
    Rule("aten::uniform.default", uniform),
    Rule("prims::uniform.default", prims_uniform),
    Rule("aten::bernoulli.default", bernoulli),
    Rule("aten::bernoulli.p", bernoulli_p),
    Rule("aten::multinomial.default", multinomial),
    Rule("aten::exponential.default", exponential),
    Rule("aten::rrelu.default", rrelu),
    Rule("aten::rrelu_with_noise.default", rrelu_with_noise),
    Rule("aten::rrelu_with_noise_functional.default", rrelu_with_noise),
    Rule("aten::alpha_dropout.default", alpha_dropout),
    Rule("aten::feature_dropout.default", feature_dropout),
    Rule("aten::feature_alpha_dropout.default", feature_alpha_dropout),
]
