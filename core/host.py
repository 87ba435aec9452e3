"""Protocols of the plugin host, which ``onnxplug.plugins`` implements; core depends on these alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from onnxplug.observers import Observer
from onnxplug.plugin_api import Domain, Evaluator, Patch


class RuntimeHost(Protocol):
    """The plugin host as far as running a model needs it."""

    def runtimes(self) -> Sequence[Any]:
        """What each plugin supplies to run its operators (``onnxplug.run.plugin_runtime.PluginRuntime``)."""

    def evaluators(self) -> Sequence[Evaluator]:
        """What runs models node by node."""

    def explain_domain(self, domain: str) -> str:
        """Which plugin could run the operators of a domain, and why none does."""


class PluginHost(RuntimeHost, Protocol):
    """The plugin host as far as an export needs it."""

    def stamps(self) -> tuple[str, ...] | None:
        """What tells this state of the plugins' code from every other; ``None`` when that of one is not known."""

    def targets(self) -> set[str]:
        """Names of the runtimes that plugins know."""

    def domains(self) -> Sequence[Domain]:
        """The domains that plugins declare."""

    def rewrites(self) -> Sequence[Any]:
        """Rewrites, the builtin ones first."""

    def module_maker(self, model: Any) -> Callable[[Any], Any] | None:
        """What makes a Module of a model, where a plugin's source accepts the model."""

    def patches(self) -> Sequence[Patch]:
        """What holds during capture."""

    def decompositions(self) -> Mapping[str, Callable[..., Any] | None]:
        """Decompositions by qualified name; ``None`` forbids one."""

    def kernels(self, runtime: str | None) -> Mapping[str, str] | None:
        """The kernels of a runtime, where a plugin knows them."""

    def observers(self, options: Any) -> Sequence[Observer]:
        """Plugins' observers of an export with these options."""

    def missing(self, node: Any) -> Callable[..., Any] | None:
        """The first plugin's converter for an operator that no rule translates."""

    def explain_missing(self, namespace: str) -> str | None:
        """Why a namespace has no rules, or nothing serves a library of that import name."""
