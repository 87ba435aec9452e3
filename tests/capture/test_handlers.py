"""Handlers are judged once a line, as long as the classes that they name are the same.

PYTEST_DONT_REWRITE: the handlers of the models are Python's own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import onnxplug

FINE = torch.tensor([[2.0, 0.5, 0.0], [0.5, 2.0, 0.5], [0.0, 0.5, 1.0]])
_taken: type[BaseException] = TypeError


def rebinds_the_class(x: torch.Tensor) -> torch.Tensor:
    """The handler takes other classes of errors at its second call, at the same instruction."""
    global _taken
    result = x
    for kind in (TypeError, RuntimeError):
        _taken = kind
        try:
            result = result + torch.linalg.cholesky(x)
        except _taken:
            result = result - 1
    return result


class Claimed(Exception):
    """A class whose attribute names the errors, and which is not Python's own."""

    __module__ = "builtins"
    kind: type[BaseException] = TypeError


def rebinds_an_attribute(x: torch.Tensor) -> torch.Tensor:
    result = x
    for kind in (TypeError, RuntimeError):
        Claimed.kind = kind
        try:
            result = result + torch.linalg.cholesky(x)
        except Claimed.kind:
            result = result - 1
    return result


@pytest.mark.parametrize("model", [rebinds_the_class, rebinds_an_attribute])
def test_a_handler_whose_class_is_bound_anew_is_judged_anew(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.warns(UserWarning, match="handles errors of"):
        onnxplug.to_onnx(model, (FINE,))
