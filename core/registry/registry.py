"""OnnxRegistry: chooses the rule that translates a node, and explains the choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from onnxplug.errors import PluginError, RuleConflictError, UsageError
from onnxplug.registry.names import packet_of
from onnxplug.registry.rule import Rule
from onnxplug.registry.target import Target, closeness, intersect, with_outer
from onnxplug.warn import warn


class RuleWarning(UserWarning):
    """A rule was refused; everything else goes on."""


class Layer(IntEnum):
    """Where a rule comes from; the higher layer goes first."""

    BUILTIN = 0
    PLUGIN = 1
    CALL = 2


@dataclass(frozen=True)
class Explanation:
    """One candidate for an operator, with the reason it was taken or passed over.

    Attributes:
        rule: The candidate.
        layer: Its layer.
        source: Distribution that supplied it.
        taken: Whether it translates the operator.
        reason: Why it was taken or passed over.
    """

    rule: Rule
    layer: Layer
    source: str
    taken: bool
    reason: str


class OnnxRegistry:
    """An immutable table of rules, one per export.

    Args:
        builtin: The rules that ship with onnxplug.
        plugin: Rules of installed packages; each carries its distribution's name in ``source``.
        call: Rules of this call.
        prefer: Qualified operator name (of an overload or a packet) to the distribution whose rules go first.

    Raises:
        PluginError: One distribution states the same rule twice.
        UsageError: ``prefer`` names a distribution that supplies no rule for the operator.
    """

    def __init__(
        self,
        builtin: Iterable[Rule] = (),
        plugin: Iterable[Rule] = (),
        call: Iterable[Rule] = (),
        *,
        prefer: Mapping[str, str] | None = None,
    ) -> None:
        self._prefer = dict(prefer or {})
        self.refused: list[Rule] = []
        table: dict[str, list[tuple[Layer, Rule]]] = {}
        for rule in builtin:
            table.setdefault(rule.op, []).append((Layer.BUILTIN, rule))
        plugin_rules = list(plugin)
        overloads: dict[str, list[str]] = {}
        for op in table if plugin_rules else ():
            overloads.setdefault(packet_of(op), []).append(op)
        for rule in plugin_rules:
            if not rule.override and self._shadowed(rule, table, overloads):
                self._refuse(rule)
                continue
            table.setdefault(rule.op, []).append((Layer.PLUGIN, rule))
        #: The rules of this call.
        self.call_rules: tuple[Rule, ...] = tuple(call)
        for rule in self.call_rules:
            table.setdefault(rule.op, []).append((Layer.CALL, rule))
        self._table: Mapping[str, tuple[tuple[Layer, Rule], ...]] = MappingProxyType(
            {op: tuple(rules) for op, rules in table.items()}
        )
        self._check_duplicates()
        self._check_preferences()

    # -- building ------------------------------------------------------------------------------------------------------

    def _shadowed(
        self, rule: Rule, table: Mapping[str, Sequence[tuple[Layer, Rule]]], overloads: Mapping[str, Sequence[str]]
    ) -> Rule | None:
        """A builtin rule for an operator and opset that the plugin's rule claims too."""
        packet = packet_of(rule.op)
        if packet not in overloads:
            return None
        names = [*overloads.get(packet, ()), packet] if packet == rule.op else [rule.op, packet]
        for name in dict.fromkeys(names):
            for layer, other in table.get(name, ()):
                if layer is Layer.BUILTIN and _overlap(rule, other):
                    return other
        return None

    def _refuse(self, rule: Rule) -> None:
        self.refused.append(rule)
        warn(
            f"the rule {rule.name} of {rule.source or 'a plugin'} for {rule.op} is ignored: onnxplug translates that "
            "operator itself. A rule that is meant to replace a builtin one says so: Rule(..., override=True).",
            RuleWarning,
        )

    def _check_duplicates(self) -> None:
        for op, rules in self._table.items():
            if len(rules) < 2:
                continue
            seen: dict[Any, Rule] = {}
            for layer, rule in rules:
                if rule.when is not None or rule.domains:
                    continue
                key = (layer, rule.source, rule.priority, rule.opset, frozenset(rule.target), rule.exact)
                other = seen.setdefault(key, rule)
                if other is not rule:
                    raise PluginError(
                        f"{rule.source or 'one table'} has two rules for {op} with the same conditions: {other.name} and "
                        f"{rule.name}",
                        hint="Give one of them an opset range, a target, a condition or a priority.",
                    )

    def _check_preferences(self) -> None:
        for op, wanted in self._prefer.items():
            sources = {rule.source for name in self._names(op) for _, rule in self._table.get(name, ())}
            if wanted not in sources:
                available = ", ".join(sorted(s for s in sources if s)) or "none"
                raise UsageError(
                    f"prefer: {wanted!r} has no rule for {op}; the distributions that have one: {available}"
                )

    def _names(self, op: str) -> list[str]:
        """The keys of rules for ``op``; every overload of a packet."""
        if "::" in op and "." not in op.partition("::")[2]:
            return [op, *(name for name in self._table if packet_of(name) == op and name != op)]
        packet = packet_of(op)
        return [op] if packet == op else [op, packet]

    # -- looking up ----------------------------------------------------------------------------------------------------

    def bind(self, target: Target) -> BoundRegistry:
        """The registry for one target: conditions on opsets, domains, runtime and exactness are evaluated once."""
        return BoundRegistry(self, target)

    def find(self, node: Any, target: Target) -> Rule | None:
        """The rule that translates a node.

        Args:
            node: The node (:class:`onnxplug.FxNode`).
            target: The target of the export.

        Returns:
            The first rule that applies; ``None`` when there is none.

        Raises:
            RuleConflictError: Two distributions claim the operator equally.
        """
        rules = self.candidates(node, target)
        return rules[0] if rules else None

    def candidates(self, node: Any, target: Target) -> Sequence[Rule]:
        """The rules that apply to a node.

        Args:
            node: The node (:class:`onnxplug.FxNode`).
            target: The target of the export.

        Returns:
            The rules in order of precedence.

        Raises:
            RuleConflictError: Two distributions claim the operator equally.
        """
        return self.bind(target).candidates(node)

    def ranked(self, op: str, target: Target) -> list[tuple[Layer, Rule]]:
        """The rules for an operator whose conditions on the target hold; conditions on the node are not evaluated.

        Args:
            op: The qualified name of an overload.
            target: The target of the export.

        Returns:
            The rules with their layers, in order of precedence. Within a layer and a priority, a rule for the closest target goes
            first, then a rule that states ``exact``, then the rule for the newest opset.

        Raises:
            RuleConflictError: Two distributions have equal precedence.
        """
        rows = [
            (layer, name == op, rule)
            for name in ([op] if packet_of(op) == op else [op, packet_of(op)])
            for layer, rule in self._table.get(name, ())
            if _why_not(rule, target) is None
        ]
        preferred = self._prefer.get(op, self._prefer.get(packet_of(op)))

        def key(row: tuple[Layer, bool, Rule]) -> tuple[Any, ...]:
            layer, closer, rule = row
            return (
                layer,
                rule.source == preferred and preferred is not None,
                closer,
                rule.priority,
                closeness(rule.target, target.runtime) or 0,
                rule.exact is not None,
                rule.opset[0] or 0,
            )

        rows.sort(key=key, reverse=True)
        for first, second in pairwise(rows):
            one, other = first[2], second[2]
            if key(first) == key(second) and one.source != other.source and first[0] is not Layer.CALL:
                raise RuleConflictError(
                    f"{one.source!r} and {other.source!r} both translate {op}, by {one.name} and {other.name}",
                    hint=f"Say which one: prefer={{{op!r}: {one.source!r}}}, or --prefer {op}={one.source}.",
                )
        return [(layer, rule) for layer, _, rule in rows]

    def explain(self, op: str, target: Target, node: Any = None) -> list[Explanation]:
        """Explains which rule translates an operator, and why the others don't.

        Args:
            op: The qualified name of an overload, or of an operator, for all its overloads.
            target: The target of the export.
            node: A node, to evaluate conditions on it; without one they are named as conditions.

        Returns:
            Every candidate with the reason; the chosen rule comes first.
        """
        explanations: list[Explanation] = []
        overloads = [name for name in self._names(op) if name != packet_of(name)] if packet_of(op) == op else [op]
        for name in overloads or [op]:
            explanations.extend(self._explain_one(name, target, node))
        unique = {(id(e.rule), e.reason): e for e in explanations}
        return list(unique.values())

    def _explain_one(self, op: str, target: Target, node: Any) -> Iterator[Explanation]:
        try:
            ranked = self.ranked(op, target)
        except RuleConflictError as conflict:
            for name in dict.fromkeys([op, packet_of(op)]):
                for layer, rule in self._table.get(name, ()):
                    yield Explanation(rule, layer, rule.source, False, f"conflict: {conflict.message}")
            return
        winner: Rule | None = None
        for layer, rule in ranked:
            if winner is not None:
                yield Explanation(rule, layer, rule.source, False, f"comes after {winner.name}")
            elif rule.when is not None and node is None:
                yield Explanation(rule, layer, rule.source, False, "applies to a node for which its condition holds")
            elif (unmet := _unmet(rule, node)) is not None:
                yield Explanation(rule, layer, rule.source, False, unmet)
            else:
                winner = rule
                first = _why_first(layer, rule)
                named = next((key for key in (op, packet_of(op)) if key in self._prefer), None)
                if named is not None and self._prefer[named] == rule.source:
                    first += f"; preferred by a setting: {named}={rule.source}"
                yield Explanation(rule, layer, rule.source, True, first)
        for name in dict.fromkeys([op, packet_of(op)]):
            for layer, rule in self._table.get(name, ()):
                reason = _why_not(rule, target)
                if reason is not None:
                    yield Explanation(rule, layer, rule.source, False, reason)
        for rule in self.refused:
            if rule.op in (op, packet_of(op)):
                yield Explanation(
                    rule, Layer.PLUGIN, rule.source, False, "shadows a builtin rule without override=True"
                )

    def operators(self) -> list[str]:
        """Every operator name that some rule is keyed by, sorted."""
        return sorted(self._table)

    def targets(self) -> set[str]:
        """The target names of rules, and the names that contain them."""
        return set(self._targets)

    @cached_property
    def _targets(self) -> set[str]:
        return with_outer(name for _, rule in self.rules() for name in rule.target)

    def rules(self) -> Iterator[tuple[Layer, Rule]]:
        """Every rule with its layer."""
        for rules in self._table.values():
            yield from rules

    def has_own_rules(self, prefix: str) -> bool:
        """Whether a plugin or the call has a rule for an operator whose name begins so."""
        own = (rules for op, rules in self._table.items() if op.startswith(prefix))
        return any(layer is not Layer.BUILTIN for rules in own for layer, _ in rules)

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and (op in self._table or packet_of(op) in self._table)

    def __len__(self) -> int:
        return sum(len(rules) for rules in self._table.values())


