"""Names of operators as people write them: patterns, and as Python prints them."""

from __future__ import annotations

import fnmatch

from onnxplug.registry.names import packet_of


def matches(op: str, pattern: str) -> bool:
    """Whether a pattern matches an operator.

    Args:
        op: A qualified name, of an overload or of an operator.
        pattern: A qualified name; an operator's (``"aten::gelu"``) matches all its overloads. ``*``, ``?`` and ``[…]`` match
            characters (``"aten::*pool*"``). Names as Python prints them match too (``"torch.ops.aten.gelu.default"``).
    """
    pattern = with_colons(pattern)
    return any(fnmatch.fnmatchcase(name, pattern) for name in (op, packet_of(op)))


def with_colons(name: str) -> str:
    """The qualified name of an operator as Python prints it: ``"aten::gelu.default"`` of ``"torch.ops.aten.gelu.default"``."""
    if "::" in name:
        return name
    namespace, dot, rest = name.removeprefix("torch.ops.").partition(".")
    return f"{namespace}::{rest}" if dot else name
