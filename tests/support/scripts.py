"""Comparing an exported script with the script itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import onnxplug


def scripted(model: Any) -> Any:
    """``torch.jit.script`` without the warning that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(model)


def traced(model: Callable[..., Any], *args: Any) -> Any:
    """``torch.jit.trace`` without the warnings of values that a trace keeps constant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, args, check_trace=False)


def check_script(script: Any, *cases: Sequence[Any], dynamic: Any = None) -> onnxplug.OnnxProgram:
    """Exports a script with the first inputs and compares it on all, the state after the call included.

    Args:
        script: A ScriptModule or ScriptFunction; it must be left as it was.
        cases: Positional inputs.
        dynamic: ``dynamic_shapes``.
    """
    program = onnxplug.to_onnx(script, tuple(cases[0]), dynamic_shapes=dynamic)
    assert len(cases) > 1, "one case can't tell constants from results"
    for case in cases:
        program.verify(args=case, seeds=())  # mutated state too
        with torch.no_grad():
            run = copy.deepcopy(script) if isinstance(script, torch.nn.Module) else script
            wanted = [torch.as_tensor(w) for w in pytree.tree_leaves(run(*copy.deepcopy(case))) if w is not None]
        got = list(program(*case))[: len(wanted)]
        torch.testing.assert_close(got, wanted)
    return program
