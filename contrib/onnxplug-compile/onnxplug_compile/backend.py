"""``torch.compile(model, backend="onnxplug")``: graphs of AOTAutograd, converted and run by ONNX Runtime."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import onnx
import onnx_ir as ir
import torch
from onnxplug_tools.runtime import no_library_error
from torch.nn.modules import transformer

from onnxplug.capture.signature import Captured
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.host import Kernels, RuntimeHost, plugins_of_call
from onnxplug.opsets import resolve_opsets
from onnxplug.patches.attention import is_declared_causal
from onnxplug.pipeline import Conversion
from onnxplug.plugins.runtime import CallHost, kernels_for
from onnxplug.registry.target import Target, check_runtime
from onnxplug.run.alignment import Recipe
from onnxplug.run.kernels import custom_operators, onnxruntime_module
from onnxplug.run.session import LOG_SEVERITY, make_session, model_source
from onnxplug.torch_private import (
    TracingContext,
    aot_autograd,
    disable_current_modes,
    min_cut_rematerialization_partition,
    torch_c,
)
from onnxplug_compile import cache
from onnxplug_compile.aliases import SameMemory, writes_inputs
from onnxplug_compile.binding import Executable, RunError
from onnxplug_compile.dump import Dump, DumpingExecutable
from onnxplug_compile.lowering import Lowered, guard_count, lower, structure
from onnxplug_compile.options import LEVELS, BackendOptions, parse_options, runtime_of
from onnxplug_compile.second_order import SecondOrder

Compiled = Callable[..., Any]
_GRAPH = {"forward": "a forward graph", "backward": "a backward graph", "inference": "an inference graph"}


@dataclass
class StoredGraph:
    """The record of one graph in ``options={"store": {}}``.

    Attributes:
        kind: ``"forward"`` (training), ``"backward"`` or ``"inference"``.
        module: The FX graph of AOTAutograd.
        model: The ONNX model; ``None`` when it could not be converted.
        error: The error for which eager PyTorch runs the graph; ``None`` when it doesn't.
        calls: Inputs and outputs of every call.
    """

    kind: str
    module: torch.fx.GraphModule
    model: ir.Model | None = None
    error: Exception | None = None
    calls: list[tuple[list[Any], list[Any]]] = field(default_factory=list)


def onnxplug_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """The backend ``onnxplug`` of ``torch.compile``.

    Args:
        module: The graph that Dynamo captured.
        example_inputs: Its inputs, fake or not.
        options: See :class:`~onnxplug_compile.options.BackendOptions`.
        mode: Accepted as torch's modes are; changes nothing.

    Returns:
        A function that runs the graph.

    Raises:
        UsageError: An option is unknown or malformed.
        OnnxplugError: ``options={"fallback": False}``, and the graph can't be converted or loaded.
    """
    return compile_graphs(module, example_inputs, parse_options(options, mode), _executable)


def compile_graphs(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: BackendOptions,
    make: Callable[[Lowered, Any, StoredGraph], Executable],
) -> Compiled:
    """Compiles the graph that Dynamo captured, forward and backward.

    Args:
        make: A function ``(lowered, options, stored)`` that makes the executable of a graph of AOTAutograd.
    """
    compilers = {
        name: partial(_compile, options=options, kind=kind, make=make)
        for name, kind in (("fw_compiler", "forward"), ("bw_compiler", "backward"), ("inference_compiler", "inference"))
    }
    _check_options(options)
    joints: list[torch.fx.GraphModule] = []

    def partition(joint: torch.fx.GraphModule, *args: Any, **settings: Any) -> Any:
        joints.append(joint)
        return min_cut_rematerialization_partition(joint, *args, **settings)

    with _recurrent_layers_decomposed(module):
        compiled: Compiled = aot_autograd(**compilers, partition_fn=partition)(module, example_inputs)
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    # Unlike inductor, onnxplug does not overwrite tensors saved for backward: they serve several passes.
    donated = getattr(metadata, "bw_donated_idxs", None)
    if donated:
        donated.clear()
    warn = partial(_warn, error=None) if options.fallback else None
    if joints:
        compiled = SecondOrder(compiled, module, joints[0], warn)
    return SameMemory(compiled, module, example_inputs, warn) if writes_inputs(metadata) else compiled


def _reset() -> None:
    cache.forget_sessions()


onnxplug_backend.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _let_dynamo_trace_masks() -> None:
    """From now on Dynamo traces ``nn.TransformerEncoder`` with a mask as a whole, for every backend.

    Dynamo breaks its graph where torch's own function reads the mask's values. The values only let PyTorch choose a
    faster kernel: the result is the same in both cases.
    """
    own = getattr(transformer, "_detect_is_causal_mask", None)
    if own is not None:
        with contextlib.suppress(TypeError, ValueError):  # it takes other arguments, or was replaced before
            torch.compiler.substitute_in_graph(own)(is_declared_causal)


_let_dynamo_trace_masks()


def _compile(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: BackendOptions,
    kind: str,
    make: Callable[[Lowered, Any, StoredGraph], Executable],
) -> Compiled:
    """A function over a list of arguments that runs one graph."""
    stored = StoredGraph(kind, module)
    if options.store is not None:
        options.store.setdefault("graphs", []).append(stored)
    executable = None
    try:
        with disable_current_modes():  # AOTAutograd compiles under its fake mode, and constants are real tensors
            executable = make(lower(module), options, stored)
    except Exception as error:
        if not options.fallback:
            raise
        stored.error = error
        _warn(f"{_GRAPH[kind]} of {len(module.graph.nodes)} nodes is run by eager PyTorch", error)
    return _CompiledGraph(executable, module, options, stored)


def _executable(lowered: Lowered, options: BackendOptions, stored: StoredGraph) -> Executable:
    session = _session(lowered, options, stored)
    if options.dump is None or stored.model is None:
        return Executable(session, lowered)
    return DumpingExecutable(session, lowered, Dump(options.dump, stored.model, lowered.functional, stored.kind))


class _CompiledGraph:
    """A graph run by ONNX Runtime, and by eager PyTorch for good once ONNX Runtime has failed where PyTorch does not."""

    def __init__(
        self, executable: Executable | None, module: torch.fx.GraphModule, options: BackendOptions, stored: StoredGraph
    ) -> None:
        self._boxed_call = True  # AOTAutograd then gives a list
        self._executable = executable
        self._module = module
        self._fallback = options.fallback
        self._stored = stored if options.store is not None else None

    def __call__(self, args: list[Any]) -> Any:
        if self._stored is None:
            return self._run(args)
        inputs = list(args)
        results = self._run(args)
        self._stored.calls.append((inputs, list(results)))
        return results

    def _run(self, args: list[Any]) -> Any:
        executable = self._executable
        if executable is None:
            return self._run_eager(args)
        try:
            return executable(args)
        except RunError as error:
            if not self._fallback:
                raise
            results = self._run_eager(args)  # an error of eager PyTorch is the call's own: the session stays
            self._executable = None
            if self._stored is not None:
                self._stored.error = error
            _warn("a graph is run by eager PyTorch from now on", error)
            return results

    def _run_eager(self, args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        return self._module.forward(*inputs)


def _warn(what: str, error: Exception | None, *, raises: bool = True) -> None:
    text = error.message if isinstance(error, OnnxplugError) else f"{type(error).__name__}: {error}"
    reason = f": {text}" if error is not None else ""
    instead = " (options={'fallback': False} raises instead)" if raises else ""
    warnings.warn(f"torch.compile(backend='onnxplug'): {what}{reason}{instead}", stacklevel=2)


# -- models and sessions ---------------------------------------------------------------------------------------------------


def _session(lowered: Lowered, options: BackendOptions, stored: StoredGraph) -> Any:
    """The session of a graph; ``None`` when it computes nothing."""
    if not lowered.functional.outputs:
        return None
    key = _model_key(lowered, options)
    if key is None:
        return _make_session(_converted(lowered, options, stored), options)
    return cache.session_for(f"{key} {_session_key(options)}", partial(_new_session, lowered, options, stored, key))


def _new_session(lowered: Lowered, options: BackendOptions, stored: StoredGraph, key: str) -> tuple[Any, bool]:
    """A session, and whether equal graphs may share it: not when the conversion has guarded on sizes of this call."""
    path = cache.path_of(options.cache, key) if options.cache is not None else None
    kept = cache.read_model(path) if path is not None else None
    if kept is not None:
        try:
            return _make_session(kept, options), True
        except Exception as error:
            _warn(f"the stored model {path} is made anew, since it does not load", error, raises=False)
    guards = guard_count(lowered.functional.graph)
    model = _converted(lowered, options, stored)
    is_general = guard_count(lowered.functional.graph) == guards
    session = _make_session(model, options)
    if path is not None and is_general:
        cache.write_model(path, model)
    return session, is_general


def _model_key(lowered: Lowered, options: BackendOptions) -> str | None:
    """A digest of everything that the model depends on; ``None`` when a part of it is not known."""
    if options.rules or options.transforms or options.runtime:
        return None
    if options.store is not None or options.dump is not None:  # both want the model itself
        return None
    _, host = plugins_of_call(plugins=options.plugins, call_rules=(), prefer=options.prefer)
    stamps = host.stamps()
    if stamps is None:
        return None
    parts = (
        (torch.__version__, onnx.__version__, ir.__version__, onnxruntime_module().__version__),
        stamps,
        sorted((options.prefer or {}).items()),
        sorted(resolve_opsets(options.opset).items()),
        (runtime_of(options), options.exact, options.optimize, sorted(options.rewrites.items())),
        torch.get_default_dtype(),
        structure(lowered.functional),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _session_key(options: BackendOptions) -> str:
    """A key of the options that only the session depends on."""
    session_options = options.session_options
    if isinstance(session_options, onnxruntime_module().SessionOptions):
        session_options = id(session_options)  # the session holds the object
    return repr((list(options.providers), session_options, options.optimization, _threads(options)))


def _converted(lowered: Lowered, options: BackendOptions, stored: StoredGraph) -> ir.Model:
    """Converts a graph."""
    recipe, transformed, _ = recipe_for(lowered, options)
    stored.model = transformed(recipe.convert(recipe.optimize, recipe.without, None))
    return stored.model


def recipe_for(lowered: Lowered, options: BackendOptions) -> tuple[Recipe, Callable[[ir.Model], ir.Model], RuntimeHost]:
    """The recipe of a graph's conversion, a function that transforms the model, and the host of custom operators."""
    opsets = resolve_opsets(options.opset)
    table, host = plugins_of_call(plugins=options.plugins, call_rules=options.rules, prefer=options.prefer)
    runtime = check_runtime(runtime_of(options), table.targets() | host.targets())
    captured = Captured(None)  # type: ignore[arg-type]
    conversion = Conversion(
        captured,
        table,
        host,
        Target(opsets[""], opsets, runtime, options.exact),
        optimize=options.optimize,
        without=_switched_off(options, host.rewrites()),
    )

    def transformed(model: ir.Model) -> ir.Model:
        for transform in options.transforms:
            model = transform(model) or model
        graph = model.graph
        for value in [v for v in graph.inputs if not v.uses() and not v.is_graph_output()]:
            graph.inputs.remove(value)
        return model

    return conversion.recipe(lowered.functional), transformed, CallHost(host, options.runtime)


