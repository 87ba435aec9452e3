"""Random numbers: another sample at each run."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.arithmetic import compute
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, INT64
from onnxplug.converters.helpers.fill import filled, sizes_of
from onnxplug.converters.helpers.order import first_beyond
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.randomness import drawn_in, normal_like, uniform_like
from onnxplug.converters.helpers.tables import overloads_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def _like(g: GraphBuilder, node: FxNode, sizes: list[Any]) -> Value:
    return filled(g, 0, sizes, drawn_in(g, node.dtype))


def rand_like(normal: bool) -> Converter:
    """rand_like, randn_like."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        draw = normal_like if normal else uniform_like
        return g.cast(draw(g, node.args[0], drawn_in(g, node.dtype)), node.dtype)

    convert.__name__ = convert.__qualname__ = "randn_like" if normal else "rand_like"
    return convert


def rand(normal: bool) -> Converter:
    """rand, randn."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        draw = normal_like if normal else uniform_like
        return g.cast(draw(g, _like(g, node, sizes_of(node, 0)), drawn_in(g, node.dtype)), node.dtype)

    convert.__name__ = convert.__qualname__ = "randn" if normal else "rand"
    return convert


#: Up to this range the floor of a double has every integer, each as likely up to one part in as many.
_EXACT = 1 << 53


def _integers(g: GraphBuilder, node: FxNode, shaped: Value, low: Any, high: Any) -> Value:
    """Integers from [low, high), each as likely: the floor of a uniform double, or for a wide range more bits."""
    if not isinstance(low, int) or not isinstance(high, int):
        first, last = (operand(g, v, INT64) for v in (low, high))
        width = g.cast(g.op.Sub(last, first), DOUBLE)
    else:
        if high - low > _EXACT:
            return g.cast(_of_wide_range(g, shaped, low, high), node.dtype)
        first, width = g.const(low, INT64), g.const(float(high - low), DOUBLE)
    whole = g.op.Floor(g.op.Mul(uniform_like(g, shaped, DOUBLE), width))
    whole = g.op.Min(whole, g.op.Sub(width, g.const(1.0, DOUBLE)))
    return g.cast(g.op.Add(g.cast(whole, INT64), first), node.dtype)


def _of_wide_range(g: GraphBuilder, shaped: Value, low: int, high: int) -> Value:
    """int64 from [low, high) for a range beyond a double's precision: a block of 2048 by a uniform double, and 11 random bits.

    Numbers of the last block that lie beyond the range become its last number, with a probability below 2⁻⁴². Everything is counted
    from the middle of the range, so that no sum overflows.
    """
    blocks = -(-(high - low) // 2048)
    middle = blocks // 2 * 2048
    drawn = g.op.Floor(g.op.Mul(uniform_like(g, shaped, DOUBLE), g.const(float(blocks), DOUBLE)))
    block = g.op.Sub(compute(g, "Min", INT64, g.cast(drawn, INT64), blocks - 1), g.const(blocks // 2))
    bits = g.cast(g.op.Floor(g.op.Mul(uniform_like(g, shaped, DOUBLE), g.const(2048.0, DOUBLE))), INT64)
    whole = compute(g, "Min", INT64, g.op.Add(g.op.Mul(block, g.const(2048)), bits), high - low - 1 - middle)
    return g.op.Add(whole, g.const(low + middle))


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


#: How many bits of a float type are exact, which bounds what random_ draws without an upper bound.
_DIGITS = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8, FLOAT: 24, DOUBLE: 53}


def _end(dtype: ir.DataType) -> int:
    """One more than the largest integer that random_ draws without an upper bound."""
    if dtype.is_floating_point():
        if dtype not in _DIGITS:
            raise Unsupported(f"random_ of {dtype.name.lower()}")
        return (1 << _DIGITS[dtype]) + 1
    if dtype == BOOL:
        return 2
    if dtype == ir.DataType.UINT64:
        raise Unsupported("random_ of uint64")
    return 1 << (dtype.bitwidth - dtype.is_signed())


def random(g: GraphBuilder, node: FxNode) -> Value:
    """random(Tensor self, *, Generator? generator=None) -> Tensor

    Integers from 0 up to the largest of the dtype; of a float type up to 2 to the power of its exact bits.
    """
    return _integers(g, node, node.args[0], 0, _end(node.dtype))


def random_to(g: GraphBuilder, node: FxNode) -> Value:
    """random.to(Tensor self, int to, *, Generator? generator=None) -> Tensor"""
    return _integers(g, node, node.args[0], 0, node.args[1])


def random_from(g: GraphBuilder, node: FxNode) -> Value:
    """random.from(Tensor self, int from, int? to, *, Generator? generator=None) -> Tensor"""
    x, low, high = node.args[:3]
    return _integers(g, node, x, low, _end(node.dtype) if high is None else high)


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
    dtype = drawn_in(g, node.dtype)
    mean, deviation = operand(g, mean, dtype), operand(g, deviation, dtype)
    shape: list[Any] = [g.size(d) for d in node.shape]
    drawn = normal_like(g, filled(g, 0, shape, dtype), dtype)
    return g.cast(g.op.Add(mean, g.op.Mul(drawn, deviation)), node.dtype)


def normal_functional(g: GraphBuilder, node: FxNode) -> Value:
    """normal_functional(Tensor self, float mean=0., float std=1., *, Generator? generator=None) -> Tensor"""
    x, mean, deviation = node.args[:3]
    dtype = drawn_in(g, node.dtype)
    drawn = g.op.Mul(normal_like(g, x, dtype), g.const(float(deviation), dtype))
    return g.cast(g.op.Add(drawn, g.const(float(mean), dtype)), node.dtype)


def prims_normal(g: GraphBuilder, node: FxNode) -> Value:
    """normal(SymInt[] shape, *, Scalar mean, Scalar std, ScalarType dtype, Device device, bool requires_grad, Generator? generator=None) -> Tensor"""  # noqa: E501
    named = node.kwargs
    dtype = drawn_in(g, node.dtype)
    drawn = normal_like(g, _like(g, node, sizes_of(node, 0)), dtype)
    scaled = g.op.Mul(drawn, operand(g, named["std"], dtype))
    return g.cast(g.op.Add(scaled, operand(g, named["mean"], dtype)), node.dtype)


def uniform(g: GraphBuilder, node: FxNode) -> Value:
    """uniform(Tensor self, float from=0., float to=1., *, Generator? generator=None) -> Tensor"""
    x, low, high = node.args[:3]
    return _uniform(g, node, g.cast(x, drawn_in(g, node.dtype)), low, high)


def prims_uniform(g: GraphBuilder, node: FxNode) -> Value:
    """uniform(SymInt[] shape, *, Scalar low, Scalar high, ScalarType dtype, Device device, SymInt[] stride, Generator? generator=None) -> Tensor"""  # noqa: E501
    named = node.kwargs
    return _uniform(g, node, _like(g, node, sizes_of(node, 0)), named["low"], named["high"])


def _uniform(g: GraphBuilder, node: FxNode, shaped: Value, low: Any, high: Any) -> Value:
    dtype = drawn_in(g, node.dtype)
    first, last = operand(g, low, dtype), operand(g, high, dtype)
    drawn = g.op.Mul(uniform_like(g, shaped, dtype), g.op.Sub(last, first))
    return g.cast(g.op.Add(drawn, first), node.dtype)


def bernoulli(g: GraphBuilder, node: FxNode) -> Value:
    """bernoulli(Tensor self, *, Generator? generator=None) -> Tensor

    1 with the element as the probability, else 0.
    """
    x = node.args[0]
    dtype = drawn_in(g, x.dtype)
    drawn = uniform_like(g, x, dtype)
    return g.cast(g.op.Less(drawn, g.cast(x, dtype)), node.dtype)


def bernoulli_p(g: GraphBuilder, node: FxNode) -> Value:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    x, p = node.args[:2]
    return g.cast(g.op.Less(uniform_like(g, x, DOUBLE), operand(g, p, DOUBLE)), node.dtype)


def bernoulli_tensor(g: GraphBuilder, node: FxNode) -> Value:
    """bernoulli.Tensor(Tensor self, Tensor p, *, Generator? generator=None) -> Tensor

    The probabilities broadcast to the shape of ``self``.
    """
    x, p = node.args[:2]
    return g.cast(g.op.Less(uniform_like(g, x, DOUBLE), g.cast(p, DOUBLE)), node.dtype)


def multinomial(g: GraphBuilder, node: FxNode) -> Value:
    """multinomial(Tensor self, SymInt num_samples, bool replacement=False, *, Generator? generator=None) -> Tensor

    Without replacement the largest of log p + Gumbel noise (Efraimidis and Spirakis, 2006).
    """
    x, count, replacement = node.args[:3]
    if replacement:
        return _with_replacement(g, x, count)
    dtype = drawn_in(g, x.dtype)
    logits = g.op.Log(g.cast(x, dtype))
    drawn = g.op.Max(uniform_like(g, logits, dtype), g.const(1e-30, dtype))
    noise = g.op.Neg(g.op.Log(g.op.Neg(g.op.Log(drawn))))
    _, places = g.op.TopK(g.op.Add(logits, noise), g.as_vector(count), axis=rank_of(x) - 1, _outputs=2)
    return places


def _with_replacement(g: GraphBuilder, x: Value, count: Any) -> Value:
    """The category into whose share each uniform number falls, by a search in the running sums, [..., count].

    A number never reaches the last sum, so that a category of probability 0 is never found.
    """
    sums = g.op.CumSum(g.cast(x, DOUBLE), g.const(rank_of(x) - 1))
    total = g.op.Gather(sums, g.const([-1]), axis=rank_of(x) - 1)
    shape = [*g.dims(x)[:-1], count]
    at = g.op.Mul(uniform_like(g, filled(g, 0, shape, DOUBLE), DOUBLE), total)
    return first_beyond(g, sums, g.op.Where(g.op.Less(at, total), at, g.const(0.0, DOUBLE)))


def exponential(g: GraphBuilder, node: FxNode) -> Value:
    """exponential(Tensor self, float lambd=1., *, Generator? generator=None) -> Tensor"""
    x, rate = node.args[:2]
    dtype = drawn_in(g, node.dtype)
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
    inner = drawn_in(g, node.dtype)
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

    With ``alpha`` dropped elements take SELU's lower limit; the result is scaled and shifted so that mean and variance
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
    *overloads_of("rand_like", "default generator", rand_like(normal=False)),
    *overloads_of("randn_like", "default generator", rand_like(normal=True)),
    *overloads_of("rand", "default generator", rand(normal=False)),
    *overloads_of("randn", "default generator", rand(normal=True)),
    *overloads_of("randint", "default generator", randint),
    *overloads_of("randint", "low low_generator", randint_low),
    *overloads_of("randint_like", "default generator Tensor Tensor_generator", randint_like),
    *overloads_of("randint_like", "low_dtype low_generator_dtype", randint_like_low),
    *overloads_of("randperm", "default generator", randperm),
    Rule("aten::random.default", random),
    Rule("aten::random.to", random_to),
    Rule("aten::random.from", random_from),
    *[Rule(f"aten::normal.{overload}", normal) for overload in ("Tensor_Tensor", "Tensor_float", "float_Tensor")],
    Rule("aten::normal.float_float", normal),
    Rule("aten::normal_functional.default", normal_functional),
    Rule("prims::normal.default", prims_normal),
    Rule("aten::uniform.default", uniform),
    Rule("prims::uniform.default", prims_uniform),
    Rule("aten::bernoulli.default", bernoulli),
    Rule("aten::bernoulli.p", bernoulli_p),
    Rule("aten::bernoulli.Tensor", bernoulli_tensor),
    Rule("aten::multinomial.default", multinomial),
    Rule("aten::exponential.default", exponential),
    Rule("aten::rrelu.default", rrelu),
    Rule("aten::rrelu_with_noise.default", rrelu_with_noise),
    Rule("aten::rrelu_with_noise_functional.default", rrelu_with_noise),
    Rule("aten::alpha_dropout.default", alpha_dropout),
    Rule("aten::feature_dropout.default", feature_dropout),
    Rule("aten::feature_alpha_dropout.default", feature_alpha_dropout),
]
