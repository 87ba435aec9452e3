"""Discrete Fourier transforms.

torch's fft functions are based on three operators: complex to complex, real to half a spectrum, half a spectrum to
real. The operators of ``prims`` do not normalise. Each transforms one axis after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import PART_DTYPE, Complex, to_pairs
from onnxplug.converters.helpers.axes import normalize_axes, rank_of, swap
from onnxplug.converters.helpers.complex_pairs import c_conj
from onnxplug.converters.helpers.dtypes import DOUBLE
from onnxplug.converters.helpers.matrices import product_along
from onnxplug.converters.helpers.runtimes import FLOAT_TRANSFORMS_ARE_INEXACT
from onnxplug.converters.helpers.slices import slice_axis
from onnxplug.converters.helpers.windows import windows_of
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

#: Up to this size a transform is a product with its matrix, where DFT is missing or inexact.
_MATRIX_SIZE = 512


def transform(g: GraphBuilder, x: Value | Complex, axis: int, forward: bool) -> Complex:
    """The unnormalised transform of one axis, of a real or complex tensor."""
    real = x.real if isinstance(x, Complex) else x
    size = g.dim(real, axis)
    if not forward:
        # The inverse transform is the forward transform with real and imaginary parts swapped before and after.
        exchanged = Complex(x.imag, x.real) if isinstance(x, Complex) else Complex(_zero(g, x), x)
        result = transform(g, exchanged, axis, True)
        return Complex(result.imag, result.real)
    if isinstance(size, int) and size == 1:
        return x if isinstance(x, Complex) else Complex(x, _zero(g, x))
    power_of_two = isinstance(size, int) and size & (size - 1) == 0
    inexact = FLOAT_TRANSFORMS_ARE_INEXACT.concerns(g) and not power_of_two
    if g.opset >= 17 and (not inexact or not isinstance(size, int) or size > _MATRIX_SIZE):
        return _by_operator(g, x, axis)
    return _by_matrix(g, x, axis, size)


def _zero(g: GraphBuilder, x: Value) -> Value:
    return g.op.Expand(g.const(0.0, x.dtype), g.shape(x))


def _by_operator(g: GraphBuilder, x: Value | Complex, axis: int) -> Complex:
    """ONNX's DFT, in double where the runtime's float kernel is inexact."""
    last = g.const([-1])
    parts = [x.real, x.imag] if isinstance(x, Complex) else [x]
    dtype = parts[0].dtype
    assert dtype is not None
    inner = DOUBLE if FLOAT_TRANSFORMS_ARE_INEXACT.concerns(g) else dtype
    pairs = [g.op.Unsqueeze(g.cast(p, inner), last) for p in parts]
    # DFT wants an axis before the transformed one.
    lone = rank_of(parts[0]) == 1
    stacked = g.op.Concat(*pairs, axis=-1) if len(pairs) > 1 else pairs[0]
    if lone:
        stacked, axis = g.op.Unsqueeze(stacked, g.const([0])), 1
    spectrum = g.op.DFT(stacked, None, g.const(axis)) if g.opset >= 20 else g.op.DFT(stacked, axis=axis)
    if lone:
        spectrum = g.op.Squeeze(spectrum, g.const([0]))
    return Complex(*(g.cast(g.op.Gather(spectrum, g.const(i), axis=-1), dtype) for i in (0, 1)))


def _fourier_matrix(g: GraphBuilder, size: int | Value) -> tuple[Value, Value]:
    """cos(2 pi j k / n) and sin(2 pi j k / n), both (n, n) double; j k is reduced modulo n so that the angle is exact."""
    if isinstance(size, int):
        steps = np.arange(size, dtype=np.int64)
        angles = (np.outer(steps, steps) % size) * (2 * math.pi / size)
        return g.const(np.cos(angles), DOUBLE), g.const(np.sin(angles), DOUBLE)
    index = g.op.Range(g.const(0), size, g.const(1))
    products = g.op.Mod(g.op.Mul(g.op.Unsqueeze(index, g.const([1])), index), size)
    step = g.op.Div(g.const(2 * math.pi, DOUBLE), g.cast(size, DOUBLE))
    angle = g.op.Mul(g.cast(products, DOUBLE), step)
    return g.op.Cos(angle), g.op.Sin(angle)


def _by_matrix(g: GraphBuilder, x: Value | Complex, axis: int, size: int | Value) -> Complex:
    """The discrete Fourier transform along an axis as a product with the matrix exp(-2 pi i j k / n)."""
    parts = [x.real, x.imag] if isinstance(x, Complex) else [x]
    dtype = parts[0].dtype
    assert dtype is not None
    # In double: float32 sums lose precision that a fast transform keeps.
    parts = [g.cast(part, DOUBLE) for part in parts]
    cosine, sine = _fourier_matrix(g, size)

    real, imag = product_along(g, parts[0], axis, cosine), g.op.Neg(product_along(g, parts[0], axis, sine))
    if len(parts) > 1:
        real = g.op.Add(real, product_along(g, parts[1], axis, sine))
        imag = g.op.Add(imag, product_along(g, parts[1], axis, cosine))
    return Complex(g.cast(real, dtype), g.cast(imag, dtype))


def _scaled(g: GraphBuilder, x: Any, sizes: Sequence[Any], normalization: int) -> Any:
    """Divides by the root of the number of points (``normalization`` 1) or by that number (2); 0 leaves ``x`` as it is."""
    if not normalization:
        return x
    part = x.real if isinstance(x, Complex) else x
    dtype = part.dtype
    assert dtype is not None
    if all(isinstance(s, int) for s in sizes):
        count = math.prod(sizes)
        factor = g.const(1.0 / (math.sqrt(count) if normalization == 1 else count) if count else 1.0, dtype)
    else:
        total = g.const(1)
        for size in sizes:
            total = g.op.Mul(total, g.as_scalar(size))
        wide = g.cast(total, DOUBLE)
        factor = g.cast(g.op.Reciprocal(g.op.Sqrt(wide) if normalization == 1 else wide), dtype)
    if isinstance(x, Complex):
        return Complex(g.op.Mul(x.real, factor), g.op.Mul(x.imag, factor))
    return g.op.Mul(x, factor)


def _complex_to_complex(g: GraphBuilder, x: Complex, axes: Sequence[int], normalization: int, forward: bool) -> Complex:
    over = normalize_axes(list(axes), rank_of(x.real)) if axes else []
    sizes = [g.dim(x.real, axis) for axis in over]
    for axis in over:
        x = transform(g, x, axis, forward)
    return _scaled(g, x, sizes, normalization)


def _real_to_complex(g: GraphBuilder, x: Value, axes: Sequence[int], normalization: int, onesided: bool) -> Complex:
    """Transforms the last axis first, while the tensor is real; ``onesided`` keeps only half of its spectrum."""
    over = normalize_axes(list(axes), rank_of(x))
    sizes = [g.dim(x, axis) for axis in over]
    last = over[-1]
    result = transform(g, x, last, True)
    if onesided:
        size = sizes[-1]
        half = size // 2 + 1 if isinstance(size, int) else g.op.Add(g.op.Div(size, g.const(2)), g.const(1))
        result = Complex(*(slice_axis(g, p, last, 0, half) for p in (result.real, result.imag)))
    for axis in over[:-1]:
        result = transform(g, result, axis, True)
    return _scaled(g, result, sizes, normalization)


def _complex_to_real(g: GraphBuilder, x: Complex, axes: Sequence[int], normalization: int, size: Any) -> Value:
    """The half spectrum is completed by its mirror image, the last of the axes transformed last."""
    over = normalize_axes(list(axes), rank_of(x.real))
    last = over[-1]
    sizes = [g.dim(x.real, axis) for axis in over[:-1]] + [size]
    for axis in over[:-1]:
        x = transform(g, x, axis, False)
    half = size // 2 + 1 if isinstance(size, int) else g.op.Add(g.op.Div(size, g.const(2)), g.const(1))
    x = Complex(*(slice_axis(g, p, last, 0, half) for p in (x.real, x.imag)))
    rest = size - half + 1 if isinstance(size, int) else g.op.Add(g.op.Sub(size, half), g.const(1))
    mirror = c_conj(g, Complex(*(_reversed(g, slice_axis(g, p, last, 1, rest), last) for p in (x.real, x.imag))))
    whole = Complex(*(g.op.Concat(a, b, axis=last) for a, b in ((x.real, mirror.real), (x.imag, mirror.imag))))
    return _scaled(g, transform(g, whole, last, False).real, sizes, normalization)


def _reversed(g: GraphBuilder, x: Value, axis: int) -> Value:
    return g.op.Slice(x, np.array([-1]), np.array([np.iinfo(np.int64).min]), np.array([axis]), np.array([-1]))


def fft_c2c(g: GraphBuilder, node: FxNode) -> Complex:
    """_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor"""
    x, axes, normalization, forward = node.args
    return _complex_to_complex(g, x, axes, normalization, forward)


def fft_r2c(g: GraphBuilder, node: FxNode) -> Complex:
    """_fft_r2c(Tensor self, int[] dim, int normalization, bool onesided) -> Tensor"""
    x, axes, normalization, onesided = node.args
    return _real_to_complex(g, g.cast(x, PART_DTYPE[node.dtype]), axes, normalization, onesided)


def fft_c2r(g: GraphBuilder, node: FxNode) -> Value:
    """_fft_c2r(Tensor self, int[] dim, int normalization, SymInt last_dim_size) -> Tensor"""
    x, axes, normalization, size = node.args
    return _complex_to_real(g, x, axes, normalization, size)


def prims_c2c(g: GraphBuilder, node: FxNode) -> Complex:
    """fft_c2c(Tensor self, *, int[] dim, bool forward) -> Tensor"""
    x, axes, forward = node.args
    return _complex_to_complex(g, x, axes, 0, forward)


def prims_r2c(g: GraphBuilder, node: FxNode) -> Complex:
    """fft_r2c(Tensor self, *, int[] dim, bool onesided) -> Tensor"""
    x, axes, onesided = node.args
    return _real_to_complex(g, g.cast(x, PART_DTYPE[node.dtype]), axes, 0, onesided)


def prims_c2r(g: GraphBuilder, node: FxNode) -> Value:
    """fft_c2r(Tensor self, *, int[] dim, SymInt last_dim_size) -> Tensor"""
    x, axes, size = node.args
    return _complex_to_real(g, x, axes, 0, size)


# -- torch.fft, with and without sizes of the transform -----------------------------------------------------------------


def _fitted(g: GraphBuilder, x: Any, axis: int, size: Any) -> Any:
    """Truncated or padded with zeros at the end of an axis."""
    if isinstance(x, Complex):
        return Complex(_fitted(g, x.real, axis, size), _fitted(g, x.imag, axis, size))
    present = g.dim(x, axis)
    if isinstance(present, int) and isinstance(size, int):
        if size == present:
            return x
        if size < present:
            return slice_axis(g, x, axis, 0, size)
    shape: list[Any] = [*g.dims(x)]
    shape[axis] = size
    longer = g.op.Concat(x, g.op.Expand(g.const(0.0, x.dtype), g.vector(shape)), axis=axis)
    return slice_axis(g, longer, axis, 0, size)


def _normalization(norm: str | None, forward: bool) -> int:
    """torch's enumeration: the whole factor belongs to the inverse transform, or to the forward transform with ``forward``."""
    if norm == "ortho":
        return 1
    return 2 if (norm == "forward") is forward else 0


