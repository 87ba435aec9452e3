"""Records what code asks of dynamic sizes while torch.export traces a model.

torch keeps a guard for what it does not know already; what follows from earlier guards, and from its own assumption that no
size is 0, leaves none. So every question of Python code is recorded when it is asked, with the user's line, and whether the
code asks in order to raise an error, which nothing on the stack handles (:mod:`onnxplug.capture.checks`). What an operator asks
that refuses other sizes is recorded where the model's code handles its error.

The text of a size (``str(n)``) is recorded too: while a model is captured, it is torch's name of the size.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files

from onnxplug.capture.broadcasts import Broadcast, broadcast_of, broadcasts_last
from onnxplug.capture.checks import Spot, following, is_called_by_python, is_handled_at, is_jump, only_raises, spot_of
from onnxplug.capture.implication import implied
from onnxplug.capture.locations import KERNELS, TRACING, is_core_file, is_torch_file, user_line
from onnxplug.capture.patching import patched
from onnxplug.torch_private import OpOverload, SymT, fx_config, pytree

#: Parts of torch that work out the shapes of operators' results, or run operators written in C++.
_OPERATORS = (
    *("_meta_registrations.py", "_ops.py", "_dynamo/utils.py"),
    *(f"{folder}{os.sep}" for folder in ("_subclasses", "_refs", "_prims", "_prims_common", "_decomp", "_library")),
    *(f"{folder}{os.sep}" for folder in ("_export", "export", "fx", "utils", "_inductor", "_functorch")),
    *("_higher_order_ops" + os.sep,),
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DYNAMO = _TORCH + "_dynamo" + os.sep
#: Where torch makes assertions of what it was asked before.
_ASSERTIONS = os.path.join(_TORCH, "fx", "passes", "runtime_assert.py")
_local = threading.local()


class Question(NamedTuple):
    """What Python code asked of sizes.

    Attributes:
        expr: sympy's condition on torch's symbols, which the example's sizes fulfil.
        place: The user's ``file:line``.
        raises: Whether the code raises an error for all sizes that don't fulfil it.
        of_torch: Whether one of torch's own layers and functions asked, that the line calls.
    """

    expr: Any
    place: str | None
    raises: bool
    of_torch: bool = False


class Fixing(NamedTuple):
    """An operator that accepts one size alone.

    Attributes:
        source: What torch calls the size: ``L['x'].size()[0]``.
        number: The size.
        place: The user's ``file:line``.
        operator: The operator's name, ``None`` where it isn't known.
        shape: That of the tensor with the size, among the operator's other arguments; ``None`` where there is none.
    """

    source: str
    number: int
    place: str | None
    operator: str | None
    shape: tuple[int, ...] | None


@dataclass
class Recorded:
    """What Python code asked of dynamic sizes.

    Attributes:
        oblivious: Whether torch keeps the sizes 0 and 1 symbolic.
        general: Whether operators that ask whether a size is 1 are answered as for all other sizes.
        questions: In the order asked, each once.
        places: Condition that an operator asked for to the user's ``file:line``.
        texts: ``file:line`` where the text of a size was taken, and not only printed.
        fixings: What operators made constants of.
        broadcasts: Sizes that are 1 in the example, and that operators broadcast.
        generalized: Whether an operator asked whether a size is 1, and was answered as for the other sizes.
    """

    oblivious: bool
    general: bool = False
    generalized: bool = False
    questions: dict[Question, None] = field(default_factory=dict)
    places: dict[Any, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    fixings: list[Fixing] = field(default_factory=list)
    broadcasts: list[Broadcast] = field(default_factory=list)


class Replaced:
    """An attribute of torch that is another one as long as any thread needs it.

    Args:
        owner: What has the attribute.
        name: Its name.
        replacement: Called with the original, then with the arguments of a call.
    """

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
def recorded(*, general: bool = False) -> Iterator[Recorded]:
    """Records what Python code asks of dynamic sizes while it holds, in this thread.

    Args:
        general: Answer operators that ask whether a size is 1 as for all other sizes, where torch keeps it symbolic.
    """
    # torch names the place of a guard by the innermost frame that is in none of these files.
    uninteresting_files().update((__file__, *TRACING))
    before = getattr(_local, "recorded", None)
    oblivious = bool(fx_config.backed_size_oblivious)
    _local.recorded = result = Recorded(oblivious, general and oblivious)
    try:
        with contextlib.ExitStack() as stack:
            for replaced in (_evaluations, _defaults, _texts, *_comparisons):
                stack.enter_context(replaced())
            yield result
    finally:
        _local.recorded = before


@contextlib.contextmanager
def members_are_compared() -> Iterator[None]:
    """While it holds, torch's strict mode compares a number with each size that it is searched among.

    By itself it takes no size to be equal to a number, and asks nothing.
    """

    from onnxplug.torch_private import SourcelessBuilder, SymNodeVariable, dynamo_lists

    def contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if not search.is_python_constant() or not any(isinstance(item, SymNodeVariable) for item in items):
            return original(items, search, tx, *args, **kwargs)
        equal = SourcelessBuilder.create(tx, operator.eq)
        for item in items:
            found = equal.call_function(tx, [item, search], {})
            if found.evaluate_expr(tx.output) if isinstance(found, SymNodeVariable) else found.as_python_constant():
                return type(search).create(True)
        return type(search).create(False)

    original = dynamo_lists.iter_contains
    with patched(dynamo_lists, "iter_contains", contains):
        yield


def _evaluate_expr(original: Callable[..., Any], env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
    result = getattr(_local, "recorded", None)
    broadcast = broadcast_of(expr, sys._getframe(2)) if result is not None and result.oblivious else None
    if result is not None and broadcast is not None:
        import sympy

        result.broadcasts.append(broadcast)
        return sympy.false if isinstance(expr, sympy.Ne) else sympy.true
    if result is not None and result.oblivious and broadcasts_last(expr, sys._getframe(2)):
        import sympy

        return sympy.true
    general = _general_answer(env, expr) if result is not None and result.general else None
    if result is not None and general is not None and _asking(sys._getframe(2)) is None:
        result.generalized = True
        return general
    known = len(env.guards)
    answer = original(env, expr, *args, **kwargs)
    places = result.places if result is not None else {}
    if len(env.guards) > known and (place := _place(sys._getframe(2))) is not None:
        places.setdefault(env.guards[-1].expr, place)
    if result is not None and not expr.is_Atom and kwargs.get("fallback_value") is None:
        frame = _asking(sys._getframe(2))
        if frame is not None:
            result.questions.setdefault(_question(env, expr, answer, frame))
        elif len(env.guards) > known and _refusal_is_handled(sys._getframe(2)):
            guard = env.guards[-1]
            result.questions.setdefault(Question(guard.expr, places.get(guard.expr) or user_line(guard.sloc), False))
        if frame is None and type(expr).__name__ == "Equality" and bool(answer) and len(expr.free_symbols) == 1:
            result.fixings += _fixings(env, next(iter(expr.free_symbols)), sys._getframe(2))
    if (
        result is not None and expr.is_Symbol and kwargs.get("fallback_value") is None
    ):  # int(size), or an argument that is an int
        result.fixings += _fixings(env, expr, sys._getframe(2))
    return answer


def _general_answer(env: Any, expr: Any) -> Any:
    """What holds for all sizes of 2 or more, where it is not what holds for the example's size 1; ``None`` elsewhere."""
    import sympy
    from sympy.logic.boolalg import Boolean

    examples = env.backed_var_to_val
    ones = [symbol for symbol in expr.free_symbols if examples.get(symbol) == 1 and env.replace(symbol) == symbol]
    if not ones or not isinstance(expr, Boolean) or not expr.free_symbols <= examples.keys():
        return None
    holds = expr.xreplace({symbol: sympy.Integer(examples[symbol]) for symbol in expr.free_symbols})
    ranges = dict.fromkeys(ones, (2, None))
    if holds not in (sympy.true, sympy.false) or not implied(sympy.Not(expr) if holds else expr, ranges):
        return None
    return sympy.Not(holds)


