"""The inputs that a piece gets: alike in all its calls, but for sizes and ints, which are dynamic where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from onnxplug.capture.dynamic import inputs_by_name, parse_dynamic_shapes
from onnxplug.capture.signature import InputKind, InputSlot
from onnxplug.errors import UsageError
from onnxplug.program import OnnxProgram
from onnxplug.text import shortened
from onnxplug.torch_private import pytree
from onnxplug_tools.pieces.record import RecordedCall, Run, Source, form_of


def leaves_of(call: RecordedCall) -> list[Any]:
    """The inputs of a call, flattened."""
    return list(pytree.tree_leaves((call.args, call.kwargs)))


def names_of(module: torch.nn.Module, call: RecordedCall) -> list[str]:
    """The name of each input of a call."""
    return list(parse_dynamic_shapes(None, module, call.args, call.kwargs).paths)


def check_alike(path: str, module: torch.nn.Module, calls: Sequence[RecordedCall]) -> None:
    """Checks that one exported model can do all calls of a piece.

    Raises:
        UsageError: A call has an input that another call lacks, or one of another kind, dtype, rank or fixed value.
    """
    first, *others = calls
    names, expected = names_of(module, first), [_kind(leaf) for leaf in leaves_of(first)]
    for number, call in enumerate(others, 2):
        where = f"the model calls the piece {path!r} in two ways, and one exported model has one"
        hint = "Name as pieces submodules that are called in one way: within this one, or around it."
        if _structure(call) != _structure(first):
            raise UsageError(f"{where}: call {number} has inputs of another structure than call 1", hint=hint)
        for name, kind, leaf in zip(names, expected, leaves_of(call), strict=True):
            if _kind(leaf) != kind:
                raise UsageError(f"{where}: {name} is {kind} in call 1 and {_kind(leaf)} in call {number}", hint=hint)


def dynamic_inputs(
    module: torch.nn.Module, path: str, runs: Sequence[Run], names: set[str]
) -> tuple[RecordedCall, dict[str, Any] | None]:
    """The first call of a piece, and its ``dynamic_shapes`` from all calls.

    Args:
        names: The user's names for dimensions.
    """
    calls = [(run, call) for run in runs for call in run.calls if call.path == path]
    first = calls[0][1]
    seen = [(run, leaves_of(call)) for run, call in calls if _structure(call) == _structure(first)]
    specs = [
        _dynamic(leaf, [(run, leaves[position]) for run, leaves in seen], names)
        for position, leaf in enumerate(leaves_of(first))
    ]
    if not any(specs):
        return first, None
    args, kwargs = _arranged((first.args, first.kwargs), iter(specs))
    return first, inputs_by_name(module, args, kwargs)


def _arranged(tree: Any, specs: Iterator[Any]) -> Any:
    """Specs of leaves in the structure of a tree; a list of the parts for a container that torch.export does not know itself."""
    kind = pytree._get_node_type(tree)
    if kind not in pytree.SUPPORTED_NODES:
        return next(specs)
    node = pytree.SUPPORTED_NODES[kind]
    children, context = node.flatten_fn(tree)
    parts = [_arranged(child, specs) for child in children]
    return node.unflatten_fn(parts, context) if kind in pytree.BUILTIN_TYPES else parts


def source_of(program: OnnxProgram, call: RecordedCall, slot: InputSlot) -> Source | None:
    """The source of the tensor that an input of a piece takes."""
    return call.sources[_position(program, call, slot)]


def fed(program: OnnxProgram, call: RecordedCall) -> set[int]:
    """The positions of the leaves of a call that are inputs of the exported piece."""
    slots = [slot for slot in program.inputs if slot.kind is InputKind.USER]
    return {_position(program, call, slot) for slot in slots}


def _position(program: OnnxProgram, call: RecordedCall, slot: InputSlot) -> int:
    # torch.export may have keyword inputs in another order.
    structure = _structure(call)
    args, kwargs = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    assert slot.position is not None
    return int(program.flatten(args, kwargs)[slot.position])


def _structure(call: RecordedCall) -> Any:
    return pytree.tree_structure((call.args, call.kwargs))


def _kind(leaf: Any) -> str:
    """What must be the same in all calls, in words."""
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of {str(leaf.dtype).removeprefix('torch.')} and rank {leaf.dim()}"
    return "an int" if type(leaf) is int else shortened(form_of(leaf), 100)


def _dynamic(leaf: Any, seen: Sequence[tuple[Run, Any]], names: set[str]) -> Any:
    """The axes of a tensor whose sizes differ between calls, with their dynamic dimensions; ``DYNAMIC`` for an int that differs.

    An axis gets the name of the user's dimension whose size it always has, if there is one.
    """
    alike = [(run, other) for run, other in seen if _kind(other) == _kind(leaf)]
    if type(leaf) is int:
        return torch.export.Dim.DYNAMIC if any(other != leaf for _, other in alike) else None
    axes: dict[int, Any] = {}
    for axis in range(leaf.dim() if isinstance(leaf, torch.Tensor) else 0):
        sizes = [(run.sizes, tensor.shape[axis]) for run, tensor in alike]
        if len({size for _, size in sizes}) < 2:
            continue
        same = [n for n in sorted(names) if all(known.get(n) == size for known, size in sizes)]
        axes[axis] = same[0] if same and same[0].isidentifier() else torch.export.Dim.DYNAMIC
    return axes or None
