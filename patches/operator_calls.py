"""The memo of capture: an operator call that is equal in kind to an earlier call repeats its nodes.

While torch.export traces a model in its non-strict mode, nearly all time goes into computing the fake results of operators on
tensors of symbolic sizes: some milliseconds a call. A model calls the same operators with arguments of the same kind again and
again. Here all of the model's Python code runs as ever, and each call of an operator reaches torch's tracer as ever; there the call
is compared with earlier calls, and an equal call gets copies of the FX nodes and results of the same kind, without computing them.

Two calls are equal if the operator is the same builtin operator, every argument is of the same kind (for a tensor: sizes, strides
and offset as expressions, dtype, device, which other arguments share its memory; for everything else: the value), and the whole
state of torch that a call may depend on is the same (:func:`state`). Calls that can't be compared are traced.

An example, a model with three layers ``gelu(linear(x))``, with ``x`` of the sizes ``[s0, 8]``::

    linear(x, w1, b1)    traced: 8 ms. Key: aten.linear, [s0, 8] float32 contiguous, [8, 8] float32, [8] float32
    gelu(y1)             traced: 6 ms. Key: aten.gelu, [s0, 8] float32 contiguous, approximate="none"
    linear(y1', w2, b2)  equal: a copy of the node with other arguments, and a fake tensor of [s0, 8], in 0.2 ms
    gelu(y2)             equal
    gelu(y3[:, :4])      traced: its operand has the sizes [s0, 4] and the strides [8, 1]
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from onnxplug import logs
from onnxplug.capture.patching import patched
from onnxplug.patches.operands import Incomparable, Operands, expressions, memory_of
from onnxplug.plugin_api import CaptureRequest
from onnxplug.torch_private import (
    FakeTensor,
    OpOverload,
    ProxyTensor,
    Thunk,
    decompositions_of,
    pre_dispatch_modes,
    proxies,
    share_memory,
    torch_c,
    transforms_depth,
)

_LOGGER = logs.logger("capture")
#: The kinds of sizes for which torch's tracer makes nodes, and the operators of these nodes.
_SIZE_OPERATORS = {
    "size": torch.ops.aten.sym_size.int,
    "stride": torch.ops.aten.sym_stride.int,
    "numel": torch.ops.aten.sym_numel.default,
    "offset": torch.ops.aten.sym_storage_offset.default,
}


@dataclass(slots=True)
class _Result:
    """The template of a call's result.

    Attributes:
        operand: The place of the operand that this result is, or whose memory it shares; -1 for neither.
        same: Whether it is that operand itself.
        like: A bare tensor of the same sizes on the device meta.
        device: Its device.
        attributes: The attributes of a new fake tensor of that kind.
        memory: The place of the first result in the same new memory.
        node: The place of its node among the call's nodes.
        sizes: Symbolic sizes that are new with this result: the kind of size, the axis, and torch's SymNode.
        repeated: Whether the call was repeated before.
    """

    operand: int
    same: bool
    like: torch.Tensor
    device: torch.device
    attributes: dict[str, Any]
    memory: int
    node: int
    sizes: Sequence[tuple[str, int, Any]]
    repeated: bool = False


class _Call(NamedTuple):
    """A call that can be repeated.

    Attributes:
        items: The index of each node that takes an item of the results.
        metadata: For each node its recorded tensor metadata, and the keys of all its metadata.
        name: The stem of the names of the operator's nodes, before a number is added.
        results: The templates of the results; ``None`` for an absent result.
        sequence: ``tuple`` or ``list`` where the operator gives several, else ``None``.
        written: The places among the operands of the tensors that the call writes.
        known: Whether the tracer computed the result, as it knows the value of each operand.
        computed: Whether the fake tensors' mode computed it too.
        forgotten: The places of the operands whose value the fake tensors' mode no longer knows after the call.
    """

    items: Sequence[int]
    metadata: Sequence[tuple[Any, frozenset[str]]]
    name: str
    results: Sequence[_Result | None]
    sequence: type | None
    written: Sequence[int]
    known: bool
    computed: bool
    forgotten: Sequence[int]


@contextlib.contextmanager
def operator_calls_repeated(counts: dict[str, int]) -> Iterator[None]:
    """While it holds, torch.export (in its non-strict mode) traces only the first of the operator calls that are equal in kind.

    With a torch that lacks a private name needed here, each call is traced.

    Args:
        counts: Receives at the end how many were ``"repeated"``.
    """
    calls = OperatorCalls(getattr(proxies, "proxy_call", None))
    with patched(proxies, "proxy_call", calls.call) if _is_supported() else contextlib.nullcontext():
        yield
    counts["repeated"] = calls.repeated
    _LOGGER.debug("operator calls: %d traced, %d repeated", calls.traced, calls.repeated)


def repeats_calls(request: CaptureRequest) -> bool:
    """Whether equal operator calls are repeated in an attempt."""
    is_asked_for = getattr(request.options, "capture", "calls") == "calls"
    return is_asked_for and not request.strict and not request.below


@functools.cache
def _is_supported() -> bool:
    needed = [
        (proxies, "proxy_call get_proxy_slot set_proxy_slot set_meta"),
        (torch_c, "_set_throw_on_mutable_data_ptr _DisableTorchDispatch DisableTorchFunction _increment_version"),
        (torch_c, "_dispatch_tls_local_include_set _dispatch_tls_local_exclude_set _len_torch_dispatch_stack"),
        (torch.ops.aten, "sym_is_contiguous"),
    ]
    has_all = all(hasattr(owner, name) for owner, names in needed for name in names.split())
    gone = [
        name for name in (pre_dispatch_modes, ProxyTensor, Thunk, share_memory) if isinstance(name, SimpleNamespace)
    ]
    return has_all and not gone


class OperatorCalls:
    """The calls so far, of the outermost trace: the branches of torch.cond and its like have traces of their own.

    Args:
        original: torch's function that traces a call.

    Attributes:
        repeated: How many calls were repetitions.
        traced: How many were traced.
    """

    def __init__(self, original: Any) -> None:
        self.repeated = self.traced = 0
        self._original = original
        self._calls: dict[Any, _Call | None] = {}
        self._state: tuple[Any, ...] = ()
        self._number = -1
        self._states: dict[tuple[Any, ...], int] = {}
        self._mode: Any = None
        self._can_repeat: dict[OpOverload, bool] = {}

    def call(self, mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        """Replaces torch's ``proxy_call``: repeats a call, or has it traced."""
        if self._mode is None and pre_dispatch:
            self._mode = mode
        known = self._can_repeat.get(func)
        if known is None:
            known = self._can_repeat[func] = can_repeat(func)
        if not known or mode is not self._mode or func in decompositions_of(mode) or not _is_plain_trace():
            self.traced += 1
            return self._original(mode, func, pre_dispatch, args, kwargs)
        operands = Operands(mode.tracer)
        with torch_c.DisableTorchFunction():  # every access to a size would go through all of torch's function modes
            try:
                kinds, fx_args = operands.kinds(args)
                named_kinds, fx_kwargs = operands.kinds_of_dict(kwargs) if kwargs else ((), {})
            except Incomparable:
                key = None
            else:
                key = (func, kinds, named_kinds, self._number_of(state(operands)), mode.tracer.enable_thunkify)
                call = self._calls.get(key)
                if call is not None:
                    computed = operands.computed(func, args, kwargs or {}, call.computed) if call.known else None
                    results = repeat(call, func, operands, fx_args, fx_kwargs, computed)
                    if results is not None:
                        self.repeated += 1
                        return results[0]
                    self._calls[key] = None
        self.traced += 1
        if key is None or key in self._calls:
            return self._original(mode, func, pre_dispatch, args, kwargs)
        graph = mode.tracer.graph
        last, sizes_before = graph._root._prev, len(mode.tracer.symnode_tracker.sym_node_dict)
        # The fake mode's own cache would never be used again, and costs as much as the call.
        fake_mode = operands.fake_mode
        with patched(fake_mode, "cache_enabled", False) if fake_mode is not None else contextlib.nullcontext():
            result = self._original(mode, func, pre_dispatch, args, kwargs)
        with torch_c.DisableTorchFunction():
            self._calls[key] = record(func, operands, last, result, sizes_before)
        return result

    def _number_of(self, current: tuple[Any, ...]) -> int:
        """A number that is the same for equal states of torch; nearly always the state is that of the previous call."""
        if current != self._state:
            self._state = current
            self._states.setdefault(current, len(self._states))
            self._number = self._states[current]
        return self._number