def _guard_or(original: Callable[..., bool], condition: Any, default: bool) -> bool:
    """Takes a size for 1 where it is broadcast, which torch answers without a guard."""
    result = getattr(_local, "recorded", None)
    if result is not None and result.oblivious and isinstance(condition, torch.SymBool):
        broadcast = broadcast_of(condition.node.expr, sys._getframe(2))
        if broadcast is not None:
            result.broadcasts.append(broadcast)
            return True
        if broadcasts_last(condition.node.expr, sys._getframe(2)):
            return True
    return original(condition, default)


def _fixings(env: Any, symbol: Any, frame: FrameType | None) -> Iterator[Fixing]:
    """What an operator fixes a size at, if it does."""
    number = env.replace(symbol)
    if not number.is_Integer or not env.var_to_sources.get(symbol):
        return
    place, operator, shape = _place(frame), None, None
    while frame is not None and not _ends_model(frame.f_code.co_filename):
        called = frame.f_locals.get("func")
        if isinstance(called, OpOverload):  # the outermost is the one that the model calls
            operator = called._schema.name
            arguments = pytree.tree_leaves((frame.f_locals.get("args"), frame.f_locals.get("kwargs")))
            shapes = [a.shape for a in arguments if isinstance(a, torch.Tensor)]
            shape = next((tuple(s) for s in shapes if all(type(n) is int for n in s) and int(number) in s), None)
        frame = frame.f_back
    yield Fixing(env.var_to_sources[symbol][0].name, int(number), place, operator, shape)


