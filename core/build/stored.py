"""Parameters, buffers and constants stored in another form than torch's: packed, converted, laid out anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build.dtypes import to_onnx_dtype

Tensor = torch.Tensor | ir.TensorProtocol
Make = Callable[[torch.Tensor], Tensor]

#: Where an initializer keeps how it is made (``onnx_ir.Value.meta``), so that weights replaced later are made alike.
META = "onnxplug.derived"


class Derived(NamedTuple):
    """How an initializer is made of a tensor of the model.

    Attributes:
        source: That tensor's name in the model.
        make: The function of it.
    """

    source: str
    make: Make


class StoredMixin:
    """What :class:`GraphBuilder` knows of the tensors that are exported with the model."""

    def __init__(self) -> None:
        #: The parameters, buffers and constants of the model.
        self.state: Mapping[ir.Value, torch.Tensor] = {}
        self._derived: dict[ir.Value, tuple[ir.Value, Tensor, Make]] = {}
        self._derived_by_key: dict[Any, ir.Value] = {}
        super().__init__()

    def stored(self, x: ir.Value | None) -> torch.Tensor | None:
        """The tensor that a parameter, buffer or constant is exported with; ``None`` for anything else.

        To decide a form by. A number taken from it would stay when the weights are replaced: what depends on its content
        is made by :meth:`derive`.
        """
        if x is None:
            return None
        if x.const_value is not None:
            array = x.const_value.numpy()
            # numpy has no bfloat16, 8-bit floats or nibbles of its own, which torch would take.
            return torch.from_numpy(np.array(array)) if array.dtype.isbuiltin == 1 else None
        tensor = self.state.get(x)
        if tensor is None or tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
            return None
        return tensor.detach()

    def derive(self, source: ir.Value, make: Make, key: Hashable) -> ir.Value:
        """An initializer made of a stored tensor, at export and again whenever the weights are replaced.

        Args:
            source: A value that :meth:`stored` knows.
            make: From the tensor to what is stored: a torch tensor, or an ``onnx_ir`` one for dtypes that torch lacks.
            key: What ``make`` does: equal keys of one source share one initializer.

        Returns:
            Its value. The initializer has the name of the source where nothing else reads that.
        """
        found = self._derived_by_key.get((source, key))
        if found is not None:
            return found
        tensor = self.stored(source)
        assert tensor is not None, "derive() wants a value that stored() knows"
        made = make(tensor)
        dtype = to_onnx_dtype(made.dtype)
        shape = ir.Shape(tuple(made.shape) if isinstance(made, torch.Tensor) else made.shape.numpy())
        value = ir.Value(type=ir.TensorType(dtype), shape=shape)
        self._derived[value] = (source, made, make)
        self._derived_by_key[source, key] = value
        return value

    def derived_tensors(self, taken: Iterable[str | None]) -> dict[ir.Value, Tensor]:
        """The derived initializers that nodes read, each with a name that isn't taken."""
        if not self._derived:
            return {}
        names = {name for name in taken if name}
        given = {value.name for value in self._derived}
        found: dict[ir.Value, Tensor] = {}
        for value, (source, tensor, make) in self._derived.items():
            if not value.uses():
                continue
            if value.name is None and source.name and not source.uses() and source.name not in given:
                value.name = source.name
            number = 0
            while value.name is None:
                number += 1
                name = f"{source.name or 'constant'}_stored{number}"
                value.name = None if name in names else name
            names.add(value.name)
            given.add(value.name)
            found[value] = tensor
            if source in self.state:
                value.meta[META] = Derived(str(source.name), make)
        return found
