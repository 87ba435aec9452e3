"""``int``, ``float``, ``divmod``, ``max``, ``min``, ``math.sqrt`` and ``numel`` of sizes, and ``int(tensor)``, in a trace.

Python requires a plain number of ``__int__``, ``__float__`` and ``math.sqrt``, which makes a dynamic size a constant, and an error
of a number that follows from data. A call by such a name in the model's own code therefore calls the functions below. The name
itself, as in ``isinstance(n, int)`` or ``dtype=int``, stays Python's.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.limits import conditions_of_limit
from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patching import CODE_CHANGES, patched
from onnxplug.capture.questions import ask
from onnxplug.patches.kinds import class_attribute
from onnxplug.patches.lengths import Globals
from onnxplug.patches.lists import dynamic_list, dynamic_range
from onnxplug.torch_private import FakeTensor

_python_sqrt = math.sqrt
_builtins_of = operator.attrgetter("__builtins__")
_SYMBOLIC = (torch.SymBool, torch.SymInt, torch.SymFloat)


def _number(item: Any) -> Any:
    """The number of a traced tensor with one element, a condition as 1 or 0, and every other item as it is."""
    if isinstance(item, FakeTensor) and item.numel() == 1:
        item = item.item()
    return torch.sym_ite(item, 1, 0) if isinstance(item, torch.SymBool) else item


def _int(*args: Any, **kwargs: Any) -> Any:
    """As Python's ``int``, but an integer of the graph for a number of the graph."""
    number = _number(args[0]) if len(args) == 1 and not kwargs else None
    return torch.sym_int(number) if isinstance(number, _SYMBOLIC) else int(*args, **kwargs)


def _float(*args: Any) -> Any:
    """As Python's ``float``, but a float of the graph for a number of the graph."""
    number = _number(args[0]) if len(args) == 1 else None
    return torch.sym_float(number) if isinstance(number, _SYMBOLIC) else float(*args)


def _divmod(first: Any, second: Any) -> Any:
    """As Python's ``divmod``, for numbers of the graph too."""
    if isinstance(first, _SYMBOLIC) or isinstance(second, _SYMBOLIC):
        return first // second, first % second
    return divmod(first, second)


def _extreme(name: str, of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        """As Python's, which torch replaces for two numbers alone; a size of the graph for any number of integers."""
        items = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        dynamic = any(isinstance(item, torch.SymInt) for item in items)
        if dynamic and not kwargs and all(isinstance(item, int | torch.SymInt) for item in items):
            plain = [item for item in items if isinstance(item, int)]
            numbers = [getattr(builtins, name)(plain)] if plain else []
            numbers += [item for item in items if not isinstance(item, int)]
            return functools.reduce(functools.partial(_of_two, name, of_two, sys._getframe(1)), numbers)
        return getattr(builtins, name)(*args, **kwargs)

    return extreme


def _of_two(name: str, of_two: Callable[[Any, Any], Any], frame: types.FrameType, first: Any, second: Any) -> Any:
    """The extreme of two numbers; torch simplifies ``max(1, n)`` to ``n``, which asks for a size that is not 0."""
    result = of_two(first, second)
    sizes = [number.node for number in (first, second) if isinstance(number, torch.SymInt)]
    if sizes:
        exprs = [number.node.expr if isinstance(number, torch.SymInt) else number for number in (first, second, result)]
        for condition in conditions_of_limit(name.capitalize(), *exprs):
            ask(condition, frame, sizes[0].shape_env)
    return result


def _sqrt(number: Any) -> Any:
    """As ``math.sqrt``, but a float of the graph for a number of the graph."""
    return torch.sym_sqrt(number) if isinstance(number, _SYMBOLIC) else _python_sqrt(number)


_CALLED: dict[str, Callable[..., Any]] = {
    "int": _int,
    "float": _float,
    "divmod": _divmod,
    "max": _extreme("max", torch.sym_max),
    "min": _extreme("min", torch.sym_min),
    "range": dynamic_range,
    "list": dynamic_list,
}
#: What the replaced names begin with; not an identifier, so that no code has them.
_PREFIX = "onnxplug's "


def _calling(code: types.CodeType) -> types.CodeType:
    """Code in which calls by these names, and ``map(name, …)``, call the functions above; the code itself without such calls."""
    return _calling_of_file(code, code.co_filename)


@functools.lru_cache(maxsize=65536)
def _calling_of_file(code: types.CodeType, file: str) -> types.CodeType:  # equal code may be of another file
    constants = tuple(_calling(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    names, instructions = list(code.co_names), bytearray(code.co_code)
    if _CALLED.keys() & set(names):
        for before, instruction in itertools.pairwise(dis.get_instructions(code)):
            if _is_load(instruction) and (_is_called(instruction) or (_is_called(before) and before.argval == "map")):
                name, argument = _PREFIX + instruction.argval, instruction.arg or 0
                number = names.index(name) if name in names else len(names)
                if number < 128 and argument < 256:  # of one byte, with the bit for NULL
                    names[number:] = names[number:] or [name]
                    instructions[instruction.offset + 1] = number << 1 | argument & 1
    if len(names) == len(code.co_names) and all(map(operator.is_, constants, code.co_consts)):
        return code
    return code.replace(co_consts=constants, co_names=tuple(names), co_code=bytes(instructions))


def _is_load(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_GLOBAL" and instruction.argval in _CALLED


def _is_called(instruction: dis.Instruction) -> bool:
    """Whether the compiler loads a global to call it: the lowest bit stands for the NULL beside what is called."""
    return instruction.opname == "LOAD_GLOBAL" and bool((instruction.arg or 0) & 1)


@contextlib.contextmanager
def numbers_stay_dynamic(mentions: Mentions) -> Iterator[None]:
    """While it holds, these calls in the model's own code have results in the graph."""
    own = [f for f in mentions.functions if not str(f.__globals__.get("__name__")).startswith("onnxplug")]
    with contextlib.ExitStack() as stack:
        # For good: a frame of such code may outlive the capture, in another thread or a generator.
        vars(builtins).update({_PREFIX + name: function for name, function in _CALLED.items()})
        stack.enter_context(patched(math, "sqrt", _sqrt))
        # torch's own multiplies plain numbers.
        stack.enter_context(class_attribute(torch.Size, "numel", lambda sizes: math.prod(sizes)))
        for namespace in {id(f.__globals__): f.__globals__ for f in own}.values():
            for name in [name for name, value in namespace.items() if value is _python_sqrt]:
                stack.enter_context(patched(Globals(namespace), name, _sqrt))
        for function in own:
            has_builtins = _builtins_of(function) is vars(builtins) and not _CALLED.keys() & function.__globals__.keys()
            if has_builtins and (code := _calling(function.__code__)) is not function.__code__:
                stack.enter_context(_with_code(function, code))
        CODE_CHANGES.append(_calling)
        stack.callback(CODE_CHANGES.remove, _calling)
        yield


@contextlib.contextmanager
def _with_code(function: types.FunctionType, code: types.CodeType) -> Iterator[None]:
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before
