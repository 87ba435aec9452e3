"""Parameters, buffers and constants stored in another form than torch's: packed, converted, laid out anew.

An example, a linear layer, ``x @ a.weight.T``: ``derive(a.weight, make, ("permuted", (1, 0)))`` makes the initializer
``a.weight.transposed``, a view of the parameter's memory, and the same initializer at each later call with this key. Its
:class:`Origin` has the name ``a.weight`` and ``make``, so that other weights, given later, are stored transposed too.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.build.names import Names
from onnxplug.build.sizes import Sizes
from onnxplug.errors import UsageError, WeightsError
from onnxplug.fake import is_fake

Tensor = torch.Tensor | ir.TensorProtocol
Make = Callable[[torch.Tensor], Tensor]

#: Where an initializer keeps its :class:`Origin` (``onnx_ir.Value.meta``), so that weights replaced later are stored alike.
META = "onnxplug.origin"
#: Metadata key (``onnx_ir.TensorProtocol.meta``) of an initializer made of several tensors: the functions that load each of them.
PARTS = "onnxplug.parts"


class Origin(NamedTuple):
    """The tensor of the PyTorch model that an initializer holds, or is made of.

    Attributes:
        targets: The tensor's names in the PyTorch model; a tied tensor has several.
        make: From the tensor to the stored content.
        dtype, shape: Of the tensor.
        persistent: Whether it is in the model's ``state_dict``.
        keys: The keys of ``make``, step by step, as :meth:`Weights.derive` received them; empty where the tensor itself is stored.
        parts: Where it is made of several tensors, the origin of each; ``make`` takes the results of their ``make``.
    """

    targets: tuple[str, ...]
    make: Callable[..., Tensor]
    dtype: torch.dtype
    shape: torch.Size
    persistent: bool = True
    keys: tuple[Hashable, ...] = ()
    parts: tuple[Origin, ...] = ()

    def then(self, make: Make, key: Hashable) -> Origin:
        """The origin of an initializer derived from this one."""
        return self._replace(make=_composed(self.make, make), keys=(*self.keys, key))


def _composed(first: Callable[..., Tensor], then: Make) -> Callable[..., Tensor]:
    def both(*tensors: torch.Tensor) -> Tensor:
        first_made = first(*tensors)
        assert isinstance(first_made, torch.Tensor)
        return then(first_made)

    return both


def _composed_again(before: Callable[[], Tensor], make: Make) -> Callable[[], Tensor]:
    def again() -> Tensor:
        source = before()
        assert isinstance(source, torch.Tensor)
        return make(source)

    return again


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A weight where converters and rewrites compute with it: wherever the model is, their own numbers are on the CPU."""
    return tensor.detach() if is_fake(tensor) else tensor.detach().cpu()