def _axes_and_sizes(g: GraphBuilder, x: Any, sizes: Any, axes: Any) -> tuple[list[int], list[Any]]:
    """Non-negative axes and the size of the transform along each; -1 is the axis's own size."""
    part = x.real if isinstance(x, Complex) else x
    rank = rank_of(part)
    if axes is None:
        axes = range(rank) if sizes is None else range(rank - len(sizes), rank)
    over = [a % rank for a in axes]
    wanted = [-1] * len(over) if sizes is None else list(sizes)
    return over, [g.dim(part, a) if isinstance(s, int) and s == -1 else s for a, s in zip(over, wanted, strict=True)]


def _arguments(g: GraphBuilder, node: FxNode) -> tuple[Any, list[int], list[Any], bool, str | None]:
    """Tensor, axes, sizes, whether sizes were given, and norm of every function of torch.fft."""
    named = node.kwargs
    dtype = PART_DTYPE.get(node.dtype, node.dtype)
    x = node.args[0]
    x = Complex(g.cast(x.real, dtype), g.cast(x.imag, dtype)) if isinstance(x, Complex) else g.cast(x, dtype)
    if "n" in named:
        sizes, axes = None if named["n"] is None else [named["n"]], [named["dim"]]
    else:
        sizes, axes = named["s"], named["dim"]
    over, chosen = _axes_and_sizes(g, x, sizes, axes)
    return x, over, chosen, sizes is not None and not (isinstance(sizes[-1], int) and sizes[-1] == -1), named["norm"]


