"""Functions of higher-order operators, which Dynamo traces in torch.export too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onnxplug.capture.patching import patched
from onnxplug.torch_private import dynamo_config, higher_order_utilities


@contextlib.contextmanager
def steps_of_static_sizes() -> Iterator[None]:
    """While it holds, sizes that are static outside of a step, a loop or a branch are static inside too.

    torch.export has Dynamo take every size for a dynamic one, those of operands that are broadcast among them.
    """
    original = higher_order_utilities._set_compilation_env

    @contextlib.contextmanager
    def environment() -> Iterator[None]:
        with original(), dynamo_config.patch(assume_static_by_default=True):
            yield

    with patched(higher_order_utilities, "_set_compilation_env", environment):
        yield
