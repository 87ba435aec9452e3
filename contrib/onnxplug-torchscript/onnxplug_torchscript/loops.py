"""Loops of a script: unrolled while their end is known, or made a part of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxplug.capture.patching import patched
from onnxplug.errors import CaptureError
from onnxplug.torch_private import is_alias_of, scans, while_loop_op
from onnxplug_torchscript.branches import decided
from onnxplug_torchscript.graphs import Step
from onnxplug_torchscript.interpreter import Interpreter, Values
from onnxplug_torchscript.numbers import as_int, truth_tensor
from onnxplug_torchscript.regions import (
    ContainerChanged,
    Region,
    as_before,
    as_results,
    filled,
    is_computed,
    kinds,
    same,
    unknown,
)
from onnxplug_torchscript.sequences import GROWTH, Growing, stacked
from onnxplug_torchscript.values import (
    UNINITIALIZED,
    ScalarTensor,
    Stacked,
    is_symbolic,
    is_unbacked,
    leaves,
    lists_in,
    mapped,
    scalar,
    structure,
)

_UNBOUNDED = 2**31 - 1


def loop(interpreter: Interpreter, step: Step, values: Values) -> list[Any]:
    """``prim::Loop``: unrolled while its end is known, else ``while_loop``."""
    count, going = _turns(step, values)
    carried = [values[number] for number in step.inputs[2:]]
    index = 0
    while True:
        follows_sizes = index == 0 and _follows_sizes(going)
        if is_symbolic(count) or is_unbacked(count) or (not follows_sizes and decided(step, going) is None):
            return _in_graph(interpreter, step, values, index, count, going, carried)
        if index >= count or not (follows_sizes or decided(step, going)):
            return carried
        if index == 0:
            following = going if follows_sizes else _after_one(interpreter, step, values, carried)
            if isinstance(following, torch.Tensor) or is_unbacked(following):
                return _in_graph(interpreter, step, values, index, count, going, carried)
            if _follows_sizes(following):
                try:
                    return _in_graph(interpreter, step, values, index, count, going, carried)
                except CaptureError:
                    pass  # unrolled as often as for the example's sizes, which is a guard
            if not decided(step, going):
                return carried
        going, *carried = _iterated(interpreter, step, values, index, carried)
        index += 1


def _follows_sizes(condition: Any) -> bool:
    """Whether a condition is true for some sizes of the inputs, false for others."""
    if not is_symbolic(condition) or is_unbacked(condition):
        return False
    return not (statically_known_true(condition) or statically_known_true(torch.sym_not(condition)))


def _turns(step: Step, values: Values) -> tuple[Any, Any]:
    """The number of iterations, and whether to begin.

    With ``continue`` or ``break`` in it, a script has ``for`` over a size as a ``while`` with a counter, which begins by
    ``size > first`` and goes on by ``counter + 1 < size``, alone or ``and`` that there was no ``break``.
    """
    count, going = values[step.inputs[0]], values[step.inputs[1]]
    (body,) = step.blocks
    made = {number: inner for inner in body.steps for number in inner.outputs}
    outside = {number: value for number, value in values.items() if number not in made and number not in body.inputs}
    condition = made.get(body.outputs[0])
    both = condition is not None and condition.kind == "aten::__and__"
    for less in [made.get(number) for number in condition.inputs] if condition is not None and both else [condition]:
        following = made.get(less.inputs[0]) if less is not None and less.kind == "aten::lt" else None
        if less is None or following is None or following.kind != "aten::add":
            continue
        counters = zip(body.outputs[1:], body.inputs[1:], step.inputs[2:], strict=True)
        first: Any = next((values[a] for b, c, a in counters if (b, c) == (less.inputs[0], following.inputs[0])), None)
        size: Any = outside.get(less.inputs[1])
        counts = isinstance(size, torch.SymInt) and type(first) is int and outside.get(following.inputs[1]) == 1
        if counts and str(going) == str(size > first):
            return size - first, True
    return count, going


def _iterated(interpreter: Interpreter, step: Step, values: Values, index: Any, carried: Sequence[Any]) -> list[Any]:
    (body,) = step.blocks
    values.update(zip(body.inputs, [index, *carried], strict=True))
    return interpreter.run(body, values)


def _after_one(interpreter: Interpreter, step: Step, values: Values, carried: Sequence[Any]) -> Any:
    """Whether a ``while`` goes on after its first iteration; True where that follows from no value of the iteration."""
    (body,) = step.blocks
    constant = {s.outputs[0] for s in body.steps if s.kind == "prim::Constant"}
    if body.outputs[0] in constant or body.outputs[0] not in {n for s in body.steps for n in s.outputs}:
        return True
    region = Region(interpreter, step, values)
    try:
        after = region.tried(lambda operands: region.function(body, [0, *carried])(operands))
    except ContainerChanged:
        return True
    condition = next(iter(after), True)
    return condition.known() if isinstance(condition, ScalarTensor) else condition


def _never_leaves(step: Step, values: Values) -> bool:
    """Whether a loop runs all of its iterations: ``for`` without ``break`` or ``return``."""
    (body,) = step.blocks
    constants = {s.outputs[0]: s.node.output().toIValue() for s in body.steps if s.kind == "prim::Constant"}
    going = body.outputs[0]
    computed = {number for s in body.steps for number in s.outputs}
    return constants.get(going) is True if going in computed else values.get(going) is True


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
    except (ContainerChanged, IndexError) as error:
        # A branch that the first iteration does not take may read an item of the list that the loop adds to.
        if isinstance(error, IndexError) and not _added_to(interpreter, step, values, carried):
            raise
        over_a_size = is_symbolic(count) and not is_unbacked(count) and decided(step, going) is not None
        if over_a_size and _never_leaves(step, values):
            collected = _collected(interpreter, step, values, index, count, carried)
            if collected is not None:
                return collected
        if over_a_size:
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


class _Body:
    """The body of a loop of the graph, with the values that it carries from iteration to iteration.

    Attributes:
        region: The loop's blocks and the operands that they take from outside.
        first: The carried values of the first iteration, as tensors.
    """

    def __init__(self, region: Region, carried: list[Any]) -> None:
        self.region = region
        (self._block,) = region.step.blocks
        count = len(self._block.outputs)
        # Numbers are unknown in a try as in the graph: what an iteration writes and keeps must not follow from the first's.
        tried = region.tried(
            lambda operands: region.function(self._block, [unknown(0), *mapped(carried, unknown)])(operands)
        )
        self._outer = region.outer
        self._carried = filled(carried, tried[1:count])
        start = [*leaves(self._carried), *leaves(self._outer)]
        _, after = region.tried(lambda operands: self._iterated(unknown(0), [unknown(v) for v in start], operands))
        self._kept = kept = [a if a is not UNINITIALIZED else b for a, b in zip(start, after, strict=True)]
        # A tensor that the body only passes on, or writes in place, is the tensor of the outside.
        self._tied = [isinstance(a, torch.Tensor) and region.operand(b) is a for a, b in zip(kept, after, strict=True)]
        self._moving = [
            i
            for i, (a, b) in enumerate(zip(kept, after, strict=True))
            if not self._tied[i] and (is_computed(b) or not same(a, b))
        ]
        _check_writes(region, [kept[i] for i in self._moving if i < len(kept) - len(region.mutated)])
        for i in self._moving:
            if not is_computed(kept[i]) or not (is_computed(after[i]) or after[i] is UNINITIALIZED):
                raise _changes_kind(region.step, kept[i], after[i])
        self._likes = [after[i] if isinstance(after[i], torch.Tensor) else kept[i] for i in self._moving]
        self._before, self._after = [start[i] for i in self._moving], [after[i] for i in self._moving]
        self.first = as_results(self._before, self._likes, region.operands)

    def _rebuilt(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        rest = iter(flat)
        return mapped(self._carried, lambda _: next(rest)), mapped(self._outer, lambda _: next(rest))

    def _iterated(self, number: Any, flat: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, list[Any]]:
        now, outer_now = self._rebuilt(flat)
        after = self.region.function(self._block, [number, *now], outer_now)(operands)
        count = len(self._block.outputs)
        results, outer_after = after[:count], after[count:]
        results[1:] = filled(results[1:], self._carried)
        if structure(results[1:]) != structure(self._carried) or structure(outer_after) != structure(self._outer):
            raise _changes_kind(self.region.step, self._carried, results[1:])
        return results[0], [*leaves(results[1:]), *leaves(outer_after)]

    def _unpacked(self, state: Sequence[Any]) -> list[Any]:
        flat = list(self._kept)
        for i, like, value in zip(self._moving, self._likes, state, strict=True):
            flat[i] = as_before(value, like)
        return flat

    def once(
        self, number: Any, state: Sequence[Any], operands: Sequence[Any], added: Callable[[], Sequence[Any]] = tuple
    ) -> tuple[Any, list[torch.Tensor]]:
        """An iteration: whether to go on, then the new state and the tensors that the iteration added to lists.

        Args:
            state: The state after the last iteration.
            added: Returns, once the iteration has run, the tensors that it added to lists.
        """
        still, flat = self._iterated(number, self._unpacked(state), operands)
        for i in set(range(len(flat))).difference(self._moving):
            kept = self._kept[i]
            if not (self.region.operand(flat[i]) is kept if self._tied[i] else same(flat[i], kept)):
                raise _changes_kind(self.region.step, kept, flat[i])
        new = list(added())
        likes = [*self._likes, *new]
        return still, as_results([*(flat[i] for i in self._moving), *new], likes, [*operands, *state])

    def finished(self, state: Sequence[Any]) -> list[Any]:
        """The outputs of the loop from the final state of its operator; applies the loop's changes of the outside."""
        now, outer_now = self._rebuilt(self._unpacked(state))
        outputs = self.region.accepted([*now, *outer_now])
        # What is written in place has its value back in its own memory.
        count = sum(i < len(self._kept) - len(self.region.mutated) for i in self._moving)
        self.region.remember(state[:count], self._before[:count], self._after[:count])
        return outputs


