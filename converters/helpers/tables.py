"""Rows of rule tables."""

from __future__ import annotations

from onnxplug.registry.rule import Converter, Rule


def overloads_of(names: str, overloads: str, convert: Converter) -> list[Rule]:
    """A rule for every overload of every operator of aten, both named in a text with blanks between them."""
    return [Rule(f"aten::{name}.{overload}", convert) for name in names.split() for overload in overloads.split()]