def can_repeat(func: Any) -> bool:
    """Whether an operator is PyTorch's own and returns tensors, and no number that depends on data."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or torch.Tag.data_dependent_output in func.tags:
        return False
    # A constant of the model's code is a new tensor each time.
    if func is torch.ops.aten.lift_fresh.default or not func._schema.returns:
        return False
    if not all(str(r.type) in ("Tensor", "List[Tensor]", "Optional[Tensor]") for r in func._schema.returns):
        return False
    # Another library's Python kernel may read anything.
    kernels = [k for k in func.py_kernels.values() if callable(k)]
    return all((getattr(k, "__module__", None) or "").split(".")[0] in ("torch", "onnxplug") for k in kernels)


def _is_plain_trace() -> bool:
    """Whether a call goes directly from the tracer to the fake mode: no transform, no dual numbers, no other mode sees it.

    Tensors of the inference mode have no versions, by which writes are detected.
    """
    return (
        not torch.is_inference_mode_enabled()
        and torch_c._len_torch_dispatch_stack() == 1
        and pre_dispatch_modes() == 0
        and transforms_depth() == 0
        and forward_ad._current_level < 0
    )


def state(operands: Operands) -> tuple[Any, ...]:
    """All state of torch, beyond the arguments, that may change the result of a call.

    That is the dispatcher's state of this thread (autograd, autocast, …), and each setting for which torch has a getter.
    """
    return (
        torch_c._dispatch_tls_local_include_set().raw_repr(),
        torch_c._dispatch_tls_local_exclude_set().raw_repr(),
        *[torch.get_autocast_dtype(device) for device in operands.devices],
        *torch_c._get_sdp_priority_order(),
        *map(operator.call, _SETTINGS),
    )


def _getters() -> list[Callable[[], Any]]:
    """torch's functions without arguments that return a setting of any part of torch, recognised by the type of their result."""
    getters = []
    for name, getter in sorted(vars(torch_c).items()):
        if _GETTER.match(name) and callable(getter) and not isinstance(getter, type):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    value = getter()
            except Exception:  # it takes arguments, has no answer on this machine, or is a deprecated name
                continue
            if isinstance(value, bool | int | str | torch.dtype) or type(value).__name__.endswith("Backend"):
                getters.append(getter)
    return getters


