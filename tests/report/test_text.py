"""Text made fit to be shown."""

from __future__ import annotations

import pytest

from onnxplug.report.text import bytes_text, clean, number_text, seconds_text, split_place


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 中文 😀\n\t", "plain äöü 中文 😀\n\t"),
        ("\u202eleft", "\\u202eleft"),
        ("\x00\x1b[31m\r", "\\u0000\\u001b[31m\\u000d"),
        ("\ud800", "\\ud800"),
        ("\u200b\ufeff", "\\u200b\\ufeff"),
        (12, "12"),
    ],
)
def test_clean(text: object, shown: str) -> None:
    assert clean(text) == shown
    clean(text).encode("utf-8")


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("a/b.py:12", ("a/b.py", 12)),
        ("C:/b.py:12", ("C:/b.py", 12)),
        ("a.py", None),
        ("a.py:x", None),
        ("a.py:0", None),
        (":3", None),
        (None, None),
    ],
)
def test_split_place(place: str | None, parts: tuple[str, int] | None) -> None:
    assert split_place(place) == parts


def test_numbers() -> None:
    assert [number_text(n) for n in (0, 1234, 1_250_000, 3.2e9, 7e12)] == ["0", "1,234", "1.25 M", "3.2 G", "7 T"]
    assert [bytes_text(n) for n in (12, 1500, 2_000_000)] == ["12 bytes", "1.5 kB", "2 MB"]
    assert [seconds_text(s) for s in (1.234, 0.0123)] == ["1.23 s", "12.3 ms"]
