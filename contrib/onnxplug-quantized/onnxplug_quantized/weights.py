"""Modules of ordinary buffers that replace a model's quantised weights while the model is captured."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.ao.nn.quantized as nnq
from torch import Tensor, nn

from onnxplug.capture.quantised import stored
from onnxplug.errors import CaptureError
from onnxplug_quantized.tensor import INTEGERS, QTensor

_QUANTIZED = torch.ops.quantized
_PREFIX = "__torch__.torch.classes."


class _StandIn(nn.Module):
    """A module that functions of torch take for a tensor, and dispatch to the tables."""

    __torch_function__ = QTensor.__torch_function__


class Weight(_StandIn):
    """A quantised tensor, or a tensor of half precision, that the model keeps or packs.

    Attributes:
        weight: The integers, or the halves.
        scale, zero_point: Numbers, or tensors for scales along an axis, with ``None`` for zero points that are all 0.
    """

    weight: Tensor

    def __init__(self, source: Tensor | QTensor) -> None:
        super().__init__()
        self.dtype, self.axis = source.dtype, None
        if isinstance(source, QTensor):
            self.weight, self.axis, parameters = source.integers, source.axis, (source.scale, source.zero_point)
        elif not source.is_quantized:
            self.dtype = torch.float16  # unpacked, it is in float32
            self.register_buffer("weight", source.detach().half())
            return
        else:
            self.register_buffer("weight", _integers(source))
            parameters = (
                (source.q_scale(), source.q_zero_point()) if _has_one_scale(source) else self._by_channel(source)
            )
        for name, value in zip(("scale", "zero_point"), parameters, strict=True):
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def _by_channel(self, source: Tensor) -> tuple[Tensor, Tensor | None]:
        self.axis = source.q_per_channel_axis()
        scales, zero_points = source.q_per_channel_scales().float(), source.q_per_channel_zero_points()
        if zero_points.is_floating_point():
            offset = -scales * zero_points
            if source.dtype == torch.quint4x2:  # the kernel keeps both in half precision
                scales, offset = scales.half().float(), offset.half().float()
            self.register_buffer("offset", offset)
            return scales, None
        return scales, zero_points if zero_points.any() else None

    @property
    def numbers(self) -> Tensor:
        """The numbers, in float32."""
        return self.weight.float() if self.dtype not in INTEGERS else self.tensor().numbers

    def tensor(self) -> QTensor:
        """The stand-in for the tensor itself."""
        return QTensor(self.weight, self.scale, self.zero_point, self.dtype, self.axis)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name) if hasattr(Tensor, name) else super().__getattr__(name)


def _has_one_scale(source: Tensor) -> bool:
    return source.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)


def _integers(source: Tensor) -> Tensor:
    if source.dtype != torch.quint4x2:
        return source.int_repr()
    pairs = source.int_repr()  # the lower half of each byte goes first
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten()[: source.numel()].view(source.shape)


class Packed(Weight):
    """Packed weights of a linear or convolutional layer.

    Attributes:
        bias: In float32, or ``None``.
        geometry: A convolution's ``stride``, ``padding``, ``output_padding``, ``dilation``, ``groups`` and ``transpose``.
        heeds_range: Whether dynamic quantisation of the operand is to 7 bits with ``reduce_range``. Engines that heed
            it have kernels whose sums saturate beyond 7 bits on processors without VNNI, and get operands of 7 bits.
    """

    bias: Tensor | None
    heeds_range = True

    def __init__(self, weight: Any, bias: Tensor | None, **geometry: Any) -> None:
        super().__init__(weight)
        self.register_buffer("bias", bias if bias is None else bias.detach())
        self.geometry = geometry

    def unpack(self) -> tuple[QTensor, Tensor | None]:
        """The weight as a quantised tensor, and the bias."""
        return self.tensor(), self.bias


class Table(Weight):
    """Packed weights of an embedding, whose zero points are no integers.

    Attributes:
        offset: The summand of ``weight * scale``, for each row.
    """

    def rows(self, places: Tensor | slice = slice(None)) -> Tensor:
        """Rows of an embedding's table, in float32.

        Args:
            places: The rows' indices, of any shape; all rows by default.
        """
        integers, scale, offset = (t[places] for t in (self.weight, self.scale, self.offset))
        return integers.float() * scale.unsqueeze(-1) + offset.unsqueeze(-1)


class Cell(_StandIn):
    """Packed weights of one direction of one recurrent layer.

    Attributes:
        ih, hh: :class:`Packed` weights of the input and the state.
        reduce_range: Whether activations are quantised to 7 bits.
    """

    def __init__(self, ih: Packed, hh: Packed, reduce_range: bool) -> None:
        super().__init__()
        self.ih, self.hh, self.reduce_range = ih, hh, reduce_range


_GEOMETRY = "stride padding output_padding dilation groups transpose".split()


def _unpacked(packed: Any, owner: nn.Module) -> nn.Module:
    """The module for packed weights, an object of C++.

    Raises:
        CaptureError: The object is of an unknown class, or its weights can't be read.
    """
    kind = packed._type().qualified_name().removeprefix(_PREFIX)
    try:
        if kind == "quantized.LinearPackedParamsBase":
            return _packed_linear(packed)
        if kind in ("quantized.Conv2dPackedParamsBase", "quantized.Conv3dPackedParamsBase"):
            return _packed_convolution(packed, isinstance(owner, nnq.Conv1d | nnq.ConvTranspose1d))
        if kind == "quantized.EmbeddingPackedParamsBase":
            return Table(_QUANTIZED.embedding_bag_unpack(packed))
        if kind == "rnn.CellParamsBase":
            (_, _, _, numbers, weights), _ = packed.__getstate__()
            ih, hh = map(_packed_linear, weights)
            return Cell(ih, hh, bool(numbers and numbers[0]))
    except RuntimeError as error:  # QNNPACK can't unpack convolutions of volumes
        raise CaptureError(f"PyTorch can't read back the packed weights of {type(owner).__name__}: {error}") from error
    raise CaptureError(f"{type(owner).__name__} keeps an object of {kind}, which onnxplug does not know")


def _packed_linear(packed: Any) -> Packed:
    weight, bias = packed.unpack()
    made = Packed(weight, bias)
    made.heeds_range = weight.is_quantized and _heeds_range(_QUANTIZED.linear_dynamic, packed, (1, weight.shape[1]))
    return made


def _packed_convolution(packed: Any, one_dimension: bool) -> Packed:
    """A convolution's weights; torch packs a convolution of one dimension with two, the first of size 1."""
    weight, bias = packed.unpack()
    geometry = {name: getattr(packed, name)() for name in _GEOMETRY}
    transposed = bool(geometry["transpose"])
    channels = weight.shape[0] if transposed else weight.shape[1] * geometry["groups"]
    sizes = [1 + d * (size - 1) for d, size in zip(geometry["dilation"], weight.shape[2:], strict=True)]
    name = f"conv{'_transpose' if transposed else ''}{len(sizes)}d_dynamic"
    heeds_range = _heeds_range(getattr(_QUANTIZED, name), packed, (1, channels, *sizes))
    if one_dimension:
        weight = weight.squeeze(2)
        geometry = {name: value[1:] if isinstance(value, list) else value for name, value in geometry.items()}
    made = Packed(weight, bias, **geometry)
    made.heeds_range = heeds_range
    return made


