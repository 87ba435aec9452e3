"""The tensors and sizes among the arguments of an operator call, and their kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxplug.torch_private import FakeTensor, proxies, torch_c, unset_fake_temporarily

_PLAIN = frozenset(
    (int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))
)


class Incomparable(Exception):
    """The kind of an argument can't be compared."""


class Operands:
    """The tensors and symbolic sizes among a call's arguments, in order.

    Args:
        tracer: torch's tracer.
    """

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer
        self.fake_mode: Any = None
        self.tensors: list[Any] = []
        self.devices: list[str] = []
        self._places: dict[int, int] = {}
        self._memories: dict[int, int] = {}
        self._before: list[tuple[Any, int, int]] = []
        #: The places of the tensors whose value torch knows, with the fake tensor's and the tracer's record of it.
        self.constants: dict[int, tuple[Any, Any]] = {}

    def written(self) -> list[int] | None:
        """The places of the tensors that were written since.

        ``None`` where a tensor has other sizes or memory now, or where a tensor of known value was written.
        """
        written_places = []
        for i, (tensor, (sizes, address, version)) in enumerate(zip(self.tensors, self._before, strict=True)):
            if expressions(tensor) != sizes or memory_of(tensor) != address:
                return None
            is_written = tensor._version != version
            if i in self.constants and is_written:
                return None
            if tensor.constant is not None and tensor.constant is not self.constants.get(i, (None,))[0]:
                return None
            if is_written:
                written_places.append(i)
        return written_places

    def forgotten(self) -> list[int]:
        """The places of the tensors whose value the fake tensors' mode knew and no longer knows."""
        return [i for i, (constant, _) in self.constants.items() if constant is not self.tensors[i].constant]

    def are_known(self, by_tracer: bool, by_mode: bool) -> bool:
        """Whether the tracer, and the fake tensors' mode, if they are included, knew the value of every tensor."""
        values = [self.constants.get(i, (None, None)) for i in range(len(self.tensors))]
        return not any((by_mode and value is None) or (by_tracer and own is None) for value, own in values)

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any], by_mode: bool) -> tuple[Any, Any]:
        """The result of a call on tensors whose values torch knows, computed again as torch does.

        Args:
            func: The operator.
            args, kwargs: Its arguments.
            by_mode: Whether the fake tensors' mode knows the values too.

        Returns:
            The fake tensor, which is ``None`` unless ``by_mode``, and the value that the tracer keeps for its node.
        """

        def compute(which: int) -> Any:
            def known(argument: Any) -> Any:
                if isinstance(argument, tuple | list):
                    return type(argument)(map(known, argument))
                place = self._places.get(id(argument))
                return argument if place is None else self.constants[place][which]

            return func(*map(known, args), **{name: known(argument) for name, argument in kwargs.items()})

        with unset_fake_temporarily():
            if not by_mode:
                return None, compute(1)
            with torch_c._DisableTorchDispatch():
                value = compute(0)
            converter = self.fake_mode.fake_tensor_converter
            return converter.from_real_tensor(self.fake_mode, value, make_constant=True), compute(1)

    def kinds(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        """The kind of each value, and the values as arguments of an FX node."""
        kinds, fx = [type(values)], []
        for value in values:
            kind, argument = self._kind(value)
            kinds.append(kind)
            fx.append(argument)
        return tuple(kinds), tuple(fx) if isinstance(values, tuple) else fx

    def kinds_of_dict(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same for keyword arguments."""
        kinds, fx = self.kinds(tuple(values.values()))
        return (tuple(values), kinds), dict(zip(values, fx, strict=True))

    def _kind(self, value: Any) -> tuple[Any, Any]:
        cls = type(value)
        if cls is FakeTensor:
            return self._tensor(value)
        if cls in _PLAIN:
            return (cls, value), value
        if cls is float:
            return (cls, value.hex()), value
        if cls is torch.SymInt:
            node = value.node
            expression = node.expr
            if node.constant is not None or expression.is_number:
                return (int, int(expression)), int(expression)
            return (cls, expression), proxies.get_proxy_slot(value, self.tracer).force().node
        if cls is tuple or cls is list:
            return self.kinds(value)
        if cls is complex:
            return (cls, value.real.hex(), value.imag.hex()), value
        raise Incomparable

    def _tensor(self, tensor: Any) -> tuple[Any, Any]:
        entry = self.tracer.tensor_tracker.get(tensor)
        if (
            entry is None
            or tensor.real_tensor is not None
            or tensor.layout is not torch.strided
            or tensor.is_inference()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            raise Incomparable
        place = self._places.get(id(tensor))
        if place is not None:
            return ("same", place), entry.proxy.node
        requires_grad = tensor.requires_grad
        if requires_grad and torch.is_grad_enabled():
            raise Incomparable  # the result has a history
        place = self._places[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        sizes = expressions(tensor)
        address = memory_of(tensor)
        self._before.append((sizes, address, tensor._version))
        value = None
        if entry.constant is not None or tensor.constant is not None:
            value = known_number(entry.constant), known_number(tensor.constant)
            self.constants[place] = tensor.constant, entry.constant
        memory = self._memories.setdefault(address, place)
        if self.fake_mode is None:
            self.fake_mode = tensor.fake_mode
        elif tensor.fake_mode is not self.fake_mode:
            raise Incomparable
        device = tensor.fake_device
        if device.type not in self.devices:
            self.devices.append(device.type)
        return (tensor.dtype, device, requires_grad, memory, sizes, value), entry.proxy.node


def known_number(constant: torch.Tensor | None) -> Any:
    """The only number in a tensor whose value torch keeps in its fake tensor.

    Raises:
        Incomparable: It is of another kind.
    """
    if constant is None:
        return None
    if type(constant) is not torch.Tensor or constant.numel() != 1 or not constant.is_cpu:
        raise Incomparable
    with torch_c._DisableTorchDispatch():
        number: Any = constant.item()
    if isinstance(number, complex):
        return (constant.dtype, number.real.hex(), number.imag.hex())
    return (constant.dtype, number.hex() if isinstance(number, float) else number)


def memory_of(tensor: Any) -> int:
    """A number that is the same for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)


def expressions(tensor: Any) -> tuple[Any, ...]:
    """Sizes, strides and offset of a tensor, as expressions."""
    return (
        tensor.dim(),
        *[
            s.node.expr if type(s) is torch.SymInt else s
            for s in (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        ],
    )
