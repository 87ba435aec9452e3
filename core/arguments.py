"""Checks of an export's arguments: everything that can be checked before the model is captured is, because capture takes long."""

from __future__ import annotations

import difflib
import inspect
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onnxplug.errors import NameCountError, OnnxplugError, UsageError
from onnxplug.host import PluginHost
from onnxplug.kinds import check_lists
from onnxplug.packages import load
from onnxplug.registry.names import close_operators, is_known_operator, known_namespaces, without_prefix
from onnxplug.registry.registry import Layer, OnnxRegistry
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import pytree
from onnxplug.warn import warn

if TYPE_CHECKING:
    import onnx_ir as ir

_MICROSOFT = ("com.microsoft", "com.microsoft.nchwc", "com.microsoft.experimental", "com.ms.internal.nhwc")


class UnusedRuleWarning(UserWarning):
    """A rule of the call is for an operator that the model does not have."""


# -- inputs ------------------------------------------------------------------------------------------------------------


def positional_and_named(model: Any, args: Any, kwargs: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any] | None]:
    """The example inputs; a dict at the end of ``args`` becomes keyword inputs, as in ``torch.onnx.export``.

    It stays positional where the model's signature accepts it so and not as keywords. A single tensor becomes a tuple of it.
    """
    args = (args,) if isinstance(args, torch.Tensor) else args
    if kwargs:
        return args, dict(kwargs)
    is_call = isinstance(args, tuple | list) and args and isinstance(args[-1], dict)
    if not is_call or isinstance(model, torch.export.ExportedProgram):
        return args, None
    rest, last = tuple(args[:-1]), args[-1]
    if not all(isinstance(name, str) for name in last) or (not _binds(model, rest, last) and _binds(model, args, {})):
        return args, None
    return rest, dict(last)


def _binds(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call fits the model's signature; True where there is none."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _leaves(inputs: Any) -> list[Any]:
    try:
        return list(pytree.tree_leaves(inputs))
    except RecursionError as error:
        raise UsageError("the inputs are nested too deeply") from error


def check_inputs(inputs: tuple[Any, Any]) -> None:
    """Checks the example inputs.

    Args:
        inputs: The positional and the keyword inputs.

    Raises:
        UsageError: A tensor is sparse, which ONNX models can't take, or the nesting is endless.
    """
    for leaf in _leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.layout in _SPARSE:
            raise UsageError(
                f"an input is a sparse tensor ({leaf.layout}), and the inputs of an ONNX model are dense",
                hint="Give x.to_dense(), or the indices and values as inputs of their own.",
            )


#: Layouts of sparse tensors.
_SPARSE = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def check_names(
    input_names: Sequence[str] | None, output_names: Sequence[str] | None, inputs: tuple[Any, Any] | None
) -> None:
    """Checks the names of graph inputs and outputs as far as they can be without the graph.

    Args:
        input_names, output_names: The user's arguments.
        inputs: The positional and the keyword inputs; ``None`` when they are not known.

    Raises:
        UsageError: A name is malformed or appears twice, or there are more names than inputs.
    """
    for argument, names in (("input_names", input_names), ("output_names", output_names)):
        if names is None:
            continue
        if (
            isinstance(names, str)
            or not isinstance(names, Iterable)
            or not all(isinstance(name, str) and name for name in names)
        ):
            raise UsageError(f"{argument} must be a list of names, got {names!r}")
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise UsageError(f"{argument} has {repeated[0]!r} twice")
    common = sorted(set(input_names or ()) & set(output_names or ()))
    if common:
        raise UsageError(f"{common[0]!r} is in input_names and in output_names", hint="A name stands for one value.")
    if inputs is not None and input_names is not None:
        values = _leaves(inputs)
        leaves = [leaf for leaf in values if isinstance(leaf, torch.Tensor | int | float)]
        # A plugin may define the structure of other objects later.
        whole = all(isinstance(value, torch.Tensor | int | float | complex | str | None) for value in values)
        if whole and len(input_names) > len(leaves):
            text = f"input_names has {len(input_names)} names for {len(leaves)} inputs"
            raise NameCountError.of(text, "input_names", len(leaves))


# -- functions, destination and runtime --------------------------------------------------------------------------------


def check_destination(f: Any) -> None:
    """Checks that a model can be written there.

    Raises:
        SaveError: The folder is missing or not writable, or it can't hold a file.
        UsageError: It is neither a path nor a file object.
    """
    if f is None or hasattr(f, "write"):
        return
    if not isinstance(f, str | os.PathLike):
        raise UsageError(f"f must be the path of a file, got {f!r}")
    from onnxplug.run.save import check_destination as check

    check(f)


def check_verifiable(opset: int) -> None:
    """Checks that ONNX Runtime is installed and loads models of an opset.

    Raises:
        OnnxplugError: It is not installed, or too old.
    """
    from onnxplug.run.kernels import onnxruntime_module
    from onnxplug.run.loadable import loads_opset, newest_loadable_opset

    runtime = onnxruntime_module()
    if not loads_opset(opset):
        raise OnnxplugError(
            f"verification needs an ONNX Runtime that loads opset {opset}; version {runtime.__version__} is installed, which "
            f"loads opsets up to {newest_loadable_opset()}",
            hint="Install a newer one (pip install -U onnxruntime), or choose an older opset.",
        )


# -- rules -------------------------------------------------------------------------------------------------------------


def rules_of_call(rules: Iterable[Any], table: Mapping[Any, Any] | None) -> list[Rule]:
    """The rules of a call, including those of its ``custom_translation_table``.

    Raises:
        UsageError: An item is not a rule, or names an operator that torch does not know in a namespace that it knows.
    """
    checked = []
    check_lists(rules=[rules] if isinstance(rules, Rule) else rules)
    for rule in [rules] if isinstance(rules, Rule) else rules:
        if not isinstance(rule, Rule):
            raise UsageError(f"rules= takes Rule objects, got {rule!r}", hint="Rule('mylib::nms', converter)")
        checked.append(rule)
    if table:
        checked += load("custom_translation_table=")(table)
    check_operators(checked, late=False)
    return checked


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


# -- domains -----------------------------------------------------------------------------------------------------------


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
