"""Functions of quantised tensors, by their names.

Most of torch's kernels turn the integers into numbers, compute, and quantise the result; so does each function of this
module. A kernel that computes with the integers gives the same result, except halfway between two quanta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxplug.errors import CaptureError
from onnxplug.torch_private import pytree
from onnxplug_quantized.tensor import INTEGERS, QTensor

Function = Callable[..., Any]


def _unwrapped(tree: Any) -> tuple[Any, list[QTensor]]:
    """Arguments with integers in place of quantised tensors, and the quantised tensors."""
    leaves, spec = pytree.tree_flatten(tree)
    quantized = [leaf for leaf in leaves if isinstance(leaf, QTensor)]
    integers = [leaf.integers if isinstance(leaf, QTensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(integers, spec), quantized


def _same_parameters(tensors: list[QTensor]) -> bool:
    return all(tensor.has_parameters_of(tensors[0]) for tensor in tensors)


def _moved(func: Function, *args: Any, **kwargs: Any) -> Any:
    """A function that only moves or chooses elements, applied to the integers."""
    (args, kwargs), tensors = _unwrapped((args, kwargs))
    if not _same_parameters(tensors):
        raise CaptureError(f"{func.__name__} of quantised tensors with a scale for each channel, or of several scales")
    source = tensors[0]

    def wrapped(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if result.dtype == torch.int64:  # indices
            return result
        if result.dtype != source.integers.dtype:
            raise CaptureError(f"{func.__name__} of a quantised tensor gives {result.dtype}")
        other = source.with_integers(result)
        other.aliased = True
        return other

    for tensor in tensors:
        tensor.aliased = True
    return pytree.tree_map(wrapped, func(*args, **kwargs))


def _kept(func: Function, x: QTensor, *args: Any, **kwargs: Any) -> QTensor:
    """A function on numbers, whose result has the operand's scale and zero point."""
    return x.like(func(x.numbers, *args, **kwargs))


def _pooled(func: Function, x: QTensor, *args: Any, **kwargs: Any) -> QTensor:
    """A pool of the integers without their scale: results halfway between integers, which are frequent, are exact."""
    levels = QTensor(x.integers, 1.0, x.zero_point, x.dtype)
    return x.with_integers(levels.like(func(levels.numbers, *args, **kwargs)).integers)


def _averaged(func: Function, x: QTensor, *args: Any, **kwargs: Any) -> QTensor:
    """A mean of the integers without their scale, with an even zero point, which doesn't change a mean.

    FBGEMM's kernels round halves to even after they add the zero point, QuantizeLinear before; with an even zero point
    both give the same result.
    """
    even = x.zero_point - x.zero_point % 2
    levels = QTensor(x.integers, 1.0, even, x.dtype)
    return x.with_integers(levels.like(func(levels.numbers, *args, **kwargs)).integers)


def _leaky_relu_into(
    func: Function, x: QTensor, negative_slope: float = 0.01, *, out: QTensor | None = None
) -> QTensor:
    """``leaky_relu`` with the operand's scale and zero point, or those of ``out``."""
    if out is None:
        return _kept(func, x, negative_slope)
    out.integers = out.like(F.leaky_relu(x.numbers, negative_slope)).integers
    return out


def _kept_by(function: Function) -> Function:
    """Row of an operator whose result has the operand's scale and zero point, computed by ``function``."""
    return lambda _, x, *args, **kwargs: x.like(function(x.numbers, *args, **kwargs))


def _compared(func: Function, *args: Any) -> Tensor:
    """A function on numbers, whose result is an ordinary tensor."""
    result: Tensor = func(*(x.numbers if isinstance(x, QTensor) else x for x in args))
    return result


def _to(steps: int, unsigned: int) -> Function:
    """Row of a function whose result has the scale ``1 / steps`` and zero point ``unsigned``, 128 less for qint8."""

    def convert(func: Function, x: QTensor) -> QTensor:
        if x.dtype == torch.qint32:
            raise CaptureError(f"{func.__name__} of qint32")
        return QTensor.of(func(x.numbers), 1 / steps, unsigned - 128 * (x.dtype == torch.qint8), x.dtype)

    return convert


def _joined(func: Function, tensors: Any, dim: int = 0) -> QTensor:
    """Tensors of one scale, joined by their integers; otherwise the result has the first tensor's scale."""
    if _same_parameters(list(tensors)):
        result: QTensor = _moved(func, tensors, dim)
        return result
    first: QTensor = tensors[0]
    return first.like(func([t.numbers for t in tensors], dim))


def _dequantised(_: Function, x: Any) -> Any:
    """The numbers of a tensor, or of several tensors, in float32; an ordinary tensor is cast."""
    if isinstance(x, list | tuple):
        return [_dequantised(_, each) for each in x]
    return x.numbers if isinstance(x, QTensor) else x.float()


