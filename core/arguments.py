"""Checks of an export's arguments: everything that can be checked before the model is captured is, because capture takes long."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from onnxplug.errors import NameCountError, UsageError
from onnxplug.kinds import check_lists
from onnxplug.packages import load
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import pytree

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


# -- rules -------------------------------------------------------------------------------------------------------------


def rules_of_call(rules: Iterable[Any], table: Mapping[Any, Any] | None) -> list[Rule]:
    """The rules of a call, including those of its ``custom_translation_table``.

    Raises:
        UsageError: An item is not a rule.
    """
    checked = []
    check_lists(rules=[rules] if isinstance(rules, Rule) else rules)
    for rule in [rules] if isinstance(rules, Rule) else rules:
        if not isinstance(rule, Rule):
            raise UsageError(f"rules= takes Rule objects, got {rule!r}", hint="Rule('mylib::nms', converter)")
        checked.append(rule)
    if table:
        checked += load("custom_translation_table=")(table)
    return checked
