"""Dynamic shapes: torch.export's own forms, and strings as names."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onnxplug.capture.dimensions import Multiple, evaluate, expand, in_names, is_expression, names_in, same_symbols
from onnxplug.capture.implication import implied
from onnxplug.errors import CaptureError, FixedDimensionError, UsageError
from onnxplug.text import did_you_mean, type_with_article
from onnxplug.torch_private import DimHint, pytree

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")

#: Positional and keyword inputs of one call.
Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class DynamicShapes:
    """The user's dynamic shapes, ready for torch.export.

    Attributes:
        leaves: For each leaf of the flattened inputs its part of the argument, ``None`` where it has none.
        paths: For each leaf its name in messages.
        shared: Names used in several places; each becomes one ``Dim``.
        inputs: The inputs by name, their leaves in the order of ``leaves``.
    """

    spec: Any
    leaves: list[Any]
    paths: list[str]
    shared: frozenset[str] = frozenset()
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def reading(self, tied: bool) -> Any:
        """torch.export's argument: shared names as one ``Dim`` each (``tied``), or every name on its own."""
        dims = {name: torch.export.Dim(name) for name in self.shared if tied and name.isidentifier()}
        return _replace_strings(self.spec, dims)

    def with_static(self, axes: Set[tuple[int, int]]) -> DynamicShapes:
        """The same with some dimensions static: (leaf, axis)."""
        leaves = [_without(spec, leaf, axes) for leaf, spec in enumerate(self.leaves)]
        rest = iter(leaves)
        # The leaves are in the order of the inputs; torch.export wants the names in the order of the signature.
        static_by_name = {
            name: _walk(self.spec[name], self.inputs[name], name, lambda *_: next(rest)) for name in self.inputs
        }
        return replace(self, spec={name: static_by_name[name] for name in self.spec}, leaves=leaves)

    def has_empty(self) -> bool:
        """Whether a dimension that should be dynamic has the size 0 in the example inputs."""
        values = pytree.tree_leaves(list(self.inputs.values()))
        return any(
            isinstance(v := values[leaf], torch.Tensor) and v.shape[axis] == 0
            for leaf, axis, _ in self.requested_axes()
        )

    def name(self, leaf: int, axis: int) -> str:
        """A dimension's name in messages."""
        name = name_of(self.wanted(leaf, axis))
        return f"axis {axis} of the input {self.paths[leaf]}" + (f" ({name!r})" if name else "")

    def wanted(self, leaf: int, axis: int) -> Any:
        """The user's request for a dimension; ``None`` without one."""
        return next((wanted for i, a, wanted in self.requested_axes() if (i, a) == (leaf, axis)), None)

    def requested_axes(self) -> Iterator[tuple[int, int, Any]]:
        """Leaf, axis and request of every dimension with a request."""
        for leaf, spec in enumerate(self.leaves):
            items: Any = ()
            if isinstance(spec, Mapping):
                items = spec.items()
            elif isinstance(spec, list | tuple):
                items = enumerate(spec)
            for axis, wanted in items:
                if wanted is not None:
                    yield leaf, axis, wanted

    def must_be_dynamic(self) -> Iterator[tuple[int, int, Any]]:
        """As :meth:`requested_axes`, for the dimensions that must not come out static."""
        yield from (row for row in self.requested_axes() if _must_be_dynamic(row[2]))

    def source(self, leaf: int, axis: int) -> str:
        """torch's name for the size of a dimension."""
        argument, bracket, keys = self.paths[leaf].partition("[")
        return f"L['{argument}']{bracket}{keys}.size()[{axis}]"

    def numbers(self) -> Iterator[tuple[int, str]]:
        """Leaf and name of every named number, which stays an input."""
        for leaf, spec in enumerate(self.leaves):
            if isinstance(spec, str):
                yield leaf, spec

    def describe(self) -> str:
        """The dimensions that should be dynamic, in words."""
        parts = [
            f"axis {axis} of {self.paths[leaf]} ({name_of(wanted) or 'dynamic'})"
            for leaf, axis, wanted in self.requested_axes()
            if _must_be_dynamic(wanted)
        ]
        return ", ".join(parts)


