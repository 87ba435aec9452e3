"""The findings on an export in SARIF 2.1.0, which code hosts and editors show at the lines of the findings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from onnxplug.text import printable
from onnxplug_tools.report.text import split_place

if TYPE_CHECKING:
    from onnxplug_tools.report.record import Facts, Failure

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_HOME = "https://github.com/onnxplug/onnxplug"
_DOCS = f"{_HOME}/blob/main/docs"


class Kind(NamedTuple):
    """A kind of result: a rule, in SARIF's words.

    Attributes:
        level: ``"error"``, ``"warning"`` or ``"note"``.
    """

    level: str
    short: str
    help: str
    page: str


KINDS = {
    "onnxplug/missing-rule": Kind(
        "error",
        "No rule translates an operator of the model",
        "Install a plugin that translates the operator, or give a rule of your own: rules=[Rule('namespace::op', converter)].",
        "write-a-plugin.md",
    ),
    "onnxplug/capture": Kind(
        "error",
        "torch.export can't capture the model",
        "The line is where torch.export stopped. onnxplug.diagnose(model, args) captures each submodule by itself.",
        "diagnose.md",
    ),
    "onnxplug/refused-guard": Kind(
        "error",
        "The model's code fixes a dimension that was declared dynamic",
        "Make that dimension static in dynamic_shapes, or change the code that depends on its value.",
        "dynamic-shapes.md",
    ),
    "onnxplug/conversion": Kind(
        "error",
        "An operator can't be converted",
        "The message names the rule and its package. A rule of your own goes before it: rules=[Rule('namespace::op', converter)].",
        "override.md",
    ),
    "onnxplug/output-mismatch": Kind(
        "error",
        "A converter returned something else than torch computes",
        "The converter is wrong, not the model. Report it to the package that the message names.",
        "override.md",
    ),
    "onnxplug/verification": Kind(
        "error",
        "The exported model computes something else than PyTorch, or does not run",
        "program.verify(intermediates=True) tells whether a rule, a rewrite or the runtime is wrong.",
        "who-is-wrong.md",
    ),
    "onnxplug/saving": Kind(
        "error", "The model can't be written", "What stood at the destination before is untouched.", "saving.md"
    ),
    "onnxplug/arguments": Kind(
        "error", "An argument of the export is malformed", "The message says which, and what it takes.", "reports.md"
    ),
    "onnxplug/error": Kind("error", "The export failed", "The message says why.", "reports.md"),
    "onnxplug/plugin": Kind(
        "warning",
        "A plugin can't be used",
        "onnxplug plugins check NAME shows why. Without it, its operators have no rules.",
        "write-a-plugin.md",
    ),
    "onnxplug/warning": Kind(
        "warning", "Something to know of the exported model", "The message says what it means.", "reports.md"
    ),
    "onnxplug/size-condition": Kind(
        "note",
        "The exported model takes a condition on sizes for granted",
        "It is right for sizes that fulfil the condition. checks=True puts it into the model, which then fails at others.",
        "dynamic-shapes.md",
    ),
    "onnxplug/capture-attempt": Kind(
        "note",
        "An attempt at capture failed, a later one succeeded",
        "Nothing has to be done. strict= and dynamic_shapes= make the export begin with what succeeded.",
        "capture.md",
    ),
}
_IDS = list(KINDS)
_OF_STAGE = {
    "capture": "onnxplug/capture",
    "conversion": "onnxplug/conversion",
    "verification": "onnxplug/verification",
    "saving": "onnxplug/saving",
    "arguments": "onnxplug/arguments",
}
#: Text that SARIF takes for a link within a message.
_LINK = re.compile(r"\[(?=[^\]]*\]\()")


class Finding(NamedTuple):
    """A result.

    Attributes:
        kind: One of :data:`KINDS`.
        place: ``file:line``.
        subject: The operator, module or output that it is about.
    """

    kind: str
    text: str
    place: str | None = None
    subject: str = ""


def to_sarif(report: Facts) -> str:
    """See :meth:`ExportReport.sarif`."""
    import sarif_pydantic as sarif

    import onnxplug

    driver = sarif.ToolDriver(
        name="onnxplug",
        version=printable(report.versions.get("onnxplug", onnxplug.__version__)),
        information_uri=_HOME,
        rules=[_rule(sarif, name, kind) for name, kind in KINDS.items()],
    )
    invocation = sarif.Invocation(execution_successful=report.failure is None)
    if report.began:
        invocation.start_time_utc = datetime.fromisoformat(report.began).astimezone(UTC)
    run = sarif.Run(
        tool=sarif.Tool(driver=driver),
        invocations=[invocation],
        results=[_result(sarif, finding) for finding in findings(report)],
    )
    log = sarif.Sarif(schema_uri=SCHEMA, version="2.1.0", runs=[run])
    text: str = log.model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return text + "\n"


def findings(report: Facts) -> Iterator[Finding]:
    """The findings on an export: errors, missing rules, differences, warnings, conditions."""
    if report.failure is not None:
        yield from _of_failure(report.failure)
    if report.verification is not None:
        for case in report.verification.cases:
            for output in case.outputs:
                if output.problem:
                    sizes = ", ".join(f"{name}={size}" for name, size in case.sizes.items())
                    where = f" at {sizes}" if sizes else ""
                    yield Finding(
                        "onnxplug/verification", f"output {output.name!r} {output.problem}{where}", None, output.name
                    )
    for plugin in report.plugins:
        if plugin.status == "failed":
            text = f"the plugin {plugin.name} ({plugin.distribution} {plugin.version}) failed: {plugin.error}"
            yield Finding("onnxplug/plugin", text, None, plugin.name)
    for warned in report.warnings:
        yield Finding("onnxplug/warning", f"{warned.category}: {warned.text}", warned.place)
    if report.capture is not None:
        for condition in report.capture.conditions:
            about = "; often it is right at the size 1 too" if condition.only_small else ""
            text = f"the exported model is right where {condition.text}{about}"
            yield Finding("onnxplug/size-condition", text, condition.place)
        for attempt in report.capture.attempts if report.failure is None else ():
            if attempt.error is not None:
                yield Finding("onnxplug/capture-attempt", f"capture ({attempt.mode}) failed: {attempt.error}")


def _of_failure(failure: Failure) -> Iterator[Finding]:
    for missing in failure.missing:
        why = f" ({'; '.join(missing.reasons)})" if missing.reasons else ""
        for place in missing.places or (None,):
            text = f"{missing.op} has no rule and no decomposition{why}"
            yield Finding("onnxplug/missing-rule", text, place, missing.op)
    if failure.missing:
        return
    kind = _OF_STAGE.get(failure.stage, "onnxplug/error")
    if failure.error == "OutputMismatchError":
        kind = "onnxplug/output-mismatch"
    elif failure.error in ("FixedDimensionError", "FixedExpressionError"):
        kind = "onnxplug/refused-guard"
    hint = f"\nHint: {failure.hint}" if failure.hint else ""
    yield Finding(kind, f"{failure.error}: {failure.message}{hint}", failure.place, failure.submodule or "")


def _rule(sarif: Any, name: str, kind: Kind) -> Any:
    page = f"{_DOCS}/{kind.page}"
    return sarif.ReportingDescriptor(
        id=name,
        name="".join(part.capitalize() for part in re.split(r"[/-]", name)),
        short_description=sarif.Message(text=f"{kind.short}."),
        full_description=sarif.Message(text=f"{kind.short}. {kind.help}"),
        help=sarif.Message(text=f"{kind.help} See {page}", markdown=f"{kind.help}\n\nSee [{kind.page}]({page})."),
        help_uri=page,
        default_configuration=sarif.ReportingConfiguration(level=kind.level),
    )


def _result(sarif: Any, finding: Finding) -> Any:
    location = _location(sarif, finding)
    return sarif.Result(
        rule_id=finding.kind,
        rule_index=_IDS.index(finding.kind),
        level=KINDS[finding.kind].level,
        message=sarif.Message(text=_LINK.sub(r"\\[", printable(finding.text))),
        locations=[location] if location is not None else None,
    )


def _location(sarif: Any, finding: Finding) -> Any:
    """The location of a result: a line of a file, and its subject; ``None`` where neither is known."""
    place, known = split_place(finding.place), {}
    if place is not None and not place[0].startswith("<"):
        file, line = place
        known["physical_location"] = sarif.PhysicalLocation(
            artifact_location=sarif.ArtifactLocation(uri=quote(printable(file), safe="/")),
            region=sarif.Region(start_line=line),
        )
    if finding.subject:
        known["logical_locations"] = [sarif.LogicalLocation(fully_qualified_name=printable(finding.subject))]
    return sarif.Location(**known) if known else None
