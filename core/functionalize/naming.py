"""Names of inputs, outputs and state: the user's first, then the model's own, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from onnxplug.capture.input_names import part_names
from onnxplug.capture.signature import FunctionalGraph, InputKind, OutputKind, present_name
from onnxplug.errors import NameCountError, UsageError
from onnxplug.torch_private import pytree


def result_names(program: torch.export.ExportedProgram, count: int) -> list[str]:
    """Names of the user outputs: the keys of dicts, dataclasses and ModelOutputs, else ``output`` or ``output_0`` …"""
    default = ["output"] if count == 1 else [f"output_{i}" for i in range(count)]
    spec = program.call_spec.out_spec
    if spec is None or spec.num_leaves != count:
        return default
    try:
        structure = pytree.tree_unflatten(list(range(count)), spec)
        paths = pytree.tree_flatten_with_path(structure)[0]
    except Exception:
        return default
    names = []
    for path, index in paths:
        parts = [_key_text(key) for key in path]
        # A bare position is no name: "output_0"; a key is: "logits", "past_key_values_0".
        if not parts or all(isinstance(key, pytree.SequenceKey) for key in path):
            parts = ["output", *parts] if count > 1 else ["output"]
        names.append((int(index), "_".join(parts)))
    return [name for _, name in sorted(names)]


def _key_text(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def assign_names(
    functional: FunctionalGraph,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    *,
    present_names: bool = False,
    places: tuple[Sequence[Place], Sequence[Place]] = ((), ()),
) -> None:
    """Decides every name; of two equal names, the user's stays.

    Args:
        functional: The graph; its slots get their names.
        input_names, output_names: The user's names, in order.
        present_names: Whether an output that is the new value of an input is named after it: an input that the model writes,
            or a result that has the name of an input.
        places: Where each user input is in the arguments, and each user output in the results; empty where it is not known.

    Raises:
        UsageError: Too many names, too few, or a name twice.
    """
    users = [slot for slot in functional.inputs if slot.kind is InputKind.USER]
    outputs = [slot for slot in functional.outputs if slot.value is not None]
    pasts = {slot.name: slot for slot in users} if present_names else {}
    input_names = _of_parts("input_names", input_names, users, places[0])
    _apply("input_names", input_names, users)
    for output in outputs:
        past = pasts.get(output.target or "") if output.kind is OutputKind.INPUT_MUTATION else None
        past = pasts.get(output.name) if output.kind is OutputKind.USER else past
        if past is not None:
            output.name = present_name(past.name)
    if not present_names:  # else the outputs that the user left out are named after inputs
        results = [slot for slot in outputs if slot.kind is OutputKind.USER]
        output_names = _of_parts("output_names", output_names, results, places[1])
    _apply("output_names", output_names, outputs)
    names_of_inputs = set(input_names or ())
    names_of_outputs = set(output_names or ())
    taken = set(names_of_inputs | names_of_outputs)
    state_names = {slot.target for slot in functional.inputs}

    def settle(slot: Any, users_names: set[str]) -> None:
        if slot.name in users_names:
            users_names.discard(slot.name)
            return
        if slot.name in taken:  # a parameter's name is not for another tensor
            slot.name = _unique(slot.name, taken | state_names)
        taken.add(slot.name)

    for name in sorted(names_of_inputs & names_of_outputs):
        raise UsageError(f"{name!r} is in input_names and in output_names", hint="A name stands for one value.")
    for slot in users:
        settle(slot, names_of_inputs)
    for output in outputs:
        if output.kind is OutputKind.USER:
            settle(output, names_of_outputs)
    for slot in functional.inputs:
        if slot.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT):
            settle(slot, set())
    for output in outputs:
        if output.kind is not OutputKind.USER:
            settle(output, names_of_outputs)


#: The argument or result that a value is a part of, and its place there.
Place = tuple[Any, Sequence[str]]


def input_places(program: torch.export.ExportedProgram, functional: FunctionalGraph) -> list[Place]:
    """Where each user input is in the arguments of the call."""
    spec = program.call_spec.in_spec
    paths = _places(spec, 1) if spec is not None else []
    users = [slot for slot in functional.inputs if slot.kind is InputKind.USER]
    if any(slot.position is None or slot.position >= len(paths) for slot in users):
        return []
    return [paths[slot.position] for slot in users if slot.position is not None]


def output_places(program: torch.export.ExportedProgram, functional: FunctionalGraph) -> list[Place]:
    """Where each user output is in the model's result; empty where a part of the result is no output of the graph."""
    spec = program.call_spec.out_spec
    paths = _places(spec, 0) if spec is not None else []
    results = [slot for slot in functional.outputs if slot.kind is OutputKind.USER]
    if len(results) != len(paths):
        return []
    return [path for path, slot in zip(paths, results, strict=True) if slot.value is not None]


def _places(spec: pytree.TreeSpec, depth: int) -> list[Place]:
    """The place of each leaf; the key at ``depth`` is that of an argument or result."""
    try:
        paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))[0]
    except Exception:  # a class that was registered without the names of its parts
        return []
    by_leaf: dict[int, Place] = {}
    for path, number in paths:
        keys = [_key_text(key) for key in path]
        by_leaf[int(number)] = (tuple(keys[: depth + 1]), keys[depth + 1 :])
    return [by_leaf[number] for number in sorted(by_leaf)]


def _of_parts(
    argument: str, names: Sequence[str] | None, slots: Sequence[Any], places: Sequence[Place]
) -> Sequence[str] | None:
    """The names of all values, where there is only a name for each argument or result.

    Raises:
        NameCountError: There are too few names.
    """
    if names is None or isinstance(names, str) or not 0 < len(names) < len(slots) or len(places) != len(slots):
        return names
    if (of_parts := part_names(names, places)) is not None:
        return of_parts
    nested = any(place for _, place in places)
    if argument == "output_names" and not nested:
        return names
    slot_names = ", ".join(slot.name for slot in slots)
    raise NameCountError.of(
        f"{argument} has {len(names)} names for {len(slots)} values ({slot_names})",
        argument,
        len(slots),
        [slot.name for slot in slots],
        nested=nested,
        hint="Give a name for each value, or one for each argument or result, which its parts are then called after.",
    )


def _apply(argument: str, names: Sequence[str] | None, slots: Sequence[Any]) -> None:
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(n, str) and n for n in names):
        raise UsageError(f"{argument} must be a list of names, got {names!r}")
    if len(names) > len(slots):
        slot_names = ", ".join(slot.name for slot in slots) or "none"
        text = f"{argument} has {len(names)} names for {len(slots)} values ({slot_names})"
        raise NameCountError.of(text, argument, len(slots))
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UsageError(f"{argument} has {repeated[0]!r} twice")
    for name, slot in zip(names, slots, strict=False):
        slot.name = name


def _unique(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