def _ends_model(file: str) -> bool:
    """Whether a frame of a file is none of the model's, nor of what the model calls."""
    return is_core_file(file) and file not in TRACING


def _repr(original: Callable[..., str], size: torch.SymInt) -> str:
    result, frame = getattr(_local, "recorded", None), sys._getframe(2)
    file = frame.f_code.co_filename
    if result is not None and not is_torch_file(file) and not is_core_file(file) and not _discards(frame):
        result.texts.append(f"{file}:{frame.f_lineno}")
    return original(size)


def _compare(relation: str, original: Callable[..., Any], first: Any, second: Any) -> Any:
    """Records a comparison that torch answers at once, as it takes sizes to be positive."""
    answer, result = original(first, second), getattr(_local, "recorded", None)
    decided = answer if isinstance(answer, bool) else _decided(answer)
    frame = _asking(sys._getframe(2)) if result is not None and decided is not None else None
    held = _undecided(relation if decided else _OPPOSITE[relation], first, second) if frame is not None else None
    if frame is not None and held is not None and result is not None:
        result.questions.setdefault(_asked(first.node.shape_env, held, bool(decided), relation == "Eq", frame))
    return answer


def _undecided(relation: str, *sides: Any) -> Any:
    """A comparison that holds, as sympy's; ``None`` where it holds at the size 0 too."""
    import sympy

    exprs = [getattr(getattr(side, "node", None), "expr", side) for side in sides]
    if not all(isinstance(expr, sympy.Basic | int | float) for expr in exprs):
        return None
    held = getattr(sympy, relation)(*map(sympy.sympify, exprs), evaluate=False)
    nonnegative = {s: sympy.Symbol(s.name, integer=True, nonnegative=True) for s in held.free_symbols if s.is_positive}
    return held if nonnegative and held.xreplace(nonnegative) is not sympy.true else None


def _decided(answer: Any) -> bool | None:
    import sympy

    expr = getattr(getattr(answer, "node", None), "expr", None)
    return {sympy.true: True, sympy.false: False}.get(expr)


