"""Numbers that a model's code reads from its own buffers and constants (``if self.initialized``), known when it is exported.

torch.export takes every number read from a tensor for unknown, except a constant of one element. Here a read is computed from the
graph so far: where it depends on no input, no parameter and no random number, and the model writes nothing that it may depend on,
the number is that of every call of the model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from onnxplug.capture.patching import patched
from onnxplug.capture.places import plain_tensors
from onnxplug.capture.questions import place_of
from onnxplug.errors import CaptureError
from onnxplug.fake import is_fake
from onnxplug.functionalize.effects import aliased_arguments, effects_of, written_arguments
from onnxplug.patches.kinds import id_of
from onnxplug.patches.seeds import is_random
from onnxplug.plugin_api import CaptureRequest
from onnxplug.torch_private import FakeTensor, OpOverload, is_transformed, proxies, pytree, unset_fake_temporarily

#: The most operators that a number may depend on.
_MOST = 256
_UNKNOWN: Any = object()
#: It writes no number; ``torch.tensor`` calls it.
_DETACH = torch.ops.aten.detach_.default


class Reads:
    """The reads of numbers of one trace.

    Args:
        original: torch's function that traces a call.
        module: The model that is traced; its parameters and buffers are traced tensors meanwhile.
    """

    def __init__(self, original: Any, module: torch.nn.Module) -> None:
        self._original = original
        self._module = module
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        self._names: dict[int, list[str]] = {}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._names.setdefault(id(buffer), []).append(name)
        #: A checkpoint has other numbers, where the model has weights without numbers.
        self._loaded = set(module.state_dict()) if any(map(is_fake, self._tensors.values())) else set()
        #: The buffers from which numbers were read, by their names.
        self.numbers: dict[str, torch.Tensor] = {}
        self._mode: Any = None
        self._roots: dict[fx.Node, torch.Tensor] = {}
        self._seen, self._casts = 0, False
        self._written: set[fx.Node] = set()
        #: The storages of which numbers were read, each with the place of the first read.
        self._read: dict[int, str | None] = {}
        #: The storages of the model's other tensors, and those that were written: their nodes are no constants after the trace.
        memories = (_memory(tensor) for _, tensor in plain_tensors(module))
        self._plain = {memory for memory in memories if memory is not None}
        self._plain_written: set[int] = set()

    def call(self, mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """Replaces torch's ``proxy_call``: a read of a number that is known returns the number."""
        if self._mode is None and pre_dispatch:
            self._mode, self._roots = mode, self._placeholders(mode.tracer)
        reads = isinstance(func, OpOverload) and torch.Tag.data_dependent_output in func.tags
        if reads and mode is self._mode and not kwargs:
            value = self._value(mode.tracer, func, args)
            if value is not _UNKNOWN:
                return value
        if mode is self._mode and isinstance(func, OpOverload) and effects_of(func).written and func is not _DETACH:
            self._plain_written |= self._plain & self._constants_in(mode.tracer, args)
        return self._original(mode, func, pre_dispatch, args, kwargs)

    def _constants_in(self, tracer: Any, args: Any) -> set[int]:
        """The storages of the constants among the arguments of a call, and of those whose memory an argument may share."""
        found, nodes = set[int](), []
        for tensor in pytree.tree_leaves(args):
            if not isinstance(tensor, torch.Tensor):
                continue
            slot = proxies.get_proxy_slot(tensor, tracer, None)
            if slot is not None:
                nodes.append(slot.proxy.node)
            elif (memory := _memory(tensor)) is not None:
                found.add(memory)
        constants = [node for node in _behind(nodes, _viewed) or () if node.op == "get_attr"]
        return found | self._storages(tracer, constants)

    def _value(self, tracer: Any, func: Any, args: Any) -> Any:
        """The number; ``_UNKNOWN`` where it may be another one at another call."""
        slots = [proxies.get_proxy_slot(a, tracer, None) for a in args if isinstance(a, torch.Tensor)]
        memory = _memory(args[0]) if slots == [None] else None
        if memory is not None and memory in self._plain:  # torch reads its number, as of every constant of one element
            self._read.setdefault(memory, place_of(sys._getframe(2)))
        needed = _behind([slot.proxy.node for slot in slots], _all_operands, _MOST) if None not in slots else None
        if not needed:
            return _UNKNOWN
        roots = self._roots
        placeholders = {node for node in needed if node.op == "placeholder"}
        ids = {id(roots[node]) for node in placeholders & roots.keys()}
        names = [name for tensor in ids for name in self._names.get(tensor, ())]
        known = placeholders <= roots.keys() and not self._parameters & ids and self._loaded.isdisjoint(names)
        if not known or not all(map(_is_computed, needed - placeholders)):
            return _UNKNOWN
        storages = self._storages(tracer, needed)
        written = self._written_so_far(tracer)
        if self._casts or needed & written or storages & self._storages(tracer, written):
            return _UNKNOWN
        values: dict[fx.Node, Any] = {}
        with unset_fake_temporarily():
            for node in sorted(needed):  # in the order of the graph
                if node in placeholders:
                    values[node] = roots[node]
                elif node.op == "get_attr":
                    values[node] = getattr(tracer.root, str(node.target))
                elif node.target is _DETACH:
                    values[node] = values[node.all_input_nodes[0]].detach()
                else:
                    operands, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    target: Any = node.target
                    values[node] = target(*operands, **named)
                if isinstance(values[node], FakeTensor):
                    return _UNKNOWN
            rest = iter(slots)
            value = func(*[values[next(rest).proxy.node] if isinstance(a, torch.Tensor) else a for a in args])
            self.numbers |= {name: self._tensors[key].detach().clone() for key in ids for name in self._names[key]}
        for storage in storages:
            self._read.setdefault(storage, place_of(sys._getframe(1)))
        return value

    def _written_so_far(self, tracer: Any) -> set[fx.Node]:
        """The nodes whose memory a call may have written."""
        calls = list(tracer.graph.nodes)
        for call in calls[self._seen :]:
            self._written |= _behind(_written_by(call), _viewed) or set()
            self._casts = self._casts or _casts(call)
        self._seen = len(calls)
        return self._written

    def check(self) -> None:
        """
        Raises:
            CaptureError: The trace writes a tensor of which its code has read a number: the next call may read another one.
        """
        if not self._read:
            return
        tracer = self._mode.tracer
        for storage in (self._storages(tracer, self._written_so_far(tracer)) | self._plain_written) & self._read.keys():
            place = self._read[storage]
            raise CaptureError(
                f"the model's code{f' at {place}' if place else ''} reads a number from a tensor that it writes afterwards",
                hint="Its next call may read another number. Keep the number in a tensor (torch.where, torch.cond), or export "
                "the model in the state in which it writes the buffer no more.",
            )

    def replaced_texts(self, replaced: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """A warning for each tensor of the model that its code has replaced and of which it has read a number.

        Args:
            replaced: The tensors before the call, by their names in the model.
        """
        for name, tensor in replaced.items():
            memory = _memory(tensor)
            if memory in self._read and memory is not None:
                place = self._read[memory]
                yield (
                    f"the model's code{f' at {place}' if place else ''} reads a number from the tensor {name!r}, and replaces it: "
                    "the exported model has the number of the export at every call. Make it an input, or compute with the tensor."
                )

    def _placeholders(self, tracer: Any) -> dict[fx.Node, torch.Tensor]:
        """The model's parameters and buffers by the placeholders of the trace that stand for them: before the first operator."""
        traced = (*self._module.parameters(), *self._module.buffers())
        slots = ((proxies.get_proxy_slot(t, tracer, None), self._tensors.get(id_of(t))) for t in traced)
        return {slot.proxy.node: tensor for slot, tensor in slots if slot is not None and tensor is not None}

    def _storages(self, tracer: Any, nodes: Iterable[fx.Node]) -> set[int]:
        """The storages of the model's tensors and constants among some nodes."""
        constants = [getattr(tracer.root, str(node.target)) for node in nodes if node.op == "get_attr"]
        tensors = [*constants, *(self._roots[node] for node in nodes if node in self._roots)]
        return {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor)}