def _without(spec: Any, leaf: int, axes: Set[tuple[int, int]]) -> Any:
    if isinstance(spec, Mapping):
        return {axis: None if (leaf, axis) in axes else wanted for axis, wanted in spec.items()}
    if isinstance(spec, list | tuple):
        return [None if (leaf, axis) in axes else wanted for axis, wanted in enumerate(spec)]
    return spec


def _replace_strings(spec: Any, dims: Mapping[str, Any]) -> Any:
    if isinstance(spec, str):
        return dims.get(spec, torch.export.Dim.DYNAMIC)
    if isinstance(spec, Mapping):
        return {k: _replace_strings(v, dims) for k, v in spec.items()}
    if isinstance(spec, list):
        return [_replace_strings(v, dims) for v in spec]
    if isinstance(spec, tuple):
        values = [_replace_strings(v, dims) for v in spec]
        return type(spec)(*values) if hasattr(spec, "_fields") else tuple(values)
    return spec


def parse_dynamic_shapes(
    spec: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DynamicShapes:
    """Checks ``dynamic_shapes`` against the inputs and lines its parts up with their leaves.

    Raises:
        UsageError: It names an input that isn't there, an axis out of range, or has another structure than the inputs.
    """
    if hasattr(spec, "dynamic_shapes") and not isinstance(spec, Mapping | list | tuple):
        # ShapesCollection and AdditionalInputs compute the structure themselves.
        spec = spec.dynamic_shapes(module, args, dict(kwargs))
    combined = inputs_by_name(module, args, kwargs)
    by_name = _top_level(spec, combined)
    leaves: list[Any] = []
    paths: list[str] = []
    values: list[Any] = []

    def visit(spec: Any, value: Any, path: str) -> Any:
        _check_leaf(spec, value, path)
        leaves.append(spec)
        paths.append(path)
        values.append(value)
        return spec

    # Leaves are in the order of the call: positional inputs, then keywords. The signature may have another order.
    inputs = {name: combined[name] for name in [*(n for n in combined if n not in kwargs), *kwargs]}
    for name, value in inputs.items():
        _walk(by_name.get(name), value, name, visit)
    result = DynamicShapes(by_name if spec is not None else None, leaves, paths, inputs=inputs)
    result.shared = _check_dimension_names(result, values)
    return result


def check_name(name: str, where: str = "dynamic_shapes") -> None:
    """Refuses what can't be the name of a dimension.

    Raises:
        UsageError: It is empty, or a number.
    """
    if not name.strip():
        raise UsageError(f"{where}: the name of a dimension is empty")
    if _NUMBER.fullmatch(name.strip()):
        raise UsageError(
            f"{where}: a dimension is named {name!r}, which is a number",
            hint="Give a dynamic dimension a name, as 'batch'; leave a static one out, or give None.",
        )


def _check_dimension_names(shapes: DynamicShapes, values: Sequence[Any]) -> frozenset[str]:
    """Checks the names of dimensions, and returns the strings that several dimensions have.

    Raises:
        UsageError: A name is empty or a number, or is shared by example sizes that differ.
    """
    counts: Counter[str] = Counter()
    first: dict[str, tuple[int, int, int]] = {}
    numbers = {name: shapes.paths[leaf] for leaf, name in shapes.numbers()}
    for number in numbers:
        check_name(number)
    for leaf, axis, wanted in shapes.requested_axes():
        name = name_of(wanted)
        if name is None:
            continue
        if name in numbers:
            raise UsageError(
                f"{name!r} names axis {axis} of {shapes.paths[leaf]} and the number {numbers[name]}; torch.export can't tie a "
                "size to a number",
                hint="Give them different names.",
            )
        if isinstance(wanted, str):
            check_name(wanted)
            counts[wanted] += 1
        if not isinstance(values[leaf], torch.Tensor):
            continue
        size = values[leaf].shape[axis]
        other_leaf, other_axis, other = first.setdefault(name, (leaf, axis, size))
        if other != size:
            raise UsageError(
                f"the dimension {name!r} has the size {other} in axis {other_axis} of {shapes.paths[other_leaf]} and {size} in "
                f"axis {axis} of {shapes.paths[leaf]}; one name stands for one size",
                hint="Give the two dimensions different names, or example inputs of the same size.",
            )
    return frozenset(name for name, count in counts.items() if count > 1)


def inputs_by_name(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs, or their dynamic shapes, by torch.export's names for them, in the order of the signature."""
    try:
        signature = inspect.signature(module.forward)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{f"args_{i}": a for i, a in enumerate(args)}, **kwargs}
    combined: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            combined.update(value)
        else:
            combined[name] = value
    return combined


def _top_level(spec: Any, combined: Mapping[str, Any]) -> dict[str, Any]:
    if spec is None:
        return {}
    names = list(combined)
    if isinstance(spec, Mapping):
        for name in spec:
            if name not in combined:
                raise UsageError(
                    f"dynamic_shapes names {name!r}, but the inputs are {', '.join(names)}",
                    hint=did_you_mean(name, names),
                )
        return {name: spec.get(name) for name in names}
    if isinstance(spec, list | tuple):
        if len(spec) != len(names):
            raise UsageError(
                f"dynamic_shapes has {len(spec)} entries for {len(names)} inputs ({', '.join(names)})",
                hint="Give one entry an input, None for a static one; or a dict by name.",
            )
        return dict(zip(names, spec, strict=True))
    raise UsageError(f"dynamic_shapes must be a dict by input name, or a tuple with an entry an input, got {spec!r}")


def _walk(spec: Any, value: Any, path: str, visit: Callable[[Any, Any, str], Any]) -> Any:
    """Calls ``visit`` for each leaf of ``value`` in pytree order, with its part of ``spec``.

    Returns:
        ``spec`` with each part replaced by the result of ``visit``.
    """
    node_type = pytree._get_node_type(value)
    if node_type not in pytree.SUPPORTED_NODES:
        return visit(spec, value, path)
    children, context = pytree.SUPPORTED_NODES[node_type].flatten_fn(value)
    keys: list[Any] = list(value) if isinstance(value, Mapping) else list(range(len(children)))
    if spec is not None and not isinstance(spec, Mapping | list | tuple):
        if isinstance(spec, DimHint):
            spec = [spec] * len(children)
        else:
            raise UsageError(
                f"dynamic_shapes of {path} must follow its structure ({type(value).__name__}), got {spec!r}"
            )
    if isinstance(spec, Mapping):
        labels = keys if isinstance(value, Mapping) else (context if isinstance(context, list | tuple) else keys)
        unknown = [k for k in spec if k not in labels]
        if unknown and len(spec) != len(children):
            raise UsageError(f"dynamic_shapes of {path} names {unknown[0]!r}; it has {', '.join(map(str, labels))}")
        parts = [spec.get(k) for k in labels] if not unknown else list(spec.values())
    elif spec is not None:
        if len(spec) != len(children):
            raise UsageError(f"dynamic_shapes of {path} has {len(spec)} entries for {len(children)} elements")
        parts = list(spec)
    else:
        parts = [None] * len(children)
    visited = [_walk(p, child, f"{path}[{key!r}]", visit) for key, p, child in zip(keys, parts, children, strict=True)]
    if spec is None:
        return None
    if isinstance(spec, Mapping):
        return dict(zip(spec if unknown else labels, visited, strict=True))
    return type(spec)(*visited) if hasattr(spec, "_fields") else type(spec)(visited)


def _check_leaf(spec: Any, value: Any, path: str) -> None:
    if spec is None or isinstance(spec, DimHint):
        return
    if isinstance(spec, str) and type(value) is int:
        return  # the name of a number
    if isinstance(spec, str):
        raise UsageError(f"dynamic_shapes of {path} is the string {spec!r}: name an axis, as {{0: {spec!r}}}")
    if not isinstance(value, torch.Tensor):
        if isinstance(spec, Mapping | list | tuple) and not any(_must_be_dynamic(s) for s in _values(spec)):
            return
        if isinstance(value, int) and not isinstance(spec, Mapping | list | tuple):
            return
        raise UsageError(f"dynamic_shapes gives {path} dimensions, but it is {type_with_article(value)}")
    rank = value.dim()
    if isinstance(spec, Mapping):
        for axis in spec:
            if not isinstance(axis, int) or not 0 <= axis < rank:
                raise UsageError(f"dynamic_shapes of {path}: no axis {axis!r} in a tensor of rank {rank}")
    elif isinstance(spec, list | tuple):
        if len(spec) != rank:
            raise UsageError(f"dynamic_shapes of {path} has {len(spec)} entries for a tensor of rank {rank}")
    else:
        raise UsageError(
            f"dynamic_shapes of {path} must be a dict by axis or a tuple with an entry an axis, got {spec!r}"
        )


def _values(spec: Any) -> list[Any]:
    return list(spec.values()) if isinstance(spec, Mapping) else list(spec)


def _must_be_dynamic(wanted: Any) -> bool:
    """Whether a static result would be an error: for strings, ``Dim`` objects and ``Dim.DYNAMIC``, not for AUTO."""
    if isinstance(wanted, str):
        return True
    if isinstance(wanted, DimHint):
        return wanted.type.name == "DYNAMIC"
    return wanted is not None and not isinstance(wanted, int)


def name_of(wanted: Any) -> str | None:
    """The user's name of a dimension; ``None`` where it has none."""
    if isinstance(wanted, str):
        return wanted
    if isinstance(wanted, DimHint | int) or wanted is None:
        return None
    return getattr(wanted, "__name__", None)


def _user_values(program: torch.export.ExportedProgram) -> list[Any]:
    from torch.export.graph_signature import InputKind

    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    return [
        node.meta.get("val")
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True)
        if spec.kind is InputKind.USER_INPUT
    ]


