"""``onnxplug.compat``: translations written for torch.onnx, used unchanged.

Every name is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "symbolic": "torchscript",
    "registered_symbolics": "torchscript",
    "onnxscript_function": "torchlib",
    "table_rules": "table",
    "function_body": "functions",
    "autograd_function": "autograd",
    "keep_autograd_functions": "autograd",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from onnxplug.compat.autograd import autograd_function as autograd_function
    from onnxplug.compat.autograd import keep_autograd_functions as keep_autograd_functions
    from onnxplug.compat.functions import function_body as function_body
    from onnxplug.compat.table import table_rules as table_rules
    from onnxplug.compat.torchlib import onnxscript_function as onnxscript_function
    from onnxplug.compat.torchscript import registered_symbolics as registered_symbolics
    from onnxplug.compat.torchscript import symbolic as symbolic


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'onnxplug.compat' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"onnxplug.compat.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
