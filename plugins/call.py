"""Checks of a call of ``to_onnx`` against what torch, the plugins and the captured model know: operators of rules, and domains."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxplug.errors import UsageError
from onnxplug.host import PluginHost
from onnxplug.registry.names import close_operators, is_known_operator, known_namespaces, without_prefix
from onnxplug.registry.registry import Layer, OnnxRegistry
from onnxplug.registry.rule import Rule
from onnxplug.warn import warn

if TYPE_CHECKING:
    import onnx_ir as ir

_MICROSOFT = ("com.microsoft", "com.microsoft.nchwc", "com.microsoft.experimental", "com.ms.internal.nhwc")


class UnusedRuleWarning(UserWarning):
    """A rule of the call is for an operator that the model does not have."""


class CallChecks:
    """The checks of one call, the first of which is its making.

    Args:
        host: The plugins.
        registry: The rules.
        rules: The rules of the call.
        opsets: The requested versions, by domain.
        runtime: What the call gives to run custom operators.
        own: Domains that the call itself names.

    Raises:
        UsageError: A rule is for an operator that torch does not know, in a namespace that it knows, or nothing knows a domain.
    """

    def __init__(
        self,
        host: PluginHost,
        registry: OnnxRegistry,
        rules: Sequence[Rule],
        opsets: Mapping[str, int],
        runtime: Iterable[Any],
        own: Iterable[str],
    ) -> None:
        check_operators(rules, late=False)
        self._rules = rules
        self._unknown = unknown_domains(opsets, registry, host, runtime, own)

    def captured(self) -> None:
        """Checks, once the model is captured and all libraries are imported, that torch knows the operators of the rules.

        Raises:
            UsageError: It knows no such operator.
        """
        check_operators(self._rules, late=True)

    def converted(self, model: ir.Model) -> None:
        """Checks that the domains that nothing declares have a node in the model.

        Raises:
            UsageError: The model has no operator of such a domain.
        """
        check_domains_used(model, self._unknown)


def check_operators(rules: Sequence[Rule], *, late: bool) -> None:
    """Checks that torch knows the operators of the rules of a call.

    Args:
        rules: The rules.
        late: After capture. Before it, operators of a namespace that torch does not know are accepted: the model may import
            the library that registers them.

    Raises:
        UsageError: torch knows no such operator.
    """
    unknown = [rule for rule in rules if not _is_registered_symbolic(rule) and not is_known_operator(rule.op)]
    if not unknown:
        return
    namespaces = known_namespaces()
    for rule in unknown:
        namespace = without_prefix(rule.op).partition("::")[0]
        if late or "::" not in rule.op or namespace in namespaces:
            near = close_operators(rule.op)
            meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise UsageError(
                f"a rule of the call ({rule.name}) is for {rule.op!r}, an operator that torch does not know",
                hint=f"{meant}Import the library that registers the operator before the export.",
            )


def warn_of_unused_rules(registry: Any, operators: Iterable[str]) -> None:
    """Warns of rules of the call that no node needed.

    Args:
        registry: The registry of the export.
        operators: The operators for which rules were looked up.
    """
    if not registry.call_rules:
        return
    names = {without_prefix(name) for name in operators}
    packets = {name.partition(".")[0] if "::" in name else name for name in names}
    unused = [
        rule
        for rule in registry.call_rules
        if not _is_registered_symbolic(rule) and without_prefix(rule.op) not in names | packets
    ]
    if not unused:
        return
    texts = []
    for rule in unused:
        packet = without_prefix(rule.op).partition(".")[0]
        others = sorted(name for name in names if name.startswith(f"{packet}."))
        texts.append(f"{rule.op} ({rule.name})" + (f", where the model has {', '.join(others)}" if others else ""))
    warn(
        f"the model has none of the operators that these rules of the call are for: {'; '.join(texts)}",
        UnusedRuleWarning,
    )


def _is_registered_symbolic(rule: Rule) -> bool:
    """Whether it comes from ``compat.registered_symbolics``: all functions registered with torch, used or not."""
    return getattr(rule.convert, "onnxplug_registered", False)


def unknown_domains(
    opsets: Mapping[str, int],
    registry: OnnxRegistry,
    host: PluginHost,
    runtime: Iterable[Any],
    own: Iterable[str] = (),
) -> list[str]:
    """The requested domains that nothing declares; rules from outside onnxplug may still emit them.

    Args:
        opsets: The requested versions, by domain.
        registry, host, runtime: Sources of declared domains.
        own: Domains that the call itself names.

    Raises:
        UsageError: There is such a domain, and no rule from outside onnxplug.
    """
    import onnx.defs

    known = {schema.domain for schema in onnx.defs.get_all_schemas_with_history()} if len(opsets) > 1 else set()
    known |= {"", *own, "ai.onnx", "ai.onnx.ml", "ai.onnx.training", *_MICROSOFT, *(d.name for d in host.domains())}
    known |= {name for _, rule in registry.rules() for name in rule.domains} if not known >= set(opsets) else set()
    known |= {name for rewrite in host.rewrites() for name in getattr(rewrite, "domains", ())}
    known |= {name for item in runtime for name in getattr(item, "domains", ())}
    unknown = [name for name in opsets if name not in known]
    if unknown and all(layer is Layer.BUILTIN for layer, _ in registry.rules()):
        raise unknown_domain(unknown[0], known)
    return unknown


def check_domains_used(model: ir.Model, unknown: Sequence[str]) -> None:
    """Checks that undeclared domains have a node.

    Raises:
        UsageError: The model has no operator of such a domain.
    """
    if unknown:
        used = {node.domain for node in model.graph.all_nodes()} | {key[0] for key in model.functions}
        used |= {node.domain for function in model.functions.values() for node in function.all_nodes()}
        for name in unknown:
            if name not in used:
                raise unknown_domain(name, used | set(_MICROSOFT))


def unknown_domain(name: str, known: Iterable[str]) -> UsageError:
    """The error for an unknown domain of ``opset_version``."""
    near = difflib.get_close_matches(name, [n for n in known if n], 1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return UsageError(
        f"opset_version names the domain {name!r}, which nothing here knows",
        hint=f"{meant}A plugin declares a domain through its hook onnxplug_domains; `onnxplug plugins list` shows the plugins.",
    )
