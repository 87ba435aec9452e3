"""``copy.deepcopy`` of a tensor while torch.export traces it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from onnxplug.capture.patching import patched
from onnxplug.torch_private import FakeTensor


@contextlib.contextmanager
def copies_of_tensors() -> Iterator[None]:
    """While it holds, a deep copy of a fake tensor is a clone. torch looks where its numbers are, which it has none of."""

    def __deepcopy__(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        return memo[id(self)]

    with patched(FakeTensor, "__deepcopy__", __deepcopy__):
        yield