def _heeds_range(operator: Any, packed: Any, shape: tuple[int, ...]) -> bool:
    """Whether the engine of packed weights heeds ``reduce_range``, which QNNPACK's kernels ignore.

    It is tried on a copy: oneDNN's packed weights keep the kernel of their first call, ReLU or not, for all calls of
    its shape.
    """
    x = torch.linspace(-1, 1.3, math.prod(shape)).view(shape)
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        tried = _copied(operator, packed, x)
        return not torch.equal(operator(x, tried, True), operator(x, tried, False))
    return True  # it doesn't run at all


def _copied(operator: Any, packed: Any, x: Tensor) -> Any:
    """A copy of packed weights by the engine that packed them.

    torch packs a copy by the current engine, and packed weights don't name theirs: engines differ in the errors of
    wrong inputs.
    """
    backend = torch.backends.quantized
    before, refused = backend.engine, _refusals(operator, packed, x)
    try:
        for engine in (before, *backend.supported_engines):
            backend.engine = engine
            copied = copy.deepcopy(packed)
            if _refusals(operator, copied, x) == refused:
                return copied
    finally:
        backend.engine = before
    return copy.deepcopy(packed)


def _refusals(operator: Any, packed: Any, x: Tensor) -> list[str]:
    """An operator's errors for inputs of another dtype and without axes."""
    reasons: list[str] = []
    for wrong in (x.double(), x.new_zeros(())):
        try:
            operator(wrong, packed, True)
        except RuntimeError as error:
            reasons.append(str(error).partition("\n")[0])
    return reasons


@contextlib.contextmanager
def weights_as_modules(module: nn.Module) -> Iterator[None]:
    """A context in which modules of ordinary buffers replace a model's quantised weights."""
    made: dict[int, nn.Module] = {}
    with contextlib.ExitStack() as stack:
        for owner, name, value in list(stored(module)):
            if id(value) not in made:
                made[id(value)] = Weight(value) if isinstance(value, Tensor) else _unpacked(value, owner)
            stack.enter_context(_replaced(owner, name, made[id(value)]))
        yield


@contextlib.contextmanager
def _replaced(owner: nn.Module, name: str, value: Any) -> Iterator[None]:
    """A context with another attribute of a module; afterwards the old one is back, at its old place in the order."""
    places = [vars(owner), owner._buffers, owner._parameters, owner._modules]
    before: list[dict[str, Any]] = [dict(place) for place in places]
    for place in places:
        place.pop(name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        for place, items in zip(places, before, strict=True):
            place.pop(name, None)
            if name in items:
                now = dict(place)
                place.clear()
                place.update(
                    {key: items[key] if key == name else now.pop(key) for key in items if key in now or key == name}
                )
                place.update(now)


@contextlib.contextmanager
def numbers_as_constants(module: nn.Module) -> Iterator[None]:
    """A context in which scales and zero points in buffers of ``torch.ao.nn`` modules and FX graphs are numbers.

    torch.export takes a buffer for a variable, with which Python can't compute.
    """
    with contextlib.ExitStack() as stack:
        for owner in module.modules():
            for name in list(_numbers_of(owner)):
                stack.enter_context(_replaced(owner, name, owner._buffers[name].item()))  # type: ignore[union-attr]
        yield


def _numbers_of(owner: nn.Module) -> Iterator[str]:
    single = {name for name, buffer in owner._buffers.items() if buffer is not None and buffer.numel() == 1}
    if type(owner).__module__.startswith("torch.ao.nn."):
        yield from single & {"scale", "zero_point"}
    elif isinstance(owner, torch.fx.GraphModule):
        for node in owner.graph.nodes:
            if node.op == "get_attr" and node.target in single and all(map(_quantises, node.users)):
                single.discard(node.target)
                yield node.target


def _quantises(node: torch.fx.Node) -> bool:
    """Whether a call takes a scale and a zero point, which are no tensors."""
    if node.op != "call_function":
        return False
    return node.target is torch.quantize_per_tensor or str(getattr(node.target, "_qualified_op_name", "")).startswith(
        "quantized::"
    )
