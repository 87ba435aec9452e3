"""Records the questions of code about dynamic sizes while torch.export traces a model.

torch keeps a guard only for an answer that it does not know already: an answer that follows from earlier guards, or from its own
assumption that no size is 0, leaves none. So every question of Python code is recorded with the user's line. Questions of operators
are recorded where the model's code may handle the refusal of other sizes (:mod:`onnxplug.capture.handlers`).

The texts of sizes (``str(n)``), of tensors and of numbers read from tensors are recorded too: while a model is captured, they are
torch's names. So are conditions of tensors' values (``flag.item()``), where code may compare them by ``is``.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal, NamedTuple

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch.fx.experimental import sym_node, symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, uninteresting_files

from onnxplug.capture.branches import Branches
from onnxplug.capture.broadcasts import Broadcast, broadcast_of, broadcasts_last
from onnxplug.capture.data_dependent import is_only_tested, is_unpacked
from onnxplug.capture.general import general_answer, removes_axis
from onnxplug.capture.handlers import ANY, handler_over
from onnxplug.capture.locations import KERNELS, TRACING, is_core_file, is_torch_file, user_line
from onnxplug.capture.patching import patched
from onnxplug.capture.refusals import Answers
from onnxplug.capture.symbolic_numbers import (
    constant,
    divided,
    is_of_sizes,
    is_unequal_by_class,
    observing_reads,
    plain_operand,
)
from onnxplug.torch_private import (
    FakeTensor,
    NonStrictFunctions,
    OpOverload,
    fx_config,
    pytree,
)

#: Parts of torch that compute the shapes of operators' results, or run operators written in C++.
_OPERATORS = (
    *("_meta_registrations.py", "_ops.py", "_dynamo/utils.py"),
    *(f"{folder}{os.sep}" for folder in ("_subclasses", "_refs", "_prims", "_prims_common", "_decomp", "_library")),
    *(f"{folder}{os.sep}" for folder in ("_export", "export", "fx", "utils", "_inductor", "_functorch")),
    *("_higher_order_ops" + os.sep,),
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DYNAMO = _TORCH + "_dynamo" + os.sep
#: Higher-order operators that go over an axis.
_OVER_ALL = tuple(os.path.join(_TORCH, "_higher_order_ops", name) for name in ("map.py", "scan.py"))
#: torch's functions that make assertions of earlier questions.
_ASSERTIONS = os.path.join(_TORCH, "fx", "passes", "runtime_assert.py")
_local = threading.local()


class Question(NamedTuple):
    """A question about sizes.

    Attributes:
        expr: sympy's condition on torch's symbols, which the example's sizes fulfil.
        place: The user's ``file:line``.
        asker: ``code`` of the model; a ``layer`` or function of torch that it calls; ``check``, which is ``torch._check``; an
            ``operator`` whose refusal of other sizes the model may handle; ``constant``, an operator's argument in the graph or the
            length of a list; or ``list``, the length of a list that is unpacked, or whose parts are only joined again.
    """

    expr: Any
    place: str | None
    asker: Literal["code", "layer", "check", "operator", "constant", "list"] = "code"


class Fixing(NamedTuple):
    """An operator that accepts a single size, or code that goes on with a single size.

    Attributes:
        source: torch's name for the size: ``L['x'].size()[0]``.
        place: The user's ``file:line``.
        operator: The operator's name, ``None`` where it isn't known.
        shape: The shape of the other argument that has the size; ``None`` where there is none.
    """

    source: str
    number: int
    place: str | None
    operator: str | None
    shape: tuple[int, ...] | None


@dataclass
class Recorded:
    """The recorder of questions about dynamic sizes.

    Attributes:
        oblivious: Whether torch keeps the sizes 0 and 1 symbolic.
        general: Whether operators that ask whether a symbolic size is 1 get the answer for other sizes.
        generalized: Whether an operator got that answer.
        questions: The questions in their order, each once.
        places: Condition of an operator to the user's ``file:line``.
        of_kernels: Conditions of torch's guards that operators in C++ have asked; the guards name the line that calls these.
        unpacked: Conditions asked by calls whose result the model's code unpacks, ``a, b = x.chunk(2)``.
        texts: ``file:line`` where the text of a size or tensor was taken, and not only printed.
        truths: ``file:line`` where code got a condition of tensors' values that it may compare by ``is``.
        fixings: The sizes that operators fixed.
        broadcasts: Sizes that are 1 in the example, and that operators broadcast.
        elements: Data-dependent sizes for which operators got the answer that they are not 0.
        answers: What code is answered that asks for values of tensors; ``None``: torch's error.
        branches: The branches on values that may become selections; ``None``: none.
        decides: Whether the model's comparisons of sizes are answered at once, as its code may compare the answer by ``is``.
        unknown: torch's error for the first question of the model's code that has no answer, which the code may have handled.
    """

    oblivious: bool = False
    general: bool = False
    generalized: bool = False
    questions: dict[Question, None] = field(default_factory=dict)
    places: dict[Any, str] = field(default_factory=dict)
    of_kernels: set[Any] = field(default_factory=set)
    unpacked: set[Any] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    truths: list[str] = field(default_factory=list)
    fixings: list[Fixing] = field(default_factory=list)
    broadcasts: list[Broadcast] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)
    answers: Answers | None = None
    branches: Branches | None = None
    decides: bool = False
    unknown: Exception | None = None

    def note_read(self, frame: FrameType) -> None:
        """Records that code got a condition of tensors' values."""
        place = place_of(frame)
        if place is not None and not is_only_tested(frame):
            self.truths.append(place)

    def count(self, env: ShapeEnv) -> tuple[int, ...]:
        """The number of questions so far."""
        return len(env.guards), len(self.questions), len(self.fixings), len(self.broadcasts)


