"""Mixtures of experts: tokens sorted by expert, then one product a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers.integrations import moe

#: Ways of computing experts that torch.export doesn't capture, besides the eager one.
_KERNELS_OF_GPUS = frozenset({"deepgemm", "sonicmoe"})


@contextlib.contextmanager
def exportable_experts() -> Iterator[None]:
    """Holds while a model is captured: experts are computed by ``grouped_mm`` where the model's own way can't be captured.

    The eager way is a loop over the experts that were chosen, whose number depends on the data.
    """
    interface = moe.ALL_EXPERTS_FUNCTIONS
    choose = interface.get_interface

    def exportable(implementation: Any, default: Any) -> Any:
        found = choose(implementation, default)
        plain = found is not default and implementation not in _KERNELS_OF_GPUS
        return found if plain else moe.grouped_mm_experts_forward

    interface.get_interface = exportable
    try:
        yield
    finally:
        del interface.get_interface
