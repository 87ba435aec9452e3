"""Higher-order operators: graphs within the graph."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.build.quantized import Quantized
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, INT64
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import OpOverload

# -- inputs and outputs of subgraphs -----------------------------------------------------------------------------------


def _parts(g: GraphBuilder, items: Iterable[Any]) -> list[Value]:
    """Tensors and numbers as values; a complex tensor is two."""
    result: list[Value] = []
    for item in items:
        if isinstance(item, Complex):
            result += [item.real, item.imag]
        elif isinstance(item, Quantized):
            raise Unsupported("a quantised tensor as the result of a branch or body; call dequantize() in it")
        elif isinstance(item, float):
            result.append(g.const(item, DOUBLE))  # a SymFloat is a double too
        else:
            result.append(item if isinstance(item, Value) else g.const(item))
    return result


def _whole(parts: Iterable[Value], like: Sequence[Any]) -> list[Any]:
    """The reverse of :func:`_parts`: complex tensors where ``like`` has complex values or fake tensors."""
    rest = iter(parts)
    is_complex = [isinstance(x, Complex) or (isinstance(x, torch.Tensor) and x.is_complex()) for x in like]
    return [Complex(next(rest), next(rest)) if pair else next(rest) for pair in is_complex]


def _formals(g: GraphBuilder, body: torch.fx.GraphModule, operands: Sequence[Any], parts: Sequence[Value]) -> list[Any]:
    """Dtype and dimensions of a body's first inputs, as it was traced with them."""
    placeholders = [fx for fx in body.graph.nodes if fx.op == "placeholder"]
    dims: list[Any] = []
    for item, fx in zip(operands, placeholders, strict=False):
        val = fx.meta.get("val")
        dimensions = g.interpreter.dims(val) if isinstance(val, torch.Tensor) else ()
        dims += [dimensions] * (2 if isinstance(item, Complex) else 1)
    return [(part.dtype, dimensions) for part, dimensions in zip(parts, dims, strict=True)]


def _results(node: FxNode) -> list[Any]:
    val = node.fx.meta["val"]
    return list(val) if isinstance(val, list | tuple) else [val]


def _several(values: Any) -> tuple[Value, ...]:
    return (values,) if isinstance(values, Value) else tuple(values)


#: Higher-order operators that run their graph unchanged on the inputs after it.
_WITH_INPUTS = ("wrap", "tag_activation_checkpoint", "wrap_activation_checkpoint", "local_map_hop")

# -- operators ---------------------------------------------------------------------------------------------------------


def inlined(g: GraphBuilder, node: FxNode) -> Any:
    """A region under another gradient or autocast mode, inlined: its operators already have the dtypes of that mode."""
    position = next(i for i, a in enumerate(node.args) if isinstance(a, torch.fx.GraphModule))
    return g.interpreter.inline(node.args[position], node.args[position + 1 :])


def invoked(g: GraphBuilder, node: FxNode) -> Any:
    """A region that is compiled once (``nested_compile_region``) or checkpointed, inlined: (graph, identifier, *inputs)."""
    return g.interpreter.inline(node.args[0], node.args[2:])


def hinted(g: GraphBuilder, node: FxNode) -> Any:
    """A region with hints for a compiler, inlined: (graph, inputs, named inputs, hints)."""
    graph, inputs, named, _ = node.args
    if named:
        raise Unsupported("named inputs of a hints_wrapper")
    return g.interpreter.inline(graph, inputs)


def checkpointed(g: GraphBuilder, node: FxNode) -> Any:
    """A region that is checkpointed, or placed on a mesh of devices, inlined: (graph, *inputs), and keywords of that mode."""
    inputs = node.args[1 : len(node.fx.args)]
    return g.interpreter.inline(node.args[0], inputs)


def with_effects(g: GraphBuilder, node: FxNode) -> list[Any]:
    """A call whose only effect is an error or a text, behind the token that orders effects: (token, operator, *arguments).

    The exported model has neither, as without the token, where nothing reads the call.
    """
    called = node.args[1]
    if not isinstance(called, OpOverload) or called._schema.returns:
        raise Unsupported(f"the results of {called}, which has effects")
    return [g.const(torch.zeros(0))]


def cond(g: GraphBuilder, node: FxNode) -> list[Any]:
    """``torch.cond``: an If; each branch reads its operands from outside."""
    predicate, true_graph, false_graph, operands = node.args
    if not isinstance(predicate, Value):
        return g.interpreter.inline(true_graph if predicate else false_graph, operands)
    branches = [
        g.subgraph(lambda m=module: _parts(g, g.interpreter.inline(m, operands)), name=name)
        for module, name in ((true_graph, "then"), (false_graph, "else"))
    ]
    count = len(branches[0].outputs)
    if not count:
        raise Unsupported("cond without results")
    results = g.op.If(predicate, then_branch=branches[0], else_branch=branches[1], _outputs=count)
    return _whole(_several(results), _results(node))


def while_loop(g: GraphBuilder, node: FxNode) -> list[Any]:
    """``while_loop``: a Loop."""
    carried = node.args[2]
    _, results = _looped(g, node, [])
    return _whole(results, carried)


