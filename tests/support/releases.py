"""Marks of tests that a release of torch does not pass."""

from __future__ import annotations

import pytest
import torch

IS_29 = torch.__version__.startswith("2.9.")


def not_with(release: str, reason: str) -> pytest.MarkDecorator:
    """Expects a failure with a release of torch, for a reason in torch."""
    return pytest.mark.xfail(
        torch.__version__.startswith(f"{release}."), strict=True, reason=f"torch {release} {reason}"
    )