#: The names of torch's getters: `_get_cudnn_benchmark`, `is_anomaly_enabled`, `_are_functorch_transforms_active`.
_GETTER = re.compile(r"_?(get|is|are)_")
_SETTINGS = _getters()


def record(func: Any, operands: Operands, last: torch.fx.Node, result: Any, sizes_before: int) -> _Call | None:
    """The record of a call that was just traced; ``None`` where a repetition can't be derived from it.

    Args:
        func: The operator.
        operands: Its operands.
        last: The last node of the graph before the call.
        result: The call's result.
        sizes_before: How many symbolic sizes the tracer knew before.
    """
    name = operands.tracer.graph._target_to_str(func.overloadpacket.__name__)
    nodes, node = [], last._next
    while node.op != "root":
        nodes.append(node)
        node = node._next
    if not nodes or nodes[0].target is not func:
        return None
    items: list[int] = []
    for item in nodes[1:]:
        if item.target is not operator.getitem or item.args[0] is not nodes[0]:
            return None
        items.append(item.args[1])  # type: ignore[arg-type]
    several = isinstance(result, tuple | list)
    values = list(result) if several else [result]
    if several and (type(result) not in (tuple, list) or items != list(range(len(values)))):
        return None
    computed = not several and getattr(result, "constant", None) is not None
    entry = operands.tracer.tensor_tracker.get(result) if type(result) is FakeTensor else None
    known = entry is not None and entry.constant is not None
    if computed > known or not operands.are_known(known, computed):
        return None
    places = {id(t): i for i, t in enumerate(operands.tensors)}
    memories = {memory_of(t): i for i, t in reversed(list(enumerate(operands.tensors)))}
    new_memories: dict[int, int] = {}
    tracked = operands.tracer.symnode_tracker.sym_node_dict
    new_sizes = {id(n) for n, _ in zip(reversed(tracked), range(len(tracked) - sizes_before), strict=False)}
    results: list[_Result | None] = []
    for i, value in enumerate(values):
        if value is None:
            results.append(None)
            continue
        if type(value) is not FakeTensor or value.is_conj() or value.is_neg():
            return None
        if value.layout is not torch.strided or value.requires_grad or _is_data_dependent(value):
            return None
        entry = operands.tracer.tensor_tracker.get(value)
        if entry is None or (entry.constant is not None, value.constant is not None) != (known, computed):
            return None
        node_place = i + 1 if several else 0
        if entry.proxy.node is not nodes[node_place]:
            return None
        same = id(value) in places
        memory = memory_of(value)
        operand = places[id(value)] if same else memories.get(memory, -1)
        if operand in operands.constants and not (known and (computed or operands.tensors[operand].constant is None)):
            return None
        like = detached(value)
        fresh = FakeTensor(value.fake_mode, like, value.fake_device)
        sizes = [(kind, axis, s) for kind, axis, s in sizes_of(value) if id(s) in new_sizes]
        results.append(
            _Result(
                operand,
                same,
                like,
                value.fake_device,
                dict(vars(fresh)),
                new_memories.setdefault(memory, i),
                node_place,
                sizes,
            )
        )
    metadata = [(n.meta.get("tensor_meta"), frozenset(n.meta)) for n in nodes]
    written = operands.written()
    if written is None or any("unbacked_bindings" in names for _, names in metadata):
        return None
    sequence = type(result) if several else None
    return _Call(items, metadata, name, results, sequence, written, known, computed, operands.forgotten())


