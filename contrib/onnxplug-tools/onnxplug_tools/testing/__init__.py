"""Helpers for tests of a plugin; :mod:`onnxplug_tools.testing.plugin` has the pytest fixtures. Nothing heavy is imported here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "GraphExpectation": "graph",
    "expect_graph": "graph",
    "SampleCase": "samples",
    "cases_of": "samples",
    "check_model": "check",
    "sample_cases": "registry",
    "IsolatedRegistry": "registry",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from onnxplug_tools.testing.check import check_model as check_model
    from onnxplug_tools.testing.graph import GraphExpectation as GraphExpectation, expect_graph as expect_graph
    from onnxplug_tools.testing.registry import IsolatedRegistry as IsolatedRegistry, sample_cases as sample_cases
    from onnxplug_tools.testing.samples import SampleCase as SampleCase, cases_of as cases_of


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxplug_tools.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onnxplug_tools.testing.{home}"), name)
    globals()[name] = value
    return value
