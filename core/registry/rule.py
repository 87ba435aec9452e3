"""A rule: one translation of one torch operator, as data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from onnxplug.errors import PluginError, UsageError
from onnxplug.registry.target import checked_names

Converter = Callable[..., Any]
OpsetRange = tuple[int | None, int | None]


class Rule:
    """A translation of a torch operator.

    Args:
        op: Qualified torch name: ``"aten::add.Tensor"`` for one overload, ``"mylib::nms"`` for every overload of that
            packet, ``"mylib::nms.default"`` for the default overload alone. Python functions of the FX graph are keyed by
            module and name (``"_operator::mul"``), higher-order operators by name (``"cond"``).
        convert: A function ``(g, node) -> Value | Sequence[Value | None]``, or a string ``"package.module:function"``
            that is imported at first use.
        opset: Inclusive range (since, until) of ai.onnx versions; ``None`` leaves a side open.
        domains: Other domains, with the least version, that the target opsets must include.
        target: Names of the runtimes for which it holds (``"onnxruntime"``, or a part: ``"onnxruntime:cpu"``); ``None`` for
            all. A rule for the export's target goes before a rule for all.
        exact: ``True``: only in exports with exact special values (NaN, infinities, ties, integers beyond 2**53);
            ``False``: only in the others; ``None``: in all.
        when: A pure predicate on the node.
        reason: Why the operator has this rule besides another; ``onnxplug why`` shows it.
        override: Must be ``True`` in a plugin's rule for an operator that a builtin rule translates.
        priority: Among rules of a layer the higher priority goes first.

    Raises:
        UsageError: An argument is malformed.
    """

    __slots__ = (
        "_function",
        "convert",
        "domains",
        "exact",
        "op",
        "opset",
        "override",
        "priority",
        "reason",
        "source",
        "target",
        "when",
    )

    def __init__(
        self,
        op: str,
        convert: Converter | str,
        *,
        opset: OpsetRange = (None, None),
        domains: Mapping[str, int] | None = None,
        target: str | Sequence[str] | None = None,
        exact: bool | None = None,
        when: Callable[[Any], bool] | None = None,
        override: bool = False,
        priority: int = 0,
        reason: str = "",
    ) -> None:
        if not isinstance(op, str) or not op:
            raise UsageError(f"Rule: op must be a qualified operator name such as 'aten::add.Tensor', got {op!r}")
        if isinstance(convert, str):
            module, _, function = convert.partition(":")
            if not module or not function:
                raise UsageError(
                    f"Rule {op!r}: convert must be a function or 'package.module:function', got {convert!r}"
                )
        elif not callable(convert):
            raise UsageError(f"Rule {op!r}: convert must be a function or 'package.module:function', got {convert!r}")
        if not isinstance(opset, tuple | list) or len(opset) != 2 or not all(isinstance(v, int | None) for v in opset):
            raise UsageError(f"Rule {op!r}: opset is a pair (since, until) of versions or None, got {opset!r}")
        if not isinstance(domains, Mapping | None):
            raise UsageError(f"Rule {op!r}: domains is a dict from names to versions, got {domains!r}")
        if not isinstance(priority, int | float):
            raise UsageError(f"Rule {op!r}: priority is a number, got {priority!r}")
        since, until = opset
        if since is not None and until is not None and since > until:
            raise UsageError(f"Rule {op!r}: the opset range {opset} is empty")
        if when is not None and not callable(when):
            raise UsageError(f"Rule {op!r}: when must be a function of the node, got {when!r}")
        if exact not in (True, False, None):
            raise UsageError(f"Rule {op!r}: exact must be True, False or None, got {exact!r}")
        self.op = op
        self.convert = convert
        self.opset: OpsetRange = (since, until)
        self.domains: dict[str, int] = dict(domains) if domains else {}
        self.target: tuple[str, ...] = checked_names(f"Rule {op!r}", target)
        self.exact = exact
        self.when = when
        self.override = override
        self.priority = priority
        self.reason = reason
        #: Name of the distribution that supplied the rule; the plugin manager sets it.
        self.source: str = ""
        self._function: Converter | None = None if isinstance(convert, str) else convert

    @property
    def name(self) -> str:
        """``package.module:function`` of the converter, without importing it."""
        if isinstance(self.convert, str):
            return self.convert
        module = getattr(self.convert, "__module__", "?")
        return f"{module}:{getattr(self.convert, '__qualname__', repr(self.convert))}"

    def patches(self) -> Sequence[Callable[[], AbstractContextManager[Any]]]:
        """Context managers that hold during capture; empty except in subclasses whose operator needs a patch."""
        return ()

    @property
    def is_imported(self) -> bool:
        """Whether :meth:`resolve` has nothing to import."""
        return self._function is not None

    def resolve(self) -> Converter:
        """The converter itself, imported at first use.

        Raises:
            PluginError: The module or the function is not there.
        """
        if self._function is None:
            assert isinstance(self.convert, str)
            self._function = load_object(self.convert, f"the converter of {self.op}", self.source)
        return self._function

    def __repr__(self) -> str:
        since, until = self.opset
        conditions = "" if since is None and until is None else f", opset=({since}, {until})"
        conditions += f", target={', '.join(self.target)!r}" if self.target else ""
        conditions += "" if self.exact is None else f", exact={self.exact}"
        return f"Rule({self.op!r}, {self.name!r}{conditions})"


def object_of(item: Any, purpose: str) -> Any:
    """An object of a plugin: the object itself, or its name ``"package.module:attribute"``.

    Raises:
        PluginError: The module raises or has no such attribute.
    """
    return load_object(item, purpose) if isinstance(item, str) else item


def load_object(reference: str, purpose: str, source: str = "") -> Any:
    """Imports ``"package.module:attribute"``.

    Args:
        reference: The object's name.
        purpose: Its purpose, for the message of the error.
        source: The distribution that names it, for the message; empty for onnxplug itself.

    Returns:
        The object.

    Raises:
        PluginError: The module raises or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    owner = f" (from {source})" if source else ""
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:
        raise PluginError(
            f"cannot import {reference!r}, {purpose}{owner}: {type(error).__name__}: {error}",
            hint="Is the package that supplies it installed whole? `onnxplug plugins list` shows its version.",
        ) from error
    return value
