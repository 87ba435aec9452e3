"""A report as one page of HTML, which loads nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplug.text import printable
from onnxplug_tools.inspection import pages
from onnxplug_tools.inspection.words import bytes_text
from onnxplug_tools.report.differences import DECADES
from onnxplug_tools.report.markdown import summary_rows, verification_text
from onnxplug_tools.report.text import number_text, seconds_text

if TYPE_CHECKING:
    from onnxplug_tools.inspection.view import ModelView, ModuleView
    from onnxplug_tools.report.differences import Histogram
    from onnxplug_tools.report.record import Facts

_TEMPLATES = Path(__file__).parent / "templates"
#: The columns of the table of nodes; docs/reports.md names them.
COLUMNS = ("#", "operator", "module", "outputs", "rule", "package", "source line", "FLOPs")
#: Further facts about a node, shown below the table.
DETAILS = ("name", "graph", "inputs", "attributes", "rewritten by")
#: The beginning of the names of builtin rules; a name is clear without it.
_BUILTIN = "onnxplug.converters."
#: Submodules of one module that the tree shows; a model may have ten thousand.
_MOST_CHILDREN = 500


@functools.cache
def environment() -> Any:
    """jinja2 with the templates."""
    made = pages.environment(_TEMPLATES)
    made.filters |= {
        "number": number_text,
        "size": bytes_text,
        "seconds": seconds_text,
        "shortened": _shortened,
        "tail": _tail,
    }
    return made


def to_html(report: Facts) -> str:
    """See :meth:`ExportReport.html`."""
    from markupsafe import Markup

    env = environment()
    script = env.loader.get_source(env, "script.js.jinja")[0]
    style = env.loader.get_source(env, "style.css.jinja")[0]
    view = report.view
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text: str = env.get_template("report.html.jinja").render(
        report=report,
        status=report.status,
        rows=summary_rows(report),
        verification=verification_text(report),
        script=Markup(script),
        style=Markup(style),
        digest=digest,
        data=Markup(_embedded(_nodes(view))) if view is not None else None,
        columns=COLUMNS,
        tree=_tree(view.root) if view is not None else None,
        whole=view.root if view is not None else None,
        stages=_stages(report),
        bars=_bars(report.verification.histogram) if report.verification is not None else None,
    )
    return text


def _shortened(text: object, most: int) -> str:
    text = printable(str(text))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _tail(text: object, most: int) -> str:
    """A text, or its end where it is too long: the end of a path is more specific than the beginning."""
    text = printable(str(text))
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _embedded(data: Any) -> str:
    """JSON that can't end the element it stands in, nor begin a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _nodes(view: ModelView) -> dict[str, Any]:
    """The nodes as rows of numbers, with a list of the texts: each text is there once, as most stand in many rows."""
    texts: dict[str, int] = {"": 0}

    def number(text: object) -> int:
        return texts.setdefault(printable(str(text)) if text is not None else "", len(texts))

    rows = []
    for node in view.nodes:
        package = f"{node.package} {node.version}" if node.version else node.package
        rows.append(
            [
                node.index,
                number(node.operator),
                number(node.module),
                number(", ".join(value.type for value in node.outputs)),
                number((node.rule or "").removeprefix(_BUILTIN)),
                number(package),
                number(node.source),
                node.flops,
                number(node.name),
                number(node.graph),
                number(", ".join(f"{value.name} {value.type}" if value.name else "absent" for value in node.inputs)),
                number(", ".join(f"{name} = {value}" for name, value in node.attributes.items())),
                number(", ".join(node.rewritten)),
            ]
        )
    return {"columns": COLUMNS, "further": DETAILS, "numbers": [0, 7], "texts": list(texts), "rows": rows}


def _tree(root: ModuleView) -> list[tuple[str, ModuleView, int]]:
    """The modules as steps: ``open`` and ``close`` around submodules, ``leaf``, ``more`` for submodules left out."""
    steps: list[tuple[str, ModuleView, int]] = []
    pending: list[tuple[str, ModuleView, int]] = [("open", root, 0)]
    while pending:
        step, module, count = pending.pop()
        if step == "open" and not module.children:
            step = "leaf"
        steps.append((step, module, count))
        if step == "open":
            pending.append(("close", module, 0))
            left_out = len(module.children) - _MOST_CHILDREN
            if left_out > 0:
                pending.append(("more", module, left_out))
            pending += [("open", child, count + 1) for child in reversed(module.children[:_MOST_CHILDREN])]
    return steps


def _stages(report: Facts) -> list[dict[str, Any]]:
    """The stages with their parts, and the share of each in the whole time."""
    if report.times is None:
        return []
    whole = report.times.seconds or 1.0
    return [
        {
            "stage": stage,
            "depth": depth,
            "share": f"{100 * min(1.0, stage.seconds / whole):.1f}",
            "error": stage.about.get("error", ""),
        }
        for depth, stage in report.times.stage_rows()
    ]


def _bars(histogram: Histogram) -> list[dict[str, Any]]:
    """The bars of a histogram, as high as the logarithm of their counts."""
    within = DECADES.index(0)  # 1e0 times the tolerance is the largest difference that is accepted
    logarithms = {count: len(str(count)) + int(str(count)[0]) / 10 for _, count in histogram.bars() if count}
    most = max(logarithms.values(), default=1.0)
    return [
        {
            "label": label,
            "count": count,
            "kind": "same" if not position else "within" if position <= within + 1 else "beyond",
            "height": round(130 * logarithms.get(count, 0) / most),
        }
        for position, (label, count) in enumerate(histogram.bars())
    ]
