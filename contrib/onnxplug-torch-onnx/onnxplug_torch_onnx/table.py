"""``custom_translation_table`` of ``torch.onnx.export``, as rules."""

from __future__ import annotations

import contextlib
import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.kinds import check_mappings
from onnxplug.registry.names import qualified_name
from onnxplug.registry.rule import Rule
from onnxplug_torch_onnx.functions import function_body, is_function
from onnxplug_torch_onnx.torchlib import onnxscript_function

_HINT = (
    "Say what it is: rules=[Rule(op, function)] for a converter (g, node), "
    "onnxplug.compat.onnxscript_function(function) for a function over an onnxscript opset, "
    "onnxplug.compat.symbolic(function) for a TorchScript symbolic function (g, *args)."
)


def table_rules(table: Mapping[Any, Any] | None) -> list[Rule]:
    """Rules for a ``custom_translation_table``.

    Args:
        table: Operator (an overload, a packet, a Python function, or a qualified name) to a function or several, in the
            order to try them. A function is an ``@onnxscript.script()`` function, an ``onnx.FunctionProto``, a plain
            function over an onnxscript opset, or a converter ``(g, node)``.

    Raises:
        UsageError: An entry is no function, or a function of an unclear kind.
    """
    check_mappings(custom_translation_table=table)
    rules = []
    for target, entry in (table or {}).items():
        name = target if isinstance(target, str) else qualified_name(target)
        functions = list(entry) if isinstance(entry, list | tuple) else [entry]
        if not functions:
            raise UsageError(f"custom_translation_table[{name!r}] is an empty list")
        for position, function in enumerate(functions):
            rules.append(Rule(name, as_converter(function, name, target), priority=len(functions) - position))
    return rules


def as_converter(function: Any, name: str, target: Any = None) -> Callable[..., Any]:
    """A converter of an entry of a ``custom_translation_table``."""
    if is_function(function):
        return function_body(function)
    if not callable(function):
        raise UsageError(
            f"custom_translation_table[{name!r}] must be a function: a converter (g, node), or one over an onnxscript "
            f"opset; got {function!r}"
        )
    if getattr(function, "onnxplug_converter", False):
        return function
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UsageError(
            f"custom_translation_table[{name!r}]: the parameters of {function!r} can't be determined", hint=_HINT
        ) from None
    names = [p.name for p in parameters]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    if names[:2] == ["g", "node"] and len(required) == 2:
        return function
    if uses_onnxscript(function):
        return onnxscript_function(function)
    if names[:1] == ["g"]:
        raise UsageError(
            f"custom_translation_table[{name!r}]: {_text(function)} looks like a TorchScript symbolic function",
            hint=_HINT,
        )
    if len(required) == 2 and names != _schema_names(target)[: len(names)]:
        raise UsageError(
            f"custom_translation_table[{name!r}]: {_text(function)} takes two arguments, and may be a converter (g, node) "
            "or a function of the operator's arguments",
            hint=_HINT,
        )
    return onnxscript_function(function)


def uses_onnxscript(function: Any) -> bool:
    """Whether a function's own code names an onnxscript opset or function."""
    from onnxscript import values

    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None:
        return False
    # Not inspect.getclosurevars: it takes the attribute in `g.op` for the global of that name.
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    values_read = [value for name, value in inner.__globals__.items() if name in loaded]
    for cell in inner.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            values_read.append(cell.cell_contents)
    return any(isinstance(item, values.Opset | values.Op) for item in values_read)


def _schema_names(target: Any) -> Sequence[str]:
    schema = getattr(target, "_schema", None)
    return [a.name for a in schema.arguments] if schema is not None else []


def _text(function: Any) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}{inspect.signature(function)}"