class Replaced:
    """A replacement of an attribute as long as any thread needs it; it is called with the original and the arguments of a call."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._original = original = getattr(owner, name)
        self._lock = threading.Lock()
        self._depth = 0

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self._replaced = replaced

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
            setattr(self._owner, self._name, self._replaced)
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    setattr(self._owner, self._name, self._original)


@contextlib.contextmanager
def recorded(
    *, general: bool = False, answers: Answers | None = None, branches: Branches | None = None, decides: bool = False
) -> Iterator[Recorded]:
    """Within the context, records this thread's questions about dynamic sizes; arguments as in :class:`Recorded`."""
    # torch's place of a guard is the innermost frame outside of these files.
    uninteresting_files().update((__file__, *TRACING))
    before = getattr(_local, "recorded", None)
    oblivious = bool(fx_config.backed_size_oblivious)
    _local.recorded = record = Recorded(
        oblivious, general and oblivious, answers=answers, branches=branches, decides=decides
    )
    try:
        with contextlib.ExitStack() as stack:
            for replaced in (_evaluations, _defaults, _prints, *_operands, *_texts, *_comparisons):
                stack.enter_context(replaced())
            function = getattr(NonStrictFunctions, "__torch_function__", None)  # of the non-strict mode
            if decides and function is not None:
                stack.enter_context(
                    patched(NonStrictFunctions, "__torch_function__", observing_reads(function, record.note_read))
                )
            yield record
    finally:
        _local.recorded = before