def _parameter(value: Callable[[QTensor], Any], *, by_channel: bool) -> Function:
    """Row of a function that reads a parameter of quantisation, of a tensor with one scale or with one by channel."""

    def convert(func: Function, x: QTensor) -> Any:
        if (x.axis is not None) != by_channel:
            raise CaptureError(f"{func.__name__} of a tensor quantised {'as a whole' if by_channel else 'by channel'}")
        return value(x)

    return convert


def _dropout(func: Function, x: QTensor, p: float = 0.5, training: bool = False) -> QTensor:
    return _kept(func, x, p, training) if training else x


# -- torch.ops.quantized: the result's scale and zero point are arguments ----------------------------------------------


def _scaled(function: Function, places: int, *, relu: bool = False) -> Function:
    """Row of an operator whose result's scale and zero point are arguments.

    Args:
        function: The function that computes the operator on numbers.
        places: The number of arguments before the scale.
        relu: Whether negative results become 0.
    """

    def convert(_: Function, *args: Any, **kwargs: Any) -> QTensor:
        scale, zero_point = (_named(kwargs, name) for name in ("scale", "zero_point"))
        before, after = args[:places], list(args[places:])
        if scale is None:
            scale, zero_point, *after = after
        tensors = [x for x in pytree.tree_leaves(before) if isinstance(x, QTensor)]
        if len(tensors) == 0:
            raise CaptureError("an operator of quantised tensors is called with none")
        first = tensors[0]
        scale, zero_point = (first.scale, first.zero_point) if scale is None else (scale, zero_point)
        numbers = pytree.tree_map(lambda x: x.numbers if isinstance(x, QTensor) else x, before)
        result = function(*numbers, *after, **kwargs)
        return QTensor.of(result.relu() if relu else result, scale, zero_point, first.dtype)

    return convert


def _named(kwargs: dict[str, Any], name: str) -> Any:
    """Takes the result's scale or zero point from keyword arguments."""
    return kwargs.pop(name, None) if name in kwargs else kwargs.pop(f"output_{name}", None)


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Tensor:
    return F.layer_norm(x, tuple(shape), weight, bias, eps)