def _is_data_dependent(tensor: Any) -> bool:
    env = tensor.fake_mode.shape_env
    if env is None:
        return False
    return any(env.is_unbacked_symint(s) for e in expressions(tensor) if not isinstance(e, int) for s in e.free_symbols)


def sizes_of(tensor: Any) -> Iterator[tuple[str, int, Any]]:
    """The symbolic sizes of a tensor that torch's tracer knows: the kind, the axis, and the SymNode."""
    for kind, sizes in (("size", tensor.shape), ("stride", tensor.stride())):
        for axis, size in enumerate(sizes):
            if type(size) is torch.SymInt:
                yield kind, axis, size.node
    for kind, size in (("numel", tensor.numel()), ("offset", tensor.storage_offset())):
        if type(size) is torch.SymInt:
            yield kind, -1, size.node


def detached(tensor: Any) -> torch.Tensor:
    """A bare tensor on the device meta with the same sizes, strides, offset and memory as a fake tensor."""
    with torch_c._DisableTorchDispatch():
        return torch.Tensor.detach(tensor)


def repeat(
    call: _Call, func: Any, operands: Operands, fx_args: Any, fx_kwargs: Any, computed: tuple[Any, Any] | None
) -> tuple[Any] | None:
    """Adds the nodes of a call to the graph, and makes its results.

    Args:
        call: The call.
        func: The operator.
        operands: Its operands this time.
        fx_args, fx_kwargs: Its arguments as arguments of a node.
        computed: Its result, where the fake tensors' mode computes it, and the value that the tracer keeps for its node.

    Returns:
        The results, in a tuple; ``None`` where a result is of another kind than the recorded call's, or where the nodes get
        other metadata than the recorded nodes.
    """
    tracer = operands.tracer
    made, value = computed or (None, None)
    if made is not None and not is_like(made, call.results[0], operands):
        return None
    nodes = [tracer.create_node("call_function", func, fx_args, fx_kwargs, name=call.name)]
    nodes += [tracer.create_node("call_function", operator.getitem, (nodes[0], i), {}) for i in call.items]
    for node, (tensor_meta, names) in zip(nodes, call.metadata, strict=True):
        if tensor_meta is not None:
            node.meta["tensor_meta"] = tensor_meta
        if node.meta.keys() | {"val"} != names:
            for added in reversed(nodes):
                tracer.graph.erase_node(added)
            return None
    results: list[Any] = []
    snapshots: list[Any] = []
    for result in call.results:
        if result is None:
            results.append(None)
            snapshots.append(None)
            continue
        node = nodes[result.node]
        if not result.repeated:
            result.repeated = True
            _work_out_layout(result.like)
        tensor, bare = remade(result, operands, results, made)
        snapshot = fake_tensor(bare, result)
        node.meta["val"] = snapshot
        proxy = tracer.proxy(node)
        for kind, axis, size in result.sizes:
            tracer.symnode_tracker.sym_node_dict[size] = Thunk(partial(_size_proxy, tracer, proxy, kind, axis, size))
        proxies.set_proxy_slot(tensor, tracer, ProxyTensor(proxy, value))
        results.append(tensor)
        snapshots.append(snapshot)
    if call.sequence is not None:
        nodes[0].meta["val"] = call.sequence(snapshots)
    if call.written:
        torch_c._increment_version([operands.tensors[i] for i in call.written])
    for i in call.forgotten:
        if operands.constants[i][0] is not None:
            operands.fake_mode.fake_tensor_converter.invalidate_constant_aliases(operands.constants[i][0])
    return (call.sequence(results) if call.sequence is not None else results[0],)


