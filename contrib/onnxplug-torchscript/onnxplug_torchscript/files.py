"""Which models are TorchScript's, and files of them."""

from __future__ import annotations

from typing import Any

import torch

from onnxplug import OnnxplugError


def is_script(model: Any) -> bool:
    """Whether a model is one of TorchScript's."""
    return isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction)


def load(path: str) -> Any:
    """The ScriptModule of a file of ``torch.jit.save``, on the CPU.

    Args:
        path: The file.

    Raises:
        OnnxplugError: It is another file; one of ``torch.save`` among them, which holds weights or pickled objects.
    """
    try:
        return torch.jit.load(path, map_location="cpu")
    except (RuntimeError, ValueError) as error:
        raise OnnxplugError(
            f"{path} is not a script that torch.jit.save wrote: {str(error).strip().splitlines()[0]}",
            hint="Weights of torch.save need the model's code: file.py:callable.",
        ) from error
