"""Libraries and kernels for a model's custom operators: plugins' ONNX Runtime libraries, and their reference kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplug.errors import OnnxplugError, PluginError, UsageError
from onnxplug.host import RuntimeHost, plugin_host
from onnxplug.kinds import check_lists
from onnxplug.plugin_api import Evaluator, OrtLibrary, ReferenceOp
from onnxplug.run.plugin_runtime import PluginRuntime, reference_kernels
from onnxplug.run.report import Verifier
from onnxplug.text import in_a_line, shortened

if TYPE_CHECKING:
    import onnx_ir as ir

CPU = "CPUExecutionProvider"
_ONNX = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "ai.onnx.preview")
#: Domains whose operators come with ONNX Runtime: a plugin that declares such a domain doesn't claim that its library has them.
_BUILTIN = re.compile(r"com\.microsoft(\..+)?|com\.ms\.internal\..+")


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
        self._items = self.checked(items)

    @staticmethod
    def checked(items: Iterable[Any]) -> tuple[OrtLibrary | ReferenceOp, ...]:
        """The items of ``runtime=`` as a tuple.

        Raises:
            UsageError: It holds anything else.
        """
        if not isinstance(items, OrtLibrary | ReferenceOp):
            check_lists(runtime=items)
        checked_items = tuple([items] if isinstance(items, OrtLibrary | ReferenceOp) else items)
        for item in checked_items:
            if not isinstance(item, OrtLibrary | ReferenceOp):
                raise UsageError(
                    f"runtime= takes OrtLibrary and ReferenceOp objects, got {item!r}", hint="OrtLibrary('lib.so')"
                )
        return checked_items

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


def custom_operators(model: ir.Model | str | bytes) -> CustomOperators:
    """The custom operators of a model, its subgraphs and its functions; a file's external weights are not read.

    Raises:
        UsageError: The file is not an ONNX model.
    """
    import onnx
    import onnx_ir as ir

    if isinstance(model, str):
        if model.endswith(".ort"):  # the operators of ONNX Runtime's own format can't be read
            return CustomOperators()
        path = model
        try:
            model = ir.load(path)
        except Exception as error:  # a value is computed twice, for example
            text = f"{type(error).__name__}: {in_a_line(error)}"
            raise UsageError(f"{shortened(path, 300)} is not a sound ONNX model: {text}") from error
    elif isinstance(model, bytes):
        model = ir.serde.deserialize_model(onnx.load_from_string(model))
    nodes = {(n.domain, n.op_type) for n in model.graph.all_nodes()}
    for function in model.functions.values():
        nodes |= {(n.domain, n.op_type) for n in function.all_nodes()}
    custom = sorted(n for n in nodes if n[0] not in _ONNX)
    bodies = {(f.domain, f.name) for f in model.functions.values()}
    return CustomOperators(tuple(sorted({d for d, _ in custom})), tuple(n for n in custom if n not in bodies))


def is_builtin(domain: str) -> bool:
    """Whether ONNX or ONNX Runtime itself defines a domain."""
    return domain in _ONNX or _BUILTIN.fullmatch(domain) is not None


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
        names = set(_available_providers())
        usable = [(i, r) for i, r in offered if set(i.providers) & names]
    if not usable:
        present = ", ".join(kernels.providers if not may_add else _available_providers())
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
            available = _available_providers()
            kernels.providers.insert(0, next(p for p in item.providers if p in available))


def onnxruntime_module() -> Any:
    """ONNX Runtime.

    Raises:
        OnnxplugError: It isn't installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OnnxplugError(
            "running the model needs ONNX Runtime, which is not installed", hint="pip install 'onnxplug[ort]'"
        ) from error
    return onnxruntime


def _available_providers() -> list[str]:
    return list(onnxruntime_module().get_available_providers())


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


def lacks_operator(error: Exception) -> bool:
    """Whether ONNX Runtime refused a model because of an unknown operator."""
    return "is not a registered function/op" in str(error) or "No Op registered for" in str(error)


def missing_text(
    kernels: Kernels, host: RuntimeHost, lacking: Sequence[tuple[str, str]], *, reference: bool = True
) -> str:
    """Why nothing runs these operators: the missing part of each plugin that could supply them."""
    names = ", ".join(f"{domain}::{op}" for domain, op in lacking)
    missing = "no library for ONNX Runtime and no reference kernel has" if reference else "no library has"
    it = "it" if len(lacking) == 1 else "them"
    lines = [f"nothing runs {names}: {missing} {it}", *(f"{r[0].upper()}{r[1:]}." for r in kernels.passed_over)]
    lines += [host.explain_domain(domain) for domain in sorted({domain for domain, _ in lacking})]
    if kernels.libraries:
        lines.append(f"Libraries that were loaded: {', '.join(map(str, kernels.libraries))}.")
    return "\n".join(lines)


MISSING_HINT = (
    "A plugin supplies an OrtLibrary or a ReferenceOp through its hook onnxplug_runtime, a call through runtime=[…]; a "
    "rule may also give the operator a body: g.function(…)."
)


def lacking_kernels(custom: CustomOperators, kernels: Kernels) -> list[tuple[str, str]]:
    """Operators without a body that no reference kernel computes."""
    return [op for op in custom.bodiless if op not in kernels.reference]


def unknown_operators(error: Exception, custom: CustomOperators) -> list[tuple[str, str]]:
    """The operators that an error of ONNX Runtime names as unknown; all custom operators if it names none."""
    named = re.findall(r"([\w.\-]+):(\w+)\(-?\d+\) is not a registered", str(error))
    return [n for n in named if n in custom.bodiless] or list(custom.bodiless)
