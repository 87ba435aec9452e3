"""Files that an export writes beside the model: a report, the captured program, a profile."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from onnxplug.errors import OnnxplugError, SaveError
from onnxplug.program import OnnxProgram
from onnxplug.run.files import write_by_torch
from onnxplug_torch_onnx.request import Request, warn


class Stages:
    """Prints the stages of an export; ``to_onnx(progress=…)`` calls it.

    Args:
        verbose: Print each stage as it begins.
    """

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose

    def __call__(self, stage: str) -> None:
        if self.verbose:
            sys.stdout.write(f"[onnxplug] {stage} ...\n")


class Artifacts:
    """The files that ``report``, ``dump_exported_program`` and ``profile`` ask for, in ``artifacts_dir``."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stages = Stages(bool(request.verbose))
        self.folder = Path(request.artifacts_dir)
        self._captured: torch.export.ExportedProgram | None = None
        self._profile: Any = None
        self._stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
        if request.report or request.dump_exported_program:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SaveError(f"artifacts_dir={str(self.folder)!r} is no folder that can be made: {error}") from error
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise SaveError(f"no permission to write in artifacts_dir={str(self.folder)!r}")

    def finish(self, program: OnnxProgram | None, error: BaseException | None, profile: Any = None) -> None:
        """Writes and prints everything but the report, for which it keeps the captured program and the profile.

        Args:
            program: The exported program; ``None`` where the export failed.
            error: The error of a failed export.
            profile: The profile of the export, where ``profile`` asks for it.
        """
        self._captured, self._profile = _captured(program, error), profile
        if self.request.dump_exported_program and self._captured is not None:
            self._dump(self._captured)
        if program is not None and program.report is not None:  # axes were named after the export
            program.report.take_ends(program.model)
        if profile is not None and not self.request.report:
            sys.stdout.write(f"[onnxplug] where the time went\n{profile}\n")
        if self.request.verbose and program is not None:
            sys.stdout.write(f"{program}\n{program.statistics}\n")

    def write(self, reports: Sequence[Any], error: BaseException | None) -> None:
        """Writes the report.

        Args:
            error: The error of a failed export; it gets a note with the path of the report.
        """
        report = reports[-1]
        stage = report.failure.stage if report.failure is not None else "success"
        name = f"onnx_export_{self._stamp}_{'failure' if stage == 'arguments' else stage}"
        path = self.folder / f"{name}.md"
        report.save(self.folder, name=name, formats=("md", "html", "sarif", "json"), sections=self._sections())
        if self._profile is not None:
            self._profile.save(self._trace)
        if error is not None:
            error.add_note(f"A report is in {path}.")

    def _dump(self, captured: torch.export.ExportedProgram) -> None:
        path = self.folder / f"onnx_export_{self._stamp}.pt2"
        try:
            write_by_torch(path, lambda file: torch.export.save(captured, file))
        except Exception as error:  # torch decides what it can store; the export goes on, as torch's does
            warn(f"the captured program can't be stored in {path}: {type(error).__name__}: {error}")

    @property
    def _trace(self) -> Path:
        """The file of the profile."""
        return self.folder / f"onnx_export_{self._stamp}_profile.json"

    def _sections(self) -> list[tuple[str, str, str]]:
        """Further sections of the report in Markdown: title, text and code."""
        sections = []
        if self._profile is not None:
            text = f"In `{self._trace.name}` for Perfetto and speedscope."
            sections.append(("Profile", text, str(self._profile)))
        if self._captured is not None:
            sections.append(("Captured program", "", str(self._captured)))
        return sections


def _captured(program: OnnxProgram | None, error: BaseException | None) -> torch.export.ExportedProgram | None:
    if program is not None:
        return program.exported_program
    export = error.export if isinstance(error, OnnxplugError) else None
    return export[0].program if export is not None else None
