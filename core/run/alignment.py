"""The alignment of FX nodes with the values of an ONNX model that are their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.complexes import Complex
from onnxplug.capture.signature import FunctionalGraph
from onnxplug.registry.rule import Rule


@dataclass
class Alignment:
    """Filled while a graph is converted.

    Attributes:
        names: FX node to the name of the ONNX value that is its result; for a complex result two names, of the real and the
            imaginary part. Values that nothing needs are left out; an unneeded part has the name "". Names survive rewrites;
            a value that was rewritten away has left the model with its name.
        rules: FX node to the rule that translated it.
        fired: How often each rewrite fired.
    """

    names: dict[torch.fx.Node, tuple[str, ...]] = field(default_factory=dict)
    rules: dict[torch.fx.Node, Rule] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)

    def record(self, graph: ir.Graph, values: Mapping[torch.fx.Node, Any]) -> None:
        """Records the names of FX nodes' values, once the graph is assembled and before it is rewritten."""
        for node, value in values.items():
            parts = (value.real, value.imag) if isinstance(value, Complex) else (value,)
            names = tuple(_name_of(part, graph) for part in parts)
            if node.op != "placeholder" and any(names):
                self.names[node] = names


def _name_of(value: Any, graph: ir.Graph) -> str:
    return str(value.name) if isinstance(value, ir.Value) and _is_read(value, graph) else ""


def _is_read(value: ir.Value, graph: ir.Graph) -> bool:
    producer = value.producer()
    if value.name is None:
        return False
    return producer.graph is graph if producer is not None else bool(value.uses())


Build = Callable[[FunctionalGraph, bool, Collection[str], "Alignment | None"], ir.Model]


@dataclass(frozen=True)
class Recipe:
    """How a model was converted, so that it, or a part of it, can be converted again in other ways.

    Attributes:
        functional: The FX graph.
        build: ``(functional, optimize, without, alignment) -> model``: converts a graph.
        optimize: The option of the conversion.
        without: The rewrites that it was converted without.
    """

    functional: FunctionalGraph
    build: Build
    optimize: bool = True
    without: frozenset[str] = frozenset()

    def convert(self, optimize: bool, without: Collection[str], alignment: Alignment | None) -> ir.Model:
        """Converts the graph.

        Args:
            optimize: As ``to_onnx`` takes it.
            without: Names of rewrites to leave out.
            alignment: Records the values of FX nodes.

        Raises:
            ConversionError: A converter fails.
        """
        return self.build(self.functional, optimize, without, alignment)
