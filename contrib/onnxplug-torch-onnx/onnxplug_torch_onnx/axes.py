"""``dynamic_axes``, by names of graph inputs and outputs, as dynamic shapes of the model's own inputs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from onnxplug.capture.dynamic import inputs_by_name, name_of
from onnxplug.capture.signature import InputKind
from onnxplug.errors import UsageError
from onnxplug.text import type_with_article
from onnxplug.torch_private import pytree, rename_axis
from onnxplug_torch_onnx.request import warn

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxplug.program import OnnxProgram

_FORMS = "dynamic_axes={'x': {0: 'batch'}} or {'x': [0]}"
Axes = dict[int, str]


def checked_axes(dynamic_axes: Mapping[str, Any]) -> dict[str, Axes]:
    """The names of each input's and output's axes; ``NAME_dynamic_axes_1`` for an axis that is given without a name.

    Raises:
        UsageError: ``dynamic_axes`` is malformed.
    """
    checked: dict[str, Axes] = {}
    for name, axes in dynamic_axes.items():
        if not isinstance(name, str):
            raise UsageError(f"dynamic_axes has the key {name!r}, which is no name", hint=_FORMS)
        if axes is None:
            axes = {}
        if isinstance(axes, Mapping):
            named = dict(axes)
        elif isinstance(axes, list | tuple):
            named = {axis: f"{name}_dynamic_axes_{number}" for number, axis in enumerate(dict.fromkeys(axes), 1)}
        else:
            raise UsageError(
                f"dynamic_axes[{name!r}] must be a dict or a list, got {type_with_article(axes)}", hint=_FORMS
            )
        for axis, called in named.items():
            if isinstance(axis, bool) or not isinstance(axis, int):
                raise UsageError(f"dynamic_axes[{name!r}] has the axis {axis!r}, which is no number", hint=_FORMS)
            if not isinstance(called, str) or not called:
                raise UsageError(f"dynamic_axes[{name!r}] calls axis {axis} {called!r}, which is no name", hint=_FORMS)
        checked[name] = named
    return checked


class DynamicAxes:
    """Dynamic shapes that are computed once the inputs are known, like a ``torch.export.ShapesCollection``.

    Attributes:
        input_names, output_names: Names of graph inputs and outputs, in order.
        strict: Whether a name that no value has is an error; otherwise it is a warning, as in the exporter of old.
    """

    def __init__(
        self,
        axes: Mapping[str, Axes],
        input_names: Sequence[str] | None,
        output_names: Sequence[str] | None,
        *,
        strict: bool,
    ) -> None:
        self.axes = axes
        self.input_names = list(input_names or ())
        self.output_names = list(output_names or ())
        self.strict = strict

    def dynamic_shapes(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The dynamic shapes of the model's inputs, by their names in its signature."""
        keywords = dict(kwargs or {})
        by_name = inputs_by_name(module, args, keywords)
        called = [name for name in by_name if name not in keywords] + list(keywords)
        parts = [(name, item) for name in called for item in _leaves(by_name[name], name)]
        leaves = [item for _, item in parts]
        requested = self._by_path([(name, path) for name, (path, value) in parts if isinstance(value, torch.Tensor)])
        sizes: dict[str, int] = {}
        specs: list[Axes | None] = []
        for path, value in leaves:
            axes = _in_range(requested.get(path, {}), path, value) if isinstance(value, torch.Tensor) else {}
            specs.append({axis: _unshared(axes[axis], value.shape[axis], sizes) for axis in axes} or None)
        rest = iter(specs)
        mirrored = {name: _mirrored(by_name[name], rest) for name in called}
        return {name: mirrored[name] for name in by_name}

    def _by_path(self, tensors: Sequence[tuple[str, str]]) -> dict[str, Axes]:
        """The axes by the place of a tensor in the model's inputs.

        Args:
            tensors: For each tensor the name of its argument, and its place.
        """
        paths = [path for _, path in tensors]
        parts: dict[str, list[str]] = {}
        for argument, path in tensors:
            parts.setdefault(argument, []).append(path)
        of_arguments = len(self.input_names) == len(parts) < len(paths)
        named = parts.values() if of_arguments else ([path] for path in paths)
        # The model's own names, unless the user has given them to other inputs.
        places = {path: [path] for path in paths} | dict(zip(self.input_names, named, strict=False))
        unknown = [name for name in self.axes if name not in places and name not in self.output_names]
        inputs = [name for name in self.axes if name not in self.output_names]
        if unknown and not self.input_names and len(inputs) == len(paths) == len(unknown):
            return {path: self.axes[name] for path, name in zip(paths, inputs, strict=True)}  # as torch reads it
        for name in unknown:
            known = [*dict.fromkeys((*self.input_names, *paths)), *self.output_names]
            near = difflib.get_close_matches(name, known, 1)
            text = f"dynamic_axes names {name!r}, but the inputs and outputs are {', '.join(known)}"
            if self.strict:
                meant = f"Did you mean {near[0]!r}? " if near else ""
                raise UsageError(text, hint=f"{meant}Names that input_names= and output_names= give count here.")
            warn(f"{text}; it is left out")
        return {path: axes for name, axes in self.axes.items() for path in places.get(name, ())}


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """The leaves of an input, each with its path, named as the graph names its inputs."""
    try:
        parts = pytree.tree_flatten_with_path(value)[0]
    except ValueError:  # a class that was registered without the names of its parts
        return [(f"{path}_{number}", leaf) for number, leaf in enumerate(pytree.tree_leaves(value))]
    return [("_".join([path, *map(_key_text, keys)]), leaf) for keys, leaf in parts]


