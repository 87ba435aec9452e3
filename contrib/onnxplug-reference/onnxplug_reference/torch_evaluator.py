"""``TorchReferenceEvaluator``: ONNX models by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import onnx
import torch
from onnx.reference.op_run import OpRun

from onnxplug.capture.eager import inference
from onnxplug.errors import EvaluationError
from onnxplug_reference.evaluator import ExtendedReferenceEvaluator
from onnxplug_reference.graphs import Compute, Library, Resolver
from onnxplug_reference.kernels import Kernel, KernelTable, bound, schema_of
from onnxplug_reference.torch_ops.arrays import TorchArrays, to_array, to_tensor


@cache
def torch_kernels() -> KernelTable:
    """The kernels that call PyTorch's operators."""
    from onnxplug_reference.torch_ops import KERNELS

    return KernelTable(KERNELS)


#: Parts of torch's errors for an operator without a kernel for a dtype.
_LACKS = ("not implemented for", "not supported", "unsupported", "does not support", "Promotion for")


class TorchReferenceEvaluator(ExtendedReferenceEvaluator):
    """Runs a model by PyTorch's operators, on any device: a third opinion beside ONNX Runtime and NumPy, and a fast one.

    Operators without a kernel of PyTorch (:attr:`in_numpy`) are computed as by :class:`ExtendedReferenceEvaluator`.
    Results are tensors on the device; text, and elements that torch has no dtype for, stay NumPy's arrays.

    Args:
        proto: As :class:`ExtendedReferenceEvaluator` takes it.
        device: The device that the model runs on.
        options: As :class:`ExtendedReferenceEvaluator` takes them; ``kernels`` are functions of tensors, ``new_ops``
            are ``OpRun`` classes of arrays.

    Attributes:
        in_numpy: Domain and name of the operators that were computed in NumPy so far.
    """

    def __init__(self, proto: Any, *args: Any, device: str | torch.device = "cpu", **options: Any) -> None:
        self.device = torch.device(device)
        self.in_numpy: set[tuple[str, str]] = set()
        super().__init__(proto, *args, **options)

    def _arrays(self) -> TorchArrays:
        return TorchArrays(self.device)

    def _resolver(
        self, numpy: Resolver, kernels: Iterable[Kernel], classes: Mapping[tuple[str, str], type[OpRun]]
    ) -> Resolver:
        return _TorchResolver(numpy, kernels, classes, self.device, self.in_numpy)

    def _taken(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._taken(v) for v in value]
        return value.detach().to(self.device) if isinstance(value, torch.Tensor) else to_tensor(value, self.device)

    def _as_arrays(self, value: Any) -> Any:
        return to_array(value)

    def _result_as_fed(self, feeds: Mapping[str, Any]) -> Callable[[Any], Any]:
        return lambda value: value

    def run(self, *args: Any, **options: Any) -> Any:
        """Runs the model, as :meth:`ExtendedReferenceEvaluator.run` does; results are tensors on the device."""
        with inference():
            return super().run(*args, **options)


class _TorchResolver:
    """A resolver with PyTorch's kernels, and NumPy's for the inputs that these do not take."""

    def __init__(
        self,
        numpy: Resolver,
        kernels: Iterable[Kernel],
        classes: Mapping[tuple[str, str], type[OpRun]],
        device: torch.device,
        in_numpy: set[tuple[str, str]],
    ) -> None:
        self._numpy = numpy
        self._user_kernels = KernelTable(kernels)
        self._classes = classes
        self._device = device
        self._in_numpy = in_numpy

    def comes_first(self, domain: str, op_type: str, version: int) -> bool:
        """Whether a kernel of the call or of a plugin replaces the model's function."""
        return (domain, op_type) in self._classes or self._user_kernels.find(domain, op_type, version) is not None

    def _bound(self, node: onnx.NodeProto, domain: str, version: int) -> Compute | None:
        """A kernel of PyTorch with the node's attributes; ``None`` if no kernel knows them all."""
        schema = schema_of(node.op_type, version, domain)
        user_kernel = self._user_kernels.find(domain, node.op_type, version)
        if user_kernel is not None:
            return bound(user_kernel, node, schema)
        kernel = torch_kernels().find(domain, node.op_type, version)
        if kernel is None or (domain, node.op_type) in self._classes:
            return None
        try:
            return bound(kernel, node, schema)
        except EvaluationError:
            return None

    def compute(self, node: onnx.NodeProto, opsets: Mapping[str, int], library: Library) -> Compute | None:
        """The kernel of a node; ``None`` if there is none."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = opsets.get(domain, 1)
        compute = self._bound(node, domain, version)
        spare: list[Compute | None] = []  # NumPy's kernel, made at first use

        def slow(inputs: Sequence[Any]) -> Sequence[Any]:
            if not spare:
                spare.append(self._numpy.compute(node, opsets, library))
            if spare[0] is None:
                raise NotImplementedError(f"there is no kernel for {node.op_type} in NumPy either")
            if node.op_type != "Constant":
                self._in_numpy.add((domain, node.op_type))
            return [to_tensor(value, self._device) for value in spare[0]([to_array(value) for value in inputs])]

        if compute is None:
            spare.append(self._numpy.compute(node, opsets, library))
            return slow if spare[0] is not None else None

        def run(inputs: Sequence[Any]) -> Sequence[Any]:
            if all(_is_torch(value) for value in inputs):
                try:
                    return compute(inputs)
                except NotImplementedError:
                    pass
                except (RuntimeError, TypeError) as error:
                    if not any(text in str(error) for text in _LACKS):
                        raise
            return slow(inputs)

        return run


def _is_torch(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_torch(v) for v in value)
    return value is None or isinstance(value, torch.Tensor)
