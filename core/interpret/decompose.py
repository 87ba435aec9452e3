"""Decomposition on demand: one operator, traced alone on the node's fake tensors.

An example, ``addcdiv(x, x, y, value=3)`` with ``{0: "n"}``: torch's decomposition on the fake tensors of x and y::

    mul = aten.mul(x, 3)
    div = aten.div(mul, y)
    add = aten.add(x, div)

A decomposition that asks ``x.shape[0] > 1`` traces the general case; one that asks ``x.shape[0] > 3`` is refused: it holds only
where n > 3.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from onnxplug import logs
from onnxplug.capture.broadcasts import first_use
from onnxplug.capture.questions import recorded
from onnxplug.capture.shape_env import (
    larger_examples,
    layout_not_noted,
    small_sizes,
    undone_on_error,
    with_current_examples,
)
from onnxplug.capture.size_guards import holds_from_two_on
from onnxplug.functionalize.effects import writes
from onnxplug.functionalize.forms import is_of_lists, item_by_item
from onnxplug.functionalize.inplace import make_functional
from onnxplug.interpret.node import meta_of
from onnxplug.observers import span
from onnxplug.registry.names import packet_of, qualified_name
from onnxplug.torch_private import (
    DispatchKey,
    DispatchKeySet,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    fx_config,
    pytree,
)

_LOGGER = logs.logger("convert")

Decompositions = Mapping[str, "Callable[..., Any] | None"]


def find_decompositions(target: Any, op_name: str, table: Decompositions | None = None) -> list[Callable[..., Any]]:
    """The functions that compute an operator by simpler operators, in the order to try them.

    Plugins' ``table`` comes first, of the overload and then of the packet, where ``None`` forbids; then torch's
    decompositions, then the operator's own composite kernel: some of torch's decompositions take only a part of the
    operator's arguments.
    """
    own_table = table or {}
    for name in (op_name, packet_of(op_name)):
        if name in own_table:
            own = own_table[name]
            return [own] if own is not None else []
    if not isinstance(target, OpOverload):
        return []
    from onnxplug.torch_private import decomposition_table, references  # noqa: F401  (the second adds to the first)

    decompositions: list[Callable[..., Any]] = []
    if target.namespace == "onnx":
        from torch.onnx.ops import aten_decompositions

        return [own] if (own := aten_decompositions().get(target)) is not None else []
    if target in decomposition_table:
        decompositions.append(decomposition_table[target])
    if target._can_decompose():
        decompositions.append(target.decompose if target.namespace in ("aten", "prims") else _kernel(target))
    if is_of_lists(target):
        decompositions.append(item_by_item(target))
    triton_body = _triton_body(target)
    if triton_body is not None:
        decompositions.append(triton_body)
    return decompositions


def _kernel(target: OpOverload) -> Callable[..., Any]:
    """The composite kernel of a library's operator, run so that composite operators within it stay whole."""
    key = DispatchKey.CompositeImplicitAutograd
    if key in target.py_kernels:
        return target.decompose
    return functools.partial(target.redispatch, DispatchKeySet(key))


def _triton_body(target: OpOverload) -> Callable[..., Any] | None:
    """The body of a ``triton_op`` that launches no kernel: that decorator promises that it can be traced."""
    from onnxplug.torch_private import custom_operators, triton_kernels

    name = target._schema.name
    if triton_kernels.get(name) != []:
        return None
    definition = custom_operators.get(name)
    return definition._init_fn if definition is not None else None


