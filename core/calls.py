"""The inputs of a call of an exported program, in the order of the captured program's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.torch_private import child_of, pytree


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any], spec: Any, model: Callable[..., Any] | None) -> list[Any]:
    """The inputs of a call as a flat list.

    Args:
        args, kwargs: The inputs, as the PyTorch model takes them: an input may be given by position or by name, whatever the
            export had, and the keys of a dict may have any order.
        spec: The structure of the inputs of the export, a tuple of positional and a dict of keyword inputs.
        model: The PyTorch model, whose signature names the positional inputs; ``None`` where it is not there.

    Raises:
        UsageError: The inputs are not those of the export, or have another structure.
    """
    positional, named = child_of(spec, 0), child_of(spec, 1)
    names = list(named.context or ())
    if len(args) != positional.num_children or set(kwargs) != set(names):
        args, kwargs = _bound(args, kwargs, positional.num_children, names, model)
    leaves: list[Any] = []
    for place, value in enumerate(args):
        _add_leaves(leaves, value, child_of(positional, place), f"the positional input {place + 1}")
    for place, name in enumerate(names):
        _add_leaves(leaves, kwargs[name], child_of(named, place), f"the input {name!r}")
    return leaves


def _bound(
    args: Sequence[Any], kwargs: Mapping[str, Any], count: int, names: Sequence[str], model: Callable[..., Any] | None
) -> tuple[list[Any], dict[str, Any]]:
    """The inputs by position and by name as the export had them."""
    wanted = f"the exported model takes {count} positional inputs and the keyword inputs {list(names)}"
    refusal = UsageError(f"{wanted}, got {len(args)} and {list(kwargs)}")
    try:
        signature = inspect.signature(getattr(model, "forward", model))  # type: ignore[arg-type]
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except (TypeError, ValueError) as error:
        raise refusal from error
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    several = list(arguments.pop(kinds.get(inspect.Parameter.VAR_POSITIONAL, ""), ()))
    arguments |= arguments.pop(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    ordered = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    first = ordered[:count]
    if arguments.keys() != {*first, *names} or len(first) + len(several) != count:
        raise refusal
    return [*(arguments[name] for name in first), *several], {name: arguments[name] for name in names}


def _add_leaves(leaves: list[Any], value: Any, spec: Any, place: str) -> None:
    """Adds the leaves of an input in the order of the export."""
    if spec.is_leaf():
        leaves.append(value)
        return
    children, own = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if own.is_leaf() or not _is_same_kind(own, spec) or len(children) != spec.num_children:
        raise UsageError(
            f"{place} has another structure than in the export: {_in_words(own, len(children))}, not "
            f"{_in_words(spec, spec.num_children)}"
        )
    keys, wanted = _keys(own), _keys(spec)
    if keys is not None and wanted is not None:
        if set(keys) != set(wanted):
            raise UsageError(f"{place} has other keys than in the export: {list(keys)}, not {list(wanted)}")
        by_key = dict(zip(keys, children, strict=True))
        children = [by_key[key] for key in wanted]
    for number, child in enumerate(children):
        part = wanted[number] if wanted is not None else number
        _add_leaves(leaves, child, child_of(spec, number), f"{place}[{part!r}]")


def _is_same_kind(own: Any, spec: Any) -> bool:
    """Whether two containers are of one class; tuples and lists stand for each other, and so do all dicts."""
    if own.type is spec.type or not isinstance(own.type, type) or not isinstance(spec.type, type):
        return own.type is spec.type
    return any(issubclass(own.type, k) and issubclass(spec.type, k) for k in ((tuple, list), (dict,)))


def _keys(spec: Any) -> list[Any] | None:
    """The keys of a dict, or of a container whose context is a list of names; ``None`` for any other."""
    context = spec.context
    if isinstance(context, tuple | list) and len(context) == 2 and isinstance(context[1], list):
        context = context[1]  # a defaultdict
    is_of_names = isinstance(context, tuple | list) and len(context) == spec.num_children
    is_dict = isinstance(spec.type, type) and issubclass(spec.type, dict)
    return list(context) if is_of_names and (is_dict or all(isinstance(key, str) for key in context)) else None


def _in_words(spec: Any, count: int) -> str:
    return "a leaf" if spec.is_leaf() else f"{getattr(spec.type, '__name__', spec.type)} of {count}"
