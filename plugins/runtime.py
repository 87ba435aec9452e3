"""The choice among plugins' libraries of ONNX Runtime, and among their reference kernels, for a model's custom operators."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplug.errors import PluginError
from onnxplug.host import CPU, CustomOperators, Kernels, Library, RuntimeHost, plugin_host
from onnxplug.plugin_api import Evaluator, OrtLibrary, ReferenceOp, Verifier
from onnxplug.registry.rule import load_object
from onnxplug.run.kernels import ONNX_DOMAINS, available_providers, checked_items

#: Domains whose operators come with ONNX Runtime: a plugin that declares such a domain doesn't claim that its library has them.
_BUILTIN = re.compile(r"com\.microsoft(\..+)?|com\.ms\.internal\..+")


@dataclass(frozen=True)
class PluginRuntime:
    """The items of a plugin's ``onnxplug_runtime`` hook, or of a call.

    Attributes:
        plugin: The plugin, for messages: its name, distribution and version; ``None`` for a call.
        domains: ONNX domains that it declares.
        items: Its libraries and reference kernels.
    """

    plugin: str | None
    domains: tuple[str, ...]
    items: tuple[OrtLibrary | ReferenceOp, ...]

    @property
    def owner(self) -> str:
        """The plugin's name and distribution, for messages."""
        return f"the plugin {self.plugin}" if self.plugin is not None else "this call (runtime=)"


def reference_kernels(domains: Collection[str], runtimes: Iterable[PluginRuntime]) -> dict[tuple[str, str], type]:
    """Plugins' ``OpRun`` classes for the operators of some domains, by domain and operator.

    Raises:
        PluginError: Two plugins supply a kernel for the same operator, or an item is not a kernel.
    """
    kernels: dict[tuple[str, str], tuple[type, PluginRuntime]] = {}
    for runtime in runtimes:
        for item in runtime.items:
            if not isinstance(item, ReferenceOp):
                continue
            if runtime.domains and not set(runtime.domains) & set(domains):
                continue
            kernel = _kernel_class(item, runtime)
            key = (getattr(kernel, "op_domain", ""), kernel.__name__)
            if key[0] not in domains:
                continue
            if key not in kernels:
                kernels[key] = (kernel, runtime)
            elif kernels[key][0] is not kernel and kernels[key][1].plugin is not None:
                raise PluginError(
                    f"the operator {key[0]}::{key[1]} has two reference kernels, of {kernels[key][1].owner} and {runtime.owner}",
                    hint="Leave one plugin out: plugins=[…], or --no-plugin NAME.",
                )
    return {key: kernel for key, (kernel, _) in kernels.items()}


def is_kernel(value: Any) -> bool:
    """Whether it is an ``OpRun`` class of a domain; onnx is not imported to tell."""
    return isinstance(value, type) and hasattr(value, "eval") and hasattr(value, "op_domain")


def _kernel_class(item: ReferenceOp, runtime: PluginRuntime) -> type:
    kernel = item.kernel
    if isinstance(kernel, str):
        kernel = load_object(kernel, "a reference kernel", runtime.owner)
    if not is_kernel(kernel):
        raise PluginError(f"the ReferenceOp {item.kernel!r} of {runtime.owner} is not an OpRun class with an op_domain")
    return kernel


class CallHost:
    """The plugins of a call, and the call's own libraries and kernels, which go first.

    Args:
        host: The plugins; all installed plugins when ``None``.
        items: ``OrtLibrary`` and ``ReferenceOp`` objects.

    Raises:
        UsageError: An item is neither.
    """

    def __init__(self, host: RuntimeHost | None, items: Iterable[Any]) -> None:
        self._host = host
        self._items = checked_items(items)

    def _plugins(self) -> Any:
        if self._host is None:
            self._host = plugin_host()
        return self._host

    def runtimes(self) -> list[PluginRuntime]:
        """The call's items, then each plugin's."""
        return [PluginRuntime(None, (), self._items), *self._plugins().runtimes()]

    def evaluators(self) -> Sequence[Evaluator]:
        """The evaluators that run models node by node."""
        evaluators: Sequence[Evaluator] = self._plugins().evaluators()
        return evaluators

    def verifier(self, program: Any) -> Verifier:
        """The first plugin's function that compares a program with PyTorch."""
        verifier: Verifier = self._plugins().verifier(program)
        return verifier

    def explain_domain(self, domain: str) -> str:
        """The plugin that could run the operators of a domain, and why none does."""
        return self._plugins().explain_domain(domain)

    def kernels_for(self, custom: CustomOperators, providers: Sequence[str] | None = None) -> Kernels:
        """The libraries and kernels for a model's operators."""
        return kernels_for(custom, self, providers)


