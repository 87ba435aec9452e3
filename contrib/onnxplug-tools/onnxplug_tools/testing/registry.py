"""Registries for tests, with the test's plugins instead of the installed plugins; and samples of installed plugins."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from onnxplug.errors import PluginError, UsageError
from onnxplug.plugin_api import ENTRY_POINT_GROUP, PROJECT_NAME, hookimpl
from onnxplug.registry.rule import Rule, load_object

_HOST = "onnxplug.plugins.manager"


class _Point:
    """An entry point, as the plugin manager reads it, that gives an object already loaded."""

    def __init__(self, name: str, plugin: Any, distribution: str, version: str) -> None:
        self.name = name
        self.value = getattr(plugin, "__name__", type(plugin).__name__)
        self.dist = types.SimpleNamespace(name=distribution, version=version)
        self._plugin = plugin

    def load(self) -> Any:
        return self._plugin


class _Rules:
    """The plugin that carries the rules that a test adds."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    @hookimpl
    def onnxplug_rules(self) -> list[Rule]:
        return list(self.rules)


class IsolatedRegistry:
    """Replaces the installed plugins while a test runs: by the builtin plugin, and rules and plugins of the test.

    All code that asks for plugins gets these: ``to_onnx``, the fixtures, the command line run in this process.
    """

    def __init__(self) -> None:
        builtin = [
            p
            for p in entry_points(group=ENTRY_POINT_GROUP)
            if p.name == "builtin" and p.dist is not None and p.dist.name == PROJECT_NAME
        ]
        self._points: list[Any] = builtin
        self._rules: _Rules | None = None

    def add(self, *rules: Rule) -> None:
        """Adds rules, as a plugin of the distribution ``"test"`` would.

        Raises:
            UsageError: An argument is not a :class:`onnxplug.Rule`.
        """
        for rule in rules:
            if not isinstance(rule, Rule):
                raise UsageError(f"isolated_registry.add takes Rule objects, got {rule!r}")
        if self._rules is None:
            self._rules = _Rules()
            self.add_plugin(self._rules, name="test")
        self._rules.rules.extend(rules)
        self._forget()

    def add_plugin(
        self, plugin: Any, *, name: str | None = None, distribution: str | None = None, version: str = "0"
    ) -> None:
        """Adds a plugin, as if a distribution had installed it.

        Args:
            plugin: A module or object with hook implementations.
            name: Its entry point's name; the module's own unless given.
            distribution, version: The distribution that installs it; named as the plugin unless given.
        """
        known = name or str(getattr(plugin, "__name__", type(plugin).__name__))
        self._points.append(_Point(known, plugin, distribution or known, version))
        self._forget()

    def explain(self, op: str, opset: int = 21) -> list[Any]:
        """Explains which rule translates an operator, and why the others don't.

        Args:
            op: The qualified name of an operator, or of one overload.
            opset: The version of ai.onnx.

        Returns:
            Every candidate with the reason (``onnxplug.registry.registry.Explanation``); the taken rule comes first.
        """
        from onnxplug.registry.target import Target

        registry, _ = load_object(f"{_HOST}:registry_for", "the plugin manager")()
        return registry.explain(op, Target(opset=opset, opsets={"": opset}))

    def _forget(self) -> None:
        load_object(f"{_HOST}:forget", "the plugin manager")()

    @contextmanager
    def active(self) -> Iterator[IsolatedRegistry]:
        """Takes the place of the installed plugins while the context holds."""
        with load_object(f"{_HOST}:discovering", "the plugin manager")(lambda: list(self._points)):
            yield self


def sample_cases(plugin: str | None = None) -> list[Any]:
    """Every sample of installed plugins at every opset that it is promised for.

    Args:
        plugin: An entry point's or a distribution's name; all but the builtin plugin when ``None``.

    Raises:
        PluginError: There is no such plugin, or it is broken.
    """
    from onnxplug_tools.testing.samples import cases_of

    _, manager = load_object(f"{_HOST}:registry_for", "the plugin manager")()
    cases = []
    has_samples = False
    for record in manager.records():
        if plugin not in (record.name, record.distribution) and (plugin is not None or record.is_builtin):
            continue
        has_samples = True
        if record.status == "failed" and plugin is not None:
            raise PluginError(f"the plugin {record.name} of {record.distribution} is broken:\n{record.error}")
        supplied = manager.supplied(record)
        cases += cases_of(record.distribution, supplied.get("onnxplug_samples", []), supplied.get("onnxplug_rules", []))
    if plugin is not None and not has_samples:
        raise PluginError(f"no plugin {plugin!r} is installed", hint="`onnxplug plugins list` shows those that are.")
    return cases
