"""SARIF: valid by the standard's own schema, and at the user's lines."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fastjsonschema
import pytest
import torch
from onnxplug_tools.report.record import Capture, Failure, SizeCondition, Warned
from onnxplug_tools.report.report import ExportReport
from onnxplug_tools.report.sarif import KINDS

import onnxplug
from onnxplug import MissingRuleError, Rule, VerificationError
from tests.support import reports
from tests.support.reports import X

#: The schema of OASIS, unchanged: https://docs.oasis-open.org/sarif/sarif/v2.1.0/
SCHEMA = Path(__file__).with_name("sarif-schema-2.1.0.json")


@cache
def _validate() -> Any:
    return fastjsonschema.compile(json.loads(SCHEMA.read_text(encoding="utf-8")), use_default=False)


def _run(report: ExportReport) -> dict[str, Any]:
    """The one run of a report's SARIF, which is valid."""
    data = json.loads(report.sarif())
    _validate()(data)
    (run,) = data["runs"]
    known = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert known == list(KINDS)
    for result in run["results"]:
        assert known[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] == KINDS[result["ruleId"]].level
    return run  # type: ignore[no-any-return]


def _places(run: dict[str, Any]) -> list[tuple[str, str | None, int | None]]:
    results = []
    for result in run["results"]:
        location = result.get("locations", [{}])[0].get("physicalLocation")
        place = (location["artifactLocation"]["uri"], location["region"]["startLine"]) if location else (None, None)
        results.append((result["ruleId"], *place))
    return results


def test_the_schema_refuses_a_wrong_log() -> None:
    data = json.loads(reports.hostile().sarif())
    _validate()(data)
    data["runs"][0]["results"][0]["level"] = "fatal"
    with pytest.raises(fastjsonschema.JsonSchemaException):
        _validate()(data)


def test_a_success_has_nothing_to_say() -> None:
    run = _run(reports.report())
    assert run["results"] == []
    assert run["invocations"][0]["executionSuccessful"] is True
    assert run["invocations"][0]["startTimeUtc"].endswith("Z")
    for rule in run["tool"]["driver"]["rules"]:
        assert rule["help"]["text"]
        assert rule["shortDescription"]["text"].endswith(".")
        page = rule["helpUri"].rpartition("/docs/")[2]
        assert (SCHEMA.parents[4] / "docs" / page).is_file(), page


def test_each_line_of_a_missing_rule() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.reports_test.nothing(x)
        return torch.ops.reports_test.nothing(x + 1)

    line = model.__code__.co_firstlineno
    with pytest.raises(MissingRuleError) as caught:
        onnxplug.to_onnx(model, (X,), report=True)
    run = _run(caught.value.report)
    assert run["invocations"][0]["executionSuccessful"] is False
    uri = "tests/report/test_sarif.py"
    assert _places(run) == [("onnxplug/missing-rule", uri, line + 1), ("onnxplug/missing-rule", uri, line + 2)]
    assert run["results"][0]["locations"][0]["logicalLocations"] == [
        {"fullyQualifiedName": "reports_test::nothing.default"}
    ]
    assert "has no rule" in run["results"][0]["message"]["text"]


def test_outputs_that_differ() -> None:
    wrong = Rule("aten::relu", lambda g, node: g.op.Abs(node.args[0]))
    with pytest.raises(VerificationError) as caught:
        onnxplug.to_onnx(lambda x: x.relu(), (X,), rules=[wrong], verify=True, report=True)
    run = _run(caught.value.report)
    assert [result["ruleId"] for result in run["results"]] == ["onnxplug/verification"] * 2
    assert "differs at index" in run["results"][1]["message"]["text"]


def test_a_dimension_that_the_model_fixes() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.shape[0] == 2 else x

    with pytest.raises(onnxplug.CaptureError) as caught:
        onnxplug.to_onnx(Fixed(), (X,), dynamic_shapes=({0: "batch"},), report=True)
    run = _run(caught.value.report)
    (result,) = run["results"]
    assert result["ruleId"] == "onnxplug/refused-guard"


def test_conditions_and_warnings() -> None:
    report = ExportReport(
        capture=Capture("non-strict", conditions=[SizeCondition("batch % 2 == 0", "models/my model.py:12", False)]),
        warnings=[
            Warned("UserWarning", "mind [this](http://elsewhere)", "a:b.py:3"),
            Warned("W", "generated", "<string>:1"),
        ],
    )
    run = _run(report)
    assert _places(run) == [
        ("onnxplug/warning", "a%3Ab.py", 3),
        ("onnxplug/warning", None, None),
        ("onnxplug/size-condition", "models/my%20model.py", 12),
    ]
    assert run["results"][0]["message"]["text"] == "UserWarning: mind \\[this](http://elsewhere)"


@pytest.mark.parametrize(
    "stage", ["arguments", "loading", "plugins", "capture", "conversion", "verification", "saving"]
)
def test_every_stage(stage: str) -> None:
    run = _run(ExportReport(failure=Failure(stage, "SomeError", "what", hint="do", place="file.py:3")))
    (result,) = run["results"]
    assert result["message"]["text"] == "SomeError: what\nHint: do"
    assert _places(run)[0][1:] == ("file.py", 3)
    assert result["ruleId"].rpartition("/")[2] in (stage, "error")


def test_hostile_text_is_text() -> None:
    text = reports.hostile().sarif()
    run = _run(reports.hostile())
    assert len(run["results"]) >= 5
    assert not any(ord(c) < 32 and c not in "\n\t" for c in json.dumps(run, ensure_ascii=False))
    assert "\u202e" not in json.dumps(run, ensure_ascii=False)
    assert "\\ud800" not in text.replace("\\\\ud800", "")
    failure = Failure("capture", "Error", "what", hint="", place=f"a {reports.HOSTILE[0]} `|\\^{{}}.py:3")
    (uri,) = {uri for _, uri, _ in _places(_run(dataclasses.replace(reports.hostile(), failure=failure))) if uri}
    assert uri.isascii()
    assert not set(uri) & set('<>" `|\\^{}')
    assert unquote(uri).startswith("a <img")
