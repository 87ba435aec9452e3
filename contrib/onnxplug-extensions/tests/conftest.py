"""transformers imports torchvision, whose compiled kernels a machine may lack; with the checkout on the path others stand for them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

with contextlib.suppress(ImportError):
    from tests.support.vision_kernels import define_vision_kernels

    define_vision_kernels()

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own modules