def remade(result: _Result, operands: Operands, results: Sequence[Any], computed: Any) -> tuple[Any, torch.Tensor]:
    """A result's new tensor, and the bare tensor on the device meta within it.

    Args:
        result: Its template.
        operands: The operands of the call.
        results: The results before it.
        computed: The tensor, where the fake tensors' mode computes it.
    """
    if computed is not None or result.same:
        tensor = computed if computed is not None else operands.tensors[result.operand]
        return tensor, detached(tensor)
    if result.operand >= 0:
        memory = detached(operands.tensors[result.operand])
    elif result.memory != len(results):
        memory = detached(results[result.memory])
    else:
        memory = new_memory(result.like)
    bare = detached(result.like)
    share_memory(bare, memory)
    return fake_tensor(bare, result), bare


def is_like(tensor: Any, result: _Result | None, operands: Operands) -> bool:
    """Whether a tensor is of a template's kind, and in new memory or in the memory of the same operand."""
    if result is None or type(tensor) is not FakeTensor or expressions(tensor) != expressions(result.like):
        return False
    sharing = [i for i, t in enumerate(operands.tensors) if memory_of(t) == memory_of(tensor)]
    if any(tensor is t for t in operands.tensors) is not result.same or result.operand != (
        sharing[0] if sharing else -1
    ):
        return False
    return (tensor.dtype, tensor.fake_device) == (result.like.dtype, result.device)


def fake_tensor(bare: torch.Tensor, result: _Result) -> Any:
    """The same as ``FakeTensor(fake_mode, bare, device)``, from the attributes of an earlier fake tensor."""
    fake = FakeTensor._make_subclass(
        FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=result.device
    )
    if not result.attributes["fake_mode"]._allow_unsafe_data_ptr_access:
        torch_c._set_throw_on_mutable_data_ptr(fake)
    else:
        torch_c._set_warn_deprecated_on_mutable_data_ptr(fake)
    vars(fake).update(result.attributes)
    return fake


def _work_out_layout(tensor: torch.Tensor) -> None:
    """Has torch compute whether a tensor is contiguous, which its copies then know; code reads it of each copy.

    Where a size is computed and is 1 in the example, torch would take it for 1 from here on: the layout is left to the code
    that asks for it, as in a trace of each call.
    """
    nodes = [size.node for size in tensor.shape if isinstance(size, torch.SymInt)]  # type: ignore[attr-defined]
    if any(node.hint == 1 and not node.expr.is_Symbol for node in nodes):
        return
    with torch_c._DisableTorchDispatch():
        torch.ops.aten.sym_is_contiguous.default(tensor)


def new_memory(like: torch.Tensor) -> torch.Tensor:
    """An empty tensor on the device meta in memory of its own, as large as another tensor's memory."""
    with torch_c._DisableTorchDispatch():
        memory: torch.Tensor = FakeTensor._make_wrapper_subclass(
            FakeTensor, (0,), dtype=like.dtype, device=like.device, storage_size=like.untyped_storage().nbytes()
        )
    return memory


def _size_proxy(tracer: Any, proxy: Any, kind: str, axis: int, size: Any) -> Any:
    """The node of a result's size."""
    args = (proxy,) if axis < 0 else (proxy, axis)
    size_proxy = tracer.create_proxy("call_function", _SIZE_OPERATORS[kind], args, {})
    return proxies.set_meta(size_proxy, torch.SymInt(size))
