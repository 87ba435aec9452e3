"""Broadcasting of dynamic dimensions whose example size is 1.

torch.export takes such a size for the constant 1 where an operator broadcasts it to another size. ONNX's operators broadcast
when the model runs, so the size stays dynamic here: the result has the other size, which is right where the first is 1 or
equal to it. Where the other size is 1 instead, ONNX's operator still computes the right result, of the first size; operators
that use the result's size for more than broadcasting are then reported.

An example, ``z = x + y`` of ``x`` ``[rows, 3]`` and ``y`` ``[batch, 3]``, exported with 1 row and a batch of 4: ``z`` is
``[batch, 3]``, and the model also computes 5 rows and a batch of 1. But ``z * z.shape[0]`` would multiply by 1 then, not by 5: a
warning, "right only where rows == 1 or batch != 1".
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import sympy
import torch

from onnxplug.torch_private import OpOverload, pytree

#: torch's functions that compute broadcast shapes, with the names of the two sizes that they compare.
_SIZES = {"infer_size": ("sizeA", "sizeB"), "expand": ("x", "requested_length"), "should_expand": ("x", "y")}
#: Operators, besides pointwise operators, that treat tensors of all sizes alike.
_OF_ANY_SIZE = frozenset(
    f"aten::{name}"
    for name in "sum mean amax amin prod any all max min logsumexp softmax log_softmax _softmax _log_softmax norm "
    "linalg_vector_norm permute transpose t matmul mm bmm linear clone contiguous detach alias to "
    "_to_copy dropout layer_norm unsqueeze sort cumsum".split()
)
#: Operators that ask whether a size is 1, but have the same form at every size.
_SAME_FORM = frozenset({"aten::prelu"})


class Broadcast(NamedTuple):
    """Two sizes that an operator broadcasts to each other.

    Attributes:
        small: torch's symbol of the size that is 1 in the example.
        size: The size of the other operand and of the result: torch's symbol, or a number.
    """

    small: Any
    size: Any


def broadcast_of(condition: Any, frame: FrameType | None) -> Broadcast | None:
    """The broadcast for which torch would make a size the constant 1, to answer a frame's condition.

    ``None`` where the condition is not that a size is 1, where no broadcasting asks, or where the other size is 1 too.
    """
    if isinstance(condition, sympy.Or):
        return next(filter(None, (broadcast_of(part, frame) for part in condition.args)), None)
    if not isinstance(condition, sympy.Eq | sympy.Ne):
        return None
    symbol = next((side for side in condition.args if side.is_Symbol), None)
    if symbol is None or 1 not in condition.args:
        return None
    for _ in range(12):
        if frame is None:
            return None
        values, name = frame.f_locals, frame.f_code.co_name
        if name == "_broadcast_shapes" and "common_shape" in values and "idx" in values:
            sizes = [values["shape"][values["idx"]], values["common_shape"][values["idx"]]]
        elif name in _SIZES:
            sizes = [values.get(size) for size in _SIZES[name]]
        elif name == "_broadcast_in_dim_meta":
            sizes = _pair(values, symbol)
        elif isinstance(values.get("self"), OpOverload) and values["self"]._schema.name in _SAME_FORM:
            return Broadcast(symbol, 1)
        else:
            frame = frame.f_back
            continue
        return _broadcast(symbol, sizes) if isinstance(condition, sympy.Eq) else None
    return None


def broadcasts_last(condition: Any, frame: FrameType | None) -> bool:
    """Whether a broadcasting operator asks if ``x[-1:]`` has one element: it has, unless x has none.

    Broadcasting ``x[-1:]`` to x's own size is right in both cases, without a guard.
    """
    if isinstance(condition, sympy.Or):
        return any(broadcasts_last(part, frame) for part in condition.args)
    if not isinstance(condition, sympy.Eq) or 1 not in condition.args or not any(map(_is_of_last, condition.args)):
        return False
    for _ in range(12):
        if frame is not None and frame.f_code.co_name in ("_broadcast_shapes", "_broadcast_in_dim_meta", *_SIZES):
            return True
        frame = frame.f_back if frame is not None else None
    return False


def _is_of_last(expr: Any) -> bool:
    """Whether an expression is torch's size of ``x[-1:]``: ``Max(0, n - Max(0, n - 1))``."""
    if type(expr).__name__ != "Max" or 0 not in expr.args:
        return False
    inner = [part for part in expr.atoms(type(expr)) if part != expr and 0 in part.args]
    if not inner:
        return False
    size = sympy.Add(*(side for side in inner[0].args if side != 0)) + 1
    return bool(type(expr)(0, size - inner[0]) == expr)


def _pair(values: dict[str, Any], symbol: Any) -> list[Any]:
    """The size of the operand with a symbol in torch's general broadcast, and the size of the result."""
    for axis, size in zip(values["broadcast_dimensions"], values["a"].shape, strict=True):
        if isinstance(size, torch.SymInt) and size.node.expr == symbol:
            return [size, values["shape"][axis]]
    return []


def _broadcast(symbol: Any, sizes: Iterable[Any]) -> Broadcast | None:
    exprs = {getattr(getattr(size, "node", None), "expr", size): size for size in sizes if size is not None}
    small = exprs.pop(symbol, None)
    if small is None or small.node.hint != 1 or len(exprs) != 1:
        return None
    ((expr, other),) = exprs.items()
    hint = other if isinstance(other, int) else other.node.hint
    return Broadcast(symbol, expr) if hint not in (None, 1) else None


def first_use(
    program: torch.export.ExportedProgram | torch.fx.GraphModule, broadcast: Broadcast
) -> torch.fx.Node | None:
    """The first operator of a program that uses the size of a broadcast's result other than by broadcasting."""
    if not getattr(broadcast.size, "free_symbols", ()):
        return None  # a result of that size, whatever the operand's is
    results: set[torch.fx.Node] = set()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        follows = any(argument in results for argument in node.all_input_nodes)
        numbers = [getattr(getattr(a.meta.get("val"), "node", None), "expr", None) for a in node.all_input_nodes]
        counts = any(n is not None and n.free_symbols & broadcast.size.free_symbols for n in numbers)
        if (follows and not _is_of_any_size(node)) or (counts and isinstance(node.meta.get("val"), torch.Tensor)):
            return node
        if follows or _broadcasts(node, broadcast):
            results.add(node)
    return None


def _is_of_any_size(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (
        torch.Tag.pointwise in target.tags or target._schema.name in _OF_ANY_SIZE
    )


def _broadcasts(node: torch.fx.Node, broadcast: Broadcast) -> bool:
    """Whether a node's operand has the size that is 1 in the example, and its result the other size."""
    operands = [argument.meta.get("val") for argument in node.all_input_nodes]
    results = pytree.tree_leaves(node.meta.get("val"))
    return _has_size(operands, broadcast.small) and _has_size(results, broadcast.size)


def _has_size(values: Iterable[Any], expr: Any) -> bool:
    sizes = (size for value in values if isinstance(value, torch.Tensor) for size in value.shape)
    return any(isinstance(size, torch.SymInt) and size.node.expr == expr for size in sizes)
