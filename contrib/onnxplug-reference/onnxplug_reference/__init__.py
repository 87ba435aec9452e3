"""An onnxplug plugin: ONNX models evaluated node by node, in NumPy or by PyTorch's operators.

Every name is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onnxplug.plugin_api import Evaluator, hookimpl
from onnxplug.plugins.api import PluginInfo

_HOME = {
    "ExtendedReferenceEvaluator": "evaluator",
    "Kernel": "kernels",
    "Step": "engine",
    "TorchReferenceEvaluator": "torch_evaluator",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from onnxplug_reference.engine import Step as Step
    from onnxplug_reference.evaluator import ExtendedReferenceEvaluator as ExtendedReferenceEvaluator
    from onnxplug_reference.kernels import Kernel as Kernel
    from onnxplug_reference.torch_evaluator import TorchReferenceEvaluator as TorchReferenceEvaluator


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description: the defaults."""
    return PluginInfo()


@hookimpl
def onnxplug_evaluators() -> list[Evaluator]:
    """The evaluator in NumPy."""
    return [Evaluator("onnxplug.reference", "onnxplug_reference.evaluator:evaluator_of")]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxplug_reference' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onnxplug_reference.{home}"), name)
    globals()[name] = value
    return value