#: Leaf, axis, whether it must be dynamic, torch's size.
RequestedSize = tuple[int, int, bool, torch.SymInt]


def requested_sizes(program: torch.export.ExportedProgram, shapes: DynamicShapes) -> list[RequestedSize]:
    """The dimensions that should be dynamic and are: leaf, axis, whether it must be dynamic, torch's size."""
    values = _user_values(program)
    if len(values) != len(shapes.leaves):
        return []
    rows = [
        (leaf, axis, _must_be_dynamic(wanted), values[leaf].shape[axis])
        for leaf, axis, wanted in shapes.requested_axes()
        if isinstance(values[leaf], torch.Tensor)
    ]
    return [row for row in rows if isinstance(row[3], torch.SymInt)]


def size_names(
    program: torch.export.ExportedProgram, shapes: DynamicShapes, sizes: Sequence[RequestedSize]
) -> dict[str, str]:
    """torch's symbols of sizes to the user's names, or to ``x.shape[1]`` where there is none."""
    names: dict[str, str] = {}
    values = _user_values(program)
    for leaf, name in shapes.numbers() if len(values) == len(shapes.leaves) else ():
        if isinstance(values[leaf], torch.SymInt):
            names[str(values[leaf].node.expr)] = name
    for leaf, axis, _, size in sizes:
        if size.node.expr.is_Symbol:
            names.setdefault(str(size.node.expr), _called(shapes, leaf, axis))
    if sizes:
        # A symbol that torch replaced by an equal symbol is in no size any more.
        replaced = sizes[0][3].node.shape_env.replacements
        others = [(size.node.expr, _called(shapes, leaf, axis)) for leaf, axis, _, size in sizes]
        for symbol, other in replaced.items():
            free = [name for expr, name in others if expr == other and name != names.get(str(other))]
            names.update({str(symbol): free[0]} if free else {})
    return names


