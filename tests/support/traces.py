"""Captured programs, compared node for node."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onnxplug.capture.capture import capture
from onnxplug.capture.signature import Captured
from onnxplug.capture.size_guards import is_own
from onnxplug.options import ExportOptions
from onnxplug.plugin_api import CaptureRequest
from onnxplug.plugins.manager import registry_for
from onnxplug.torch_private import is_transformed


def is_layout_of_torch(node: torch.fx.Node) -> bool:
    """A copy into another memory layout, which torch 2.15 makes in one of two equal layers.

    With symbolic sizes that may be 0 or 1, the first scaled_dot_product_attention's result has other strides than a
    later result of equal inputs, so that ``contiguous`` is a node after the first alone, in a whole trace too.
    """
    return torch.__version__ >= "2.15" and node.target is torch.ops.aten.contiguous.default


def lines(program: torch.export.ExportedProgram) -> list[Any]:
    """Every node with its arguments and metadata, numbered, as names count intermediate results that are gone."""
    nodes_that_count = [node for node in program.graph.nodes if not is_layout_of_torch(node)]
    numbers = {node.name: f"%{i}" for i, node in enumerate(nodes_that_count)}
    for node in program.graph.nodes:
        if is_layout_of_torch(node):
            numbers[node.name] = numbers[node.args[0].name]
    memories: dict[int, int] = {}

    def numbered(value: Any) -> str:
        return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: numbers.get(m[0], m[0]), str(value))

    def noted(value: Any) -> str:
        return re.sub(r"<eval_with_key>\.\d+", "<eval_with_key>", str(value))

    def kinds(value: Any) -> Any:
        """Sizes, strides, offset, dtype and device, and a number that tensors of the same memory share."""
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_transformed(value):
            memory = memories.setdefault(value.untyped_storage()._cdata, len(memories))
            return str((value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, memory))
        return [kinds(v) for v in value] if isinstance(value, tuple | list) else str(value)

    notes = ("nn_module_stack", "stack_trace", "torch_fn", "tensor_meta")
    nodes = [
        (
            n.op,
            str(n.target) if n.op == "call_function" else "",
            numbered((n.args, n.kwargs)),
            kinds(n.meta.get("val")),
            *(noted(n.meta.get(note)) for note in notes),
            sorted(n.meta),
        )
        for n in nodes_that_count
    ]
    return [*nodes, numbered(program.graph_signature), str(program.range_constraints)]


def captured(make: Callable[[], nn.Module], args: Any, repeats: bool, **options: Any) -> tuple[Captured, list[str]]:
    """A model captured, with the warnings that it gave."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        request = CaptureRequest(options=ExportOptions(capture="calls" if repeats else "whole"))
        results = capture(make(), args, patches=registry_for(plugins=[])[1].patches(), request=request, **options)
    return results, [str(w.message) for w in caught]


def both(make: Callable[[], nn.Module], *args: Any, **options: Any) -> Captured:
    """Captures a model with each call traced, and with equal calls repeated; compares all of the two programs.

    Args:
        make: Makes the model, anew for each capture.
        args: Its inputs.
        options: Options of :func:`~onnxplug.capture.capture.capture`.

    Returns:
        The capture in which calls were repeated.
    """
    whole, warned = captured(make, args, False, **options)
    traced, warned_too = captured(make, args, True, **options)
    assert whole.repeated == 0
    for line, other in zip(lines(traced.program), lines(whole.program), strict=True):
        assert line == other
    assert traced.conditions == whole.conditions
    # torch asks by itself whether memory is empty, whose size it may write in two ways.
    assert [c for c in traced.assumptions if is_own(c.place)] == [c for c in whole.assumptions if is_own(c.place)]
    assert warned_too == warned
    return traced
