"""Defines torchvision's kernels, which transformers needs and a machine may lack, where the checkout is on the path."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):
    from tests.support.vision_kernels import define_vision_kernels

    define_vision_kernels()
