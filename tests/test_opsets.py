"""The opsets that are accepted, with and without a warning."""

from __future__ import annotations

import warnings

import pytest

from onnxplug.opsets import MIN_OPSET, TESTED_OPSET, resolve_opsets
from tests.opdb.report import OPSETS


def test_the_tests_cover_the_tested_opset() -> None:
    assert max(OPSETS) == TESTED_OPSET


def test_an_opset_beyond_the_tests_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxplug.opsets.max_opset", lambda: TESTED_OPSET + 1)
    with pytest.warns(UserWarning, match=f"opset {TESTED_OPSET + 1} is newer"):
        resolve_opsets(TESTED_OPSET + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opset in (MIN_OPSET, TESTED_OPSET, None):
            resolve_opsets(opset)
