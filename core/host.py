"""Protocols of the plugin host, which ``onnxplug.plugins`` implements; core depends on these alone, and on the host's name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from onnxplug.observers import Observer
from onnxplug.plugin_api import Domain, Evaluator, OnnxOperator, OrtLibrary, Patch, ReferenceOp, Verifier
from onnxplug.registry.registry import OnnxRegistry
from onnxplug.registry.rule import Rule, load_object

CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class CustomOperators:
    """Operators of a model that ONNX does not define.

    Attributes:
        domains: The domains of all of them.
        bodiless: Domain and type of the operators without a function in the model.
    """

    domains: tuple[str, ...] = ()
    bodiless: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Library:
    """A library to load, and the plugin or call that supplies it."""

    path: str
    owner: str

    def __str__(self) -> str:
        return f"{self.path} of {self.owner}"


@dataclass
class Kernels:
    """The libraries and kernels of plugins for a model.

    Attributes:
        libraries: Libraries for ONNX Runtime to load.
        providers: Execution providers that the session needs.
        reference: ``OpRun`` classes by domain and operator.
        passed_over: Libraries that can't be used here, and why.
    """

    libraries: list[Library] = field(default_factory=list)
    providers: list[str] = field(default_factory=lambda: [CPU])
    reference: dict[tuple[str, str], type] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)


class RuntimeHost(Protocol):
    """The part of the plugin host that running a model needs."""

    def runtimes(self) -> Sequence[Any]:
        """The libraries and kernels of each plugin (``onnxplug.plugins.runtime.PluginRuntime``)."""

    def kernels_for(self, custom: CustomOperators, providers: Sequence[str] | None = None) -> Kernels:
        """The libraries and kernels for a model's operators.

        Args:
            custom: The operators.
            providers: The session's execution providers; ``None``: the CPU's, and the providers that a library requires.

        Raises:
            PluginError: A library is not at its plugin's path, or a domain has two libraries, or an operator two kernels.
        """

    def evaluators(self) -> Sequence[Evaluator]:
        """The evaluators that run models node by node."""

    def verifier(self, program: Any) -> Verifier:
        """The first plugin's function that compares a program with PyTorch."""

    def explain_domain(self, domain: str) -> str:
        """The plugin that could run the operators of a domain, and why none does."""


class CallChecks(Protocol):
    """Holds a call of ``to_onnx`` against what torch, the plugins and the model know (``onnxplug.plugins.call.CallChecks``)."""

    def captured(self) -> None:
        """The model is captured."""

    def converted(self, model: Any) -> None:
        """The ``onnx_ir.Model`` is made."""


class PluginHost(RuntimeHost, Protocol):
    """The part of the plugin host that an export needs."""

    def with_runtime(self, items: Sequence[OrtLibrary | ReferenceOp]) -> RuntimeHost:
        """These plugins, behind the libraries and kernels of a call."""

    def checks(
        self,
        registry: OnnxRegistry,
        rules: Sequence[Rule],
        opsets: Mapping[str, int],
        runtime: Sequence[Any],
        own: Collection[str],
    ) -> CallChecks:
        """Checks the rules of a call and the domains that it names: now, and as the export goes on."""

    def warn_of_unused_rules(self, registry: OnnxRegistry, operators: Collection[str]) -> None:
        """Warns of rules of the call that are for none of the operators for which rules were looked up."""

    def check_verifiable(self, opset: int) -> None:
        """Checks that a model of an opset can be verified here."""

    def stamps(self) -> tuple[str, ...] | None:
        """The stamps of the plugins' code, which differ between any two states; ``None`` when a plugin's stamp is not known."""

    def targets(self) -> set[str]:
        """Names of the runtimes that plugins know."""

    def domains(self) -> Sequence[Domain]:
        """The domains that plugins declare."""

    def operators(self) -> Mapping[tuple[str, str], OnnxOperator]:
        """The records of ONNX operators by domain and name."""

    def rewrites(self) -> Sequence[Any]:
        """Rewrites, the builtin rewrites first."""

    def module_maker(self, model: Any) -> Callable[[Any], Any] | None:
        """The function that makes a Module of a model, where a plugin's source accepts the model."""

    def patches(self) -> Sequence[Patch]:
        """The patches that hold during capture."""

    def decompositions(self) -> Mapping[str, Callable[..., Any] | None]:
        """Decompositions by qualified name; ``None`` forbids decomposing."""

    def kernels(self, runtime: str | None) -> Mapping[str, str] | None:
        """The kernels of a runtime, where a plugin knows them."""

    def observers(self, options: Any) -> Sequence[Observer]:
        """Plugins' observers of an export with these options."""

    def refusals(self) -> Sequence[Callable[..., str | None]]:
        """The functions that tell why eager PyTorch refuses a call that fake tensors accept."""

    def missing(self, node: Any) -> Callable[..., Any] | None:
        """The first plugin's converter for an operator that no rule translates."""

    def explain_missing(self, namespace: str) -> str | None:
        """The reason why a namespace has no rules, or nothing serves a library of that import name."""


#: core knows the plugin host only by its names; everything that plugins supply, including the builtin rules, comes from it.
_HOST, _REGISTRY = "onnxplug.plugins.manager:host_for", "onnxplug.plugins.manager:registry_for"


def plugin_host(plugins: Sequence[str] | None = None) -> PluginHost:
    """The plugins of a process: all installed plugins, or the named ones.

    Raises:
        PluginError: A named plugin is not installed.
    """
    return load_object(_HOST, "the plugin manager")(plugins)


def plugins_of_call(
    *, plugins: Sequence[str] | None, call_rules: Sequence[Rule], prefer: Mapping[str, str] | None
) -> tuple[OnnxRegistry, PluginHost]:
    """The registry and the plugin manager that the arguments of a call select."""
    make: Any = load_object(_REGISTRY, "the plugin manager")
    return make(plugins=plugins, call_rules=call_rules, prefer=prefer)
