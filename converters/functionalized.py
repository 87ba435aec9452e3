"""Custom operators that write their arguments: torch's ``auto_functionalized_v2``, undone into a call of the operator.

torch's functionalization makes ``out = empty(...); fill(x, out)`` a call of that higher-order operator, which returns the
operator's own results and the new value of every tensor that it wrote. Here it becomes a node of the operator itself,
whose converter returns the operator's results, then the new value of each written argument in schema order.

An example, an operator ``ex::fill(Tensor x, Tensor(a!) out) -> ()`` without results of its own; ``getitem`` 1 is the new value of
the base 0::

    v2 = auto_functionalized_v2(ex.fill.default, x=x, _out_base_index=0, _all_bases=[empty])
    getitem = v2[1]

The scratch graph has the call ``ex.fill(x, out)`` for the operator's converter, whose only result becomes the value of ``getitem``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_list

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.quantized import QUANTIZED_PREFIX, is_quantized
from onnxplug.interpret.decompose import trace_function
from onnxplug.interpret.node import FxNode, meta_of
from onnxplug.registry.names import qualified_name
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import pytree


def auto_functionalized(g: GraphBuilder, node: FxNode) -> list[Any]:
    """``auto_functionalized_v2``: the operator's results (``None`` for none), then the new value of each base."""
    from onnxplug.torch_private import get_mutable_args, read_view_information_from_args

    fx = node.fx
    operator: Any = fx.args[0]
    kwargs: dict[str, Any] = dict(fx.kwargs)
    bases: list[torch.fx.Node] = list(kwargs.pop("_all_bases"))
    names, types = get_mutable_args(operator)
    views = read_view_information_from_args(names, types, kwargs, bases)
    scratch = _Scratch(g, fx)
    placeholders = [scratch.place(base) for base in bases]
    operands: dict[str, Any] = {name: torch.fx.map_arg(value, scratch.place) for name, value in kwargs.items()}
    for name in names:
        view = views[name]
        operands[name] = (
            [scratch.view(v, placeholders) for v in view]
            if isinstance(view, list)
            else scratch.view(view, placeholders)
        )
    written = [meta_of(operands[name]) for name in names if operands[name] is not None]
    count = len(operator._schema.returns)
    returned = list(fx.meta["val"][:count])
    arguments = [operands[a.name] for a in operator._schema.arguments if a.name in operands]
    call = scratch.call(operator, arguments, operands, [*returned, *written])
    results = _regrouped(g.convert(call), [*returned, *written])
    values = [g.interpreter.value_of(base) for base in bases]
    news = iter(results[count:])
    for name in names:
        if operands[name] is None:
            continue
        new, view = next(news), views[name]
        several = isinstance(view, list)
        for part, info in zip(new if several else [new], view if several else [view], strict=True):
            if info is not None:
                values[info.base_index] = scratch.scatter(info, bases, values, part)
    return [*(results[:count] or [None]), *values]


def _regrouped(results: Any, wanted: Sequence[Any]) -> list[Any]:
    """Results list by list, as the operator has them: a converter may return them flat."""
    results = list(results) if isinstance(results, list | tuple) else [results]
    if any(isinstance(result, list | tuple) for result in results):
        return results
    rest = iter(results)
    return [[next(rest) for _ in item] if isinstance(item, list | tuple) else next(rest) for item in wanted]


def _with_sizes(info: Any, number: Callable[[torch.fx.Node], Any]) -> Any:
    """A view whose sizes are numbers instead of nodes of the graph."""
    known = copy.copy(info)
    for name, value in vars(info).items():
        setattr(known, name, torch.fx.map_arg(value, number))
    return known


