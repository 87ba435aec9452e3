"""The files of a run: its page, JUnit for CI, SARIF for code hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from onnxplug.run.files import write_whole
from onnxplug.text import printable
from onnxplug_fleet.compare import compared, number_text
from onnxplug_fleet.state import Run
from onnxplug_fleet.store import Store
from onnxplug_fleet.text import bytes_text, change_text, seconds_text

#: The element of JUnit for a job that isn't fine.
_JUNIT = {"failed": "failure", "different": "failure", "killed": "error"}
#: SARIF's rules beside the rules of onnxplug's reports.
_KILLED, _DATA = "onnxplug/fleet-killed", "onnxplug/fleet-data"


def write_outputs(run: Run, before: Run | None, folder: Path, store: Store) -> None:
    """Writes ``index.html``, ``junit.xml`` and ``fleet.sarif``, each complete or not at all.

    Args:
        before: The run that it is compared with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link = "../../" if store.is_local and Path(store.path("")).resolve() == folder.parents[1].resolve() else "/store/"
    texts = {"index.html": page(run, before, link), "junit.xml": junit(run), "fleet.sarif": sarif(run, store)}
    for name, text in texts.items():
        write_whole(folder / name, lambda file, text=text: file.write(text.encode("utf-8")))  # type: ignore[misc]


def page(run: Run, before: Run | None, link: str) -> str:
    """The page of a run.

    Args:
        run, before: The run, and the run that it is compared with.
        link: The prefix of links to the store's entries.
    """
    from onnxplug_tools.inspection.pages import environment

    from onnxplug import __version__

    made = environment(Path(__file__).parent / "templates")
    made.filters.update(seconds=seconds_text, bytes=bytes_text, difference=number_text)
    made.globals["change"] = change_text
    rows = sorted(compared(before, run), key=lambda row: _ORDER.index(row.now["status"]) if row.now else len(_ORDER))
    text: str = made.get_template("fleet.html.jinja").render(
        run=run,
        before=before,
        counts=run.counts(),
        rows=[(row, *(result and {**_NOTHING, **result} for result in (row.before, row.now))) for row in rows],
        began=datetime.fromtimestamp(run.began).strftime("%Y-%m-%d %H:%M:%S"),
        version=__version__,
        link=link,
    )
    return text


#: The page begins with the jobs that need attention.
_ORDER = ("failed", "killed", "different", "exported", "unchanged")
#: Values of keys that a result may lack.
_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("error", "hint", "object", "log", "difference", "latency", "size", "nodes")),
    **dict.fromkeys(("reasons", "data", "files", "reports"), ()),
    "attempts": 1,
}


def junit(run: Run) -> str:
    """A run as JUnit's XML, with a test case for each job."""
    done = {name: result for name, result in run.results.items() if result is not None}
    kinds = [_JUNIT.get(result["status"]) for result in done.values()]
    totals = {"tests": len(done), "failures": kinds.count("failure"), "errors": kinds.count("error")}
    attributes = {key: str(value) for key, value in totals.items()}
    suite = ElementTree.Element("testsuite", {"name": Path(run.manifest).name, **attributes})
    for name, result in done.items():
        about = {"classname": Path(run.manifest).stem, "name": printable(name), "time": f"{result['seconds']:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", about)
        kind = _JUNIT.get(result["status"])
        if kind is not None:
            message = {"message": printable(result["error"]), "type": result.get("kind", "killed")}
            ElementTree.SubElement(case, kind, message).text = printable(result.get("hint") or "")
        notes = [
            *result.get("reasons", ()),
            *(f"{row['metric']} = {row['value']:.6g}" for row in result.get("data", ())),
        ]
        ElementTree.SubElement(case, "system-out").text = printable("\n".join(notes))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def sarif(run: Run, store: Store) -> str:
    """A run in SARIF: the results of all exports' reports, each with its job, and results that only the fleet knows."""
    import sarif_pydantic
    from onnxplug_tools.report.sarif import KINDS, SCHEMA

    from onnxplug import __version__

    rules = [*KINDS, _KILLED, _DATA]
    results = []
    for name, result in run.results.items():
        for item in _findings(result, store) if result is not None else ():
            text = f"{name}: {item['message']['text']}"
            index = rules.index(item["ruleId"]) if item["ruleId"] in rules else -1
            results.append({**item, "ruleIndex": index, "message": {"text": printable(text)}})
    driver = {
        "name": "onnxplug-fleet",
        "version": __version__,
        "rules": [
            {"id": rule, "defaultConfiguration": {"level": KINDS[rule].level if rule in KINDS else "error"}}
            for rule in rules
        ],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    made: str = sarif_pydantic.Sarif.model_validate(log).model_dump_json(by_alias=True, exclude_none=True, indent=1)
    return made + "\n"


def _findings(result: Mapping[str, Any], store: Store) -> Iterator[dict[str, Any]]:
    """The SARIF results of one job."""
    if result["status"] == "killed":
        yield {"ruleId": _KILLED, "level": "error", "message": {"text": result["error"]}}
        return
    if result["status"] == "different":
        yield {"ruleId": _DATA, "level": "error", "message": {"text": result["error"]}}
    content = store.read(f"{result['object']}/report.sarif")
    for item in json.loads(content)["runs"][0]["results"] if content is not None else ():
        yield {key: item[key] for key in ("ruleId", "level", "message", "locations") if key in item}
    if content is None and result["status"] == "failed":
        yield {"ruleId": "onnxplug/error", "level": "error", "message": {"text": result["error"]}}
