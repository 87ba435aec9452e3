"""The objects that plugins supply, in words."""

from __future__ import annotations

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
    name = getattr(item, "__qualname__", getattr(item, "name", None))
    return f"{getattr(item, '__module__', '?')}:{name}" if name else repr(item)


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
