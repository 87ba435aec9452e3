"""The objects that plugins supply, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


def describe(hook: str, value: Any) -> list[str]:
    """The result of a hook in words, one line for each item."""
    kind = hook.removeprefix("onnxplug_")
    if kind == "rules":
        return [rule_text(rule) for rule in value]
    if kind == "decompositions":
        return [f"{op}: {_name(f) if f is not None else 'forbidden'}" for op, f in value.items()]
    if kind == "domains":
        return [f"{d.name} {d.version}" + (f", {len(d.schemas)} schemas" if d.schemas else "") for d in value]
    if kind == "samples":
        return [s.op + (f" at opsets {', '.join(map(str, s.opsets))}" if s.opsets else "") for s in value]
    return list(_names(value))


def _names(value: Iterable[Any]) -> Iterable[str]:
    for item in value:
        if hasattr(item, "kernel"):
            yield f"Python kernel {_name(item.kernel)}"
        elif hasattr(item, "providers"):
            path = item.path if isinstance(item.path, str) else f"{_name(item.path)}()"
            yield f"library {path}" + (f" for {', '.join(item.providers)}" if item.providers else "")
        elif hasattr(item, "op") and hasattr(item, "name"):
            yield f"{item.name} at {item.op}"
        else:
            yield _name(item)


def _name(item: Any) -> str:
    """The place of a function or class, the name of a record, or the names and functions in it."""
    if isinstance(item, str):
        return item
    if hasattr(item, "__qualname__"):
        return f"{item.__module__}:{item.__qualname__}"
    if getattr(item, "name", None):
        return str(item.name)
    if dataclasses.is_dataclass(item):
        parts = [getattr(item, field.name) for field in dataclasses.fields(item) if field.repr]
        named = [_name(part) for part in parts if (isinstance(part, str) and part) or callable(part)]
        return f"{type(item).__name__}({', '.join(named)})"
    return f"{type(item).__module__}:{type(item).__qualname__}"


def rule_text(rule: Any) -> str:
    """A rule and its conditions on one line."""
    since, until = rule.opset
    notes = []
    if since is not None or until is not None:
        notes.append(f"opset {since or 'any'} to {until or 'the newest'}")
    notes += [f"{name} {version}" for name, version in rule.domains.items()]
    notes += [f"for {' or '.join(rule.target)}"] if rule.target else []
    notes += ["exact"] if rule.exact else ["not exact"] if rule.exact is False else []
    notes += ["conditional"] if rule.when is not None else []
    notes += ["override"] if rule.override else []
    notes += [f"priority {rule.priority}"] if rule.priority else []
    return f"{rule.op}: {rule.name}" + (f" ({', '.join(notes)})" if notes else "")