def _group_norm(x: Tensor, groups: int, weight: Any, bias: Any, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


def _instance_norm(x: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
    return F.instance_norm(x, None, None, weight, bias, True, 0.0, eps)


def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    if scale != 1 or input_scale != 1:
        raise CaptureError("quantized::elu with a scale of its operand")
    return F.elu(x, alpha)


def _leaky_relu(x: Tensor, slope: float, inplace: bool) -> Tensor:
    return F.leaky_relu(x, slope)


def _prelu(_: Function, x: QTensor, weight: Any, output_scale: float, output_zero_point: int) -> QTensor:
    """``quantized::prelu``, whose kernel multiplies positive numbers by the number nearest to 1 that the weight can hold."""
    numbers = x.numbers
    if isinstance(weight, QTensor):
        one = weight.like(torch.ones(())).numbers
        result = torch.where(numbers > 0, numbers * one, F.prelu(numbers, weight.numbers))
    else:
        result = F.prelu(numbers, weight)
    return QTensor.of(result, output_scale, output_zero_point, x.dtype)


def _identity(x: Tensor, *_: Any) -> Tensor:
    return x


def _add_scalar(relu: bool) -> Function:
    """Row of ``add_scalar``: the zero point moves where it stays within the dtype; otherwise the scale grows."""

    def convert(_: Function, x: QTensor, c: Any) -> QTensor:
        low, high = INTEGERS[x.dtype][1:]
        scale, zero_point, c = float(x.scale), int(x.zero_point), _number(c)
        shift = round(c / scale)  # halves to even, as torch
        moved = zero_point - shift
        if low <= moved <= high:
            result = QTensor(x.integers, scale, moved, x.dtype)
        else:
            end, span = (low, high - moved) if moved < low else (high, moved - low)
            result = QTensor.of(x.numbers + shift * scale, span / (high - low) * scale, end, x.dtype)
        return result.like(result.numbers.relu()) if relu else result

    return convert


def _mul_scalar(relu: bool) -> Function:
    """Row of ``mul_scalar``: the integers stay and the scale is multiplied; a negative factor mirrors the integers."""

    def convert(_: Function, x: QTensor, c: Any) -> QTensor:
        low, high = INTEGERS[x.dtype][1:]
        scale, zero_point, c = float(x.scale), int(x.zero_point), _number(c)
        if c == 0:
            return QTensor.of(torch.zeros_like(x.numbers), 0.1, 0, x.dtype)
        if c > 0:
            result = QTensor(x.integers, scale * c, zero_point, x.dtype)
        else:
            mirrored = QTensor(x.integers, -scale * c, zero_point, x.dtype).numbers.neg()
            result = QTensor.of(mirrored, -scale * c, low + high - zero_point, x.dtype)
        return result.like(result.numbers.relu()) if relu else result

    return convert


def _or_scalar(name: str, relu: bool) -> Function:
    """Row of ``add`` or ``mul``, of two tensors with the result's scale and zero point, or of a tensor and a number."""
    pair = _scaled(*_SCALED[name], relu=relu)
    scalar = (_add_scalar if name == "add" else _mul_scalar)(relu)

    def convert(func: Function, a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(a, QTensor) and isinstance(b, QTensor):
            return pair(func, a, b, *args, **kwargs)
        return scalar(func, a, b) if isinstance(a, QTensor) else scalar(func, b, a)

    return convert


def _number(c: Any) -> float:
    if isinstance(c, Tensor):
        raise CaptureError("a quantised tensor together with a number in a tensor")
    return float(c)


_BINARY: dict[str, Function] = {"add": torch.add, "mul": torch.mul, "matmul": torch.matmul}
_NORMS: dict[str, tuple[Function, int]] = {f"batch_norm{dims}": (_batch_norm, 6) for dims in ("", "1d", "2d", "3d")}
#: Operator of torch.ops.quantized to its function on numbers and the number of arguments before the scale.
_SCALED: dict[str, tuple[Function, int]] = {
    **{name: (function, 2) for name, function in _BINARY.items()},
    **_NORMS,
    "cat": (torch.cat, 2),
    "celu": (F.celu, 1),
    "elu": (_elu, 1),
    "dropout": (_identity, 1),
    "group_norm": (_group_norm, 5),
    "hardswish": (F.hardswish, 1),
    "instance_norm": (_instance_norm, 4),
    "layer_norm": (_layer_norm, 5),
    "leaky_relu": (_leaky_relu, 3),
    "sigmoid": (torch.sigmoid, 1),
    "softmax": (torch.softmax, 2),
}
_RELU = frozenset({"cat", *_NORMS})

_MOVING = """
view _unsafe_view reshape flatten unflatten ravel permute transpose t T mT movedim moveaxis swapaxes swapdims unsqueeze squeeze
expand broadcast_to slice select narrow split split_with_sizes chunk tensor_split unbind flip repeat tile clone contiguous detach
index_select unfold view_as reshape_as expand_as diagonal __getitem__ pixel_shuffle pixel_unshuffle channel_shuffle
max min topk sort cpu
""".split()
_KEPT = """
relu relu6 hardtanh clamp clip threshold gelu pad max_pool1d max_pool2d max_pool3d
""".split()
_POOLING = "avg_pool1d avg_pool2d avg_pool3d".split()
_AVERAGING = "mean interpolate adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d".split()
_COMPARISONS = "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__".split()

TABLE: dict[str, Function] = {
    **dict.fromkeys(_MOVING, _moved),
    **dict.fromkeys(_KEPT, _kept),
    "_threshold": _kept,  # the name of nn.functional.threshold
    **dict.fromkeys(_POOLING, _pooled),
    **dict.fromkeys(_AVERAGING, _averaged),
    **dict.fromkeys(_COMPARISONS, _compared),
    **dict.fromkeys(("cat", "concat", "stack"), _joined),
    "sigmoid": _to(256, 0),
    "hardsigmoid": _to(256, 0),
    "tanh": _to(128, 128),
    "leaky_relu": _leaky_relu_into,
    "dropout": _dropout,
    "dequantize": _dequantised,
    "int_repr": lambda _, x: x.integers.clone(),
    "qscheme": lambda _, x: torch.per_tensor_affine if x.axis is None else torch.per_channel_affine,
    "q_scale": _parameter(lambda x: x.scale, by_channel=False),
    "q_zero_point": _parameter(lambda x: x.zero_point, by_channel=False),
    "q_per_channel_scales": _parameter(lambda x: x.scale.double(), by_channel=True),
    "q_per_channel_zero_points": _parameter(lambda x: x.zero_point.long(), by_channel=True),
    "q_per_channel_axis": _parameter(lambda x: x.axis, by_channel=True),
    **{f"quantized::{name}": _scaled(*row) for name, row in _SCALED.items()},
    **{f"quantized::{name}_relu": _scaled(*_SCALED[name], relu=True) for name in _RELU},
    **{f"quantized::{name}{relu}": _or_scalar(name, bool(relu)) for name in ("add", "mul") for relu in ("", "_relu")},
    **{f"quantized::add_scalar{relu}": _add_scalar(bool(relu)) for relu in ("", "_relu")},
    **{f"quantized::mul_scalar{relu}": _mul_scalar(bool(relu)) for relu in ("", "_relu")},
    "quantized::prelu": _prelu,
    "quantized::relu6": _kept_by(lambda x, *_: F.relu6(x)),
    "quantized::clamp": _kept_by(torch.clamp),
    "quantized::threshold": _kept_by(F.threshold),
    "quantized::max_pool1d": _kept_by(F.max_pool1d),
    "quantized::max_pool2d": _kept_by(F.max_pool2d),
}
