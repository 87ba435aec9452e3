"""Qualified names, the keys of rules."""

from __future__ import annotations

import difflib
import sys
from typing import Any

from onnxplug import torch_private

_names: dict[Any, str] = {}


def qualified_name(target: Any) -> str:
    """The name under which rules find an FX target.

    ``aten.add.Tensor`` is ``"aten::add.Tensor"``, a default overload ``"aten::relu.default"``, a higher-order operator
    its name (``"cond"``), a Python function its module and name (``"_operator::mul"``, ``"torch::sym_max"``).
    """
    name = _names.get(target)
    if name is None:
        name = _names[target] = _work_out(target)
    return name


def _work_out(target: Any) -> str:

    if isinstance(target, torch_private.OpOverload):
        return f"{target._schema.name}.{target._schema.overload_name or 'default'}"
    if isinstance(target, torch_private.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, torch_private.HigherOrderOperator):
        return target.name()
    return f"{getattr(target, '__module__', '?')}::{getattr(target, '__name__', target)}"


#: Prefixes of the operator's name in rules for complex and for quantised arguments.
_PREFIXES = ("complex:", "quantized:")


def without_prefix(name: str) -> str:
    """The operator's own name: ``"aten::add"`` of ``"complex:aten::add"``."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def packet_of(name: str) -> str:
    """The name without its overload: ``"aten::add"`` of ``"aten::add.Tensor"``."""
    namespace, separator, rest = name.partition("::")
    return f"{namespace}::{rest.partition('.')[0]}" if separator else name


def find_overload(op: str) -> Any:
    """The torch operator of a qualified name; of a packet the default overload, or else the first. ``None`` if unknown."""
    import torch

    namespace, separator, rest = op.partition("::")
    if not separator:
        return None
    packet, _, overload = rest.partition(".")
    operators = getattr(getattr(torch.ops, namespace), packet, None)
    if not isinstance(operators, torch_private.OpOverloadPacket):
        return None
    names = operators.overloads()
    return getattr(operators, overload or ("default" if "default" in names else names[0]), None)


def is_known_operator(op: str) -> bool:
    """Whether torch knows an operator, or Python a function, of this qualified name; nothing is imported for it."""

    op = without_prefix(op)
    namespace, separator, rest = op.partition("::")
    if not separator:
        return op in torch_private.higher_order_operators
    return find_overload(op) is not None or callable(getattr(sys.modules.get(namespace), rest, None))


def _registered() -> list[str]:

    return list(torch_private.registered_operators())


def known_namespaces() -> set[str]:
    """The namespaces in which torch has an operator."""
    return {name.partition("::")[0] for name in _registered()}


def close_operators(op: str) -> list[str]:
    """Names of known operators that resemble an unknown name: other overloads first."""

    packet = packet_of(op)
    if "::" not in op:
        return difflib.get_close_matches(op, list(torch_private.higher_order_operators), 2)
    names = set(_registered())
    overloads = sorted(name for name in names if packet_of(name) == packet)
    if overloads:
        return difflib.get_close_matches(op, overloads, 2, 0.0)
    return difflib.get_close_matches(op.partition(".")[0], sorted({packet_of(name) for name in names}), 2, 0.75)
