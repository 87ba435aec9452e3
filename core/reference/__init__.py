"""``onnxplug.reference``: ONNX models evaluated node by node, in NumPy or by PyTorch's operators.

Every name is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "ExtendedReferenceEvaluator": "evaluator",
    "Kernel": "kernels",
    "Step": "engine",
    "TorchReferenceEvaluator": "torch_evaluator",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from onnxplug.reference.engine import Step as Step
    from onnxplug.reference.evaluator import ExtendedReferenceEvaluator as ExtendedReferenceEvaluator
    from onnxplug.reference.kernels import Kernel as Kernel
    from onnxplug.reference.torch_evaluator import TorchReferenceEvaluator as TorchReferenceEvaluator


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxplug.reference' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onnxplug.reference.{home}"), name)
    globals()[name] = value
    return value