def _while(region: Region, index: int, count: Any, going: Any, carried: list[Any]) -> list[Any]:
    step = region.step
    body = _Body(region, carried)
    size = len(body.first)
    last = step.place.call(as_int, count) if not isinstance(count, torch.SymInt) else count

    def condition(number: Any, still: Any, *rest: Any) -> torch.Tensor:
        limit = rest[size] if bounded else None
        return still.clone() if limit is None else torch.logical_and(still, number < limit)

    def step_once(number: Any, _: Any, *rest: Any) -> tuple[Any, ...]:
        still, results = body.once(number.item(), rest[:size], rest[size + bounded :])
        return number + 1, truth_tensor(still).clone(), *results

    bounded = not (isinstance(last, int) and last >= _UNBOUNDED)
    limits = (scalar(last, torch.int64),) if bounded else ()
    begin = (scalar(index, torch.int64), truth_tensor(going).clone(), *body.first)
    results = _operator(step, while_loop_op, condition, step_once, begin, (*limits, *_apart(region.operands)))
    return body.finished(results[2:])


def _apart(operands: Sequence[Any]) -> list[Any]:
    """Operands without two that share memory, which torch's operators with graphs refuse: the later ones are copies."""
    apart: list[Any] = []
    for operand in operands:
        tensors = [other for other in apart if isinstance(other, torch.Tensor)]
        is_alias = isinstance(operand, torch.Tensor) and any(is_alias_of(operand, other) for other in tensors)
        apart.append(operand.clone() if is_alias else operand)
    return apart


