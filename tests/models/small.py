"""How small models of other libraries are written down."""

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
        settings: What it is made with.
        sizes: Sizes of the example inputs where :data:`SIZES` does not do.
        constants: Other arguments.
        attributes: What the library's own exporter sets in modules that have it.
    """

    target: str
    inputs: str
    settings: Mapping[str, Any] = {}
    sizes: Mapping[str, int] = {}
    constants: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}
