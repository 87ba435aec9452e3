"""The description of small models of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Sizes of the example inputs by the names of the dimensions.
SIZES = {"batch": 2, "height": 16, "width": 24, "depth": 8, "frames": 3, "text": 7, "tokens": 12, "length": 10}


class Small(NamedTuple):
    """A small model.

    Attributes:
        target: Its class or the function that makes it: ``module:name``.
        inputs: Arguments with their dimensions, ``sample: batch 4 height width; timestep: batch < 1000``: a dimension with a name
            is dynamic. Numbers are drawn from a normal distribution; ``< 1000``: integers; ``mask``: ones, then zeros; ``flags``:
            booleans; ``image``: between 0 and 1.
        settings: Arguments of ``target``.
        sizes: Sizes of the example inputs that differ from :data:`SIZES`.
        constants: Arguments that are not drawn.
        attributes: Attributes that the library's own exporter sets in modules that have them.
    """

    target: str
    inputs: str
    settings: Mapping[str, Any] = {}
    sizes: Mapping[str, int] = {}
    constants: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}
