"""A model that is run and then is what it was."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from onnxplug.capture.mentions import Mentions
from onnxplug.patches.state import SHARED, State
from onnxplug.warn import warn


@contextlib.contextmanager
def unchanged(model: torch.nn.Module, *, alone: bool = False) -> Iterator[None]:
    """Restores the state of a model and its code afterwards.

    Args:
        model: The model.
        alone: Restore only what is reached from the model, and nothing that other threads may use meanwhile.
    """
    state = State(model, Mentions(model))
    if alone:
        shared = {id(item) for item in (torch, os.environ, *SHARED)}
        state.kept = [kept for kept in state.kept if kept.owner is None and id(kept.item) not in shared]
    try:
        yield
    finally:
        state.restore()
        for text in state.texts if not alone else ():  # the capture has said so
            warn(text)
