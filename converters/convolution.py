"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE
from onnxplug.converters.helpers.windows import spread
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def _convolve(
    g: GraphBuilder,
    x: Value,
    weight: Value,
    bias: Value | None,
    *,
    stride: Any,
    pads: Sequence[int],
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> Value:
    """Conv or ConvTranspose of a batch, or of a single sample."""
    spatial = rank_of(weight) - 2
    single = rank_of(x) == spatial + 1
    if single:
        x = unsqueeze(g, x, 0)
    dtype = x.dtype
    assert dtype is not None
    if dtype.is_integer():
        # ONNX convolves only floats; double is exact for sums below 2**53.
        x, weight = g.cast(x, DOUBLE), g.cast(weight, DOUBLE)
        bias = g.cast(bias, DOUBLE) if bias is not None else None
    attributes: dict[str, Any] = {
        "strides": spread(stride, spatial),
        "pads": list(pads),
        "dilations": spread(dilation, spatial),
        "group": groups,
    }
    result: Value
    if transposed:
        extra = spread(output_padding, spatial)
        if any(e >= s for e, s in zip(extra, attributes["strides"], strict=True)):
            result = _wide_output(g, x, weight, bias, extra, attributes)
        else:
            result = g.op.ConvTranspose(x, weight, bias, output_padding=extra if any(extra) else None, **attributes)
        channels = weight.shape[1] if weight.shape is not None else None
        if groups != 1 and not isinstance(channels, int):
            # ONNX's shape inference gives the result the weight's dynamic number of channels, which is that of a group.
            result.shape = ir.Shape([None] * (2 + spatial))
    else:
        result = g.op.Conv(x, weight, bias, **attributes)
    result = g.cast(result, dtype)
    return squeeze(g, result, 0) if single else result


def _wide_output(
    g: GraphBuilder, x: Value, weight: Value, bias: Value | None, extra: Sequence[int], attributes: dict[str, Any]
) -> Value:
    """ConvTranspose with an output padding of at least the stride, which ONNX Runtime and ONNX's reference reject.

    It crops less at the end; elements beyond the end have the bias alone.
    """
    spatial = len(extra)
    ends = attributes["pads"][spatial:]
    cut = [max(p - e, 0) for p, e in zip(ends, extra, strict=True)]
    named = {**attributes, "pads": [*attributes["pads"][:spatial], *cut]}
    result: Value = g.op.ConvTranspose(x, weight, None, **named)
    beyond = [max(e - p, 0) for p, e in zip(ends, extra, strict=True)]
    if any(beyond):
        result = g.op.Pad(result, g.const([0] * (4 + spatial) + beyond), g.const(0.0, x.dtype))
    if bias is not None:
        result = g.op.Add(result, g.op.Reshape(bias, g.const([-1] + [1] * spatial)))
    return result


def conv(g: GraphBuilder, node: FxNode) -> Value:
    """conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], SymInt[2] padding=[0, 0], SymInt[2] dilation=[1, 1], SymInt groups=1) -> Tensor"""  # noqa: E501
    x, weight, bias, stride, padding, dilation, groups = node.args
    pads = spread(padding, rank_of(weight) - 2)
    return _convolve(g, x, weight, bias, stride=stride, pads=[*pads, *pads], dilation=dilation, groups=groups)


def conv_named_padding(g: GraphBuilder, node: FxNode) -> Value:
    """conv2d.padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], str padding="valid", SymInt[2] dilation=[1, 1], SymInt groups=1) -> Tensor

    ``same`` pads d (k - 1) in total; where that is odd, the end gets one more.
    """  # noqa: E501
    x, weight, bias, stride, padding, dilation, groups = node.args
    spatial = rank_of(weight) - 2
    low, high = [0] * spatial, [0] * spatial
    if padding == "same":
        kernel = [g.dim(weight, 2 + axis) for axis in range(spatial)]
        if any(isinstance(k, Value) for k in kernel):
            x, kernel = _padded_to_same(g, x, kernel, spread(dilation, spatial)), [1] * spatial
        totals = [d * (k - 1) for d, k in zip(spread(dilation, spatial), kernel, strict=True)]
        low = [t // 2 for t in totals]
        high = [t - b for t, b in zip(totals, low, strict=True)]
    elif padding != "valid":
        raise Unsupported(f"padding {padding!r}")
    return _convolve(g, x, weight, bias, stride=stride, pads=[*low, *high], dilation=dilation, groups=groups)


def _padded_to_same(g: GraphBuilder, x: Value, kernel: Sequence[int | Value], dilation: Sequence[int]) -> Value:
    """The input with the zeros of ``same`` around it, for a kernel of dynamic size."""
    low: list[int | Value] = []
    high: list[int | Value] = []
    for d, k in zip(dilation, kernel, strict=True):
        total = g.op.Mul(g.op.Sub(g.as_scalar(k), g.const(1)), g.const(d))
        low.append(g.op.Div(total, g.const(2)))
        high.append(g.op.Sub(total, low[-1]))
    leading = [0] * (rank_of(x) - len(kernel))
    result: Value = g.op.Pad(x, g.vector([*leading, *low, *leading, *high]), g.const(0, x.dtype))
    return result


def convolution(g: GraphBuilder, node: FxNode) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""  # noqa: E501
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args[:9]
    pads = spread(padding, rank_of(weight) - 2)
    return _convolve(
        g,
        x,
        weight,
        bias,
        stride=stride,
        pads=[*pads, *pads],
        dilation=dilation,
        groups=groups,
        transposed=transposed,
        output_padding=output_padding,
    )


def conv_transpose(g: GraphBuilder, node: FxNode) -> Value:
    """conv_transpose2d.input(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=[1, 1], SymInt[2] padding=[0, 0], SymInt[2] output_padding=[0, 0], SymInt groups=1, SymInt[2] dilation=[1, 1]) -> Tensor"""  # noqa: E501
    x, weight, bias, stride, padding, output_padding, groups, dilation = node.args
    pads = spread(padding, rank_of(weight) - 2)
    return _convolve(
        g,
        x,
        weight,
        bias,
        stride=stride,
        pads=[*pads, *pads],
        dilation=dilation,
        groups=groups,
        transposed=True,
        output_padding=output_padding,
    )


def conv_tbc(g: GraphBuilder, node: FxNode) -> Value:
    """conv_tbc(Tensor self, Tensor weight, Tensor bias, int pad=0) -> Tensor

    A 1-d convolution of time first: x [T, B, Cin], weight [K, Cin, Cout], bias [Cout]; the result [T', B, Cout].
    """
    x, weight, bias, pad = node.args
    batch_first = g.op.Transpose(x, perm=[1, 2, 0])
    kernel = g.op.Transpose(weight, perm=[2, 1, 0])
    result = _convolve(g, batch_first, kernel, bias, stride=1, pads=[pad, pad], dilation=1, groups=1)
    return g.op.Transpose(result, perm=[2, 0, 1])


RULES: list[Rule] = [
    *[Rule(f"aten::conv{n}d.default", conv) for n in (1, 2, 3)],
    *[Rule(f"aten::conv{n}d.padding", conv_named_padding) for n in (1, 2, 3)],
    Rule("aten::convolution.default", convolution),
    Rule("aten::_convolution.default", convolution),
    Rule("aten::conv_tbc.default", conv_tbc),
    Rule("aten::conv_transpose1d.default", conv_transpose),
    Rule("aten::conv_transpose2d.input", conv_transpose),
    Rule("aten::conv_transpose3d.input", conv_transpose),
]
