"""Plugins' libraries of ONNX Runtime and reference kernels for their operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from onnxplug.errors import PluginError
from onnxplug.plugin_api import OrtLibrary, ReferenceOp
from onnxplug.registry.rule import load_object


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
