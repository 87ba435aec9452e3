"""Qualified names: what rules are keyed by."""

from __future__ import annotations

from typing import Any

_names: dict[Any, str] = {}


def qualified_name(target: Any) -> str:
    """The name under which rules find an FX target.

    ``aten.add.Tensor`` is ``"aten::add.Tensor"``, a default overload ``"aten::relu.default"``, a higher-order operator
    its name (``"cond"``), a Python function its module and name (``"_operator::mul"``, ``"torch::sym_max"``).
    """
    found = _names.get(target)
    if found is None:
        found = _names[target] = _work_out(target)
    return found


def _work_out(target: Any) -> str:
    import torch

    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._schema.overload_name or 'default'}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    return f"{getattr(target, '__module__', '?')}::{getattr(target, '__name__', target)}"


def packet_of(name: str) -> str:
    """The name without its overload: ``"aten::add"`` of ``"aten::add.Tensor"``."""
    namespace, separator, rest = name.partition("::")
    return f"{namespace}::{rest.partition('.')[0]}" if separator else name


def find_overload(op: str) -> Any:
    """The torch operator of a qualified name; a packet's default overload, or its first one. ``None`` if unknown."""
    import torch

    namespace, separator, rest = op.partition("::")
    if not separator:
        return None
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if not isinstance(found, torch._ops.OpOverloadPacket):
        return None
    names = found.overloads()
    return getattr(found, overload or ("default" if "default" in names else names[0]), None)
