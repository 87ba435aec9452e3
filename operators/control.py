"""Shapes of control flow's results: they are the results of its subgraphs."""

from __future__ import annotations

from typing import Any

from onnxplug.build.inference.dims import Attributes, Inputs, Result, dims_of


def if_(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    graph = attributes["then_branch"]
    return [(v.dtype, dims_of(v)) for v in graph.outputs]


def loop(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    body = attributes["body"]
    carried = len(inputs) - 2
    result: Result = []
    for position, value in enumerate(body.outputs[1:]):
        dims = dims_of(value)
        if position >= carried:
            dims = (None, *dims) if dims is not None else None
        result.append((value.dtype, dims))
    return result


def scan(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    body = attributes["body"]
    states = len(inputs) - attributes["num_scan_inputs"]
    return [
        (v.dtype, dims_of(v) if i < states else ((None, *(dims_of(v) or ())) if dims_of(v) is not None else None))
        for i, v in enumerate(body.outputs)
    ]
