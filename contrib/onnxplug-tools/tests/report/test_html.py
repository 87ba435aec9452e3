"""The page as text; tests/report/test_browser.py has it in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

from onnxplug_tools.inspection.view import ModuleView
from onnxplug_tools.report.html import _tree
from onnxplug_tools.report.report import ExportReport

from tests.support import reports

#: Elements without an end tag.
_VOID = {"meta", "br", "input", "col", "link"}


class _Elements(HTMLParser):
    """The elements of a page, which are nested as they must be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _data(html: str) -> dict[str, list[object]]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    data: dict[str, list[object]] = json.loads(match[1])
    return data


def test_one_page_that_loads_nothing() -> None:
    html = reports.report().html()
    elements = _Elements(html).seen
    for tag, attributes in elements:
        assert not attributes.keys() & {"src", "action", "srcset", "background"}, tag
        assert not any(name.startswith("on") for name in attributes), tag
        if tag == "a":
            assert (attributes["href"] or "").startswith("#")
    assert not {"link", "img", "iframe", "object", "form", "base"} & {tag for tag, _ in elements}
    assert "@import" not in html
    assert not re.search(r"url\(", html)
    links = {attributes["href"] for tag, attributes in elements if tag == "a"}
    assert links == {f"#{attributes['id']}" for tag, attributes in elements if tag == "section"} - {"#error"}


def test_the_rows_of_the_table() -> None:
    report = reports.report()
    assert report.view is not None
    data = _data(report.html())
    texts, rows = data["texts"], data["rows"]
    assert len(rows) == len(report.view.nodes)
    for row, node in zip(rows, report.view.nodes, strict=True):
        assert isinstance(row, list)
        assert (row[0], texts[row[1]], texts[row[2]], row[7]) == (node.index, node.operator, node.module, node.flops)
        assert len(row) == len(data["columns"]) + len(data["further"])


def test_hostile_text_makes_no_elements() -> None:
    hostile = reports.hostile()
    counts = []
    for report in (hostile, reports.hostile()):
        if report is not hostile:
            # The same report of harmless text has the same elements.
            for name in ("model", "system"):
                setattr(report, name, "plain")
        elements = _Elements(report.html()).seen
        counts.append([tag for tag, _ in elements])
        assert "img" not in counts[-1]
        assert counts[-1].count("script") == 2
        assert not any(name.startswith("on") for _, attributes in elements for name in attributes)
    assert counts[0] == counts[1]
    html = hostile.html()
    assert "\u202e" not in html
    assert "\x00" not in html
    assert "\x1b" not in html
    html.encode("utf-8")
    assert "{{ 7 * 7 }}" in html


def test_without_a_model_there_is_the_error_first() -> None:
    report = dataclasses.replace(reports.hostile(), view=None, verification=None, capture=None)
    html = report.html()
    _Elements(html)
    assert html.index('id="error"') < html.index('id="summary"')
    assert 'id="grid"' not in html


def test_an_empty_report_has_a_page() -> None:
    _Elements(ExportReport(versions={"onnxplug": "0"}).html())


def test_a_tree_as_deep_and_as_wide_as_a_model_likes() -> None:
    def module(path: str, children: tuple[ModuleView, ...]) -> ModuleView:
        return ModuleView(path, (), 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, children)

    deep = module("leaf", ())
    for depth in range(2000):
        deep = module(f"m{depth}", (deep,))
    assert len(_tree(deep)) == 2 * 2000 + 1
    wide = module("", tuple(module(str(i), ()) for i in range(3000)))
    steps = _tree(wide)
    assert [step for step, _, _ in steps].count("leaf") == 500
    assert ("more", wide, 2500) in steps
