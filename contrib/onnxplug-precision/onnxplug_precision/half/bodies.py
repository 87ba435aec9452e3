"""Operands and results of subgraphs and functions: the values that must have one type, and their ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxplug_precision.half.ranges import Range, Ranges, range_of
from onnxplug_precision.half.types import subgraphs_of

#: The most rounds in which ranges are passed on, for loops within loops.
_ROUNDS = 8


def joined(node: ir.Node, function: ir.Function | None) -> Iterator[list[ir.Value]]:
    """Groups of values of one type: values of a node with subgraphs, or of a call, with the values inside."""
    if function is not None:
        groups: list[list[ir.Value | None]] = [list(pair) for pair in zip(node.inputs, function.inputs, strict=False)]
    elif node.op_type == "If":
        bodies = subgraphs_of(node)
        groups = [[out, *(body.outputs[i] for body in bodies)] for i, out in enumerate(node.outputs)]
    elif node.op_type == "SequenceMap":
        groups = []
    else:
        groups = _of_loop(node, subgraphs_of(node)[0])
    for group in groups:
        yield [value for value in group if value is not None]


def _of_loop(node: ir.Node, body: ir.Graph) -> list[list[ir.Value | None]]:
    """The groups of a Loop or Scan."""
    inputs: list[ir.Value | None] = list(node.inputs)
    formals, results, outer = list(body.inputs), list(body.outputs), list(node.outputs)
    if node.op_type == "Loop":
        inputs, formals, results = inputs[2:], formals[2:], results[1:]
        carried = len(inputs)
    else:
        carried = len(inputs) - node.attributes.get_int("num_scan_inputs", 0)
    groups: list[list[ir.Value | None]] = []
    for index in range(carried):
        groups.append([inputs[index], formals[index], results[index], outer[index]])
    groups += [[inputs[i], formals[i]] for i in range(carried, len(inputs))]
    groups += [[results[i], outer[i]] for i in range(carried, len(results))]
    return groups


def spread(nodes: Iterable[ir.Node], model: ir.Model, ranges: Ranges, constants: Mapping[ir.Value, np.ndarray]) -> None:
    """Gives the inputs of subgraphs and functions the ranges of the values of their groups."""
    with_bodies = [n for n in nodes if subgraphs_of(n) or n.op_identifier() in model.functions]
    for _ in range(_ROUNDS):
        changed = False
        for node in with_bodies:
            function = model.functions.get(node.op_identifier())
            formals = formals_of(node, function)
            for group in joined(node, function):
                changed |= _merge(group, formals, ranges, constants)
        if not changed:
            return


def formals_of(node: ir.Node, function: ir.Function | None) -> set[ir.Value]:
    """The inputs of the subgraphs of a node, or of the function that it calls."""
    return {*function.inputs} if function is not None else {v for body in subgraphs_of(node) for v in body.inputs}


def _merge(
    group: list[ir.Value], formals: set[ir.Value], ranges: Ranges, constants: Mapping[ir.Value, np.ndarray]
) -> bool:
    known = [_range_of(value, ranges, constants) for value in group]
    whole = Range()
    for range_ in known:
        if range_ is not None:
            whole.merge(range_)
    changed = False
    for value, range_ in zip(group, known, strict=True):
        if value in formals and any(known) and range_ != whole:
            ranges[value] = replace(whole)
            changed = True
    return changed


def _range_of(value: ir.Value, ranges: Ranges, constants: Mapping[ir.Value, Any]) -> Range | None:
    return range_of(constants[value]) if value in constants else ranges.get(value)
