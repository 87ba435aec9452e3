"""``onnxplug.compat``: translations written for torch.onnx, used unchanged.

Every name is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "symbolic": "onnxplug_torchscript.symbolic",
    "registered_symbolics": "onnxplug_torchscript.symbolic",
    "autograd_function": "onnxplug_torchscript.autograd",
    "keep_autograd_functions": "onnxplug_torchscript.autograd",
    "onnxscript_function": "onnxplug_torch_onnx.torchlib",
    "table_rules": "onnxplug_torch_onnx.table",
    "function_body": "onnxplug_torch_onnx.functions",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from onnxplug_torchscript.autograd import autograd_function as autograd_function
    from onnxplug_torchscript.autograd import keep_autograd_functions as keep_autograd_functions
    from onnxplug_torchscript.symbolic import registered_symbolics as registered_symbolics
    from onnxplug_torchscript.symbolic import symbolic as symbolic

    from onnxplug_torch_onnx.functions import function_body as function_body
    from onnxplug_torch_onnx.table import table_rules as table_rules
    from onnxplug_torch_onnx.torchlib import onnxscript_function as onnxscript_function


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxplug.compat' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