class BoundRegistry:
    """A registry bound to one target; a look-up is one dictionary access."""

    def __init__(self, registry: OnnxRegistry, target: Target) -> None:
        self._registry = registry
        self._target = target
        self._ranked: dict[str, tuple[tuple[Rule, ...], bool]] = {}

    def candidates(self, node: Any) -> Sequence[Rule]:
        """The rules that apply to a node, in order.

        Raises:
            RuleConflictError: Two distributions claim the operator equally.
        """
        rules, conditional = self._ranked.get(node.op_name) or self._look_up(node.op_name)
        if not conditional:
            return rules
        return [rule for rule in rules if rule.when is None or rule.when(node)]

    def only_rule(self, op: str) -> Rule | None:
        """The only rule for an operator, if there is a single one and it has no condition on the node."""
        rules, conditional = self._ranked.get(op) or self._look_up(op)
        return rules[0] if len(rules) == 1 and not conditional else None

    def _look_up(self, op: str) -> tuple[tuple[Rule, ...], bool]:
        rules = tuple(rule for _, rule in self._registry.ranked(op, self._target))
        self._ranked[op] = ranked = rules, any(rule.when is not None for rule in rules)
        return ranked

    def reason(self, rule: Rule, node: Any) -> str:
        """Why a rule is chosen for a node, or comes after another; for the log."""
        candidates = self._registry.explain(node.op_name, self._target, node)
        return next((each.reason for each in candidates if each.rule is rule), "made for this node")

    def operators(self) -> set[str]:
        """The operators for which rules were looked up."""
        return set(self._ranked)


