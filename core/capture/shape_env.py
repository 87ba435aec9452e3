"""Guards and replacements that torch records while an operator is traced, kept apart from those of the program."""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxplug.capture.signature import Captured
from onnxplug.capture.size_guards import Condition, FixedExpressionError, conditions_of_decompositions, is_of_layout
from onnxplug.torch_private import FakeTensor, backed_values, uninteresting_files
from onnxplug.warn import warn

#: The first of the sizes that replace examples of 0 and 1; the others are the next odd numbers.
_LARGER = 11
#: How many times the example of a size is doubled until the sizes that follow from it exceed 1, such as a 4096th of it.
_DOUBLINGS = 12


@contextlib.contextmanager
def undone_on_error(env: ShapeEnv) -> Iterator[None]:
    """On an error, takes back everything that torch recorded about sizes within the context.

    A trace that is refused because it is right only for some sizes has made torch believe that the program has these sizes:
    later nodes would be converted for them.
    """
    saved = state_of(env)
    try:
        yield
    except BaseException:
        restore(env, saved)
        raise


@contextlib.contextmanager
def undone(env: ShapeEnv | None) -> Iterator[None]:
    """Takes back everything that torch recorded about sizes within the context."""
    saved = state_of(env) if env is not None else {}
    try:
        yield
    finally:
        if env is not None:
            restore(env, saved)


@contextlib.contextmanager
def larger_examples(env: ShapeEnv, small: Iterable[Any]) -> Iterator[None]:
    """Within the context, sizes whose example is 0 or 1 have another example, so that torch does not specialise for these two.

    Args:
        env: torch's notes.
        small: The sizes that :func:`small_sizes` finds, such as ``(n + 1) // 2`` where n is 2 in the example inputs.
    """
    import sympy

    saved = state_of(env)
    examples = backed_values(env)
    before = dict(examples)
    changed = [symbol for symbol, value in examples.items() if value in (0, 1)]
    # The last symbol gets the smallest example, so that an order of sizes that torch recorded does not hold by chance.
    examples.update({symbol: sympy.Integer(_LARGER + 2 * i) for i, symbol in enumerate(reversed(changed))})
    for size in small:
        for _ in range(_DOUBLINGS):
            if size.xreplace(examples) not in (0, 1):
                break
            examples.update({symbol: 2 * examples[symbol] for symbol in size.free_symbols & examples.keys()})
    env.fake_tensor_cache.clear()
    _forget_answers(env)
    try:
        yield
    except BaseException:
        restore(env, saved)
        raise
    examples.clear()
    examples.update(before)
    env.fake_tensor_cache.clear()
    _forget_answers(env)


@contextlib.contextmanager
def layout_not_noted(env: ShapeEnv) -> Iterator[None]:
    """Within the context, torch records no guards for its questions about strides.

    They are answered for the example's sizes, as always: ONNX has no strides, so that either answer is right. But torch would
    conclude from the answer what it asks next, which does matter.
    """
    from sympy.logic.boolalg import Boolean

    evaluate = env.evaluate_expr

    def answer(expr: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(expr, Boolean) and expr.free_symbols and _is_layout_question():
            truth = expr.xreplace(backed_values(env))
            if not truth.free_symbols:
                return truth
        return evaluate(expr, *args, **kwargs)

    # As if it were in torch's own file: torch records the asking line with each condition, and skips its own files.
    answer.__code__ = answer.__code__.replace(co_filename=ShapeEnv.evaluate_expr.__code__.co_filename)
    env.evaluate_expr = answer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del env.evaluate_expr


def _is_layout_question() -> bool:
    """Whether the question comes from a function that decides strides: the innermost frame outside torch's arithmetic on sizes."""
    frame: Any = sys._getframe(2)
    passed = uninteresting_files()
    while frame is not None and frame.f_code.co_filename in passed:
        frame = frame.f_back
    return frame is not None and is_of_layout(
        traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    )


def small_sizes(env: ShapeEnv, values: Iterable[Any]) -> list[Any]:
    """The dynamic sizes of some tensors that are 0 or 1 for the example inputs, or have a symbol that is."""
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    expressions = dict.fromkeys(s.node.expr for s in sizes if isinstance(s, torch.SymInt))
    examples = backed_values(env)
    return [e for e in expressions if any(x.xreplace(examples) in (0, 1) for x in (e, *e.free_symbols))]


def with_current_examples(env: ShapeEnv, value: Any) -> Any:
    """A copy of a fake tensor or size with the present examples of the sizes."""

    def size(s: Any) -> Any:
        if not isinstance(s, torch.SymInt):
            return s
        expr = s.node.expr
        hint = expr.xreplace(backed_values(env))
        return env.create_symintnode(expr, hint=int(hint) if hint.is_number else None)

    if isinstance(value, torch.SymInt):
        return size(value)
    if not isinstance(value, FakeTensor) or value.is_conj() or value.is_neg() or value.layout is not torch.strided:
        return value
    shape, strides = [size(s) for s in value.shape], [size(s) for s in value.stride()]
    with value.fake_mode:
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def state_of(env: ShapeEnv) -> dict[str, Any]:
    """torch's records about sizes so far."""
    return {n: copy.copy(v) for n, v in vars(env).items() if hasattr(v, "clear") and hasattr(v, "copy")}


def restore(env: ShapeEnv, saved: dict[str, Any]) -> None:
    """Takes back everything that torch has recorded since.

    Args:
        env: torch's notes.
        saved: The result of :func:`state_of`.
    """
    for name, value in saved.items():
        record = getattr(env, name)
        record.clear()
        (record.extend if isinstance(record, list) else record.update)(value)
    _forget_answers(env)


def _forget_answers(env: ShapeEnv) -> None:
    """Empties torch's caches of conclusions about sizes."""
    env._update_version_counter()
    if hasattr(env, "_replacements_version_counter"):
        env._replacements_version_counter += 1
    for method in vars(ShapeEnv).values():
        forget = getattr(method, "cache_clear", None)
        if forget is not None:
            forget()


def shape_env_of(program: torch.export.ExportedProgram) -> Any:
    """torch's environment of the program's dynamic sizes; ``None`` where it has none."""
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            for size in value.shape if isinstance(value, torch.Tensor) else (value,):
                if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
                    return size.node.shape_env
    return None


def new_conditions(captured: Captured, known: int) -> list[Condition]:
    """The guards on sizes that a decomposition adds to the ``known`` first ones, each with a warning.

    Raises:
        FixedDimensionError: A size comes out static.
    """
    program, names = captured.program, captured.size_names()
    ranges = {s: _ints(limits) for s, limits in program.range_constraints.items()}
    expressions = {condition.expr for condition in captured.conditions}
    conditions = []
    for condition in conditions_of_decompositions(program, ranges, since=known):
        if condition.expr in expressions:
            continue
        if condition.fixed:
            called = " and ".join(repr(names.get(symbol, symbol)) for symbol in sorted(map(str, condition.symbols)))
            raise FixedExpressionError(
                f"{called} came out static: torch's decomposition of the program holds only where {condition.text(names)}",
                hint="Make that dimension static in dynamic_shapes, or write the code that depends on its value in another way.",
            )
        warn(
            f"the exported model is right only where {condition.text(names)}: torch's decomposition of the program depends on it. "
            "Declare the range (torch.export.Dim(name, min=..., max=...)).",
        )
        conditions.append(condition)
    return conditions


def _ints(limits: Any) -> tuple[int | None, int | None]:
    """The ends of a torch range, ``None`` where it is open."""
    low, high = limits.lower, limits.upper
    return int(low) if low.is_Integer else None, int(high) if high.is_Integer else None
