"""The functions of a script's operators: torch's own, or from the tables of Python's operators."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug.converters.helpers.fused_layers import FUSED
from onnxplug.errors import CaptureError
from onnxplug.torch_private import registered_operators
from onnxplug_torchscript.containers import CONVERSIONS, EXACT, GENERIC
from onnxplug_torchscript.graphs import Step
from onnxplug_torchscript.numbers import SYMBOLIC, as_float, as_int, on_scalar_tensors
from onnxplug_torchscript.sequences import on_sequence
from onnxplug_torchscript.values import ScalarTensor, is_number, is_symbolic, leaves, mapped

_COERCIONS: dict[str, Callable[[Any], Any]] = {"int": as_int, "float": as_float}


def function_of(step: Step) -> Callable[..., Any]:
    """The function of an operator of a script; it takes the values of the step's inputs."""
    return on_sequence(step, _function_of(step))


def _function_of(step: Step) -> Callable[..., Any]:
    name, kind = step.operator, step.kind
    if name in EXACT or name in FUSED:
        return EXACT.get(name) or FUSED[name]
    if not _is_dispatched(name):
        if kind in SYMBOLIC:
            return _on_numbers(step)
        if kind in GENERIC:
            return _of_items(step) if kind in ("aten::tensor", "aten::as_tensor") else GENERIC[kind]
    return _of_torch(step)


_ITEM_DTYPES = {"IntType": torch.int64, "BoolType": torch.bool}


def _of_items(step: Step) -> Callable[..., Any]:
    """``torch.tensor``, of a list in the dtype of its type's items, which an empty list has too."""

    def apply(data: Any, dtype: Any = None, *more: Any) -> Any:
        if dtype is None and isinstance(data, list):
            kind = step.node.inputsAt(0).type()
            while kind.kind() == "ListType":
                kind = kind.getElementType()
            dtype = _ITEM_DTYPES.get(kind.kind())
        return GENERIC[step.kind](data, dtype, *more)

    return apply


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(registered_operators())


def _is_dispatched(name: str) -> bool:
    return name in _known() or not name.startswith(("aten::", "prim::"))


def _on_numbers(step: Step) -> Callable[..., Any]:
    symbolic = SYMBOLIC[step.kind]
    coerce = _COERCIONS.get(re.sub(r"\W*\)?$", "", step.node.schema().rpartition("-> ")[2]), lambda value: value)
    plain = GENERIC.get(step.kind)

    def apply(*args: Any) -> Any:
        if _is_about_symbols(args):
            return coerce(symbolic(*args))
        if plain is not None and not all(is_number(arg) for arg in args):
            return plain(*args)
        return _of_torch(step)(*args)

    return apply


def _is_about_symbols(args: Sequence[Any]) -> bool:
    """Whether all arguments are numbers or truth values, and one of them is symbolic or a tensor."""
    flat = [leaf for arg in args for leaf in leaves(arg)]
    tensors = (torch.Tensor, ScalarTensor)
    return all(is_number(leaf) or isinstance(leaf, tensors) for leaf in flat) and any(
        is_symbolic(leaf) or isinstance(leaf, tensors) for leaf in flat
    )


def _of_torch(step: Step) -> Callable[..., Any]:
    overload = _overload(step)
    arguments = overload._schema.arguments
    # No operator that computes has a list of a type that torch can't check, such as T[].
    conversions = [_conversion(argument) for argument in arguments]
    names = [argument.name if argument.kwarg_only else None for argument in arguments]

    def apply(*args: Any) -> Any:
        known_tensors = [leaf for arg in args for leaf in leaves(arg) if isinstance(leaf, ScalarTensor)]
        if known_tensors and all(tensor.written is None for tensor in known_tensors):
            known = _on_known_numbers(step.kind, conversions, args)
            if known is not None:
                return known
        values = [convert(arg) for convert, arg in zip(conversions, args, strict=False)]
        positional = [value for value, name in zip(values, names, strict=False) if name is None]
        keywords = {name: value for value, name in zip(values, names, strict=False) if name is not None}
        return overload(*positional, *values[len(names) :], **keywords)

    return apply


def _on_known_numbers(kind: str, conversions: Sequence[Any], args: Sequence[Any]) -> Any:
    if any(isinstance(arg, torch.Tensor | list | tuple | dict) for arg in args):
        return None
    converted = [
        arg if isinstance(arg, ScalarTensor) else convert(arg) for convert, arg in zip(conversions, args, strict=False)
    ]
    return on_scalar_tensors(kind, converted)


def _overload(step: Step) -> Any:
    namespace, _, rest = step.operator.partition("::")
    name, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except AttributeError:
        raise CaptureError(
            f"the script calls the operator {step.operator} at {step.place}, which this torch {torch.__version__} has no "
            "function for",
            hint="Import the package that registers the operator before the export, or export the nn.Module that the script "
            "was made from.",
        ) from None


def _conversion(argument: Any) -> Callable[[Any], Any]:
    kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    if kind in CONVERSIONS:
        return CONVERSIONS[kind]
    if argument.alias_info is not None and argument.alias_info.is_write:
        return _to_write
    return _as_truth if kind == "bool" else _materialised


def _as_truth(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _to_write(value: Any) -> Any:
    return value.to_write() if isinstance(value, ScalarTensor) else value


def _materialised(value: Any) -> Any:
    if isinstance(value, ScalarTensor | list | tuple):
        return mapped(value, lambda leaf: leaf.tensor() if isinstance(leaf, ScalarTensor) else leaf)
    return value
