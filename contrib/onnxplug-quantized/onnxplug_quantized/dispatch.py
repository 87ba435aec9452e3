"""Calls of functions with a stand-in, looked up by name in the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxplug.errors import CaptureError
from onnxplug.torch_private import OpOverload, OpOverloadPacket, pytree
from onnxplug_quantized import dynamic, functions, weighted
from onnxplug_quantized.tensor import QTensor
from onnxplug_quantized.weights import Weight

#: Name of torch's function to the function that computes it, which takes torch's own function, and the arguments.
TABLE: Mapping[str, Callable[..., Any]] = {**functions.TABLE, **weighted.TABLE, **dynamic.TABLE}


def call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function of torch for arguments with stand-ins.

    Raises:
        CaptureError: The function is not in the tables, or writes a tensor that may share memory with another tensor.
    """
    name, keywords = name_of(func), dict(kwargs)
    inplace = keywords.pop("inplace", False)
    if name.endswith("_") and not name.endswith("__"):
        inplace, name = True, name[:-1]
        func = getattr(torch.nn.functional, name, None) or getattr(torch, name, None)
    convert = TABLE.get(name)
    if convert is None:
        raise CaptureError(
            f"{name} is called with a quantised tensor, which onnxplug does not translate",
            hint="Call dequantize() before it, and quantise the result again.",
        )
    args, keywords = pytree.tree_map_only(Weight, _plain, (args, keywords))
    result = convert(func, *args, **keywords)
    return _written(name, args[0], result) if inplace else result


def _plain(weight: Weight) -> Any:
    """The stand-in for a quantised tensor that the model keeps; packed weights stay modules."""
    return weight.tensor() if type(weight) is Weight else weight


def name_of(func: Any) -> str:
    """The name of a function of torch: ``relu`` for ``torch.relu``, ``Tensor.relu`` and ``nn.functional.relu``.

    Operators of namespaces other than aten have it in front: ``quantized::add``.
    """
    if isinstance(func, OpOverload):
        func = func.overloadpacket
    if isinstance(func, OpOverloadPacket):
        return str(func._qualified_op_name).removeprefix("aten::")
    name = str(getattr(func, "__name__", ""))
    return str(func.__self__.__name__) if name == "__get__" else name


def _written(name: str, target: Any, result: Any) -> Any:
    """Gives the tensor that a function writes the integers of its result.

    Raises:
        CaptureError: The tensor may share memory with another tensor.
    """
    if not isinstance(target, QTensor) or target.aliased:
        raise CaptureError(
            f"{name} writes a quantised tensor that may share its memory with another one",
            hint="Call it with inplace=False.",
        )
    target.integers = result.integers
    return target