_OPPOSITE = {"Eq": "Ne", "Ne": "Eq", "Lt": "Ge", "Ge": "Lt", "Gt": "Le", "Le": "Gt"}
_RELATIONS = {"__eq__": "Eq", "__ne__": "Ne", "__lt__": "Lt", "__le__": "Le", "__gt__": "Gt", "__ge__": "Ge"}
_comparisons = [
    Replaced(kind, name, functools.partial(_compare, relation))
    for kind in (torch.SymInt, torch.SymFloat)
    for name, relation in _RELATIONS.items()
]
_evaluations = Replaced(ShapeEnv, "evaluate_expr", _evaluate_expr)
_defaults = Replaced(symbolic_shapes, "_guard_or", _guard_or)
_texts = Replaced(torch.SymInt, "__repr__", _repr)


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame of the Python code that asks; ``None`` where an operator that gives tensors does, or onnxplug.

    Args:
        frame: Where the search begins.
    """
    skipped, check = uninteresting_files(), None
    of_operator: bool | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in skipped:
            if is_core_file(file) or file == _ASSERTIONS:
                return None
            if not _is_of_operators(file):
                return None if of_operator else check or frame
            computes = _computes(frame)
            if computes:
                return None
            of_operator = computes is None if of_operator is None or computes is False else of_operator
        if file == torch.__file__ and frame.f_code.co_name.startswith(("_check", "_assert")):
            check = check or frame
        frame = frame.f_back
    return None


def _computes(frame: FrameType) -> bool | None:
    """Whether a frame of torch's runs what gives tensors; ``None`` where it only takes part in running something."""
    name, values = frame.f_code.co_name, frame.f_locals
    if name == "_tensor_min_max":  # what the non-strict mode has in the place of max and min
        return False
    if name == "run_node":  # what the strict mode traced: of numbers alone, it is an operator of Python's
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


def _question(env: Any, expr: Any, answer: Any, frame: FrameType) -> Question:
    import sympy

    holds = answer is sympy.true
    if holds or answer is sympy.false:
        held = expr if holds else sympy.Not(expr)
    else:
        held = sympy.Eq(expr, answer)
    return _asked(env, held, holds, isinstance(expr, sympy.Eq), frame)


def _asked(env: Any, held: Any, holds: bool, equal: bool, frame: FrameType) -> Question:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file == torch.__file__ and name.startswith("_check"):
        return Question(held, _place(frame), True)
    if file.startswith(_DYNAMO):
        return Question(held, user_line(env._get_sloc()), _only_raises_in_dynamo(frame, holds, equal))
    return Question(held, _place(frame), _only_raises(frame, holds, equal), is_torch_file(file))


def _place(frame: FrameType | None) -> str | None:
    """The innermost line that is neither torch's nor onnxplug's, nor of the graph that the strict mode runs again."""
    while frame is not None:
        file = frame.f_code.co_filename
        if (is_core_file(file) and file not in TRACING) or file == "<string>":
            return None
        if not is_torch_file(file) and file not in TRACING:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_of_python(sloc: Any) -> bool:
    """Whether code in Python asked for a guard, of the model or of torch's layers and functions, and no operator."""
    file = getattr(getattr(sloc, "framework_loc", None), "filename", None)
    return file is None or not _is_of_operators(file)


@functools.lru_cache(maxsize=4096)
def _is_of_operators(file: str) -> bool:
    return file == KERNELS or (is_torch_file(file) and file.removeprefix(_TORCH).startswith(_OPERATORS))


# -- what the code does with the answer --------------------------------------------------------------------------------


