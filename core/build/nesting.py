"""Graphs within the graph under construction: subgraphs of If, Loop and Scan, and the nodes that outputs need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.build.provenance import Provenance
from onnxplug.build.scope import Scope


class NestingMixin:
    """Scopes of :class:`GraphBuilder`: nodes go into the innermost one."""

    provenance: Provenance
    provenance_of: dict[ir.Node, Provenance]

    def __init__(self) -> None:
        self._scope = Scope(None)
        super().__init__()

    if TYPE_CHECKING:

        def fresh(self) -> int: ...
        def forget_sizes(self, values: Iterable[ir.Value]) -> None: ...

    @contextmanager
    def nested(self, *, isolated: bool = False, scope: Scope | None = None) -> Iterator[Scope]:
        """A context whose nodes go into a scope of their own.

        Args:
            isolated: Nodes of the scopes around it are not shared.
            scope: The scope, instead of a new one within the present one.
        """
        outer, self._scope = self._scope, Scope(self._scope, isolated=isolated) if scope is None else scope
        try:
            yield self._scope
        finally:
            self._scope = outer

    def live(self, outputs: Iterable[ir.Value]) -> list[ir.Node]:
        """The nodes emitted into the present scope that the outputs need, in order; the others let go of their inputs."""
        dead: list[ir.Value] = []
        nodes = self._scope.live_nodes(outputs, dead)
        self.forget_sizes(dead)
        return nodes

    def identity(self, value: ir.Value) -> ir.Value:
        """A value of its own that equals ``value``; never simplified away, as ``g.op.Identity`` is."""
        result = ir.Value(type=value.type, shape=value.shape.copy() if value.shape is not None else None)
        node = ir.Node("", "Identity", [value], outputs=[result])
        self.provenance_of[node] = self.provenance
        self._scope.add(node, None, (result,))
        return result

    def own_outputs(self, results: ir.Value | Sequence[ir.Value]) -> list[ir.Value]:
        """The outputs of a graph: each is made inside of the present scope, and stands once."""
        outputs = [results] if isinstance(results, ir.Value) else list(results)
        own_values = {id(v) for v in self._scope.values()}
        for position, value in enumerate(outputs):
            if id(value) not in own_values or any(value is o for o in outputs[:position]):
                outputs[position] = self.identity(value)
        return outputs

    def subgraph(
        self,
        build: Callable[..., ir.Value | Sequence[ir.Value]],
        inputs: Sequence[tuple[torch.dtype | ir.DataType, Sequence[Any] | None]] = (),
        name: str = "body",
    ) -> ir.Graph:
        """A graph for an If, Loop or Scan attribute; it may use every value of the graphs around it.

        Args:
            build: Called with one Value an input; returns the graph's outputs.
            inputs: Dtype and dimensions (``None`` for an unknown rank) of each input.
            name: The graph's name.
        """
        formals = [
            ir.Value(
                name=f"{name}_in{self.fresh()}",
                type=ir.TensorType(to_onnx_dtype(dtype)),
                shape=ir.Shape(dims) if dims is not None else None,
            )
            for dtype, dims in inputs
        ]
        with self.nested() as scope:
            try:
                outputs = self.own_outputs(build(*formals))
                nodes = self.live(outputs)
                # Named here, uniquely: ir.Graph would count from 0 in each, and a name is visible in the graphs within.
                for value in (v for node in nodes for v in node.outputs if v.name is None):
                    value.name = f"{name}_value{self.fresh()}"
            finally:
                self.forget_sizes(scope.values())
        return ir.Graph(formals, outputs, nodes=nodes, name=f"{name}_{self.fresh()}")
