"""torch.export's tracing without work whose result nobody reads, and with results that are read computed once.

An example, the node of ``torch.add(x, y)`` in a model::

    torch alone                                                        here
    reads and formats the whole stack for node.stack_trace             the running lines, whose text is written once
    looks for sizes in the arguments by pytree                         a loop over tuples, lists and dicts
    asks whether the kernel of add needs exact strides                 once for each operator
    collects the types of the tensors for its own tracer               nothing
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from onnxplug.capture.handlers import callers_known
from onnxplug.capture.patching import patched
from onnxplug.patches.export_passes import lean_passes
from onnxplug.patches.fakes import fake_of, is_plain
from onnxplug.torch_private import (
    DispatchKey,
    ModuleStackTracer,
    OpOverload,
    backed_values,
    detect_fake_mode,
    dispatch_utilities,
    export_trace,
    operator_dispatch,
    proxies,
    pytree,
    torch_c,
    use_lazy_graph_module,
)


@contextlib.contextmanager
def lean_tracing() -> Iterator[None]:
    """While it holds, no Python code is generated for graphs between torch.export's passes, and each stack trace is written once.

    Inputs get no stack trace: they are made before the model's code runs.
    """
    original, original_trace = ModuleStackTracer.create_node, ModuleStackTracer.trace
    original_call = ModuleStackTracer.call_module
    traces = _StackTraces()

    def trace(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        with traces.of(tracer, sys._getframe()):
            return original_trace(tracer, *args, **kwargs)

    def call_module(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe()
        with traces.of(tracer, frame), callers_known(frame):
            return original_call(tracer, *args, **kwargs)

    def create_node(tracer: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        recorded = tracer.record_stack_traces and traces.knows(tracer)
        if not recorded and kind != "placeholder":
            return original(tracer, kind, *args, **kwargs)
        before, tracer.record_stack_traces = tracer.record_stack_traces, False
        try:
            node = original(tracer, kind, *args, **kwargs)
        finally:
            tracer.record_stack_traces = before
        if recorded and kind not in ("placeholder", "output") and not node.stack_trace:
            text = traces.text(tracer, sys._getframe(1))
            if text:
                node.stack_trace = text
        return node

    with (
        patched(ModuleStackTracer, "create_node", create_node),
        patched(ModuleStackTracer, "trace", trace),
        patched(ModuleStackTracer, "call_module", call_module),
        _stride_needs_known(),
        _types_left_out(),
        _modes_popped_at_once(),
        lean_passes(),
        _bindings_replaced_where_there_are_some(),
        _arguments_walked_once(),
        _kinds_of_constants_made_at_once(),
        _without_function_modes(proxies, "set_meta"),
        _without_function_modes(proxies, "track_tensor"),
        use_lazy_graph_module(True),
    ):
        yield


@contextlib.contextmanager
def _bindings_replaced_where_there_are_some() -> Iterator[None]:
    """While it holds, torch.export looks for sizes that depend on data in every value of a program only where it has such sizes."""
    original = getattr(export_trace, "_replace_unbacked_bindings", None)
    if original is None:
        yield
        return

    def replace(graph_module: Any) -> None:
        values = [v for node in graph_module.graph.nodes for v in _each(node.meta.get("val"))]
        owners = [v.node if isinstance(v, torch.SymInt) else getattr(v, "fake_mode", None) for v in values]
        envs = {id(env): env for owner in owners if (env := getattr(owner, "shape_env", None)) is not None}
        if any(env.var_to_range.keys() - backed_values(env).keys() for env in envs.values()):
            original(graph_module)
            return
        for node in graph_module.graph.nodes:
            node.meta.pop("unbacked_bindings", None)

    with patched(export_trace, "_replace_unbacked_bindings", replace):
        yield


@contextlib.contextmanager
def _arguments_walked_once() -> Iterator[None]:
    """While it holds, FX looks for sizes among the arguments of a new node by a plain loop, not by torch's trees of any class."""
    if getattr(torch.fx.graph, "pytree", None) is not pytree:
        yield
        return
    with patched(torch.fx.graph, "pytree", _Arguments()):
        yield


