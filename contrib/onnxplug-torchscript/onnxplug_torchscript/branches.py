"""Branches of a script: decided while the script is interpreted, or made a part of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxplug.errors import CaptureError
from onnxplug.torch_private import cond_op
from onnxplug_torchscript.graphs import Step
from onnxplug_torchscript.interpreter import Interpreter, Values
from onnxplug_torchscript.numbers import as_bool, truth_tensor
from onnxplug_torchscript.regions import (
    ContainerChanged,
    Region,
    as_before,
    as_results,
    filled,
    is_computed,
    kinds,
    same,
)
from onnxplug_torchscript.values import (
    UNINITIALIZED,
    ScalarTensor,
    is_symbolic,
    is_unbacked,
    leaves,
    mapped,
    structure,
)


def branch(interpreter: Interpreter, step: Step, values: Values) -> list[Any]:
    """``prim::If``: decided now where the condition is known or is about sizes, else ``torch.cond``."""
    holds = decided(step, values[step.inputs[0]])
    if holds is not None:
        return interpreter.run(step.blocks[0 if holds else 1], values)
    condition = truth_tensor(as_bool(values[step.inputs[0]]))
    raising = [block.raises() for block in step.blocks]
    if any(raising):
        asserted = condition.logical_not() if raising[0] else condition
        text = f"the script's condition at {step.place} does not hold"
        step.place.call(torch.ops.aten._assert_async.msg, asserted, text)
        return interpreter.run(step.blocks[1 if raising[0] else 0], values)
    region = Region(interpreter, step, values)
    try:
        return _cond(region, condition)
    except ContainerChanged:
        raise CaptureError(
            f"the branch at {step.place} depends on a tensor's values and changes a list or dict that is made outside of it: "
            "what that holds would be known only when the model runs",
            hint="Give the tensors of both branches as results instead, or use torch.where.",
        ) from None


def decided(step: Step, condition: Any) -> bool | None:
    """The value of a condition; ``None`` where it depends on a tensor's values."""
    if isinstance(condition, ScalarTensor):
        condition = condition.known()
    if isinstance(condition, torch.Tensor):
        return None
    if is_unbacked(condition):
        if statically_known_true(condition):
            return True
        return False if statically_known_true(torch.sym_not(condition)) else None
    return bool(step.place.call(bool, condition))


def _cond(region: Region, condition: torch.Tensor) -> list[Any]:
    step = region.step
    runs = [region.function(block) for block in step.blocks]
    tried = [region.tried(run) for run in runs]
    if region.mutated:  # by either branch
        tried = [region.tried(run) for run in runs]
    sides = [filled(tried[0], tried[1]), filled(tried[1], tried[0])]
    pairs = list(zip(leaves(sides[0]), leaves(sides[1]), strict=False))
    if structure(sides[0]) != structure(sides[1]) or any(_apart(a, b) for a, b in pairs):
        raise CaptureError(
            f"the branches at {step.place} depend on a tensor's values and give results of different kinds: "
            f"{kinds(sides[0])} and {kinds(sides[1])}",
            hint="Let both branches give tensors (or numbers) in the same places.",
        )
    kept = [region.operand(a, b) for a, b in pairs]
    joined = [_joined(a, b) if operand is None else None for (a, b), operand in zip(pairs, kept, strict=True)]
    chosen = [index for index, like in enumerate(joined) if like is not None]

    def traced(run: Callable[..., Any]) -> Callable[..., Any]:
        def function(*operands: Any) -> tuple[Any, ...]:
            values = list(leaves(filled(run(operands), sides[0])))
            return tuple(as_results([values[i] for i in chosen], [joined[i] for i in chosen], operands))

        return function

    results: Sequence[Any] = ()
    if chosen:
        results = step.place.call(cond_op, condition, traced(runs[0]), traced(runs[1]), tuple(region.operands))
    values = dict(zip(chosen, results, strict=True))
    every = [
        as_before(values[i], joined[i]) if i in values else _constant(kept[i], *pair) for i, pair in enumerate(pairs)
    ]
    rest = iter(every)
    outputs = region.accepted(mapped(sides[0], lambda _: next(rest)))
    region.remember(results, [pairs[i][0] for i in chosen], [pairs[i][1] for i in chosen])
    return outputs


def _constant(operand: Any, a: Any, b: Any) -> Any:
    """The value of a result that is the same in both branches."""
    if operand is not None:
        return operand
    return b if a is UNINITIALIZED else a


def _apart(a: Any, b: Any) -> bool:
    """Whether two results of branches can't be joined to one value."""
    if a is UNINITIALIZED or b is UNINITIALIZED:
        return False
    if is_computed(a) and is_computed(b):
        return False
    return not same(a, b)


def _joined(a: Any, b: Any) -> Any:
    """The value of a branch that a result of the operator is like; ``None`` where both branches give one constant."""
    if a is UNINITIALIZED or b is UNINITIALIZED:
        other = b if a is UNINITIALIZED else a
        return other if isinstance(other, torch.Tensor | ScalarTensor) or is_symbolic(other) else None
    if same(a, b) and not isinstance(a, torch.Tensor | ScalarTensor):
        return None
    return a