def _operator(step: Step, operator: Callable[..., Any], *args: Any) -> Any:
    try:
        return step.place.call(operator, *args)
    except (ContainerChanged, CaptureError):
        raise
    except Exception as error:
        raise CaptureError(
            f"the loop at {step.place} ends by a tensor's values and can't be a loop of the graph: {error}",
            hint="What it carries must keep its shape and dtype; let the number of iterations be known otherwise.",
        ) from error


# -- loops that add to lists -------------------------------------------------------------------------------------------


def _collected(
    interpreter: Interpreter, step: Step, values: Values, index: int, count: Any, carried: list[Any]
) -> list[Any] | None:
    """A loop over a dynamic size that uses lists of tensors only to add to them: a scan.

    After it the lists are of dynamic length. ``None`` where the loop adds to no list.
    """
    lists = _added_to(interpreter, step, values, carried)
    if not lists:
        return None
    growing = {id(items): Growing() for items in lists}

    def inside(value: Any) -> Any:
        return growing.get(id(value), value)

    region = Region(interpreter, step, {number: inside(value) for number, value in values.items()})

    def added() -> list[torch.Tensor]:
        return [item for one in growing.values() for item in one.items]

    def emptied() -> None:
        for one in growing.values():
            one.items = []

    numbers: list[int] = []

    def step_once(*rest: Any) -> tuple[Any, ...]:
        emptied()
        state, number, operands = rest[:size], rest[size], rest[size + 1 :]
        still, results = body.once(number.item(), state, operands, added)
        assert still is True
        numbers[:] = [len(one.items) for one in growing.values()]
        return tuple(results)

    try:
        body = _Body(region, [inside(value) for value in carried])
        size = len(body.first)
        emptied()
        turns = torch.arange(index, count)
        with patched(scans, "first_slice_copy", lambda sequence: sequence.new_empty(sequence.shape[1:])):
            # torch slices the first turn, which would guard that there is a turn.
            results = step.place.call(scans.scan_op, step_once, tuple(body.first), (turns,), tuple(region.operands))
        rows = iter(results[size:])
        after = {
            id(items): stacked(items, [next(rows) for _ in range(number)]) if number else items
            for items, number in zip(lists, numbers, strict=True)
        }
    except (ContainerChanged, CaptureError):
        raise
    except Exception as error:
        raise CaptureError(
            f"the loop at {step.place} runs as often as a dynamic size says and adds to a list, which can't be a loop of the "
            f"graph: {error}",
            hint="Each iteration must add tensors of one shape and dtype, and not read the list.",
        ) from error
    grown_lists = {id(one): after[key] for key, one in growing.items()}
    outputs = [grown_lists.get(id(value), value) for value in body.finished(results[:size])]
    for number, value in values.items():
        values[number] = after.get(id(value), value)
    return outputs


def _added_to(interpreter: Interpreter, step: Step, values: Values, carried: Sequence[Any]) -> list[Any]:
    """The lists of tensors of the outside that the body of a loop adds to, if nothing but variables holds them."""
    (body,) = step.blocks
    inside = {**values, **dict(zip(body.inputs[1:], carried, strict=True))}
    grown = {inner.inputs[0] for inner in body.nested() if inner.kind in GROWTH}
    lists = {id(inside[n]): inside[n] for n in grown if isinstance(inside.get(n), list | Stacked)}
    borrowed = [*interpreter.borrowed, *(one for value in interpreter.attributes.values() for one in lists_in(value))]
    nested = [inner for value in inside.values() for inner in lists_in(value) if inner is not value]
    held = {id(one) for one in (*borrowed, *nested)}
    return [
        items
        for key, items in lists.items()
        if key not in held
        and (isinstance(items, Stacked) or all(isinstance(item, torch.Tensor | ScalarTensor) for item in items))
    ]


def _check_writes(region: Region, carried: Sequence[Any]) -> None:
    """Refuses a body that writes in place to a tensor of the first iteration, and carries another tensor on."""
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