def _joining(
    steps: Sequence[tuple[int, Callable[..., torch.Tensor]]], make: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """``make`` of the results of the steps, each of which takes its number of tensors."""

    def join(*tensors: torch.Tensor) -> torch.Tensor:
        left = iter(tensors)
        parts = [step(*islice(left, count)) for count, step in steps]
        device = "meta" if any(tensor.is_meta for tensor in parts) else "cpu"
        return make(*(tensor.to(device) for tensor in parts))

    return join


class AsExported:
    """A tensor whose memory a program shares with the model: it must hold the numbers that it has when this object is made.

    Args:
        tensor: The tensor.
        name: Its name.
    """

    def __init__(self, tensor: torch.Tensor, name: str | None = None) -> None:
        self._tensor, self._name = tensor, name
        self._writes = _writes(tensor)

    def __reduce__(self) -> Any:
        return AsExported, (self._tensor, self._name)  # a copy of the tensor has its own count of writes

    def load(self) -> torch.Tensor:
        """The tensor, on the CPU.

        Raises:
            WeightsError: It was written since.
        """
        self.check(self._name)
        return on_cpu(self._tensor)

    def check(self, name: str | None) -> None:
        """Checks that the tensor was not written since; ``name`` is for the error.

        Raises:
            WeightsError: It was.
        """
        if _writes(self._tensor) == self._writes:
            return
        subject = "a weight" if name is None else f"the weight {name!r}"
        raise WeightsError(
            f"{subject} was written after the export, by an optimizer or load_state_dict for example: the program has neither the "
            "model's former weights nor all of its present ones",
            names=[name] if name is not None else [],
            hint="Export the model again, or give the program all of the weights: program.apply_weights(model.state_dict()).",
        )


def _writes(tensor: torch.Tensor) -> int:
    """How often a tensor was written, as torch counts; 0 where it does not count."""
    return 0 if tensor.is_inference() else tensor._version


class WeightTensor(TorchTensor):
    """The content of an initializer: a torch tensor, whose bytes are copied once when they lie in memory.

    Args:
        tensor: The torch tensor.
        name: The initializer's name.
        shape: The tensor's shape, which can't be changed any more; a new shape when ``None``.
    """

    def __init__(self, tensor: torch.Tensor, name: str | None = None, shape: ir.Shape | None = None) -> None:
        ir.Tensor.__init__(self, tensor, to_onnx_dtype(tensor.dtype), shape=shape, name=name)
        self._source = AsExported(tensor)

    @property
    def is_fake(self) -> bool:
        """Whether the tensor has no numbers."""
        return is_fake(self.raw)

    def numpy(self) -> np.ndarray:
        """The elements as an array, without a copy where there can be one.

        Raises:
            WeightsError: The tensor is fake, or was written since the export.
        """
        self.check()
        if self.raw.dtype == torch.float4_e2m1fn_x2:
            return np.asarray(self.raw.view(torch.uint8).numpy(force=True))
        return super().numpy()

    def check(self) -> None:
        """Checks that the tensor has numbers, those that it had when this object was made.

        Raises:
            WeightsError: The tensor is fake, or was written since.
        """
        if self.is_fake:
            raise WeightsError(
                f"the weight {self.name!r} has no numbers",
                names=[str(self.name)],
                hint="Give the model its weights: program.apply_weights(…).",
            )
        self._source.check(self.name)

    def content(self) -> Any:
        """The elements in little endian order: a view of their memory where they lie there so.

        Raises:
            WeightsError: The tensor is fake, or was written since the export.
        """
        self.check()
        if self.dtype.bitwidth < 8 or sys.byteorder == "big":
            return super().tobytes()
        # torch lays elements out in another order three times as fast as NumPy.
        is_plain = type(self.raw) is torch.Tensor
        laid_out = WeightTensor(self.raw.contiguous()) if is_plain and not self.raw.is_contiguous() else self
        return np.ascontiguousarray(laid_out.numpy()).reshape(-1).view(np.uint8).data

    def tobytes(self) -> bytes:
        """A copy of :meth:`content`."""
        raw = self.raw
        is_plain = type(raw) is torch.Tensor and raw.is_cpu and self.dtype.bitwidth >= 8
        if not is_plain or raw.is_contiguous() or sys.byteorder == "big":
            return bytes(self.content())
        self.check()
        stream = io.BytesIO(bytes(raw.nbytes))  # whose buffer becomes the result, without a copy
        with stream.getbuffer() as content:
            torch.frombuffer(content, dtype=raw.dtype).view(raw.shape).copy_(raw.detach())
        return stream.getvalue()


#: Bytes above which a tensor made of a weight is not kept in memory but made when needed, unless it is a view of the weight.
_LARGE_COPY_BYTES = 1 << 24


def content_of(tensor: Tensor, source: torch.Tensor, again: Callable[[], Tensor]) -> ir.TensorProtocol:
    """The content of an initializer that is made of a tensor; a large copy is not kept in memory.

    Args:
        tensor: The stored tensor.
        source: The tensor that it is made of.
        again: Makes it once more.
    """
    return as_content(tensor) if not _is_large_copy(tensor, source) else _content_on_demand(tensor, again)


def _content_on_demand(template: Tensor, again: Callable[[], Tensor]) -> ir.TensorProtocol:
    """The content of an initializer that is made whenever it is needed; ``template`` has its dtype and shape."""
    shape = ir.Shape(template.shape if isinstance(template, torch.Tensor) else template.shape.numpy())
    return ir.LazyTensor(lambda: as_content(again()), to_onnx_dtype(template.dtype), shape)


def as_content(tensor: Tensor) -> ir.TensorProtocol:
    """A tensor as the content of an initializer."""
    return WeightTensor(tensor.detach()) if isinstance(tensor, torch.Tensor) else tensor


def _is_large_copy(tensor: Tensor, source: torch.Tensor) -> bool:
    if tensor.nbytes < _LARGE_COPY_BYTES or is_fake(source):
        return False
    return (
        not isinstance(tensor, torch.Tensor)
        or tensor.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    )


class _Derived(NamedTuple):
    """The record of a derived initializer.

    Attributes:
        root: The tensor of the model that it is made of.
        tensor: Its content; ``None`` for a large copy.
        again: Makes the content.
        is_torch: Whether the content is a torch tensor.
        content: The initializer's tensor for the file.
        form: Its form in a word.
        parts, join: Where it is made of several tensors, these tensors and the function that joins their contents.
    """

    root: ir.Value
    tensor: Tensor | None
    again: Callable[[], Tensor]
    is_torch: bool
    content: ir.TensorProtocol
    form: str
    parts: tuple[ir.Value, ...] = ()
    join: Callable[..., torch.Tensor] | None = None


class Weights:
    """The tensors that are exported with the model.

    Args:
        sizes: The builder's sizes.
        names: The names in the assembled graph.

    Attributes:
        state: The parameters, buffers and constants of the model.
    """

    def __init__(self, sizes: Sizes, names: Names) -> None:
        self.state: Mapping[ir.Value, torch.Tensor] = {}
        self._sizes = sizes
        self._names = names
        #: How many calls of the FX graph read each of them.
        self._readers: Counter[ir.Value] = Counter()
        self._derived: dict[ir.Value, _Derived] = {}
        self._derived_by_key: dict[Any, ir.Value] = {}

    def stored(self, x: ir.Value | None) -> torch.Tensor | None:
        """The tensor that a value is exported with (:meth:`GraphBuilder.stored`)."""
        if x is None:
            return None
        if x.const_value is not None:
            array = x.const_value.numpy()
            # numpy has no bfloat16, 8-bit floats or nibbles of its own, which torch would take.
            return torch.from_numpy(np.array(array)) if array.dtype.isbuiltin == 1 else None
        tensor = self.state.get(x)
        if tensor is None or is_fake(tensor):
            return None
        return on_cpu(tensor)

    def is_weight(self, x: ir.Value | None) -> bool:
        """Whether a value is a weight, or was derived from one (:meth:`GraphBuilder.is_weight`)."""
        if x is None:
            return False
        derived = self._derived.get(x)
        return derived.is_torch if derived is not None else x in self.state

    def root_of(self, x: ir.Value) -> ir.Value:
        """The tensor of the model that a derived initializer is made of; any other value itself."""
        derived = self._derived.get(x)
        return x if derived is None else derived.root

    def _content(self, x: ir.Value) -> Tensor | None:
        derived = self._derived.get(x)
        if derived is None:
            return self.state.get(x)
        return derived.tensor if derived.tensor is not None else derived.again()

    def add_readers(self, x: Any, count: int) -> None:
        """Counts calls that read a tensor of the model's state; other values are not counted.

        Args:
            x: The value.
            count: The number of additional calls that read it.
        """
        if x in self._readers or x in self.state:
            self._readers[x] += count

    def is_read_once(self, x: ir.Value) -> bool:
        """Whether a value is a weight (or derived from a weight) that a single call reads, and may store in the form it needs."""
        derived = self._derived.get(x)
        return self._readers[x if derived is None else derived.root] == 1 and self.is_weight(x)

    def permuted(self, source: ir.Value, perm: Sequence[int]) -> ir.Value:
        """A weight stored with its axes in another order, as ``NAME.transposed``.

        Args:
            source: A parameter, a buffer or a constant, as :meth:`derive` takes it.
            perm: For each axis of the result, the axis of the source.

        Raises:
            UsageError: ``source`` is known at run time only.
        """
        perm = tuple(perm)
        return self.derive(source, lambda tensor: tensor.permute(*perm), ("permuted", perm), form="transposed")

    def derive(self, source: ir.Value, make: Make, key: Hashable, *, form: str = "derived") -> ir.Value:
        """An initializer made of a stored tensor (:meth:`GraphBuilder.derive`)."""
        cached = self._derived_by_key.get((source, key))
        if cached is not None:
            return cached
        content = self._content(source)
        tensor = content if isinstance(content, torch.Tensor) else self.stored(source)
        if tensor is None:
            raise UsageError(
                f"g.derive takes a parameter, a buffer or a constant; {source.name or 'the value'!r} is known at run time only",
                hint="Where a converter may meet both, g.is_weight(x) or g.stored(x) tells which it is.",
            )
        stored = make(on_cpu(tensor))
        dtype = to_onnx_dtype(stored.dtype)
        shape = self._sizes.shape_of(tuple(stored.shape if isinstance(stored, torch.Tensor) else stored.shape.numpy()))
        value = ir.Value(type=ir.TensorType(dtype), shape=shape)
        known = self._derived.get(source)
        if known is not None and known.tensor is None:  # the source may be a large copy, and the tensor a view of it
            again, is_kept = _composed_again(known.again, make), False
        else:
            again, is_kept = (
                _composed_again(AsExported(tensor, _target(source)).load, make),
                not _is_large_copy(stored, tensor),
            )
        self._derived[value] = _Derived(
            source if known is None else known.root,
            stored if is_kept else None,
            again,
            isinstance(stored, torch.Tensor),
            as_content(stored) if is_kept else _content_on_demand(stored, again),
            form,
        )
        origin = source.meta.get(META)
        if origin is not None:
            value.meta[META] = origin.then(make, key)
        self._derived_by_key[source, key] = value
        return value

    def joined(
        self,
        sources: Sequence[ir.Value | torch.Tensor],
        make: Callable[..., torch.Tensor],
        key: Hashable,
        *,
        form: str = "joined",
    ) -> ir.Value | None:
        """An initializer made of several weights, at export and again whenever some of them are replaced.

        Args:
            sources: Weights as the model has them, results of this method, and numbers that stay. The first is a weight.
            make: From the contents of all sources to the stored content.
            key: Identifies ``make``.
            form: A word for the new form.

        Returns:
            The initializer, without numbers where a weight has none; ``None`` where a source is of another kind.
        """
        numbers = [
            (s.dtype, s.shape, bytes_of(s).numpy().tobytes()) if isinstance(s, torch.Tensor) else s for s in sources
        ]
        known = self._derived_by_key.get((tuple(numbers), key))
        if known is not None:
            return known
        steps: list[tuple[int, Callable[..., torch.Tensor]]] = []
        parts: list[ir.Value] = []
        for source in sources:
            if isinstance(source, torch.Tensor):
                steps.append((0, partial(_itself, source)))
                continue
            derived = self._derived.get(source)
            if derived is not None and derived.join is not None:
                steps.append((len(derived.parts), derived.join))
                parts += derived.parts
            elif source in self.state and META in source.meta:
                steps.append((1, _itself))
                parts.append(source)
            else:
                return None
        tensors = [self.state[part].detach() for part in parts]
        loaded = [AsExported(self.state[part], _target(part)).load for part in parts]
        join = _joining(steps, make)
        like = tensors
        if any(map(is_fake, tensors)):
            like = [torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta") for tensor in tensors]
        joint, again = join(*like), lambda: join(*(load() for load in loaded))
        is_kept = is_fake(joint) or joint.nbytes < _LARGE_COPY_BYTES
        content = as_content(joint) if is_kept else _content_on_demand(joint, again)
        content.meta[PARTS] = tuple(loaded)
        value = ir.Value(type=ir.TensorType(to_onnx_dtype(joint.dtype)), shape=self._sizes.shape_of(tuple(joint.shape)))
        origins = tuple(part.meta[META] for part in parts)
        targets = tuple(dict.fromkeys(target for origin in origins for target in origin.targets))
        persistent = any(origin.persistent for origin in origins)
        value.meta[META] = Origin(targets, join, joint.dtype, joint.shape, persistent, (key,), origins)
        tensor = joint if is_kept else None
        self._derived[value] = _Derived(parts[0], tensor, again, True, content, form, tuple(parts), join)
        self._derived_by_key[tuple(numbers), key] = value
        return value

    def derived_tensors(self) -> dict[ir.Value, ir.TensorProtocol]:
        """The derived initializers that nodes read, each with a name of its own."""
        tensors: dict[ir.Value, ir.TensorProtocol] = {}
        for value, derived in self._derived.items():
            if not value.uses():
                continue
            if value.name is None:
                value.name = self._names.unique(f"{derived.root.name or 'constant'}.{derived.form}")
            tensors[value] = derived.content
        return tensors

    def state_names(self) -> set[str]:
        """The names that the model's tensors have in PyTorch: an initializer of such a name holds that tensor."""
        origins = (value.meta.get(META) for value in self.state)
        return {target for origin in origins if origin is not None for target in origin.targets}


def _target(value: ir.Value) -> str | None:
    """The name in PyTorch of the tensor that an initializer holds or is made of."""
    origin: Origin | None = value.meta.get(META)
    return origin.targets[0] if origin is not None else None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any dtype, one after the other."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