def _is_handled(frame: FrameType | None) -> bool:
    """Whether an error that leaves a frame of the model's code is, or may be, handled by the code that called it."""
    while frame is not None and not _ends_model(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if (
            not is_torch_file(file)
            and file not in TRACING
            and (_is_called_by_python(frame) or is_handled_at(spot_of(frame)))
        ):
            return True
        frame = frame.f_back
    return False


def _refusal_is_handled(frame: FrameType | None) -> bool:
    """Whether the model goes on where an operator refuses its arguments."""
    spots = list(_interpreted(frame))
    return _is_handled_in_dynamo([spots[0], *spots]) if spots else _is_handled(frame)


def _is_called_by_python(frame: FrameType) -> bool:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return is_called_by_python(frame.f_code, frame.f_locals.get(names[0]) if names else None)


def _only_raises(frame: FrameType, holds: bool, equal: bool) -> bool:
    """As :func:`only_raises`, and nothing handles the error."""
    spot, caller = spot_of(frame), frame.f_back
    steps = following(spot)
    if frame.f_code.co_name == "<genexpr>" and steps and steps[0].opname == "YIELD_VALUE" and caller is not None:
        spot = spot_of(caller)  # any(n == 0 for n in x.shape)
    return only_raises(spot, holds, equal) and not _is_handled(frame.f_back) and not _is_called_by_python(frame)


def _only_raises_in_dynamo(frame: FrameType | None, holds: bool, equal: bool) -> bool:
    """As :func:`_only_raises`, where torch's strict mode interprets the code."""
    spots = list(_interpreted(frame))
    return bool(spots) and only_raises(spots[0], holds, equal) and not _is_handled_in_dynamo(spots)


def _is_handled_in_dynamo(spots: Sequence[Spot]) -> bool:
    """As :func:`_is_handled`; the first of the code is what raises."""
    own = [spot for spot in spots[1:] if not is_torch_file(spot.code.co_filename)]
    by_python = (is_called_by_python(spot.code, next(iter(spot.locals.values()), None)) for spot in spots)
    return any(by_python) or any(map(is_handled_at, own))


def _interpreted(frame: FrameType | None) -> Iterator[Spot]:
    """Where torch's strict mode is in the model's code, the innermost first."""
    interpreter = next(_interpreters(frame), None)
    while interpreter is not None:
        code, offset = interpreter.f_code, getattr(interpreter.current_instruction, "offset", None)
        if isinstance(code, CodeType) and isinstance(offset, int):
            found = {name: _object(variable) for name, variable in interpreter.symbolic_locals.items()}
            yield Spot(code, offset, interpreter.f_globals, found)
        interpreter = getattr(interpreter, "parent", None)


def _object(variable: Any) -> Any:
    """The object that one of Dynamo's variables stands for; its attributes are not read, which would make a tensor of it."""
    cached = vars(variable).get("_cache")
    return vars(getattr(cached, "vt", None) or variable).get("value")


def _interpreters(frame: FrameType | None) -> Iterator[Any]:
    """torch's interpreters of the model's code, the innermost first."""
    while frame is not None:
        found: Any = frame.f_locals.get("self")
        # By its class: Dynamo's lazy variables make a tensor when an attribute is read.
        if any(kind.__name__ == "InstructionTranslatorBase" for kind in type(found).__mro__):
            yield found
        frame = frame.f_back


def _discards(frame: FrameType) -> bool:
    """Whether what an instruction gives is used up by calls alone whose result is dropped, as that of ``print`` is."""
    for step in following(spot_of(frame)):
        if step.opname == "POP_TOP":
            return True
        if step.opname.startswith(("STORE", "RETURN", "YIELD", "BINARY", "COMPARE", "CONTAINS")) or is_jump(step):
            return False
    return False


# -- how torch takes sizes ---------------------------------------------------------------------------------------------


def _make_symbol(original: Callable[..., Any], prefix: Any, number: int, **assumptions: Any) -> Any:
    if prefix is SymT.SIZE and assumptions.get("positive"):
        assumptions = {**assumptions, "positive": None, "nonnegative": True}
    return original(prefix, number, **assumptions)


def _produce_guards(original: Callable[..., Any], env: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
    guards, ranges = env.guards, env.var_to_range
    env.guards = []
    env.var_to_range = {s: env._default_value_range(True) if s.is_nonnegative else r for s, r in ranges.items()}
    try:
        return original(env, *args, **kwargs)
    finally:
        env.guards, env.var_to_range = guards, ranges


#: While it holds, no size is assumed to be positive: an example's size of 0 is none of torch's sizes otherwise.
zero_is_a_size = Replaced(symbolic_shapes, "make_symbol", _make_symbol)
#: While it holds, torch does not refuse a named dimension for what the model asks of it: that is decided afterwards.
any_size_is_accepted = Replaced(ShapeEnv, "produce_guards_verbose", _produce_guards)
