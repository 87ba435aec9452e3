"""The report in Markdown."""

from __future__ import annotations

import re

import pytest
from onnxplug_tools.report.markdown import fenced, plain
from onnxplug_tools.report.report import ExportReport

from tests.support import reports


def test_parts_of_the_text() -> None:
    text = reports.report().markdown()
    for part in (
        "# Export to ONNX",
        "- model: tests.support.reports.Net",
        "- verification: the same as PyTorch on 4 sets of inputs",
        "| x | float[batch, 8] |",
        "Operator calls that repeated an equal one: 10.",
        "reports_test::halved.default",
        "## Differences in units of each element's tolerance",
        "## Times of rules",
    ):
        assert part in text, part
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_tables_have_as_many_cells_as_heads() -> None:
    for report in (reports.report(), reports.hostile()):
        width = rows = 0
        in_fence = None
        for line in report.markdown().splitlines():
            ticks = re.match("`{3,}", line)
            if ticks is not None and in_fence in (None, line):
                in_fence = None if in_fence else ticks[0]
            if in_fence or not line.startswith("|"):
                width = 0
                continue
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert cells == (width or cells)
            rows += bool(width)
            width = cells
        assert rows > 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain words_with_lines, float[2, 4] at 100%", "plain words_with_lines, float[2, 4] at 100%"),
        ("<img onerror=1>", "&lt;img onerror=1&gt;"),
        ("a | b", "a \\| b"),
        ("[text](http://x)", "\\[text](http://x)"),
        ("![image](http://x)", "\\!\\[image](http://x)"),
        ("**bold** `code` ~~gone~~", "\\*\\*bold\\*\\* \\`code\\` \\~\\~gone\\~\\~"),
        ("_soft_ __init__", "\\_soft\\_ \\_\\_init\\_\\_"),
        ("# title", "\\# title"),
        ("&lt;", "&amp;lt;"),
        ("two\nlines", "two lines"),
        ("to \u202eleft", "to \\\\u202eleft"),
    ],
)
def test_text_is_no_markup(text: str, expected: str) -> None:
    assert plain(text) == expected


def test_a_fence_is_longer_than_those_within() -> None:
    fence, text, end, _ = fenced("```\n<b>not bold</b>\n````")
    assert fence == end == "`````"
    assert "<b>" in text


def test_hostile_text_is_text() -> None:
    text = reports.hostile().markdown()
    outside = []
    fence = None
    for line in text.splitlines():
        ticks = re.fullmatch("(`{3,})(mermaid)?", line)
        if ticks is not None and (fence is None or line == fence):
            fence = None if fence else ticks[1]
        elif fence is None:
            outside.append(line)
    assert fence is None
    shown = "\n".join(outside)
    assert "<" not in shown
    assert not re.search(r"(?<!\\)\[[^\]]*\]\(", shown)
    for character in ("\u202e", "\x00", "\x1b"):
        assert character not in text
    text.encode("utf-8")


def test_an_empty_report() -> None:
    assert ExportReport().markdown().startswith("# Export to ONNX")
    assert "result: exported" in str(ExportReport())