def follows_from_names(names: Mapping[str, str], sizes: Sequence[RequestedSize], expr: Any) -> bool:
    """Whether a guard follows from the user's names: sizes with equal names are equal, and ``"past + sequence"`` is that sum.

    Args:
        names: See :func:`size_names`.
        sizes: The sizes that should be dynamic.
    """
    replaced = sizes[0][3].node.shape_env.replacements if sizes else {}
    # A symbol in names has its own.
    same = {symbol: other for symbol, other in replaced.items() if str(symbol) not in names}
    truth = in_names(names, same_symbols(expr.xreplace(same)))
    return truth.is_Boolean and not truth.free_symbols and bool(truth)


def follows_from_multiples(multiples: Mapping[str, Multiple], expr: Any) -> bool:
    """Whether a guard holds for all sizes that are declared as a multiple: ``n % 8 == 0`` of ``8 * Dim("n")``."""
    import sympy

    sizes = {symbol: multiples[str(symbol)] for symbol in expr.free_symbols if str(symbol) in multiples}
    roots = {m.root: sympy.Symbol(m.root, integer=True, nonnegative=True) for m in sizes.values()}
    return bool(sizes) and implied(
        expr.xreplace({s: m.factor * roots[m.root] + m.offset for s, m in sizes.items()}), {}
    )