def _evaluate_expr(original: Callable[..., Any], env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
    record: Recorded | None = getattr(_local, "recorded", None)
    if record is None:
        return original(env, expr, *args, **kwargs)
    frame = sys._getframe(2)
    if record.oblivious:
        if _is_broadcast(record, expr, frame):
            return sympy.false if isinstance(expr, sympy.Ne) else sympy.true
        if broadcasts_last(expr, frame):
            return sympy.true
    general = general_answer(env, expr, frame) if record.general else None
    if general is not None and _asking(frame) is None:
        record.generalized = True
        return general
    known = len(env.guards)
    unknown: Exception | None = None
    try:
        answer = original(env, expr, *args, **kwargs)
    except GuardOnDataDependentSymNode as error:
        unknown = error
    if unknown is not None:
        if _asks_for_elements(frame) and (some := _nonempty(record, env, expr)) is not None:
            return some
        return _answer_unknown(record, env, expr, unknown, _asking_for_values(frame))
    guard = env.guards[-1] if len(env.guards) > known else None
    if guard is not None and (place := place_of(frame)) is not None:
        record.places.setdefault(guard.expr, place)
        if isinstance(guard.expr, sympy.Eq) and is_unpacked(_frame_of_model(frame)):
            record.unpacked.add(guard.expr)
    if kwargs.get("fallback_value") is None:
        _record(record, env, expr, answer, guard, frame)
    return answer


def _answer_unknown(record: Recorded, env: ShapeEnv, expr: Any, error: Exception, frame: FrameType | None) -> Any:
    """The answer to a question that torch can't answer; a model that handles torch's error must not decide anything by it."""
    answer = None
    of_size = env.size_like.intersection(getattr(expr, "free_symbols", ()))
    if record.branches is not None and frame is not None and not of_size and record.branches.note(frame):
        record.unknown = record.unknown or error
        raise error
    if record.answers is not None and isinstance(expr, Boolean):
        answer = record.answers.give(env, expr, error, frame, lambda: record.count(env))
    if answer is None:
        record.unknown = record.unknown or (error if frame is not None else None)
        raise error
    return answer


def _nonempty(record: Recorded, env: Any, expr: Any) -> Any:
    """The answer to the question whether a data-dependent size is 0, for a size that is not; ``None`` for other questions.

    torch assumes the same of other dynamic sizes. The operator stays whole in the graph, and its rule is right for the size 0.
    """
    left, right = expr.args if isinstance(expr, sympy.core.relational.Relational) else (None, None)
    size = left if right in (0, 1) else right if left in (0, 1) else None
    if not isinstance(size, sympy.Expr) or not env.size_like.intersection(size.free_symbols):
        return None
    if not env.bound_sympy(size).lower >= 0:
        return None
    some, none = expr.subs(size, sympy.Dummy(integer=True, positive=True)), expr.xreplace({size: sympy.Integer(0)})
    if some not in (sympy.true, sympy.false) or none != sympy.Not(some):
        return None
    record.elements.append(size)
    return some


def _asks_for_elements(frame: FrameType | None) -> bool:
    """Whether an operator asks, and no handler of the model's code may take its error."""
    asking, of_kernel = _asking(frame), False
    inner = frame
    while inner is not None and inner is not asking:
        of_kernel |= inner.f_code.co_name == "guard_bool" and bool(inner.f_locals.get("file"))
        inner = inner.f_back
    return (asking is None or of_kernel) and handler_over(frame, ANY, ends_model) is None


def _record(record: Recorded, env: ShapeEnv, expr: Any, answer: Any, guard: Any, frame: FrameType) -> None:
    """Records a question, in addition to torch's own guard."""
    if expr.is_Symbol:  # int(size), or an argument that is an int
        record.fixings += _fixings(env, expr, frame)
    if expr.is_Atom:
        return
    if isinstance(expr, sympy.Eq) and bool(answer) and len(expr.free_symbols) == 1:
        record.fixings += _fixings(env, next(iter(expr.free_symbols)), frame)
    asking = _asking(frame)
    if asking is not None:
        condition = {sympy.true: expr, sympy.false: sympy.Not(expr)}.get(answer)
        record.questions.setdefault(
            _question(condition if condition is not None else sympy.Eq(expr, answer), asking, env)
        )
        return
    if guard is not None and is_of_python(guard.sloc):
        record.of_kernels.add(guard.expr)
    if guard is not None and handler_over(frame, ANY, ends_model) is not None:
        place = record.places.get(guard.expr) or user_line(guard.sloc)
        record.questions.setdefault(Question(guard.expr, place, "operator"))


def _guard_or(original: Callable[..., bool], condition: Any, default: bool) -> bool:
    """Answers that a size is 1 where it is broadcast, or where a squeeze removes its axis, without a guard of torch."""
    record: Recorded | None = getattr(_local, "recorded", None)
    if record is not None and record.oblivious and isinstance(condition, torch.SymBool):
        expr, frame = condition.node.expr, sys._getframe(2)
        if _is_broadcast(record, expr, frame) or broadcasts_last(expr, frame) or removes_axis(condition, frame):
            return True
    return original(condition, default)


def _is_broadcast(record: Recorded, expr: Any, frame: FrameType) -> bool:
    """Whether a condition is that a broadcast size is 1; the broadcast is recorded then."""
    broadcast = broadcast_of(expr, frame)
    record.broadcasts += [broadcast] if broadcast is not None else []
    return broadcast is not None


def _fixings(env: Any, symbol: Any, frame: FrameType | None) -> Iterator[Fixing]:
    """Records the size that an operator or a comparison fixes, if it does."""
    number = env.replace(symbol)
    if not number.is_Integer or not env.var_to_sources.get(symbol):
        return
    place, operator, shape = place_of(frame), None, None
    while frame is not None and not ends_model(frame.f_code.co_filename):
        called = frame.f_locals.get("func")
        if isinstance(called, OpOverload):  # the outermost operator is the model's call
            operator = called._schema.name
            arguments = pytree.tree_leaves((frame.f_locals.get("args"), frame.f_locals.get("kwargs")))
            shapes = [a.shape for a in arguments if isinstance(a, torch.Tensor)]
            shape = next((tuple(s) for s in shapes if all(type(n) is int for n in s) and int(number) in s), None)
        frame = frame.f_back
    yield Fixing(name_of(env.var_to_sources[symbol][0]), int(number), place, operator, shape)


def name_of(source: Any) -> str:
    """torch's name of an input, or of its size."""
    name: Any = source.name
    return str(name() if callable(name) else name)  # a method before torch 2.10


# -- texts, comparisons and arithmetic, which torch answers without a question -----------------------------------------


def _text(original: Callable[..., str], captured: Any, *args: Any, **kwargs: Any) -> str:
    record, frame = getattr(_local, "recorded", None), sys._getframe(2)
    file = frame.f_code.co_filename
    prints = getattr(_local, "prints", False) or file == logging.__file__
    is_known = isinstance(captured, torch.Tensor) and not isinstance(captured, FakeTensor)
    if record is not None and _is_of_model(file) and not prints and not is_known:
        record.texts.append(f"{file}:{frame.f_lineno}")
    return original(captured, *args, **kwargs)


def _print(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    _local.prints = True
    try:
        original(*args, **kwargs)
    finally:
        _local.prints = False


def _to_node(original: Callable[..., Any], node: Any, number: Any) -> Any:
    if type(number) not in _TAKEN and getattr(_local, "recorded", None) is not None:
        number = plain_operand(number, of_condition=node.is_bool())
    return original(node, number)


def _simplify_floor_div(original: Callable[..., Any], env: ShapeEnv, expr: Any) -> Any:
    """Leaves an expression in ``math.floor`` and ``ceil`` as it is: torch takes each ``//`` there for exact, by own guards."""
    return original(env, expr) if getattr(_local, "recorded", None) is None else expr


def _divide(
    operation: Callable[..., Any], is_reflected: bool, original: Callable[..., Any], first: Any, second: Any
) -> Any:
    is_of_floats = isinstance(first, _FLOATS) or isinstance(second, _FLOATS)
    if not is_of_floats or getattr(_local, "recorded", None) is None:
        return original(first, second)
    return divided(operation, *((second, first) if is_reflected else (first, second)))


def _round(original: Callable[..., Any], number: Any, digits: Any = None) -> Any:
    """``round(n, -1)`` makes the size a constant: torch returns the size itself."""
    if digits is None or not digits < 0 or getattr(_local, "recorded", None) is None:
        return original(number, digits)
    return round(constant(number), digits)


def _compare(relation: str, original: Callable[..., Any], first: Any, second: Any) -> Any:
    """Records a comparison that torch answers at once because it assumes that sizes are positive."""
    record: Recorded | None = getattr(_local, "recorded", None)
    if record is not None and isinstance(first, torch.SymBool):
        return _RELATIONS[relation](constant(first), constant(second))
    answer = original(first, second)
    if record is not None and relation in ("Eq", "Ne") and is_unequal_by_class(answer, second):
        return _RELATIONS[relation](constant(first), second)
    if record is not None and record.decides and _is_of_model((frame := sys._getframe(2)).f_code.co_filename):
        if is_of_sizes(answer):
            return bool(answer)
        if isinstance(answer, torch.SymBool) and not is_only_tested(frame):
            record.truths.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    truth = getattr(getattr(answer, "node", None), "expr", answer)
    if record is None or not (isinstance(truth, bool) or truth is sympy.true or truth is sympy.false):
        return answer
    condition = _undecided(relation if truth else _OPPOSITE[relation], first, second)
    asking = _asking(sys._getframe(2)) if condition is not None else None
    if asking is not None:
        record.questions.setdefault(_question(condition, asking, first.node.shape_env))
    return answer


def ask(condition: Any, frame: FrameType, env: Any) -> None:
    """Records a condition under which the result is right that onnxplug gives the model's code.

    Args:
        frame: The frame of that code.
        env: torch's environment of the dynamic sizes.
    """
    record: Recorded | None = getattr(_local, "recorded", None)
    if record is not None:
        record.questions.setdefault(_question(condition, frame, env))


def _undecided(relation: str, *sides: Any) -> Any:
    """A true comparison as sympy's; ``None`` where it holds at the size 0 too."""
    exprs = [getattr(getattr(side, "node", None), "expr", side) for side in sides]
    return _undecided_of(relation, *exprs) if all(isinstance(e, sympy.Basic | int | float) for e in exprs) else None


@functools.lru_cache(maxsize=1024, typed=True)
def _undecided_of(relation: str, *exprs: Any) -> Any:
    condition = getattr(sympy, relation)(*map(sympy.sympify, exprs), evaluate=False)
    nonnegative = {
        s: sympy.Symbol(s.name, integer=True, nonnegative=True) for s in condition.free_symbols if s.is_positive
    }
    return condition if nonnegative and condition.xreplace(nonnegative) is not sympy.true else None


_OPPOSITE = {"Eq": "Ne", "Ne": "Eq", "Lt": "Ge", "Ge": "Lt", "Gt": "Le", "Le": "Gt"}
#: Classes of operands that torch's symbolic numbers take as they are.
_TAKEN = frozenset((int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
_FLOATS = (float, torch.SymFloat)
_RELATIONS = {relation: getattr(operator, relation.lower()) for relation in _OPPOSITE}
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_comparisons = [
    Replaced(kind, f"__{relation.lower()}__", functools.partial(_compare, relation))
    for kind in _SYMBOLIC
    for relation in (_OPPOSITE if kind is not torch.SymBool else ("Eq", "Ne"))
]
_arithmetic: list[tuple[Any, str, Callable[..., Any]]] = [
    (sym_node, "to_node", _to_node),
    (ShapeEnv, "_simplify_floor_div", _simplify_floor_div),
    (torch.SymInt, "__round__", _round),
    *(
        (kind, f"__{side}{operation.__name__}__", functools.partial(_divide, operation, side == "r"))
        for kind in (torch.SymInt, torch.SymFloat)
        for operation in (operator.floordiv, operator.mod)
        for side in ("", "r")
    ),
]
# A torch without one of these names computes otherwise.
_operands = [Replaced(owner, name, function) for owner, name, function in _arithmetic if hasattr(owner, name)]
_evaluations = Replaced(ShapeEnv, "evaluate_expr", _evaluate_expr)
_defaults = Replaced(symbolic_shapes, "_guard_or", _guard_or)
_texts = [Replaced(kind, "__repr__", _text) for kind in (*_SYMBOLIC, torch.Tensor)]
_texts.append(Replaced(torch.Tensor, "__format__", _text))
_prints = Replaced(builtins, "print", _print)


# -- the asking frame --------------------------------------------------------------------------------------------------


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame of the Python code that asks; ``None`` where an operator with tensors as results asks, or onnxplug.

    Args:
        frame: The frame at which the search begins.
    """
    skipped, check = uninteresting_files(), None
    of_operator: bool | None = None
    of_kernel = False
    while frame is not None:
        file = frame.f_code.co_filename
        # meta_tensor makes a fake tensor of a tensor that a branch of the graph reads, map and scan refuse empty axes.
        if frame.f_code.co_name == "meta_tensor" or file in _OVER_ALL:
            return None
        if frame.f_code.co_name == "guard_bool":  # which looks up the asking line in C++, where none in Python asks
            of_kernel = bool(frame.f_locals.get("file"))
        if file not in skipped:
            if is_core_file(file) or file == _ASSERTIONS:
                return None
            if not _is_of_operators(file):
                return None if of_operator or (of_kernel and is_torch_file(file)) else check or frame
            computes = _computes(frame)
            if computes:
                return None
            of_operator = computes is None if of_operator is None or computes is False else of_operator
        if file == torch.__file__ and frame.f_code.co_name.startswith(("_check", "_assert")):
            check = check or frame
        frame = frame.f_back
    return None


def _asking_for_values(frame: FrameType | None) -> FrameType | None:
    """The frame of the code that reads values of tensors, as ``if tensor`` does; ``None`` where an operator does."""
    skipped = uninteresting_files()
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in skipped:
            if is_core_file(file) or _computes(frame):
                return None
            if not _is_of_operators(file):
                return frame
        frame = frame.f_back
    return None


def _computes(frame: FrameType) -> bool | None:
    """Whether a frame of torch runs an operator with tensors as results; ``None`` where it only takes part in running code."""
    name, values = frame.f_code.co_name, frame.f_locals
    if name == "_tensor_min_max":  # the non-strict mode's replacements of max and min
        return False
    if name == "run_node":  # a node that the strict mode traced: on numbers alone, it is a Python operator
        leaves = pytree.tree_leaves((values.get("args"), values.get("kwargs")))
        return any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    called = values.get("func", values.get("self"))
    if isinstance(called, OpOverload):
        return _gives_tensors(called._schema.name.partition("::")[2], (called,))
    name = getattr(called, "__name__", "") if callable(called) else ""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return _gives_tensors(name, tuple(getattr(packet, o) for o in packet.overloads())) if packet is not None else None


@functools.lru_cache(maxsize=1024)
def _gives_tensors(name: str, operators: tuple[OpOverload, ...]) -> bool | None:
    """Whether operators have tensors among their results; ``None`` for a question about layout, which ONNX doesn't have."""
    if any("Tensor" in str(r.type) for operator in operators for r in operator._schema.returns):
        return True
    return None if name in ("is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format") else False


def _question(condition: Any, frame: FrameType, env: Any) -> Question:
    """A true condition as a question of the asking frame."""
    file = frame.f_code.co_filename
    if file == torch.__file__:
        return Question(condition, place_of(frame), "check" if frame.f_code.co_name.startswith("_check") else "code")
    if file.startswith(_DYNAMO):
        return Question(condition, user_line(env._get_sloc()))
    return Question(condition, place_of(frame), "layer" if is_torch_file(file) else "code")


def place_of(frame: FrameType | None) -> str | None:
    """The innermost line outside of torch, onnxplug and the graph that the strict mode runs again."""
    frame = _frame_of_model(frame)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else None


def _frame_of_model(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside of torch, onnxplug and the graph that the strict mode runs again."""
    while frame is not None:
        file = frame.f_code.co_filename
        if ends_model(file) or file == "<string>":
            return None
        if _is_of_model(file):
            return frame
        frame = frame.f_back
    return None


def is_of_python(sloc: Any) -> bool:
    """Whether a guard comes from Python code, of the model or of torch's layers and functions, and not from an operator."""
    file = getattr(getattr(sloc, "framework_loc", None), "filename", None)
    return file is None or not _is_of_operators(file)


@functools.lru_cache(maxsize=4096)
def _is_of_operators(file: str) -> bool:
    return file in KERNELS or (is_torch_file(file) and file.removeprefix(_TORCH).startswith(_OPERATORS))


def _is_of_model(file: str) -> bool:
    """Whether a file is the model's, or of another library than torch that the model calls."""
    return not is_torch_file(file) and not is_core_file(file)


def ends_model(file: str) -> bool:
    """Whether a file's frames belong neither to the model nor to code that it calls."""
    return is_core_file(file) and file not in TRACING
