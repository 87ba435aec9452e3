"""Marks of tests that a release of torch does not pass."""

from __future__ import annotations

import pytest
import torch

IS_29 = torch.__version__.startswith("2.9.")


def not_with_29(reason: str) -> pytest.MarkDecorator:
    """Expects a failure with torch 2.9, for a reason in torch."""
    return pytest.mark.xfail(IS_29, strict=True, reason=f"torch 2.9 {reason}")
