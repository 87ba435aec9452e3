"""The check every converter test goes through: export, run by ONNX Runtime, compare with eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

import onnxplug
from onnxplug import OnnxProgram
from onnxplug.verification.compare import Scale
from onnxplug.verification.outputs import Tolerances
from onnxplug.verification.verify import verify_inputs

#: Sets of inputs that an evaluator ran, as ONNX Runtime has no kernel, since the last test; `tests/conftest.py` adds them up.
evaluated: list[str] = []


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
    sets = [(copy.deepcopy(inputs), copy.deepcopy(kwargs or {})) for inputs in (args, *others)]
    report = verify_inputs(program, sets, Tolerances(Scale.OPERATOR, rtol, atol))
    evaluated.extend(case.runtime for case in report.cases if case.runtime != "onnxruntime")
    return program


def _all_dynamic(x: Any) -> Any:
    return dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) if isinstance(x, torch.Tensor) else None