def equates_one_name(shapes: DynamicShapes, sizes: Sequence[RequestedSize], expr: Any) -> bool:
    """Whether a guard only states that sizes are equal which have the same name."""
    if expr.func.__name__ != "Equality" or not all(side.is_Symbol for side in expr.args) or not sizes:
        return False
    replaced = sizes[0][3].node.shape_env.replacements
    kept = {replaced.get(side, side) for side in expr.args}
    names = [name_of(shapes.wanted(leaf, axis)) for leaf, axis, _, size in sizes if size.node.expr in kept]
    return len(kept) == 1 and len(names) > 1 and None not in names and len(set(names)) == 1


def _called(shapes: DynamicShapes, leaf: int, axis: int) -> str:
    return name_of(shapes.wanted(leaf, axis)) or f"{shapes.paths[leaf]}.shape[{axis}]"


def declared_ranges(shapes: DynamicShapes, sizes: Sequence[RequestedSize]) -> dict[Any, tuple[int, int | None]]:
    """torch's symbols of sizes to the smallest and largest size that a ``Dim`` declares."""
    ranges: dict[Any, tuple[int, int | None]] = {}
    for leaf, axis, _, size in sizes:
        wanted = shapes.wanted(leaf, axis)
        low, high = getattr(wanted, "min", None), getattr(wanted, "max", None)
        if size.node.expr.is_Symbol and isinstance(low, int):
            ranges[size.node.expr] = (low, high if isinstance(high, int) else None)
    return ranges


def check_dynamic(program: torch.export.ExportedProgram, shapes: DynamicShapes) -> None:
    """Checks that the requested dimensions of a captured program are dynamic.

    Raises:
        FixedDimensionError: A dimension that should be dynamic came out static.
    """
    values = _user_values(program)
    if len(values) != len(shapes.leaves):
        return
    for leaf, axis, wanted in shapes.requested_axes():
        value = values[leaf]
        if not _must_be_dynamic(wanted) or not isinstance(value, torch.Tensor):
            continue
        size = value.shape[axis]
        if isinstance(size, int) or not size.node.expr.free_symbols:
            raise FixedDimensionError(
                f"{shapes.name(leaf, axis)} was declared dynamic, but the model fixes it at {int(size)}",
                hint="Some code depends on that size. Make the dimension static, or change the model.",
            )
    for leaf, name in shapes.numbers():
        if not isinstance(values[leaf], torch.SymInt) or not values[leaf].node.expr.free_symbols:
            raise FixedDimensionError(
                f"the number {shapes.paths[leaf]} ({name!r}) was declared dynamic, but the model fixes it at {values[leaf]}",
                hint="Some code depends on it. Make it static, or change the model.",
            )


def dimension_names(program: torch.export.ExportedProgram, shapes: DynamicShapes) -> dict[str, str]:
    """torch's symbols to the user's names; two symbols share a name only if it is an expression of other names.

    Raises:
        UsageError: An expression has a name that no dimension has.
        CaptureError: torch.export finds another relation between the sizes than an expression states.
    """
    values = _user_values(program)
    names: dict[str, str] = {}
    if len(values) != len(shapes.leaves):
        return names
    symbols = {str(s) for v in values if isinstance(v, torch.Tensor) for d in v.shape for s in _free(d)}
    sizes: dict[str, Any] = {}
    expressions: list[tuple[int, int, str, Any]] = []
    known = _plain_names(shapes)
    for leaf, number in shapes.numbers():
        expr = values[leaf].node.expr if isinstance(values[leaf], torch.SymInt) else values[leaf]
        sizes[number] = expr
        if getattr(expr, "is_Symbol", False):
            names[str(expr)] = number
    for leaf, axis, wanted in shapes.requested_axes():
        name, value = name_of(wanted), values[leaf]
        if name is None or not isinstance(value, torch.Tensor):
            continue
        size = value.shape[axis]
        expr = size.node.expr if isinstance(size, torch.SymInt) else size
        if isinstance(wanted, str) and is_expression(wanted, known):
            expressions.append((leaf, axis, wanted, expr))
            continue
        sizes[name] = expr
        if isinstance(expr, int) or not expr.is_Symbol or str(expr) in names:
            continue
        taken = set(names.values()) | (symbols - {str(expr)})
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        names[str(expr)] = unique
    for leaf, axis, wanted in shapes.requested_axes():
        root: Any = getattr(wanted, "root", None)
        derived: Any = values[leaf].shape[axis] if root is not None else None
        for symbol in derived.node.expr.free_symbols if isinstance(derived, torch.SymInt) else ():
            if wanted.fn(symbol) == derived.node.expr and root.__name__ not in names.values():
                names.setdefault(str(symbol), root.__name__)
    sizes = {name: in_names(names, size) for name, size in sizes.items()}
    for leaf, axis, text, size in expressions:
        _name_expression(names, sizes, shapes.name(leaf, axis), text, size)
    return names