def _key_text(key: Any) -> str:
    return str(next((getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)), key))


def _in_range(axes: Axes, path: str, value: torch.Tensor) -> Axes:
    """The axes, counted from the first."""
    for axis in axes:
        if not -value.dim() <= axis < value.dim():
            raise UsageError(f"dynamic_axes names axis {axis} of {path}, a tensor of rank {value.dim()}")
    return {axis % value.dim(): name for axis, name in axes.items()}


def _unshared(name: str, size: int, sizes: dict[str, int]) -> str:
    """The name of a dimension, or a new name where it names a dimension of another size already.

    To the exporter of old, names are labels: dimensions of one name may differ in size.
    """
    if sizes.setdefault(name, size) == size:
        return name
    number = 2
    while sizes.get(f"{name}_{number}", size) != size:
        number += 1
    other = f"{name}_{number}"
    sizes[other] = size
    warn(f"dynamic_axes calls dimensions of the sizes {sizes[name]} and {size} {name!r}; the second is {other!r}")
    return other


def _mirrored(value: Any, specs: Iterator[Axes | None]) -> Any:
    """The axes of an input's leaves, in the structure of the input."""
    node_type = pytree._get_node_type(value)
    if node_type not in pytree.SUPPORTED_NODES:
        return next(specs)
    children, _ = pytree.SUPPORTED_NODES[node_type].flatten_fn(value)
    parts = [_mirrored(child, specs) for child in children]
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return tuple(parts) if isinstance(value, tuple) else parts


# -- after the export --------------------------------------------------------------------------------------------------


def name_output_axes(program: OnnxProgram, axes: Mapping[str, Axes], input_axes: Mapping[str, Axes]) -> None:
    """Gives sizes that only outputs have the names that ``dynamic_axes`` gives them.

    A size that an input has too keeps the input's name, and a size that is computed from others stays an expression.
    """
    taken = {called for named in input_axes.values() for called in named.values()}
    taken |= {str(dim.value) for value in program.model.graph.inputs for dim in value.shape or () if _is_open(dim)}
    renamed: dict[Any, str] = {}
    for value in program.model.graph.outputs:
        shape = value.shape
        for axis, called in axes.get(str(value.name), {}).items():
            if shape is None:
                continue
            if not -len(shape) <= axis < len(shape):
                raise UsageError(f"dynamic_axes names axis {axis} of {value.name}, a tensor of rank {len(shape)}")
            dim = shape[axis]
            if not _is_open(dim):
                warn(f"dynamic_axes calls axis {axis} of the output {value.name} {called!r}; it is always {dim}")
            elif str(dim.value).isidentifier() and str(dim.value) not in taken and called not in taken:
                renamed.setdefault(str(dim.value), called)
    if renamed:
        rename_axis(program.model, renamed)  # ONNXProgram.rename_axes, which torch 2.9 has not