def trace_decomposition(fx: torch.fx.Node, function: Callable[..., Any]) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Traces ``function`` on the fake tensors of the node's arguments.

    Returns:
        The graph, and the FX arguments (Nodes) of its placeholders, in order.

    Raises:
        SomeSizesError: The trace is right only for some of the dynamic sizes.
        Exception: Whatever the function raises on these arguments.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Plain lists: a decomposition may change its argument.
    flat, spec = pytree.tree_flatten((_plain(fx.args), _plain(fx.kwargs)))
    nodes = [item for item in flat if isinstance(item, torch.fx.Node)]
    dynamic = [node for node in dict.fromkeys(nodes) if _is_traced(meta_of(node))]
    known = {node: meta_of(node) for node in nodes}

    def call(*values: Any) -> Any:
        bound = {**known, **dict(zip(dynamic, values, strict=True))}
        args, kwargs = pytree.tree_unflatten(
            [bound[item] if isinstance(item, torch.fx.Node) else item for item in flat], spec
        )
        results = function(*args, **kwargs)
        # A named tuple would be a call of its class in the graph.
        return tuple(results) if isinstance(results, tuple) else results

    fake_modes = {v.fake_mode for v in known.values() if isinstance(v, FakeTensor)}
    mode: Any = next(iter(fake_modes), None) or FakeTensorMode()
    inputs = [known[node] for node in dynamic]
    env = getattr(mode, "shape_env", None)

    def trace(inputs: list[Any]) -> torch.fx.GraphModule:
        with mode, torch.no_grad():
            # Before dispatch, composite operators inside stay whole, so that their own rules get them.
            module = make_fx(call, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)
            if any(node.target is fx.target for node in module.graph.nodes):
                module = make_fx(call, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        _drop_dead(module.graph)
        if not writes(module.graph):
            return module
        functional = make_functional(module.graph)
        if functional is not None and not functional.conditions:
            return torch.fx.GraphModule(module, functional.graph)
        with mode, torch.no_grad():
            return make_fx(torch.func.functionalize(call), tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)

    name = qualified_name(fx.target)
    by = f"{getattr(function, '__module__', None) or 'torch'}:{getattr(function, '__qualname__', type(function).__name__)}"
    with span(name, "decomposition", rule=by, package="torch's decomposition"):
        try:
            module = _for_all_sizes(trace, inputs, env)
        except Exception as error:
            _LOGGER.debug(
                "%s (%s): its decomposition %s failed: %s: %s", name, fx.name, by, type(error).__name__, error
            )
            raise
    _LOGGER.debug("%s (%s): decomposed by %s into %d nodes", name, fx.name, by, len(module.graph.nodes))
    return module, list(dynamic)


class SomeSizesError(ValueError):
    """A trace is right only for some sizes."""


def _for_all_sizes(
    trace: Callable[[list[Any]], torch.fx.GraphModule], inputs: list[Any], env: Any
) -> torch.fx.GraphModule:
    """A trace that is right for all sizes; where the example's sizes 0 and 1 prevent that, a trace with larger sizes.

    Raises:
        SomeSizesError: It does not.
    """
    if env is None:
        return trace(inputs)
    try:
        with recorded() as questions, undone_on_error(env), layout_not_noted(env):
            known = len(env.guards)
            module = trace(inputs)
            _refuse_guards(env, known)
            _refuse_elements(module, questions.elements)
            return module
    except SomeSizesError:
        small = small_sizes(env, inputs)
        if not small:
            raise
    try:
        return _with_broadcast_sizes(trace, inputs, env)
    except Exception as error:
        _LOGGER.debug("traced again, with larger examples: %s", error)
    with larger_examples(env, small), layout_not_noted(env):
        known = len(env.guards)
        module = trace([with_current_examples(env, value) for value in inputs])
        _refuse_guards(env, known)
        return module


def _with_broadcast_sizes(
    trace: Callable[[list[Any]], torch.fx.GraphModule], inputs: list[Any], env: Any
) -> torch.fx.GraphModule:
    """A trace that broadcasts the example's sizes of 1 as capture does.

    Raises:
        SomeSizesError: It isn't right for all sizes.
    """
    with (
        fx_config.patch(backed_size_oblivious=True),
        recorded() as questions,
        undone_on_error(env),
        layout_not_noted(env),
    ):
        known = len(env.guards)
        module = trace(inputs)
        _refuse_guards(env, known)
        for broadcast in dict.fromkeys(questions.broadcasts):
            if first_use(module, broadcast) is not None:
                raise SomeSizesError(f"it uses the size {broadcast.size}, to which {broadcast.small} is broadcast")
        return module


def trace_function(function: Callable[..., Any], inputs: list[Any]) -> torch.fx.GraphModule:
    """Traces a function of tensors on fake tensors.

    Raises:
        Exception: Whatever the function raises, and :class:`SomeSizesError`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    modes = [v.fake_mode for v in inputs if isinstance(v, FakeTensor)]
    mode: Any = modes[0] if modes else FakeTensorMode()

    def trace(inputs: list[Any]) -> torch.fx.GraphModule:
        with mode, torch.no_grad():
            return make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)

    return _for_all_sizes(trace, inputs, mode.shape_env)


def _refuse_guards(shape_env: Any, known: int) -> None:
    """Refuses a trace that is right only for some sizes: torch added guards on dynamic sizes while it traced.

    Guards that sizes differ or exceed 1 don't matter: they mean that the general case was traced, and ONNX's operators, which
    broadcast at run time, compute it for equal sizes and sizes of 1 too.

    Raises:
        SomeSizesError: Names the first of the conditions.
    """
    import sympy

    for guard in shape_env.guards[known:]:
        if not isinstance(guard.expr, sympy.Ne) and not holds_from_two_on(guard.expr):
            raise SomeSizesError(f"it holds only where {guard.expr}")


def _refuse_elements(module: torch.fx.GraphModule, sizes: Iterable[Any]) -> None:
    """Refuses a trace that assumes sizes other than 0 and has results with elements where such a size is 0.

    Raises:
        SomeSizesError: Names the number of the elements.
    """
    results = pytree.tree_map(meta_of, module.graph.output_node().args)
    numbers = [x.numel() for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    for size in sizes:
        symbols = [s for s in size.free_symbols if size.subs(s, 0) == 0]
        for none in [{s: 0} for s in symbols] or [dict.fromkeys(size.free_symbols, 0)]:
            if any(not isinstance(n, torch.SymInt) or n.node.expr.subs(none) != 0 for n in numbers):
                raise SomeSizesError(f"it holds only where {size} > 0")


def _plain(argument: Any) -> Any:
    """FX's immutable lists and dicts as ordinary lists and dicts."""
    if isinstance(argument, list):
        return [_plain(a) for a in argument]
    if isinstance(argument, tuple):
        return tuple(_plain(a) for a in argument)
    if isinstance(argument, dict):
        return {key: _plain(a) for key, a in argument.items()}
    return argument


def _is_traced(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _drop_dead(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and node.target is not operator.setitem:
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                graph.erase_node(node)