def _overlap(one: Rule, other: Rule) -> bool:
    """Whether two rules for an operator may both hold for some target."""
    if one.exact is not None and other.exact is not None and one.exact != other.exact:
        return False
    if not intersect(one.target, other.target):
        return False
    low = max(one.opset[0] or 0, other.opset[0] or 0)
    ends = [rule.opset[1] for rule in (one, other)]
    return low <= min((end for end in ends if end is not None), default=low)


def _why_not(rule: Rule, target: Target) -> str | None:
    """Why a rule's conditions fail for a target; ``None`` when they hold."""
    since, until = rule.opset
    if since is not None and target.opset < since:
        return f"needs opset {since} or later, the target is {target.opset}"
    if until is not None and target.opset > until:
        return f"holds up to opset {until}, the target is {target.opset}"
    for name, version in rule.domains.items():
        imported = target.opsets.get(name)
        if imported is None or imported < version:
            return f"needs the domain {name} at version {version} or later among the target opsets"
    because = f": {rule.reason}" if rule.reason else ""
    if closeness(rule.target, target.runtime) is None:
        return f"holds for the target {_names_text(rule.target)}, not for {target.runtime or 'portable ONNX'}{because}"
    if rule.exact is True and not target.exact:
        return f"applies only with exact=True{because}"
    if rule.exact is False and target.exact:
        return f"applies only without exact=True{because}"
    return None


def _names_text(names: Sequence[str]) -> str:
    return " or ".join(names)


def _unmet(rule: Rule, node: Any) -> str | None:
    """Why a rule's predicate fails for a node; ``None`` when it holds."""
    try:
        if rule.when is None or rule.when(node):
            return None
    except Exception as error:
        return f"its condition raised {type(error).__name__}: {error}"
    return "its condition does not hold for the node"


def _why_first(layer: Layer, rule: Rule) -> str:
    origin = {Layer.CALL: "given in the call", Layer.PLUGIN: f"from the plugin {rule.source}", Layer.BUILTIN: "builtin"}
    since, until = rule.opset
    versions = (
        "every opset" if since is None and until is None else f"opset {since or 'any'} to {until or 'the newest'}"
    )
    notes = [origin[layer], versions]
    notes += [f"for {_names_text(rule.target)}"] if rule.target else []
    notes += ["exact special values"] if rule.exact else ["plain special values"] if rule.exact is False else []
    return ", ".join(notes) + (f": {rule.reason}" if rule.reason else "")
