"""The user's names of graph inputs, where there are fewer than parts of nested inputs, and dynamic shapes by these names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxplug.capture.dynamic import inputs_by_name
from onnxplug.errors import UsageError
from onnxplug.torch_private import pytree


def part_names(names: Sequence[str], paths: Sequence[tuple[Any, Sequence[str]]]) -> list[str] | None:
    """Names for all parts, from a name for each argument.

    Args:
        names: The arguments' names, in order.
        paths: For each part its argument and its place there: ``("past", ["0", "key"])``.

    Returns:
        ``past_0_key`` and the like; ``None`` where the number of names differs from that of the arguments.
    """
    arguments = list(dict.fromkeys(argument for argument, _ in paths))
    if len(names) != len(arguments):
        return None
    called = dict(zip(arguments, names, strict=True))
    return ["_".join([called[argument], *place]) for argument, place in paths]


def by_argument(
    spec: Any,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    input_names: Sequence[str] | None,
) -> Any:
    """Dynamic shapes by the names of the model's arguments, where the user's keys are names of ``input_names``.

    Args:
        spec: The user's argument. Names of arguments go first: where all its keys are such, it is returned as it is.
        module, args, kwargs: The model and its example inputs.
        input_names: A name for each argument, or for each tensor in them.

    Raises:
        UsageError: The names are neither.
    """
    if not input_names or not isinstance(spec, Mapping):
        return spec
    combined = inputs_by_name(module, args, kwargs)
    if all(name in combined for name in spec) or not all(name in input_names for name in spec):
        return spec
    called = [name for name in combined if name not in kwargs] + list(kwargs)
    values = {name: pytree.tree_leaves(combined[name]) for name in called}
    tensors = {name: [v for v in values[name] if isinstance(v, torch.Tensor)] for name in called}
    with_tensors = [name for name in called if tensors[name]]
    if len(input_names) == len(with_tensors):
        return {name: spec[new] for name, new in zip(with_tensors, input_names, strict=True) if new in spec}
    if len(input_names) != sum(map(len, tensors.values())):
        raise UsageError(
            f"dynamic_shapes has names of input_names, which has {len(input_names)} for {sum(map(len, tensors.values()))} tensors "
            f"in the arguments {', '.join(with_tensors)}",
            hint="Give input_names a name for each tensor, or for each argument; or dynamic_shapes the names of the arguments.",
        )
    names = iter(input_names)
    parts = iter(
        [spec.get(next(names)) if isinstance(v, torch.Tensor) else None for name in called for v in values[name]]
    )
    return {name: _in_structure(combined[name], parts) for name in called}


def _in_structure(value: Any, parts: Iterator[Any]) -> Any:
    """The dynamic shapes of an argument's parts, in the argument's structure."""
    node_type = pytree._get_node_type(value)
    if node_type not in pytree.SUPPORTED_NODES:
        return next(parts)
    children, _ = pytree.SUPPORTED_NODES[node_type].flatten_fn(value)
    specs = [_in_structure(child, parts) for child in children]
    return dict(zip(value, specs, strict=True)) if isinstance(value, Mapping) else specs
