"""Translations that ``torch.onnx.export`` finds by itself.

Registered symbolic functions, the ``symbolic`` of autograd functions, and operators that are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from onnxplug_torchscript.autograd import autograd_function
from onnxplug_torchscript.symbolic import registered_symbolics
from torch.onnx import OperatorExportTypes

from onnxplug.errors import Unsupported
from onnxplug.registry.names import packet_of, without_prefix
from onnxplug.registry.registry import Layer, OnnxRegistry
from onnxplug.registry.rule import Rule

#: The domain and the operator as which the exporter of old keeps an operator of PyTorch.
_ATEN_DOMAIN, _ATEN = "org.pytorch.aten", "ATen"


def registered_rules(registry: OnnxRegistry, versions: Mapping[str, int]) -> list[Rule]:
    """Rules of the symbolic functions registered with ``torch.onnx.register_custom_op_symbolic``.

    A plugin's own rules go before the functions that the library registers for the exporter of old.

    Args:
        registry: The rules of this export without the call's rules.
    """
    plugins = {_packet(rule.op) for layer, rule in registry.rules() if layer is Layer.PLUGIN}
    return [rule for rule in registered_symbolics(domains=versions) if _packet(rule.op) not in plugins]


def _packet(op: str) -> str:
    return packet_of(without_prefix(op))


def autograd_rules(versions: Mapping[str, int]) -> list[Rule]:
    """Rules of every ``torch.autograd.Function`` of this process that has a ``symbolic``."""
    rules = []
    for function in _subclasses(torch.autograd.Function):
        if callable(getattr(function, "symbolic", None)):
            rule = autograd_function(function, domains=versions)
            rule.convert.onnxplug_registered = True  # type: ignore[union-attr]
            rules.append(rule)
    return rules


def _subclasses(cls: type) -> Iterator[type]:
    seen: set[type] = set()
    waiting: list[type] = [cls]
    subclass: type
    while waiting:
        for subclass in waiting.pop().__subclasses__():
            if subclass not in seen:
                seen.add(subclass)
                waiting.append(subclass)
                yield subclass


def kept_operators(names: Mapping[str, Any], kind: Any) -> list[Rule]:
    """Rules that keep operators as they are, for a runtime that knows them; none where the kind of export keeps nothing.

    Args:
        kind: ``operator_export_type`` of the export.
    """
    keep: dict[Any, Callable[..., Any]] = {
        OperatorExportTypes.ONNX_FALLTHROUGH: _by_its_name,
        OperatorExportTypes.ONNX_ATEN_FALLBACK: _by_atens,
    }
    converter = keep.get(kind)
    return [Rule(name, converter) for name in names] if converter is not None else []


def _by_its_name(g: Any, node: Any) -> Any:
    """The operator as a node of its own name, in its namespace as the domain; numbers are inputs."""
    namespace, _, name = node.op_name.partition("::")
    operator = getattr(g.domain(namespace), name.partition(".")[0])
    return operator(*_inputs(g, node), _outputs=len(node.outputs))


def _by_atens(g: Any, node: Any) -> Any:
    """The operator as an ``ATen`` that names it; numbers are inputs."""
    name, _, overload = node.op_name.partition("::")[2].partition(".")
    overload = "" if overload == "default" else overload
    aten = g.domain(_ATEN_DOMAIN).ATen
    return aten(*_inputs(g, node), operator=name, overload_name=overload, _outputs=len(node.outputs))


def _inputs(g: Any, node: Any) -> Iterator[Any]:
    for item in node.args:
        if isinstance(item, list | tuple) and not all(isinstance(part, bool | int | float) for part in item):
            raise Unsupported("it is kept as it is, and a list of tensors is no input of an ONNX operator")
        if isinstance(item, str | torch.dtype | torch.device | torch.layout | torch.memory_format):
            raise Unsupported(f"it is kept as it is, and {item!r} is no input of an ONNX operator")
        if isinstance(item, bool | int | float | list | tuple):
            exact = torch.float64 if _has_float(item) else None
            yield g.const(list(item) if isinstance(item, list | tuple) else item, exact)
        else:
            yield item


def _has_float(item: Any) -> bool:
    return any(isinstance(part, float) for part in (item if isinstance(item, list | tuple) else [item]))
