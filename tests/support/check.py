"""The check every converter test goes through: export, run by ONNX Runtime, compare with eager PyTorch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

import onnxplug
from onnxplug import OnnxProgram


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def check(
    model: Callable[..., Any],
    *args: Any,
    others: Sequence[tuple[Any, ...]] = (),
    dynamic: Any = None,
    opset: int | dict[str, int] | None = None,
    kwargs: dict[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **options: Any,
) -> OnnxProgram:
    """Exports ``model`` with ``args`` and compares the result with eager PyTorch, on these inputs and on ``others``.

    Args:
        model: A function or module.
        args: Example inputs.
        others: Further positional inputs, of other values, and of other sizes where ``dynamic`` allows.
        dynamic: ``dynamic_shapes`` of ``torch.export.export``: one entry an argument; ``True``: every dimension of
            every tensor argument is ``Dim.AUTO``.
        opset: ai.onnx version, or that of several domains; the default one otherwise.
        kwargs: Keyword inputs.
        rtol, atol: Tolerances, torch.testing's own otherwise.
        options: Passed on to ``to_onnx``.
    """
    module = model if isinstance(model, torch.nn.Module) else Call(model)
    if dynamic is True:
        dynamic = _pytree.tree_map(_all_dynamic, tuple(args))
    if dynamic is not None and isinstance(module, Call):
        dynamic = (tuple(dynamic),)
    program = onnxplug.to_onnx(module, args, kwargs=kwargs, dynamic_shapes=dynamic, opset_version=opset, **options)
    wanted_opset = opset[""] if isinstance(opset, dict) else opset
    expected_opset = wanted_opset if wanted_opset is not None else program.model.opset_imports[""]
    assert program.model.opset_imports[""] == expected_opset
    for inputs in (args, *others):
        with torch.no_grad():
            expected = copy.deepcopy(module)(*copy.deepcopy(inputs), **copy.deepcopy(kwargs or {}))
        wanted = [x for x in _pytree.tree_leaves(expected) if x is not None]
        got = program(*copy.deepcopy(inputs), **copy.deepcopy(kwargs or {}))
        for index, (actual, reference) in enumerate(zip(got, wanted, strict=False)):
            reference = torch.as_tensor(reference)
            assert actual.dtype == reference.dtype or not isinstance(wanted[index], torch.Tensor), (
                f"output {index}: {actual.dtype} where torch has {reference.dtype}"
            )
            torch.testing.assert_close(
                actual,
                reference.to(actual.dtype),
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=functools.partial(_describe, index, inputs),
            )
        assert len(got) >= len(wanted)
    return program


def _describe(index: int, inputs: Sequence[Any], text: str) -> str:
    return f"output {index} for inputs {[getattr(a, 'shape', a) for a in inputs]}: {text}"


def _all_dynamic(x: Any) -> Any:
    return dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) if isinstance(x, torch.Tensor) else None
