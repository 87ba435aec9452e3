"""transformers imports torchvision, whose compiled kernels a machine may lack: in the checkout there are others."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    from tests.support.vision_kernels import define_vision_kernels

    define_vision_kernels()
