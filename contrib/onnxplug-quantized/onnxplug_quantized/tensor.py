"""The stand-in for a quantised tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

_OPS = torch.ops.quantized_decomposed
#: Quantised dtypes: the dtype of the integers, and their limits.
INTEGERS = {
    torch.quint8: (torch.uint8, 0, 255),
    torch.qint8: (torch.int8, -128, 127),
    torch.qint32: (torch.int32, -(2**31), 2**31 - 1),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch 2.15 calls it deprecated
    _HALF = torch.quantize_per_tensor(torch.tensor([0.5]), 1.0, 1, torch.qint32).int_repr()
#: Whether the installed torch rounds before it adds the zero point (2.9 and 2.15, not 2.13): then 0.5 rounds to 0,
#: otherwise 0.5 + 1 rounds to 2.
_ROUNDS_FIRST = int(_HALF) == 1
#: Attributes that depend on the shape and the device of a tensor, not on its numbers.
_OF_SHAPE = frozenset(
    "shape size dim ndim ndimension numel nelement stride is_contiguous device layout is_cuda".split()
)


class QTensor:
    """A quantised tensor during capture: its numbers are ``(integers - zero_point) * scale``.

    It is no tensor, so that nothing can compute with it unnoticed: functions of torch find ``__torch_function__`` here.

    Attributes:
        integers: The integers, of the tensor's shape.
        scale: A number, or a tensor of one number, or of a number for each index of ``axis``.
        zero_point: An integer, or a tensor as ``scale``.
        dtype: ``quint8``, ``qint8`` or ``qint32``.
        axis: The axis with a scale for each index; ``None`` for one scale.
        aliased: Whether another stand-in may share its memory.
    """

    is_quantized = True
    requires_grad = False
    #: Computes a function of torch with arguments and keywords; :mod:`onnxplug_quantized.dispatch` has the tables.
    compute: ClassVar[Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]]

    def __init__(
        self, integers: torch.Tensor, scale: Any, zero_point: Any, dtype: torch.dtype, axis: int | None = None
    ) -> None:
        self.integers = integers
        self.scale = scale
        self.zero_point = zero_point
        self.dtype = dtype
        self.axis = axis
        self.aliased = False

    @classmethod
    def of(cls, numbers: torch.Tensor, scale: Any, zero_point: Any, dtype: torch.dtype) -> QTensor:
        """Quantises numbers of float32 with one scale."""
        storage, low, high = INTEGERS[dtype]
        if dtype == torch.qint32:
            return cls(_quantised_to_32_bits(numbers, scale, zero_point), scale, zero_point, dtype)
        quantize, scale, zero_point = _with_numbers(_OPS.quantize_per_tensor, scale, zero_point)
        return cls(quantize(numbers, scale, zero_point, low, high, storage), scale, zero_point, dtype)

    @property
    def numbers(self) -> torch.Tensor:
        """The numbers, in float32."""
        return self.restored()

    def restored(self, *, reduced: bool = False) -> torch.Tensor:
        """The numbers, in float32.

        Args:
            reduced: Whether bytes have a range of 7 bits, which the dequantising operator then states.
        """
        storage, low, high = INTEGERS[self.dtype]
        high = 127 if reduced and self.dtype == torch.quint8 else high
        numbers: torch.Tensor
        if self.axis is None and self.dtype == torch.qint32:
            numbers = (
                self.integers - self.zero_point
            ).float() * self.scale  # the difference wraps around, as in the kernel
        elif self.axis is None:
            dequantize, scale, zero_point = _with_numbers(_OPS.dequantize_per_tensor, self.scale, self.zero_point)
            numbers = dequantize(self.integers, scale, zero_point, low, high, storage)
        else:
            parameters = (self.scale, self.zero_point, self.axis)
            numbers = _OPS.dequantize_per_channel(self.integers, *parameters, low, high, storage)
        return numbers

    def has_parameters_of(self, other: QTensor) -> bool:
        """Whether both tensors have one scale and one zero point, and these are equal."""
        if self.axis is not None or other.axis is not None or self.dtype != other.dtype:
            return False
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        return all(
            a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b) for a, b in pairs
        )

    def like(self, numbers: torch.Tensor) -> QTensor:
        """Quantises other numbers with the same scale and zero point."""
        return QTensor.of(numbers, self.scale, self.zero_point, self.dtype)

    def with_integers(self, integers: torch.Tensor) -> QTensor:
        """A tensor of other integers with the same scale and zero point."""
        return QTensor(integers, self.scale, self.zero_point, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.compute(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in _OF_SHAPE:
            return getattr(self.integers, name)
        attribute = getattr(torch.Tensor, name)  # AttributeError, as a tensor raises it

        def method(*args: Any, **kwargs: Any) -> Any:
            return self.__torch_function__(attribute, (), (self, *args), kwargs)

        return method if callable(attribute) else self.__torch_function__(attribute.__get__, (), (self,))

    def __len__(self) -> int:
        return len(self.integers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __repr__(self) -> str:
        return f"QTensor({self.integers!r}, scale={self.scale!r}, zero_point={self.zero_point!r}, dtype={self.dtype})"


def _with_numbers(packet: Any, scale: Any, zero_point: Any) -> tuple[Any, Any, Any]:
    """The overload of an operator for a scale and zero point in numbers or in tensors, and the two as its arguments."""
    if isinstance(scale, torch.Tensor):
        return packet.tensor, scale, torch.as_tensor(zero_point)
    return packet.default, float(scale), int(zero_point)


def _quantised_to_32_bits(numbers: torch.Tensor, scale: Any, zero_point: Any) -> torch.Tensor:
    """Quantises to qint32 as the kernel; ``quantized_decomposed`` clamps in float32, which lacks the greatest int32."""
    _, low, high = INTEGERS[torch.qint32]
    inverse = scale.float().reciprocal() if isinstance(scale, torch.Tensor) else float(1 / np.float32(scale))
    scaled = numbers * inverse
    levels = scaled.round() + zero_point if _ROUNDS_FIRST else (scaled + zero_point).round()
    return levels.double().clamp(low, high).to(torch.int32)


def _operator(name: str) -> Any:
    def method(self: QTensor, *args: Any) -> Any:
        return self.__torch_function__(getattr(torch.Tensor, name), (), (self, *args))

    return method


for _name in "getitem setitem add radd sub rsub mul rmul truediv neg matmul eq ne lt le gt ge bool float int".split():
    setattr(QTensor, f"__{_name}__", _operator(f"__{_name}__"))
