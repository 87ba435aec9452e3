"""The condition of loops of tensors that carry, as their second tensor, whether to go on."""

from __future__ import annotations

from torch import Tensor


def goes_on(_: Tensor, going: Tensor, *__: Tensor) -> Tensor:
    """Whether a loop goes on: a copy of the second carried tensor, bool [], as torch takes no input for a result."""
    return going.clone()