def is_builtin(domain: str) -> bool:
    """Whether ONNX or ONNX Runtime itself defines a domain."""
    return domain in ONNX_DOMAINS or _BUILTIN.fullmatch(domain) is not None


def kernels_for(custom: CustomOperators, host: RuntimeHost, providers: Sequence[str] | None = None) -> Kernels:
    """Chooses the plugins' libraries and kernels for a model's operators.

    Args:
        custom: The model's operators.
        host: The plugins.
        providers: The session's execution providers; ``None``: the CPU's, and the providers that a library requires.

    Raises:
        PluginError: A library is not at its plugin's path, or a domain has two libraries, or an operator two kernels.
    """
    kernels = Kernels(providers=list(providers) if providers is not None else [CPU])
    runtimes = host.runtimes()
    offers: dict[str, list[tuple[OrtLibrary, PluginRuntime]]] = {}
    taken: set[str] = set()
    for runtime in runtimes:
        for item in runtime.items:
            if isinstance(item, ReferenceOp):
                continue
            if runtime.plugin is None:  # libraries of the call are always loaded, and plugins' not for the same domains
                _choose_library("", [(item, runtime)], kernels, may_add=providers is None)
                taken |= set(item.domains)
                continue
            for domain in item.domains or [d for d in runtime.domains if not is_builtin(d)]:
                if domain in custom.domains and domain not in taken:
                    offers.setdefault(domain, []).append((item, runtime))
    for domain, offered in offers.items():
        _choose_library(domain, offered, kernels, may_add=providers is None)
    kernels.reference = reference_kernels(custom.domains, runtimes)
    return kernels


def _choose_library(
    domain: str, offered: Sequence[tuple[OrtLibrary, PluginRuntime]], kernels: Kernels, may_add: bool
) -> None:
    """Adds the library for a domain: for one of the session's providers, else for another available provider."""
    usable = [(i, r) for i, r in offered if not i.providers or set(i.providers) & {CPU, *kernels.providers}]
    if not usable and may_add:
        names = set(available_providers())
        usable = [(i, r) for i, r in offered if set(i.providers) & names]
    if not usable:
        present = ", ".join(kernels.providers if not may_add else available_providers())
        whose = "this ONNX Runtime" if may_add else "the session"
        for item, runtime in offered:
            needs = " or ".join(item.providers)
            where = "" if callable(item.path) else f" {os.fspath(item.path)}"
            purpose = f" for the domain {domain}" if domain else ""
            kernels.passed_over.append(
                f"the library{where} of {runtime.owner}{purpose} needs {needs}, and {whose} has {present}"
            )
        return
    candidates: dict[str, tuple[Library, OrtLibrary]] = {}
    for item, runtime in usable:
        library = _located(item, runtime)
        if library is not None:
            candidates.setdefault(os.path.realpath(library.path), (library, item))
    if len(candidates) > 1:
        raise PluginError(
            f"{len(candidates)} libraries implement the domain {domain}, and ONNX Runtime loads one: "
            + "; ".join(str(library) for library, _ in candidates.values()),
            hint="Leave one plugin out: plugins=[…], or --no-plugin NAME. A library that does not implement the domain "
            "says so: OrtLibrary(path, domains=[…]).",
        )
    for real, (library, item) in candidates.items():
        if all(os.path.realpath(other.path) != real for other in kernels.libraries):
            kernels.libraries.append(library)
        if item.providers and not set(item.providers) & {CPU, *kernels.providers}:
            available = available_providers()
            kernels.providers.insert(0, next(p for p in item.providers if p in available))


def _located(item: OrtLibrary, runtime: PluginRuntime) -> Library | None:
    path = item.path
    if callable(path):
        try:
            path = path()  # type: ignore[assignment]
        except Exception as error:
            raise PluginError(
                f"{runtime.owner} can't say where its library is: {type(error).__name__}: {error}"
            ) from error
        if path is None:
            return None
    if not isinstance(path, str | os.PathLike):
        raise PluginError(f"{runtime.owner} names {path!r} as its library; a path is needed")
    text = os.fspath(path)
    if not Path(text).is_file():
        problem = "is a folder" if Path(text).is_dir() else "is not there"
        raise PluginError(
            f"the library {os.path.abspath(text)} of {runtime.owner} {problem}",
            hint="Install the plugin's package again; its build may have left the library out."
            if runtime.plugin is not None
            else None,
        )
    return Library(os.path.abspath(text), runtime.owner)