@contextlib.contextmanager
def _recurrent_layers_decomposed(module: torch.fx.GraphModule) -> Iterator[None]:
    """Lets AOTAutograd decompose an LSTM by its definition.

    Where its input needs no gradient torch uses oneDNN's layer, which has no rule, and whose training AOTAutograd
    refuses.
    """
    if all(getattr(node.target, "__name__", "") != "lstm" for node in module.graph.nodes):
        yield
        return
    with mock.patch.object(torch_c, "_get_mkldnn_enabled", lambda: False):  # no kernel calls it
        yield


def _check_options(options: BackendOptions) -> None:
    """Checks names that the options' class can't check: of plugins, rewrites, targets and attributes of sessions."""
    table, host = plugins_of_call(plugins=options.plugins, call_rules=options.rules, prefer=options.prefer)
    check_runtime(runtime_of(options), table.targets() | host.targets())
    _switched_off(options, host.rewrites())
    _session_options(options)


def _switched_off(options: BackendOptions, rewrites: Sequence[Any]) -> set[str]:
    known = {rewrite.name for rewrite in rewrites}
    unknown = [name for name in options.rewrites if name not in known]
    if unknown:
        raise UsageError(
            f"options['rewrites'] names {unknown[0]!r}, and there is no such rewrite",
            hint=f"The rewrites are {', '.join(sorted(known))}.",
        )
    return {name for name, used in options.rewrites.items() if not used}