def name_given_axes(program: OnnxProgram, dynamic_shapes: Any) -> None:
    """Gives the sizes of an ``ExportedProgram`` the names that ``dynamic_shapes`` has for them, input by input."""
    exported = program.exported_program
    assert exported is not None
    users = [slot for slot in program.inputs if slot.position is not None]
    specs = _in_order(dynamic_shapes, exported.graph_signature.user_inputs)
    leaves = pytree.tree_flatten(specs, is_leaf=_is_axes)[0]
    if len(leaves) != len(users):
        raise UsageError(
            f"dynamic_shapes has {len(leaves)} entries for the {len(users)} inputs of the ExportedProgram",
            hint="Its shapes are fixed already; dynamic_shapes= can only name them.",
        )
    renamed: dict[Any, str] = {}
    inputs = {value.name: value for value in program.model.graph.inputs}
    for slot, spec in zip(users, leaves, strict=True):
        value = inputs.get(slot.name) if slot.kind is InputKind.USER else None
        for axis, wanted in spec.items() if isinstance(spec, Mapping) else enumerate(spec or ()):
            called = name_of(wanted)
            if called is None or value is None or value.shape is None:
                continue
            if not -len(value.shape) <= axis < len(value.shape):
                raise UsageError(
                    f"dynamic_shapes names axis {axis} of {slot.name}, a tensor of rank {len(value.shape)}"
                )
            dim = value.shape[axis]
            if not _is_open(dim):
                raise UsageError(
                    f"dynamic_shapes calls axis {axis} of {slot.name} {called!r}, which the ExportedProgram fixes at {dim}",
                    hint="Make it dynamic in torch.export.export.",
                )
            renamed.setdefault(str(dim.value), called)
    if renamed:
        rename_axis(program.model, renamed)  # ONNXProgram.rename_axes, which torch 2.9 has not


def _in_order(dynamic_shapes: Any, inputs: Sequence[Any]) -> list[Any]:
    """The entries for the inputs of a program, in their order.

    Args:
        dynamic_shapes: By name of an input, or in order.
        inputs: The names of the leaves of the inputs: ``"x"``, ``"past_0"``.
    """
    if not isinstance(dynamic_shapes, Mapping):
        return list(dynamic_shapes)
    # The leaves of "past" are "past_0" and "past_1"; "past_key" may be an input of its own.
    owners = [max((n for n in dynamic_shapes if f"{i}_".startswith(f"{n}_")), key=len, default=None) for i in inputs]
    for name in dynamic_shapes:
        if name not in owners:
            raise UsageError(
                f"dynamic_shapes names {name!r}, but the inputs of the ExportedProgram are {', '.join(map(str, inputs))}"
            )
    return [dynamic_shapes[name] for name in dict.fromkeys(owners) if name is not None]


def _is_axes(spec: Any) -> bool:
    """Whether an entry of ``dynamic_shapes`` is about the axes of one tensor, and no container of entries."""
    if isinstance(spec, Mapping):
        return all(isinstance(axis, int) for axis in spec)
    if isinstance(spec, list | tuple):
        return all(not isinstance(item, Mapping | list | tuple) for item in spec)
    return True


def _is_open(dim: int | ir.SymbolicDim) -> TypeGuard[ir.SymbolicDim]:
    return not isinstance(dim, int) and dim.value is not None