class _Scratch:
    """A scratch FX graph with the call of the mutating operator itself, as it was before torch's functionalization."""

    def __init__(self, g: GraphBuilder, fx: torch.fx.Node) -> None:
        self._walk = g.interpreter
        self._fx = fx
        self._graph = torch.fx.Graph()
        self._placed: dict[torch.fx.Node, torch.fx.Node] = {}
        self._values: dict[torch.fx.Node, Any] = {}

    def place(self, node: torch.fx.Node) -> torch.fx.Node:
        """The placeholder for a node of the model's graph."""
        placeholder = self._placed.get(node)
        if placeholder is None:
            placeholder = self._placed[node] = self._new(node.meta.get("val"), self._walk.value_of(node), node.name)
        return placeholder

    def _new(self, meta: Any, value: Any, name: str) -> torch.fx.Node:
        placed = self._graph.placeholder(name)
        placed.meta["val"] = meta
        self._values[placed] = value
        return placed

    def _value_of(self, argument: Any) -> Any:
        """The value of an operator's argument."""
        if isinstance(argument, torch.fx.Node):
            return self._values[argument] if argument in self._values else self._walk.value_of(argument)
        if isinstance(argument, list | tuple):
            return immutable_list(map(self._value_of, argument))
        return argument

    def view(self, info: Any, placeholders: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
        """The node of a written argument: a base, or a view of it."""
        from onnxplug.torch_private import NotView

        if info is None:
            return None
        base = placeholders[info.base_index]
        if isinstance(info, NotView):
            return base
        fake, value = self._traced(lambda view, tensor: view.regenerate_view({info.base_index: tensor}), info, [base])
        return self._new(fake, value, "view")

    def scatter(self, info: Any, bases: Sequence[torch.fx.Node], values: Sequence[Any], new: Any) -> Any:
        """The new value of a base after a write to a view of it."""
        from onnxplug.torch_private import AsStridedViewInfo, SliceViewInfo

        if not isinstance(info, AsStridedViewInfo | SliceViewInfo):
            return new
        meta = bases[info.base_index].meta["val"]
        base = self._new(meta, values[info.base_index], "base")
        with torch.no_grad(), meta.fake_mode:
            known: Any = _with_sizes(info, meta_of)
            part = self._new(known.regenerate_view({info.base_index: meta}), new, "part")

        def write(view: Any, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if isinstance(info, SliceViewInfo):
                return torch.slice_scatter(tensor, value, view.dim, view.start, view.end)
            return torch.as_strided_scatter(tensor, value, view.size, view.stride, view.storage_offset)

        return self._traced(write, info, [base, part])[1]

    def _traced(self, function: Any, info: Any, tensors: list[torch.fx.Node]) -> tuple[Any, Any]:
        """The result of a function of a view and tensors; the view's dynamic sizes are inputs of its graph."""
        sizes = list(dict.fromkeys(x for x in pytree.tree_leaves(vars(info)) if isinstance(x, torch.fx.Node)))

        def call(*inputs: Any) -> Any:
            numbers = dict(zip(sizes, inputs[len(tensors) :], strict=True))
            return function(_with_sizes(info, numbers.__getitem__), *inputs[: len(tensors)])

        nodes = [*tensors, *sizes]
        module = trace_function(call, [node.meta["val"] for node in nodes])
        (result,) = self._walk.inline(module, [self._value_of(node) for node in nodes])
        output: Any = module.graph.output_node().args[0]
        return meta_of(output[0] if isinstance(output, list | tuple) else output), result

    def call(self, operator: Any, args: Sequence[Any], operands: dict[str, Any], val: list[Any]) -> FxNode:
        """The call of the operator itself, at the user's line."""
        formals = operator._schema.arguments
        positional = [operands[a.name] for a in formals if a.name in operands and not a.kwarg_only]
        keywords = {a.name: operands[a.name] for a in formals if a.name in operands and a.kwarg_only}
        fx = self._graph.call_function(operator, tuple(positional), keywords)
        fx.meta = {**self._fx.meta, "val": tuple(val)}
        fx.name = self._fx.name
        # Every result is read: by whatever reads the wrapper's.
        values = tuple([self._value_of(a) for a in args])
        name = QUANTIZED_PREFIX + qualified_name(operator) if is_quantized(values) else qualified_name(operator)
        return self._walk.new_call(fx, name, values)


RULES: list[Rule] = [
    Rule("auto_functionalized_v2", auto_functionalized),
    Rule(f"{QUANTIZED_PREFIX}auto_functionalized_v2", auto_functionalized),
]
