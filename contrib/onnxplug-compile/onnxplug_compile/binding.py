"""Calls of an ONNX Runtime session on PyTorch's memory: nothing is copied where layouts agree."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.errors import OnnxplugError
from onnxplug.run.kernels import onnxruntime_module
from onnxplug_compile.lowering import Computed, Constant, Lowered, Number, Passed, Result, View
from onnxplug_compile.randomness import AnyDraw, generators_of
from onnxplug_compile.sizes import Evaluate

#: Its address stands for the address of a tensor without elements, which has none in PyTorch; ONNX Runtime wants one.
_SOMEWHERE = torch.zeros(1, dtype=torch.complex128)

#: Types of which ONNX Runtime makes no DLPack tensor.
_NOT_IN_DLPACK = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})


class RunError(OnnxplugError):
    """A session failed in a call, or left an output unset."""


@dataclass(frozen=True)
class _Input:
    """An input of the session.

    Attributes:
        is_fixed: Whether every call gives it one shape, so that the same address means the same input.
    """

    position: int
    name: str
    element: int
    is_number: bool
    is_fixed: bool
    dtype: torch.dtype
    is_complex: bool


class _Bound:
    """A binding, and the addresses of the inputs of fixed shape that it holds."""

    def __init__(self, binding: Any, count: int) -> None:
        self.binding = binding
        self.addresses = [-1] * count


class Executable:
    """A lowered graph with its session: called with a list of arguments as AOTAutograd calls compiled graphs.

    Calls may come from several threads at once.

    Args:
        session: An ``onnxruntime.InferenceSession``; ``None`` where there is nothing to compute.
        device: The device of the session's inputs and outputs, by name and number.
    """

    def __init__(self, session: Any, lowered: Lowered, device: tuple[str, int] = ("cpu", 0)) -> None:
        self._boxed_call = True  # AOTAutograd then gives a list
        self._draws: list[AnyDraw] = lowered.draws
        self._generators = generators_of(lowered.draws)
        self._evaluate: Evaluate | None = lowered.sizes.function()
        self._session: Any = session._sess if session is not None else None
        runtime = onnxruntime_module()
        self._run_options = runtime.RunOptions()
        self._device = runtime.capi._pybind_state.OrtDevice(
            getattr(runtime.capi._pybind_state.OrtDevice, device[0])(),
            runtime.capi._pybind_state.OrtDevice.default_memory(),
            device[1],
        )
        self._new_binding: Callable[[Any], Any] = runtime.capi._pybind_state.SessionIOBinding
        taken = {i.name for i in session.get_inputs()} if session is not None else set()
        self._inputs = [
            _input(slot.position or 0, slot.name, slot.node.meta["val"])
            for slot in lowered.functional.inputs
            if slot.name in taken
        ]
        self._results: list[Result] = lowered.results
        read = [*lowered.results, *(check.info for check in lowered.checks)]
        bases = [r.base if isinstance(r, View) else r for r in read]
        computed = sorted({r for r in bases if isinstance(r, Computed)}, key=lambda r: r.index)
        self._outputs = [(f"output_{r.index}", int(to_onnx_dtype(_real(r.dtype))), r) for r in computed]
        self._in_order = lowered.results == computed
        self._checks = lowered.checks
        self._idle: list[_Bound] = []
        self._checked = False

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the graph.

        Args:
            args: Tensors and numbers; emptied, so that tensors that nothing else holds are freed.
        """
        numbers = self._evaluate(args) if self._evaluate is not None else ()
        values, states = args, []
        if self._draws:
            states = [(generator, generator.get_state()) for generator in self._generators]
            values = [*args, *[draw(numbers, args) for draw in self._draws]]
        outputs: list[Any] = []
        if self._session is not None:
            try:
                outputs = self._run(values, numbers)
            except Exception as error:
                for generator, state in states:  # eager PyTorch then draws the same numbers
                    generator.set_state(state)
                if isinstance(error, RunError):
                    raise
                raise RunError(f"ONNX Runtime failed: {error}") from error
        for check in self._checks:
            check(_result(check.info, values, numbers, outputs))
        if not self._in_order:
            outputs = [_result(result, values, numbers, outputs) for result in self._results]
        args.clear()
        return outputs

    def _run(self, values: Sequence[Any], numbers: Sequence[int]) -> list[torch.Tensor]:
        try:
            bound = self._idle.pop()
        except IndexError:
            bound = _Bound(self._new_binding(self._session), len(self._inputs))
        alive: list[Any] = []  # temporaries that the binding points into
        self._bind_inputs(bound, values, alive)
        bind, device, checked = bound.binding.bind_output, self._device, self._checked
        made: list[torch.Tensor | None] = []
        for name, element, output in self._outputs:
            # ONNX Runtime allocates in the first call: in given memory, an output that it leaves unset is not noticed.
            if not checked or output.shape is None:
                made.append(None)
                bind(name, device)
                continue
            tensor = torch.empty([numbers[i] for i in output.shape], dtype=output.dtype, device=output.device)
            made.append(tensor)
            real = torch.view_as_real(tensor) if output.dtype.is_complex else tensor
            bind(name, device, element, real.shape, real.data_ptr() or _SOMEWHERE.data_ptr())
        self._session.run_with_iobinding(bound.binding, self._run_options)
        outputs = self._fetch(bound, made, numbers)
        del alive
        self._checked = True
        self._idle.append(bound)
        return outputs

    def _bind_inputs(self, bound: _Bound, values: Sequence[Any], alive: list[Any]) -> None:
        bind = bound.binding.bind_input
        addresses = bound.addresses
        device = self._device
        for i, slot in enumerate(self._inputs):
            value = values[slot.position]
            if slot.is_number:
                value = torch.tensor(value, dtype=slot.dtype)
                alive.append(value)
            elif not value.is_contiguous() or slot.is_complex or value.is_neg():
                value = value.resolve_conj().resolve_neg()
                value = (torch.view_as_real(value) if slot.is_complex else value).contiguous()
                alive.append(value)
            elif slot.is_fixed:
                address = value.data_ptr()
                if addresses[i] == address:
                    continue
                addresses[i] = address
                bind(slot.name, device, slot.element, value.shape, address or _SOMEWHERE.data_ptr())
                continue
            addresses[i] = -1
            bind(slot.name, device, slot.element, value.shape, value.data_ptr() or _SOMEWHERE.data_ptr())

    def _fetch(self, bound: _Bound, made: Sequence[torch.Tensor | None], numbers: Sequence[int]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        values: Any = None
        for i, (tensor, (_, _, output)) in enumerate(zip(made, self._outputs, strict=True)):
            if tensor is None:
                values = bound.binding.get_outputs() if values is None else values
                tensor = _adopt(values[i], output, numbers)
            outputs.append(tensor if output.contiguous else laid_out(tensor, output, numbers))
        if values is not None:
            bound.binding.clear_binding_outputs()
        return outputs


def _real(dtype: torch.dtype) -> torch.dtype:
    """The element type in ONNX: for complex numbers, the type of their parts."""
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype


def _input(position: int, name: str, val: Any) -> _Input:
    if isinstance(val, torch.Tensor):
        dtype = _real(val.dtype)
        fixed = all(isinstance(size, int) for size in val.shape)
        return _Input(position, name, int(to_onnx_dtype(dtype)), False, fixed, dtype, val.dtype.is_complex)
    dtype = {torch.SymFloat: torch.float64, torch.SymBool: torch.bool}.get(type(val), torch.int64)
    return _Input(position, name, int(to_onnx_dtype(dtype)), True, True, dtype, False)


def _adopt(value: Any, output: Computed, numbers: Sequence[int]) -> torch.Tensor:
    """The memory that ONNX Runtime allocated, as a tensor."""
    if not value.has_value():
        raise RunError(f"ONNX Runtime left the output {output.index} unset")
    real = _real(output.dtype)
    if value.element_type() != int(to_onnx_dtype(real)):
        raise RunError(f"ONNX Runtime gave the output {output.index} as {value.data_type()}, and it is {real}")
    tensor = (
        torch.utils.dlpack.from_dlpack(value) if output.dtype not in _NOT_IN_DLPACK else _copied(value, output.dtype)
    )
    if output.dtype.is_complex:
        tensor = torch.view_as_complex(tensor)
    elif tensor.dtype != output.dtype:
        tensor = tensor.view(output.dtype)
    expected = None if output.shape is None else [numbers[i] for i in output.shape]
    if expected is not None and list(tensor.shape) != expected:
        raise RunError(f"ONNX Runtime gave the output {output.index} the shape {list(tensor.shape)}, not {expected}")
    return tensor


def _copied(value: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(value.shape(), dtype=dtype)
    ctypes.memmove(tensor.data_ptr(), value.data_ptr(), tensor.nbytes)
    return tensor


def laid_out(tensor: torch.Tensor, output: Computed, numbers: Sequence[int]) -> torch.Tensor:
    """The output in eager's memory layout, which views and later graphs rely on."""
    if output.contiguous:
        return tensor
    if output.strides is None:
        back = sorted(range(tensor.dim()), key=output.order.index)
        return tensor.permute(output.order).contiguous().permute(back)
    strides = tuple(numbers[i] for i in output.strides)
    if tensor.stride() == strides or tensor.numel() < 2:
        return tensor
    shape = tensor.shape
    for axis, stride in enumerate(strides):
        if stride == 0:  # an expanded axis: all its elements lie at one place
            tensor = tensor.narrow(axis, 0, 1)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor).expand(shape)


def _result(result: Result, args: Sequence[Any], numbers: Sequence[int], outputs: Sequence[torch.Tensor]) -> Any:
    if isinstance(result, Computed):
        return outputs[result.index]
    if isinstance(result, Passed):
        return args[result.position]
    if isinstance(result, Constant):
        return result.value
    if isinstance(result, Number):
        return numbers[result.index]
    assert isinstance(result, View)
    tensor = _result(result.base, args, numbers, outputs)
    for target, rest in result.steps:
        tensor = target(tensor, *[_argument(a, numbers) for a in rest])
    return tensor


def _argument(argument: Any, numbers: Sequence[int]) -> Any:
    if isinstance(argument, Number):
        return numbers[argument.index]
    return [_argument(a, numbers) for a in argument] if isinstance(argument, list) else argument
