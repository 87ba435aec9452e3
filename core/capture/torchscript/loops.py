"""Loops of a script: unrolled while their end is known, or made part of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxplug.capture.torchscript.branches import decided
from onnxplug.capture.torchscript.graphs import Step
from onnxplug.capture.torchscript.interpreter import Interpreter, Values
from onnxplug.capture.torchscript.numbers import as_int, truth_tensor
from onnxplug.capture.torchscript.regions import (
    ContainerChanged,
    Region,
    as_before,
    as_results,
    filled,
    is_computed,
    kinds,
    same,
)
from onnxplug.capture.torchscript.values import (
    UNINITIALIZED,
    ScalarTensor,
    is_symbolic,
    is_unbacked,
    leaves,
    mapped,
    scalar,
    structure,
)
from onnxplug.errors import CaptureError
from onnxplug.torch_private import is_alias_of, while_loop_op

_UNBOUNDED = 2**31 - 1


def loop(interpreter: Interpreter, step: Step, values: Values) -> list[Any]:
    """``prim::Loop``: unrolled while its end is known, else ``while_loop``."""
    count, going = values[step.inputs[0]], values[step.inputs[1]]
    carried = [values[number] for number in step.inputs[2:]]
    index = 0
    while True:
        if is_symbolic(count) or is_unbacked(count) or decided(step, going) is None:
            return _in_graph(interpreter, step, values, index, count, going, carried)
        if index >= count or not decided(step, going):
            return carried
        if index == 0 and _depends_on_data(interpreter, step, values, count, going, carried):
            return _in_graph(interpreter, step, values, index, count, going, carried)
        going, *carried = _iterated(interpreter, step, values, index, carried)
        index += 1


def _iterated(interpreter: Interpreter, step: Step, values: Values, index: Any, carried: Sequence[Any]) -> list[Any]:
    (body,) = step.blocks
    values.update(zip(body.inputs, [index, *carried], strict=True))
    return interpreter.run(body, values)


def _depends_on_data(
    interpreter: Interpreter, step: Step, values: Values, count: Any, going: Any, carried: Sequence[Any]
) -> bool:
    """Whether a ``while`` that surely begins asks a tensor whether to go on."""
    (body,) = step.blocks
    constant = {s.outputs[0] for s in body.steps if s.kind == "prim::Constant"}
    if body.outputs[0] in constant or body.outputs[0] not in {n for s in body.steps for n in s.outputs}:
        return False
    region = Region(interpreter, step, values)
    try:
        after = region.tried(lambda operands: region.function(body, [0, *carried])(operands))
    except ContainerChanged:
        return False
    return _decided_quietly(step, next(iter(after), True)) is None


def _decided_quietly(step: Step, condition: Any) -> bool | None:
    if isinstance(condition, ScalarTensor):
        condition = condition.known()
    if isinstance(condition, torch.Tensor) or is_unbacked(condition):
        return None
    return True


def _in_graph(
    interpreter: Interpreter,
    step: Step,
    values: Values,
    index: int,
    count: Any,
    going: Any,
    carried: list[Any],
) -> list[Any]:
    try:
        return _while(Region(interpreter, step, values), index, count, going, carried)
    except ContainerChanged:
        if is_symbolic(count) and not is_unbacked(count) and decided(step, going) is not None:
            return _unrolled(interpreter, step, values, index, step.place.call(int, count), going, carried)
        raise CaptureError(
            f"the loop at {step.place} ends by a tensor's values and changes a list or dict that is made outside of it: "
            "what that holds would be known only when the model runs",
            hint="Write into a tensor that is made before the loop, or let the number of iterations be known.",
        ) from None


def _unrolled(
    interpreter: Interpreter, step: Step, values: Values, index: int, count: int, going: Any, carried: list[Any]
) -> list[Any]:
    values = {**values, step.inputs[0]: count, step.inputs[1]: going}
    values.update(zip(step.inputs[2:], carried, strict=True))
    return loop(interpreter, step, values)


def _while(region: Region, index: int, count: Any, going: Any, carried: list[Any]) -> list[Any]:
    step = region.step
    (body,) = step.blocks
    number_of_outputs = len(body.outputs)
    tried = region.tried(region.function(body, [0, *carried]))
    outer = region.outer
    carried = filled(carried, tried[1:number_of_outputs])
    shape = structure(carried)
    start = [*leaves(carried), *leaves(outer)]

    def rebuilt(flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        rest = iter(flat)
        return mapped(carried, lambda _: next(rest)), mapped(outer, lambda _: next(rest))

    def iterated(number: Any, flat: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, list[Any]]:
        now, outer_now = rebuilt(flat)
        after = region.function(body, [number, *now], outer_now)(operands)
        results, outer_after = after[:number_of_outputs], after[number_of_outputs:]
        results[1:] = filled(results[1:], carried)
        if structure(results[1:]) != shape or structure(outer_after) != structure(outer):
            raise _changes_kind(step, carried, results[1:])
        return results[0], [*leaves(results[1:]), *leaves(outer_after)]

    _, after = region.tried(lambda operands: iterated(0, start, operands))
    kept = [a if a is not UNINITIALIZED else b for a, b in zip(start, after, strict=True)]
    # What the body only passes on, or writes in place, is the tensor of the outside.
    tied = [isinstance(a, torch.Tensor) and region.operand(b) is a for a, b in zip(kept, after, strict=True)]
    moving = [
        i
        for i, (a, b) in enumerate(zip(kept, after, strict=True))
        if not tied[i] and (is_computed(b) or not same(a, b))
    ]
    _check_writes(region, [kept[i] for i in moving if i < len(kept) - len(region.mutated)])
    for i in moving:
        if not is_computed(kept[i]) or not (is_computed(after[i]) or after[i] is UNINITIALIZED):
            raise _changes_kind(step, kept[i], after[i])
    likes = [after[i] if isinstance(after[i], torch.Tensor) else kept[i] for i in moving]
    first = as_results([start[i] for i in moving], likes, region.operands)
    last = step.place.call(as_int, count) if not isinstance(count, torch.SymInt) else count

    def unpacked(state: Sequence[Any]) -> list[Any]:
        flat = list(kept)
        for i, like, value in zip(moving, likes, state, strict=True):
            flat[i] = as_before(value, like)
        return flat

    def condition(number: Any, still: Any, *rest: Any) -> torch.Tensor:
        limit = rest[len(moving)] if bounded else None
        return still.clone() if limit is None else torch.logical_and(still, number < limit)

    def step_once(number: Any, _: Any, *rest: Any) -> tuple[Any, ...]:
        state, operands = rest[: len(moving)], rest[len(moving) + bounded :]
        still, flat = iterated(number.item(), unpacked(state), operands)
        for i in set(range(len(kept))).difference(moving):
            if not (region.operand(flat[i]) is kept[i] if tied[i] else same(flat[i], kept[i])):
                raise _changes_kind(step, kept[i], flat[i])
        results = as_results([flat[i] for i in moving], likes, [*operands, *state])
        return number + 1, truth_tensor(still).clone(), *results

    bounded = not (isinstance(last, int) and last >= _UNBOUNDED)
    limits = (scalar(last, torch.int64),) if bounded else ()
    begin = (scalar(index, torch.int64), truth_tensor(going).clone(), *first)
    try:
        results = step.place.call(while_loop_op, condition, step_once, begin, (*limits, *region.operands))
    except (ContainerChanged, CaptureError):
        raise
    except Exception as error:
        raise CaptureError(
            f"the loop at {step.place} ends by a tensor's values and can't be a loop of the graph: {error}",
            hint="What it carries must keep its shape and dtype; let the number of iterations be known otherwise.",
        ) from error
    flat = unpacked(results[2:])
    now, outer_now = rebuilt(flat)
    outputs = region.accepted([*now, *outer_now])
    region.remember(results[2:], [start[i] for i in moving], [after[i] for i in moving])
    return outputs


def _check_writes(region: Region, carried: Sequence[Any]) -> None:
    """Refuses a body that writes in place to what the first iteration is given, and carries another tensor on.

    Raises:
        CaptureError: It does: only the first iteration would write to the outside.
    """
    written = [region.operands[position] for position in region.mutated]
    tensors = [value for value in carried if isinstance(value, torch.Tensor)]
    if any(is_alias_of(a, b) for a in written for b in tensors):
        raise CaptureError(
            f"the loop at {region.step.place} ends by a tensor's values, and writes in place to a tensor that it replaces by "
            "another one later",
            hint="Give the loop a copy (.clone()), and compute what it carries without writing in place (x = x + y).",
        )


def _changes_kind(step: Step, before: Any, after: Any) -> CaptureError:
    return CaptureError(
        f"the loop at {step.place} ends by a tensor's values and carries {kinds(before)} in, {kinds(after)} out: what it "
        "carries must stay of one kind",
        hint="Give the variable a tensor of its final shape before the loop.",
    )
