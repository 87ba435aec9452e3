"""A report as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

from onnxplug_tools.report.differences import CaseDifference, OutputDifference
from onnxplug_tools.report.record import Verification
from onnxplug_tools.report.report import ExportReport

from tests.support import reports

PAGE = (Path(__file__).parents[4] / "docs" / "reports.md").read_text(encoding="utf-8")


def test_every_key_is_documented() -> None:
    data = reports.report().to_dict()
    assert data["schema"] == "onnxplug.report/1"
    rows = re.findall(r"^\| (`.*?) \|", PAGE.partition("## JSON")[2], re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(data)


def test_json_agrees_with_the_report() -> None:
    report = reports.report()
    assert report.view is not None
    data = json.loads(report.json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert len(data["nodes"]) == len(report.view.nodes)
    assert data["modules"]["nodes"] == report.view.root.total_nodes
    assert [child["path"] for child in data["modules"]["children"]] == ["blocks", "head"]
    assert data["verification"]["accepted"] is True
    assert len(data["verification"]["histogram"]["counts"]) == len(data["verification"]["decades"]) + 1


def test_numbers_that_json_has_not() -> None:
    case = CaseDifference({}, None, "onnxruntime", [OutputDifference("y", "float32", 1, math.inf, 0, None)])
    report = ExportReport(verification=Verification([case]))
    data = json.loads(report.json())
    assert data["verification"]["max_abs_difference"] == "inf"


def test_hostile_text_is_kept() -> None:
    report = dataclasses.replace(reports.hostile())
    text = report.json()
    assert text.isascii()
    assert json.loads(text)["model"] == report.model
