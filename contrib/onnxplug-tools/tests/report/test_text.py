"""Text made fit to be shown."""

from __future__ import annotations

import pytest
from onnxplug_tools.inspection.words import bytes_text
from onnxplug_tools.report.text import number_text, seconds_text, split_place

from onnxplug.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 中文 😀\n\t", "plain äöü 中文 😀\n\t"),
        ("\u202eleft", "\\u202eleft"),
        ("\x00\x1b[31m\r", "\\x00\\x1b[31m\\r"),
        ("\ud800", "\\ud800"),
        ("\u200b\ufeff", "\\u200b\\ufeff"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode("utf-8")


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
    near = {999_999: "999,999", 999_499_999: "999 M", 999_500_000: "1 G", 999_999_999_999: "1 T", 1_234e12: "1,234 T"}
    assert {n: number_text(n) for n in near} == near
    assert [bytes_text(n) for n in (12, 1500, 2_000_000)] == ["12 bytes", "1.5 kB", "2.0 MB"]
    assert [seconds_text(s) for s in (1.234, 0.0123)] == ["1.23 s", "12.3 ms"]