def complex_transform(forward: bool) -> Converter:
    """fft, ifft and their forms of two and n axes."""

    def convert(g: GraphBuilder, node: FxNode) -> Complex:
        x, axes, sizes, _, norm = _arguments(g, node)
        for axis, size in zip(axes, sizes, strict=True):
            x = _fitted(g, x, axis, size)
        x = x if isinstance(x, Complex) else Complex(x, _zero(g, x))
        return _complex_to_complex(g, x, axes, _normalization(norm, forward), forward)

    convert.__name__ = convert.__qualname__ = "fft" if forward else "ifft"
    return convert


def real_transform(forward: bool) -> Converter:
    """rfft and ihfft: half the spectrum of a real tensor; ihfft gives its conjugate."""

    def convert(g: GraphBuilder, node: FxNode) -> Complex:
        x, axes, sizes, _, norm = _arguments(g, node)
        for axis, size in zip(axes, sizes, strict=True):
            x = _fitted(g, x, axis, size)
        result = _real_to_complex(g, x, axes, _normalization(norm, forward), True)
        return result if forward else c_conj(g, result)

    convert.__name__ = convert.__qualname__ = "rfft" if forward else "ihfft"
    return convert


def half_spectrum_transform(forward: bool) -> Converter:
    """irfft and hfft: the real tensor of half a spectrum; hfft is the inverse transform of the conjugate."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, axes, sizes, has_sizes, norm = _arguments(g, node)
        x = x if isinstance(x, Complex) else Complex(x, _zero(g, x))
        last = sizes[-1]
        if not has_sizes:
            # The default size is 2 (m - 1).
            last = 2 * (last - 1) if isinstance(last, int) else g.op.Mul(g.op.Sub(last, g.const(1)), g.const(2))
        half = last // 2 + 1 if isinstance(last, int) else g.op.Add(g.op.Div(last, g.const(2)), g.const(1))
        for axis, size in zip(axes, [*sizes[:-1], half], strict=True):
            x = _fitted(g, x, axis, size)
        x = c_conj(g, x) if forward else x
        return _complex_to_real(g, x, axes, _normalization(norm, forward), last)

    convert.__name__ = convert.__qualname__ = "hfft" if forward else "irfft"
    return convert


def stft(g: GraphBuilder, node: FxNode) -> Any:
    """stft(Tensor self, int n_fft, int? hop_length=None, int? win_length=None, Tensor? window=None, bool normalized=False, bool? onesided=None, bool? return_complex=None, bool? align_to_window=None) -> Tensor

    Frames of n_fft samples, hop_length apart, are multiplied by the window, centred in each frame; the columns are
    their transforms.
    """  # noqa: E501
    x, size, hop, width, window, normalized, onesided, _, align = node.args[:9]
    if align is not None:
        raise Unsupported("stft with align_to_window")
    hop = hop if hop is not None else size // 4
    width = width if width is not None else size
    is_complex = isinstance(x, Complex)
    parts = [x.real, x.imag] if is_complex else [x]
    if window is not None and isinstance(window, Complex):
        raise Unsupported("stft with a complex window")
    left = (size - width) // 2
    frames = []
    for part in parts:
        axis = rank_of(part) - 1
        cut = windows_of(g, part, axis, size, hop)
        if window is not None or width != size:
            weights = window if window is not None else g.op.Expand(g.const(1.0, part.dtype), g.const([width]))
            weights = g.op.Pad(g.cast(weights, part.dtype), g.const([left, size - width - left]))
            cut = g.op.Mul(cut, weights)
        frames.append(cut)
    last = rank_of(frames[0]) - 1
    scale = 1 if normalized else 0
    if is_complex:
        result = _complex_to_complex(g, Complex(*frames), [last], scale, True)
    else:
        half = onesided if onesided is not None else True
        result = _real_to_complex(g, frames[0], [last], scale, half)
    transposed = Complex(swap(g, result.real, -1, -2), swap(g, result.imag, -1, -2))
    return transposed if node.dtype in PART_DTYPE else to_pairs(g, transposed)


def _functions(name: str, convert: Converter) -> list[Rule]:
    return [Rule(f"complex:aten::fft_{name}{form}.default", convert) for form in ("", "2", "n")]


RULES: list[Rule] = [
    *_functions("fft", complex_transform(forward=True)),
    *_functions("ifft", complex_transform(forward=False)),
    *_functions("rfft", real_transform(forward=True)),
    *_functions("ihfft", real_transform(forward=False)),
    *_functions("irfft", half_spectrum_transform(forward=False)),
    *_functions("hfft", half_spectrum_transform(forward=True)),
    *[
        Rule(f"aten::fft_{name}{form}.default", half_spectrum_transform(forward=name == "hfft"))
        for name in ("irfft", "hfft")
        for form in ("", "2", "n")
    ],
    Rule("complex:aten::stft.default", stft),
    Rule("aten::stft.default", stft),
    Rule("complex:aten::_fft_c2c.default", fft_c2c),
    Rule("complex:aten::_fft_r2c.default", fft_r2c),
    Rule("complex:aten::_fft_c2r.default", fft_c2r),
    Rule("complex:prims::fft_c2c.default", prims_c2c),
    Rule("complex:prims::fft_r2c.default", prims_r2c),
    Rule("complex:prims::fft_c2r.default", prims_c2r),
]
