"""``onnxplug inspect --diff``: the differences between two models, on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from onnxplug.text import counted
from onnxplug_tools.cli.models import loaded
from onnxplug_tools.cli.tables import show_table

if TYPE_CHECKING:
    from onnxplug_tools.inspection.diff import ModelDiff

#: The most rows of a table; a page has them all.
_MOST_ROWS = 100


def show_difference(before: Path, after: Path, *, html: Path | None, as_json: bool) -> bool:
    """Prints the differences between two models, and returns whether there are none."""
    from onnxplug.cli.report import progress
    from onnxplug_tools.inspection.diff import diff
    from onnxplug_tools.inspection.differences import node_rows, summary_rows, to_html, weight_rows
    from onnxplug_tools.inspection.pages import check_writable, save_text
    from onnxplug_tools.inspection.summary import to_json

    if html is not None:
        check_writable(html, "page", [before, after])
    models = loaded(before), loaded(after)
    with progress() as shown:
        shown("comparing")
        difference = diff(*models)
    if html is not None:
        save_text(html, to_html(difference, str(before), str(after)), "page")
    if as_json:
        sys.stdout.write(f"{to_json(difference)}\n")
        return difference.equal
    from onnxplug.cli.report import out
    from onnxplug_tools.inspection.words import visible

    out.print(f"{visible(str(before))} → {visible(str(after))}: {_verdict(difference)}", markup=False)
    show_table("", ("", "before", "after"), summary_rows(difference), _MOST_ROWS)
    show_table("Nodes", ("module", "", "node", "what"), node_rows(difference), _MOST_ROWS)
    show_table("Weights", ("before", "after", "what"), weight_rows(difference), _MOST_ROWS)
    return difference.equal


def _verdict(difference: ModelDiff) -> str:
    kept = f"{counted(difference.same_nodes, 'node')} and {counted(difference.same_weights, 'weight')} without a difference"
    return kept if not difference.equal else f"the same; {kept}"
