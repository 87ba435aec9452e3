"""Rows of rule tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug.build.builder import GraphBuilder
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def overloads_of(names: str, overloads: str, convert: Converter, **conditions: Any) -> list[Rule]:
    """A rule for every overload of every operator of aten, both named in a text with blanks between them."""
    return [
        Rule(f"aten::{name}.{overload}", convert, **conditions)
        for name in names.split()
        for overload in overloads.split()
    ]


def of_rank(convert: Callable[[GraphBuilder, FxNode, int], Any], spatial: int) -> Converter:
    """The converter for one number of spatial axes: ``max_pool`` becomes ``max_pool1d``, ``max_pool2d``, ``max_pool3d``."""

    def of_this_rank(g: GraphBuilder, node: FxNode) -> Any:
        return convert(g, node, spatial)

    of_this_rank.__name__ = of_this_rank.__qualname__ = f"{convert.__name__}{spatial}d"
    of_this_rank.__module__, of_this_rank.__doc__ = convert.__module__, convert.__doc__
    return of_this_rank


def complex_rule(name: str, convert: Converter) -> Rule:
    """A rule for an overload of aten on complex tensors, or for every overload of an operator."""
    return Rule(f"complex:aten::{name}", convert)