def while_loop_stack_output(g: GraphBuilder, node: FxNode) -> list[Any]:
    """``while_loop`` with the results of all iterations along a new first axis; without an iteration, the carried operands."""
    carried = node.args[2]
    read = {user.args[1] for user in node.fx.users if user.target is operator.getitem}
    counts = [len(_parts(g, [item])) for item in carried]
    ends = list(itertools.accumulate(counts))
    wanted = [n for i, end in enumerate(ends) if i in read for n in range(end - counts[i], end)]
    holds, results = _looped(g, node, wanted)
    stacks = dict(zip(wanted, results[ends[-1] :], strict=True))
    always = g.constant(holds)
    if always is None or not always:
        none = g.reshape(g.cast(g.op.Not(holds), INT64), [1])
        first = _parts(g, carried)
        for n, stack in stacks.items():
            row = g.op.Slice(g.op.Unsqueeze(first[n], g.const([0])), g.const([0]), none, g.const([0]))
            stacks[n] = g.op.Concat(stack, row, axis=0)
    return _whole([stacks.get(n, value) for n, value in enumerate(results[: ends[-1]])], carried)


def _looped(g: GraphBuilder, node: FxNode, stacked: Sequence[int]) -> tuple[Value, list[Value]]:
    """A Loop. The condition is emitted twice: before the first iteration, and at the end of the body.

    Args:
        stacked: The parts of the carried values of which each iteration's result is kept.

    Returns:
        The first condition; the carried values after the loop, and the results of all iterations.
    """
    condition, body, carried, outside = node.args
    first = _parts(g, carried)

    def holds(values: Sequence[Any]) -> Value:
        with g.sizes.local():
            (answer,) = _parts(g, g.interpreter.inline(condition, [*values, *outside]))
        return g.reshape(answer, []) if answer.shape is None or len(answer.shape) else answer

    def step(_: Value, __: Value, *parts: Value) -> list[Value]:
        with g.sizes.local():
            results = g.interpreter.inline(body, [*_whole(parts, carried), *outside])
        values = _parts(g, results)
        return [holds(results), *values, *(g.op.Identity(values[n]) for n in stacked)]

    graph = g.subgraph(step, [(INT64, ()), (BOOL, ()), *_formals(g, body, carried, first)], name="loop")
    begins = holds(carried)
    looped = g.op.Loop(None, begins, *first, body=graph, _outputs=len(first) + len(stacked))
    return begins, list(_several(looped))


def scan(g: GraphBuilder, node: FxNode) -> list[Any]:
    """``scan``: a Scan over the first axis, a Loop over a range; the carried states are its first results."""
    body, initial, sequences, outside = node.args
    first = _first_of_range(node.fx.args[2])
    if first is not None:
        return _counted(g, node, body, initial, sequences[0], first, outside)
    return _scanned(g, node, body, initial, sequences, outside)


def _first_of_range(sequences: Any) -> int | None:
    """The first number of a scan over nothing but a range with steps of 1; ``None`` for any other."""
    if len(sequences) != 1 or sequences[0].target not in (torch.ops.aten.arange.default, torch.ops.aten.arange.start):
        return None
    numbers, dtype = sequences[0].args, sequences[0].meta["val"].dtype
    first = numbers[0] if len(numbers) > 1 else 0
    return first if isinstance(first, int) and dtype == torch.int64 else None


def _counted(
    g: GraphBuilder,
    node: FxNode,
    body: torch.fx.GraphModule,
    initial: Sequence[Any],
    numbers: Value,
    first: int,
    outside: Sequence[Any],
) -> list[Any]:
    """A Loop. ONNX Runtime 1.31's Scan refuses a sequence of no elements, which a range may be."""
    states = _parts(g, initial)

    def step(turn: Value, going: Value, *parts: Value) -> list[Value]:
        number = g.op.Add(turn, g.const(first)) if first else turn
        with g.sizes.local():
            return [going, *_parts(g, g.interpreter.inline(body, [*_whole(parts, initial), number, *outside]))]

    graph = g.subgraph(step, [(INT64, ()), (BOOL, ()), *_formals(g, body, initial, states)], name="loop")
    count = g.as_scalar(g.dim(numbers, 0))
    results = g.op.Loop(count, None if states else g.const(True), *states, body=graph, _outputs=len(graph.outputs) - 1)
    return _whole(_several(results), _results(node))


def map_impl(g: GraphBuilder, node: FxNode) -> list[Any]:
    """``map``: a Scan without state."""
    body, sequences, outside = node.args
    return _scanned(g, node, body, [], sequences, outside)


def _scanned(
    g: GraphBuilder,
    node: FxNode,
    body: torch.fx.GraphModule,
    initial: Sequence[Any],
    sequences: Sequence[Any],
    outside: Sequence[Any],
) -> list[Any]:
    states, slices = _parts(g, initial), _parts(g, sequences)

    def step(*parts: Value) -> list[Value]:
        return _parts(g, g.interpreter.inline(body, [*_whole(parts, [*initial, *sequences]), *outside]))

    graph = g.subgraph(step, _formals(g, body, [*initial, *sequences], [*states, *slices]), name="scan")
    results = g.op.Scan(*states, *slices, body=graph, num_scan_inputs=len(slices), _outputs=len(graph.outputs))
    return _whole(_several(results), _results(node))


RULES: list[Rule] = [
    Rule("wrap_with_set_grad_enabled", inlined),
    Rule("wrap_with_autocast", inlined),
    *(Rule(name, checkpointed) for name in _WITH_INPUTS),
    Rule("invoke_subgraph", invoked),
    Rule("hints_wrapper", hinted),
    Rule("with_effects", with_effects),
    Rule("cond", cond),
    Rule("while_loop", while_loop),
    Rule("while_loop_stack_output", while_loop_stack_output),
    Rule("scan", scan),
    Rule("map_impl", map_impl),
]