def _make_session(model: ir.Model | bytes, options: BackendOptions) -> Any:
    """Makes the session of a model."""
    custom = custom_operators(model)
    kernels, host = Kernels(), None
    providers = list(options.providers)
    if custom.domains:
        _, plugins = plugins_of_call(plugins=options.plugins, call_rules=options.rules, prefer=options.prefer)
        host = CallHost(plugins, options.runtime)
        kernels = kernels_for(custom, host, [_name(p) for p in providers])
    session_options = _session_options(options)
    source, folder = (model, None) if isinstance(model, bytes) else model_source(model)
    try:
        session = make_session(
            source, _threads(options), libraries=kernels.libraries, providers=providers, options=session_options
        )
    except OnnxplugError:
        raise
    except Exception as error:
        lacking = no_library_error(error, custom, kernels, host)
        raise lacking or RunError(f"ONNX Runtime can't load the model: {error}") from error
    session._onnxplug_folder = folder  # the files that the session reads live as long as it does
    return session


def _threads(options: BackendOptions) -> int | None:
    """Threads within an operator: the option's, else PyTorch's; ``None`` where the session options decide."""
    session_options = options.session_options
    if options.threads is not None or isinstance(session_options, onnxruntime_module().SessionOptions):
        return options.threads
    return None if "intra_op_num_threads" in (session_options or {}) else torch.get_num_threads()


def _name(provider: Any) -> str:
    return str(provider[0] if isinstance(provider, list | tuple) else provider)


def _session_options(options: BackendOptions) -> Any:
    runtime = onnxruntime_module()
    session_options = options.session_options
    if isinstance(session_options, runtime.SessionOptions):
        made = session_options
    else:
        made = runtime.SessionOptions()
        made.log_severity_level = LOG_SEVERITY
        for name, value in (session_options or {}).items():
            if not hasattr(made, name):
                raise UsageError(f"onnxruntime.SessionOptions has no attribute {name!r}")
            try:
                setattr(made, name, value)
            except TypeError as error:
                raise UsageError(f"options['session_options']: {name} can't be {value!r}") from error
    if options.optimization is not None:
        made.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, LEVELS[options.optimization])
    return made
