"""Names of inputs, outputs and state: the user's first, then the model's own, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

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
        # A bare position says nothing: "output_0"; a key does: "logits", "past_key_values_0".
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
) -> None:
    """Settles every name; where two meet, the one that the user gave stays.

    Args:
        functional: The graph; its slots get their names.
        input_names, output_names: The user's names, in order.
        present_names: Whether an output that is the new value of an input is called after it: an input that the model writes,
            or a result that has the name of an input.

    Raises:
        UsageError: Too many names, or one twice.
    """
    users = [slot for slot in functional.inputs if slot.kind is InputKind.USER]
    outputs = [slot for slot in functional.outputs if slot.value is not None]
    pasts = {slot.name: slot for slot in users}
    _apply("input_names", input_names, users)
    if present_names:
        for output in outputs:
            past = pasts.get(output.target or "") if output.kind is OutputKind.INPUT_MUTATION else None
            past = pasts.get(output.name) if output.kind is OutputKind.USER else past
            if past is not None:
                output.name = present_name(past.name)
    _apply("output_names", output_names, outputs)
    given_inputs = set(input_names or ())
    given_outputs = set(output_names or ())
    taken = set(given_inputs | given_outputs)
    state_names = {slot.target for slot in functional.inputs}

    def settle(slot: Any, given: set[str]) -> None:
        if slot.name in given:
            given.discard(slot.name)
            return
        if slot.name in taken:  # a parameter's name is not for another tensor
            slot.name = _unique(slot.name, taken | state_names)
        taken.add(slot.name)

    common = given_inputs & given_outputs
    if common:
        name = sorted(common)[0]
        raise UsageError(f"{name!r} is in input_names and in output_names", hint="A name stands for one value.")
    for slot in users:
        settle(slot, given_inputs)
    for output in outputs:
        if output.kind is OutputKind.USER:
            settle(output, given_outputs)
    for slot in functional.inputs:
        if slot.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT):
            settle(slot, set())
    for output in outputs:
        if output.kind is not OutputKind.USER:
            settle(output, given_outputs)


def _apply(argument: str, names: Sequence[str] | None, slots: Sequence[Any]) -> None:
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(n, str) and n for n in names):
        raise UsageError(f"{argument} must be a list of names, got {names!r}")
    if len(names) > len(slots):
        have = ", ".join(slot.name for slot in slots) or "none"
        text = f"{argument} has {len(names)} names for {len(slots)} values ({have})"
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