def declared_multiples(program: torch.export.ExportedProgram, shapes: DynamicShapes) -> dict[str, Multiple]:
    """torch's symbols whose sizes are declared by a ``Dim`` that is no size (``8 * Dim("h")``): torch keeps the range alone."""
    values = _user_values(program)
    multiples: dict[str, Multiple] = {}
    for leaf, axis, wanted in shapes.requested_axes() if len(values) == len(shapes.leaves) else ():
        root, function, value = getattr(wanted, "root", None), getattr(wanted, "fn", None), values[leaf]
        if root is None or function is None or not isinstance(value, torch.Tensor):
            continue
        size = value.shape[axis]
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:  # else an expression of the symbol of ``root``
            offset = int(function(0))
            multiples[str(size.node.expr)] = Multiple(root.__name__, int(function(1)) - offset, offset)
    return multiples


def _plain_names(shapes: DynamicShapes) -> dict[str, None]:
    named = (name_of(wanted) for _, _, wanted in shapes.requested_axes())
    return {name: None for name in (*named, *(n for _, n in shapes.numbers())) if name and not names_in(name)}


def _name_expression(names: dict[str, str], sizes: Mapping[str, Any], where: str, text: str, size: Any) -> None:
    """Gives the symbol of a size its expression; a size that is an expression for torch too must be equal to it."""
    wanted = evaluate(text, sizes)
    if str(size) not in names and getattr(size, "is_Symbol", False) and hasattr(wanted, "free_symbols"):
        names[str(size)] = str(wanted)
        return
    actual = in_names(names, size)
    if expand(same_symbols(actual) - same_symbols(wanted)) != 0:
        raise CaptureError(
            f"{where}: torch.export finds its size to be {actual}",
            hint="Name it by that expression, or leave its size to torch.export: {axis: Dim.AUTO}.",
        )


def check_expressions(shapes: DynamicShapes, leaves: Sequence[Any]) -> None:
    """Checks the sizes of the inputs against the expressions that name their dimensions.

    Raises:
        UsageError: The inputs have other sizes, or an expression has a name that no dimension has.
    """
    known = _plain_names(shapes)
    sizes: dict[str, int] = {name: leaves[leaf] for leaf, name in shapes.numbers()}
    expressions = []
    for leaf, axis, wanted in shapes.requested_axes():
        name, value = name_of(wanted), leaves[leaf]
        if name is None or not isinstance(value, torch.Tensor):
            continue
        if isinstance(wanted, str) and is_expression(wanted, known):
            expressions.append((leaf, axis, wanted))
        else:
            sizes.setdefault(name, int(value.shape[axis]))
    for leaf, axis, text in expressions:
        if not set(names_in(text)) <= set(sizes):
            continue
        expected, size = evaluate(text, sizes), int(leaves[leaf].shape[axis])
        if size != expected:
            values = ", ".join(f"{name} {sizes[name]}" for name in names_in(text))
            raise UsageError(
                f"axis {axis} of the input {shapes.paths[leaf]} is named {text!r}, which is {expected} ({values}), but its size in "
                f"the example is {size}"
            )


def _free(size: Any) -> Any:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
