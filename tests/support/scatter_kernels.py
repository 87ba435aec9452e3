"""torch_scatter's and pyg_lib's operators where the packages aren't installed, as the plugin's own tests have them."""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

from tests.support.contrib import CONTRIB


@cache
def scatter_kernels() -> ModuleType:
    """The module of kernels under ``contrib/onnxplug-torch-geometric/tests``."""
    path = CONTRIB / "onnxplug-torch-geometric" / "tests" / "kernels.py"
    spec = importlib.util.spec_from_file_location("onnxplug_scatter_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def define_scatter_kernels() -> None:
    """Makes the operators known to torch. May be called any number of times."""
    scatter_kernels().define()
