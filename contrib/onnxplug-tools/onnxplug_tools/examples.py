"""``to_onnx(examples=…)``: dynamic dimensions inferred from the inputs of several calls. A size that differs is dynamic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onnxplug.arguments import positional_and_named
from onnxplug.capture.dynamic import DynamicShapes, Example, inputs_by_name
from onnxplug.errors import UsageError
from onnxplug.text import counted, shortened, type_with_article
from onnxplug.torch_private import DimHint, pytree

Call = tuple[Any, dict[str, Any] | None]


def with_examples(
    model: Any, args: Any, kwargs: Mapping[str, Any] | None, examples: Any
) -> tuple[Any, dict[str, Any] | None, list[Example]]:
    """The inputs that the model is captured with, and the inputs of the further calls in ``examples=``.

    Args:
        args, kwargs: The inputs that were given beside the examples; without any, the first example takes their place.
        examples: As the user gave them: each a tuple as ``args`` is, a dict of keyword inputs, or a tensor.
    """
    args, kwargs = positional_and_named(model, args, kwargs)
    if not isinstance(examples, list | tuple) or not all(
        isinstance(e, torch.Tensor | tuple | list | dict) for e in examples
    ):
        raise UsageError(
            f"examples= takes a list of inputs, each as args= takes them, got {type_with_article(examples)}",
            hint="examples=[(x,), (other_x,)], or [{'x': x}, {'x': other_x}]",
        )
    calls: list[Call] = [(args, kwargs)] if args or kwargs else []
    for example in examples:
        if isinstance(example, dict):
            calls.append(((), dict(example)))
        else:
            calls.append(
                positional_and_named(model, (example,) if isinstance(example, torch.Tensor) else example, None)
            )
    if len(calls) < 2:
        raise UsageError(
            f"examples= has the inputs of {counted(len(calls), 'call')}: what is dynamic is what differs among several",
            hint="Give two or more, or name the dynamic dimensions in dynamic_shapes=.",
        )
    first = _as_call(calls[0])
    others = []
    for number, call in enumerate(calls[1:], 2):
        inputs = _as_call(call)
        if len(inputs[0]) != len(first[0]) or set(inputs[1]) != set(first[1]):
            raise UsageError(f"example {number} has {_call_text(inputs)}, example 1 {_call_text(first)}")
        others.append((inputs[0], {name: inputs[1][name] for name in first[1]}))
    return (*first, others)


def _as_call(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = call
    return (args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {})


def _call_text(call: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    named = f" and {', '.join(call[1])}" if call[1] else ""
    return f"{counted(len(call[0]), 'positional input')}{named}"


def shapes_of(module: torch.nn.Module, examples: Sequence[Example]) -> dict[str, Any]:
    """``dynamic_shapes`` with a name for each size and each int that differs among calls; all other sizes are static.

    Each dimension has a name of its own (``x_dim_0``). Two become one dimension only where torch.export finds that they
    must be equal; the dimension then has the name of the first.

    Args:
        examples: The inputs of two calls or more, with the same number of positional inputs and the same keywords.
    """
    calls = [inputs_by_name(module, args, kwargs) for args, kwargs in examples]
    taken: set[str] = set()
    return {name: _shapes([call[name] for call in calls], name, taken) for name in calls[0]}


def check_covered(shapes: DynamicShapes, inferred: DynamicShapes) -> None:
    """Checks that the user's own dynamic shapes cover the sizes and ints that differ among the examples."""
    for leaf, axis, _ in inferred.requested_axes():
        if isinstance(shapes.leaves[leaf], DimHint):
            continue
        wanted = shapes.wanted(leaf, axis)
        if wanted is None or isinstance(wanted, int) or (isinstance(wanted, DimHint) and wanted.type.name == "STATIC"):
            raise UsageError(
                f"the size of axis {axis} of the input {shapes.paths[leaf]} differs among the examples, but dynamic_shapes leaves "
                "it static",
                hint="Name it in dynamic_shapes, or leave dynamic_shapes out: it is inferred from the examples then.",
            )
    for leaf, _ in inferred.numbers():
        if shapes.leaves[leaf] is None:
            raise UsageError(
                f"the number {shapes.paths[leaf]} differs among the examples, but dynamic_shapes leaves it static",
                hint=f"Name it in dynamic_shapes: {{{shapes.paths[leaf]!r}: 'n'}}.",
            )


def _shapes(values: Sequence[Any], path: str, taken: set[str]) -> Any:
    first = values[0]
    kind = pytree._get_node_type(first)
    if kind not in pytree.SUPPORTED_NODES:
        return _leaf(values, path, taken)
    children = [_children(value, kind) for value in values]
    for number, child in enumerate(children[1:], 2):
        if child is None or children[0] is None or child[1] != children[0][1]:
            raise UsageError(
                f"the input {path} of example {number} has another structure than that of example 1: "
                f"{_structure(values[number - 1])}, not {_structure(first)}"
            )
    parts = [child[0] for child in children if child is not None]
    specs = {key: _shapes([part[key] for part in parts], f"{path}[{key!r}]", taken) for key in parts[0]}
    if kind not in pytree.BUILTIN_TYPES:  # torch.export takes a list of the parts of other containers
        return list(specs.values())
    node = pytree.SUPPORTED_NODES[kind]
    return node.unflatten_fn(list(specs.values()), node.flatten_fn(first)[1])


def _children(value: Any, kind: Any) -> tuple[dict[Any, Any], Any] | None:
    """A container's items by key or position, and its keys or its length and context; ``None`` for another kind."""
    if pytree._get_node_type(value) is not kind:
        return None
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    if isinstance(value, Mapping):
        return dict(value), set(value)
    return dict(enumerate(children)), (len(children), context)


def _structure(value: Any) -> str:
    return f"{{{', '.join(map(str, value))}}}" if isinstance(value, Mapping) else f"{pytree.tree_structure(value)}"


def _leaf(values: Sequence[Any], path: str, taken: set[str]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        axes: set[int] = set()
        for number, value in enumerate(values[1:], 2):
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"the input {path} is a tensor in example 1 and {type_with_article(value)} in example {number}"
                )
            if value.dtype is not first.dtype or value.dim() != first.dim():
                raise UsageError(
                    f"the input {path} is {_text(first)} in example 1 and {_text(value)} in example {number}: only sizes may differ"
                )
            axes |= {axis for axis, (a, b) in enumerate(zip(first.shape, value.shape, strict=True)) if a != b}
        return {axis: _name(f"{path}_dim_{axis}", taken) for axis in sorted(axes)} or None
    for number, value in enumerate(values[1:], 2):
        # The text of a number tells 0.0 from -0.0, and a NaN is itself.
        if type(value) is not type(first) or (_text(value) != _text(first) and type(first) is not int):
            raise UsageError(
                f"the input {path} is {shortened(_text(first), 100)} in example 1 and {shortened(_text(value), 100)} in example "
                f"{number}: only sizes of tensors, and ints, may differ"
            )
    return _name(path, taken) if type(first) is int and any(value != first for value in values) else None


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def _name(path: str, taken: set[str]) -> str:
    """A path as a name: ``pair[0]_dim_1`` becomes ``pair_0_dim_1``."""
    name = plain = re.sub(r"\W+", "_", path).strip("_").replace("__", "_")
    number = 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    taken.add(name)
    return name
