"""Functions of plugins that run after loading, in an export: the error of one that fails names its plugin."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onnxplug.errors import OnnxplugError, PluginError
from onnxplug.plugins.records import PluginRecord
from onnxplug.registry.names import packet_of
from onnxplug.registry.rule import load_object

_LEAVE_OUT = "Leave one plugin out: plugins=[…], or --no-plugin NAME."


def failed(purpose: str, owner: str, error: Exception) -> PluginError:
    """The error that replaces an error of a plugin's function."""
    return PluginError(
        f"{purpose} of the plugin {owner} raised {type(error).__name__}: {error}",
        hint="Without the plugin: plugins=[…], or --no-plugin NAME.",
    )


def function_of(item: Any, purpose: str, record: PluginRecord) -> Callable[..., Any]:
    """A plugin's function, or the function that it names; its errors name the plugin. The builtin plugin's is as it is.

    Raises:
        PluginError: The module raises or has no such attribute.
    """
    function: Callable[..., Any] = load_object(item, purpose, record.distribution) if isinstance(item, str) else item
    if record.is_builtin:
        return function

    def called(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except OnnxplugError:
            raise
        except Exception as error:
            raise failed(purpose, record.label, error) from error

    return called


def hook_result(hook: Any, **arguments: Any) -> Any:
    """The result of a hook that pluggy calls.

    Raises:
        PluginError: A plugin's function raised.
    """
    try:
        return hook(**arguments)
    except OnnxplugError:
        raise
    except Exception as error:
        running = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        names = [
            function.plugin_name
            for function in hook.get_hookimpls()
            if getattr(inspect.unwrap(function.function), "__code__", None) in running
        ]
        raise failed(hook.name, " or ".join(names) or "that failed", error) from error


Decompositions = Mapping[str, "Callable[..., Any] | None"]


def merged(tables: Iterable[tuple[PluginRecord, Decompositions]]) -> dict[str, Callable[..., Any] | None]:
    """One table of decompositions: a plugin's go before the builtin ones.

    Where two plugins differ, the function in the table is one that names both: only a model with that operator fails.
    """
    table: dict[str, Callable[..., Any] | None] = {}
    owners: dict[str, PluginRecord] = {}
    for record, own in tables:
        for name, function in own.items():
            before = owners.get(name)
            if before is not None and not before.is_builtin and table[name] is not function:
                table[name] = _disagreement(name, before, record)
                continue
            table[name], owners[name] = function, record
    return table


def decomposers(op: str, tables: Iterable[tuple[PluginRecord, Decompositions]]) -> dict[str, str]:
    """Each overload of an operator that a plugin decomposes, to that plugin's distribution."""
    names = (op, packet_of(op))
    return {
        name: record.distribution
        for record, own in tables
        for name, function in own.items()
        if function is not None and (name in names or name.startswith(f"{op}."))
    }


def _disagreement(name: str, one: PluginRecord, other: PluginRecord) -> Callable[..., Any]:
    def decomposed(*_: Any, **__: Any) -> Any:
        raise PluginError(f"the plugins {one.label} and {other.label} both decompose {name}", hint=_LEAVE_OUT)

    return decomposed
