"""The report of an export: its facts, and the formats in which it is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from onnxplug_tools.report.files import FORMATS, file_of, prepare, write_all
from onnxplug_tools.report.record import Facts, Table


class ExportReport(Facts):
    """The report of an export, also of a failed one; ``print`` shows the beginning, :meth:`save` writes all of it."""

    def saved(self, destination: Any) -> None:
        """Notes the file to which the model was saved.

        Args:
            destination: The path; an object that is no path is left out.
        """
        if isinstance(destination, str | bytes | os.PathLike):
            self.files.append(file_of(os.fsdecode(destination)))

    def add_table(self, title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Adds a table with an observer's findings to every form of the report.

        ``OnnxProgram.report`` is there as a stage ends.

        Args:
            title: The title of the table.
            head: The names of the columns.
            rows: The cells; without any, the table is left out.
        """
        cells = tuple(tuple(map(str, row)) for row in rows)
        if cells:
            self.tables.append(Table(title, tuple(head), cells))

    def to_dict(self) -> dict[str, Any]:
        """The whole report as values that JSON can hold; docs/reports.md describes each key."""
        from onnxplug_tools.report.data import to_dict

        return to_dict(self)

    def json(self) -> str:
        """:meth:`to_dict` as text."""
        from onnxplug_tools.report.data import to_json

        return to_json(self)

    def markdown(self) -> str:
        """The report in Markdown, without the table of nodes."""
        from onnxplug_tools.report.markdown import to_markdown

        return to_markdown(self)

    def html(self) -> str:
        """The report as one page, which loads nothing."""
        from onnxplug_tools.report.html import to_html

        return to_html(self)

    def sarif(self) -> str:
        """The errors, warnings and conditions of the export, in SARIF 2.1.0."""
        from onnxplug_tools.report.sarif import to_sarif

        return to_sarif(self)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str = "report",
        formats: Sequence[str] = FORMATS,
        sections: Sequence[tuple[str, str, str]] = (),
    ) -> list[str]:
        """Writes ``report.md``, ``report.html``, ``report.sarif`` and ``report.json``, each complete or not at all.

        Args:
            folder: The folder; it is made if it is not there.
            name: The name of the files, without their suffixes.
            formats: The suffixes of the files that are written.
            sections: Title, text and code of further sections in Markdown.

        Returns:
            The paths of the files.

        Raises:
            SaveError: They can't be written.
            UsageError: The folder is no path.
        """
        markdown = partial(self._markdown, sections)
        texts: dict[str, Callable[[], str]] = {
            "json": self.json,
            "sarif": self.sarif,
            "md": markdown,
            "html": self.html,
        }
        return write_all(prepare(folder), name, {suffix: texts[suffix] for suffix in formats})

    def _markdown(self, sections: Sequence[tuple[str, str, str]]) -> str:
        from onnxplug_tools.report.markdown import fenced

        lines = [self.markdown()]
        for title, text, code in sections:
            lines += [f"## {title}", "", *([text, ""] if text else []), *fenced(code)]
        return "\n".join(lines)

    def __str__(self) -> str:
        from onnxplug_tools.report.markdown import summary

        return summary(self)