def _memory(tensor: Any) -> int | None:
    """A number that is the same for plain tensors that share memory; ``None`` for other tensors."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not is_transformed(tensor)
    return int(tensor.untyped_storage()._cdata) if is_plain else None


def _behind(
    nodes: list[fx.Node], operands: Callable[[fx.Node], list[fx.Node]], most: float = float("inf")
) -> set[fx.Node] | None:
    """The nodes and those reached from them by ``operands``; ``None`` where these are more than ``most``."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += operands(node)
            if len(found) > most:
                return None
    return found


def _all_operands(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory a result may share; a constant has no metadata that would tell."""
    if node.op != "call_function" or not effects_of(node.target).aliases:
        return []
    return aliased_arguments(node) + [operand for operand in node.all_input_nodes if "val" not in operand.meta]


def _is_computed(node: fx.Node) -> bool:
    """Whether a node is a constant, or computes from its operands alone what it computes at every call."""
    if node.op == "get_attr":
        return True
    target: Any = node.target
    if target is _DETACH:
        return True
    known = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    return known and not is_random(target) and not written_arguments(node)


def _written_by(call: fx.Node) -> list[fx.Node]:
    """The operands that a call may write; other functions than operators may write any."""
    if call.op != "call_function" or call.target is _DETACH:
        return []
    if isinstance(call.target, OpOverload) or getattr(call.target, "__module__", "") in ("_operator", "math", "torch"):
        return written_arguments(call)
    return call.all_input_nodes


def _casts(node: fx.Node) -> bool:
    """Whether a node begins or ends a region under autocast, whose operators are recorded without the casts."""
    return getattr(node.target, "__module__", "") == "torch.amp.autocast_mode"


@contextlib.contextmanager
def numbers_of_buffers(request: CaptureRequest) -> Iterator[None]:
    """While it holds, such numbers are read as they are."""
    reads = Reads(proxies.proxy_call, request.module)
    request.shared["numbers"] = reads.numbers
    with patched(proxies, "proxy_call", reads.call):
        yield
    reads.check()
    request.warnings.extend(reads.replaced_texts(request.shared.get("replaced", {})))