class _Arguments:
    """``torch.utils._pytree`` with a ``tree_iter`` for the tuples, lists and dicts that arguments of nodes consist of."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pytree, name)

    @staticmethod
    def tree_iter(tree: Any) -> list[Any]:
        leaves, waiting = list[Any](), [tree]
        for item in waiting:
            if isinstance(item, tuple | list):
                waiting += item
            elif isinstance(item, dict):
                waiting += item.values()
            else:
                leaves.append(item)
        return leaves


@contextlib.contextmanager
def _kinds_of_constants_made_at_once() -> Iterator[None]:
    """While it holds, the tracer makes the kind of a constant tensor without a call of an operator through all modes."""
    original = getattr(proxies, "extract_val", None)
    if original is None:
        yield
        return

    def extract(val: Any, *args: Any, **kwargs: Any) -> Any:
        mode = detect_fake_mode(val) if is_plain(val) else None
        return original(val, *args, **kwargs) if mode is None else fake_of(mode, val)

    with patched(proxies, "extract_val", extract):
        yield


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


@contextlib.contextmanager
def _without_function_modes(module: Any, name: str) -> Iterator[None]:
    """While it holds, a function of torch's reads tensors directly; each access would go through all function modes."""
    original = getattr(module, name, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def direct(*args: Any, **kwargs: Any) -> Any:
        with torch_c.DisableTorchFunction():
            return original(*args, **kwargs)

    with patched(module, name, direct):
        yield


@contextlib.contextmanager
def _stride_needs_known() -> Iterator[None]:
    """While it holds, torch's tracer tests only once for each operator whether its kernel needs exact strides."""
    original = getattr(proxies, "_should_save_eager_input_vals", None)
    if original is None:
        yield
        return
    known: dict[OpOverload, bool] = {}

    def needs_strides(target: Any, args_kwargs: Any = None) -> bool:
        if type(target) is not OpOverload:
            return bool(original(target, args_kwargs))
        needs = known.get(target)
        if needs is None:
            needs = known[target] = bool(original(target, args_kwargs))
        return needs

    with patched(proxies, "_should_save_eager_input_vals", needs_strides):
        yield


@contextlib.contextmanager
def _types_left_out() -> Iterator[None]:
    """While it holds, torch does not collect the types of the tensors in a call for its tracer, which never reads them."""
    original = getattr(dispatch_utilities, "handle_dispatch_mode", None)
    tracing = getattr(proxies, "ProxyTorchDispatchMode", None)
    if original is None or tracing is None:
        yield
        return

    def handle(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if type(mode) is tracing:
            return mode.__torch_dispatch__(op, (), args, kwargs)
        return original(mode, op, *args, **kwargs)

    with patched(dispatch_utilities, "handle_dispatch_mode", handle):
        yield


@contextlib.contextmanager
def _modes_popped_at_once() -> Iterator[None]:
    """While it holds, an operator hands a call to torch's tracer without making a context manager each time."""
    original = getattr(OpOverload, "_get_dispatch", None)
    names = "_pop_mode_from_pre_dispatch _set_mode_pre_dispatch _len_torch_dispatch_stack_pre_dispatch"
    if original is None or not all(hasattr(operator_dispatch, name) for name in names.split()):
        yield
        return
    pop, put, count = (getattr(operator_dispatch, name) for name in names.split())
    before_dispatch: dict[Any, bool] = {}

    def get_dispatch(op: Any, key: Any) -> Any:
        known = before_dispatch.get(key)
        if known is None:
            known = before_dispatch[key] = torch_c._to_functionality_key(key) == DispatchKey.PreDispatch
        if not known or not count() or torch_c._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python):
            return original(op, key)

        def handler(*args: Any, **kwargs: Any) -> Any:
            mode = pop()
            try:
                return dispatch_utilities.handle_dispatch_mode(mode, op, *args, **kwargs)
            finally:
                put(mode)

        return handler

    with patched(OpOverload, "_get_dispatch", get_dispatch):
        yield


class _StackTraces:
    """The running lines of the model's code, as torch records them at FX nodes.

    torch's tracer reads and filters the whole stack for each node. Here its filter is evaluated once for each function.
    """

    def __init__(self) -> None:
        # By identity, as a code object is slow to hash; each function keeps its code alive.
        self._functions: dict[int, _Function] = {}
        self._texts: dict[tuple[Any, ...], str] = {}
        self._bases: dict[Any, tuple[FrameType | None, list[Any]]] = {}

    @contextlib.contextmanager
    def of(self, tracer: Any, base: FrameType) -> Iterator[None]:
        """While it holds, a frame is the base of all code that a tracer traces: it and its callers are read once.

        If there is such a frame already, the new frame is called by it.
        """
        before, outer = known = self._bases.get(tracer, (None, []))
        self._bases[tracer] = (base, self._lines(tracer, base, before) + outer)
        try:
            yield
        finally:
            if before is None:
                del self._bases[tracer]
            else:
                self._bases[tracer] = known

    @staticmethod
    def knows(tracer: Any) -> bool:
        """Whether the tracer's filter decides about each frame by itself, by its function."""
        return bool(getattr(tracer, "_record_forward_stack_traces_only", False))

    def text(self, tracer: Any, frame: FrameType | None) -> str:
        """The trace of a frame and its callers; empty where the filter keeps none."""
        base, outer = self._bases.get(tracer, (None, []))
        lines = self._lines(tracer, frame, base)
        key = (*lines, *outer)
        known = self._texts.get(key)
        if known is None:
            frames = zip(key[-2::-2], key[::-2], strict=True)
            known = self._texts[key] = _written(_frame(function.code, line) for function, line in frames)
        return known

    def _lines(self, tracer: Any, frame: FrameType | None, base: FrameType | None) -> list[Any]:
        """Function and line of each frame from ``frame`` outward to a base, as far as the tracer's filter keeps them."""
        functions = self._functions
        lines: list[Any] = []
        while frame is not base and frame is not None:
            code = frame.f_code
            function = functions.get(id(code))
            if function is None:
                function = functions[id(code)] = _Function(code, _keeps(tracer, code))
            if function.is_kept:
                lines += (function, frame.f_lineno)
            frame = frame.f_back
        return lines


class _Function:
    """The code of a function, and whether the tracer's filter keeps its frames."""

    __slots__ = ("code", "is_kept")

    def __init__(self, code: CodeType, is_kept: bool) -> None:
        self.code, self.is_kept = code, is_kept


def _keeps(tracer: Any, code: CodeType) -> bool:
    summary = traceback.StackSummary.from_list([_frame(code, code.co_firstlineno)])
    return bool(tracer._filter_traceback_frames(summary))


def _frame(code: CodeType, line: int) -> traceback.FrameSummary:
    return traceback.FrameSummary(code.co_filename, line, code.co_name)


def _written(frames: Iterator[traceback.FrameSummary]) -> str:
    return "".join(traceback.StackSummary.from_list(list(frames)).format()).strip()
