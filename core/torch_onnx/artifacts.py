"""What an export leaves beside the model: a report, the captured program, the times of its stages."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from onnxplug.errors import OnnxplugError, SaveError
from onnxplug.profiling.profile import Profile
from onnxplug.program import OnnxProgram
from onnxplug.text import value_text
from onnxplug.torch_onnx.request import Request, warn


class Stages:
    """The stages of an export, with the seconds that each took; ``to_onnx(progress=…)`` calls it.

    Args:
        verbose: Print each stage as it begins.
    """

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.seconds: dict[str, float] = {}
        self.current = ""
        self._started = 0.0

    def __call__(self, stage: str) -> None:
        self.finish()
        self.current, self._started = stage, time.perf_counter()
        if self.verbose:
            sys.stdout.write(f"[onnxplug] {stage} ...\n")

    def finish(self) -> None:
        """Ends the stage at work; a failure is one of the stage that is at work still."""
        if self.current:
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + time.perf_counter() - self._started
        self.current = ""


class Artifacts:
    """The files that ``report``, ``dump_exported_program`` and ``profile`` ask for, in ``artifacts_dir``.

    Args:
        request: The export.

    Raises:
        SaveError: They are asked for, and the folder can't be made or written.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stages = Stages(bool(request.verbose))
        self.folder = Path(request.artifacts_dir)
        self._stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
        if request.report or request.dump_exported_program:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SaveError(f"artifacts_dir={str(self.folder)!r} is no folder that can be made: {error}") from error
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise SaveError(f"no permission to write in artifacts_dir={str(self.folder)!r}")

    def finish(self, program: OnnxProgram | None, error: BaseException | None, profile: Profile | None = None) -> None:
        """Writes what is asked for.

        Args:
            program: What was exported; ``None`` where it failed.
            error: Why it failed.
            profile: Where the time went, where that is asked for.

        Raises:
            SaveError: The report can't be written.
        """
        failed_in = self.stages.current if error is not None else ""
        self.stages.finish()
        captured = _captured(program, error)
        if self.request.dump_exported_program and captured is not None:
            self._dump(captured)
        if self.request.report:
            name = f"onnx_export_{self._stamp}_{failed_in or ('failure' if error else 'success')}.md"
            text = self._text(program, error, failed_in, profile)
            try:
                _write(self.folder / name, lambda path: path.write_text(text, encoding="utf-8"))
                if profile is not None:
                    profile.save(self._trace)
            except (OSError, SaveError) as failure:
                if error is None:
                    raise SaveError(f"can't write the report {self.folder / name}: {failure}") from failure
                warn(f"can't write the report {self.folder / name}: {failure}")
            else:
                if error is not None:
                    error.add_note(f"A report is in {self.folder / name}.")
        if profile is not None and not self.request.report:
            sys.stdout.write(f"[onnxplug] where the time went\n{profile}\n")
        if self.request.verbose and program is not None:
            sys.stdout.write(f"{program}\n{program.statistics}\n")

    def _dump(self, captured: torch.export.ExportedProgram) -> None:
        path = self.folder / f"onnx_export_{self._stamp}.pt2"
        try:
            _write(path, lambda staged: torch.export.save(captured, staged))
        except Exception as error:  # what can't be stored is torch's to say; the export goes on, as torch's does
            warn(f"the captured program can't be stored in {path}: {type(error).__name__}: {error}")

    @property
    def _trace(self) -> Path:
        """The file of the profile."""
        return self.folder / f"onnx_export_{self._stamp}_profile.json"

    def _text(
        self, program: OnnxProgram | None, error: BaseException | None, failed_in: str, profile: Profile | None
    ) -> str:
        import onnxplug

        request = self.request
        lines = [
            "# Export to ONNX",
            "",
            f"- model: `{type(request.model).__module__}.{type(request.model).__qualname__}`",
            f"- onnxplug {onnxplug.__version__}, torch {torch.__version__}",
            f"- result: {f'failed in the stage {failed_in}' if failed_in else 'failed' if error else 'exported'}",
            f"- verification: {_verification(request, program, failed_in)}",
        ]
        if program is not None:
            graph, statistics = program.model.graph, program.statistics
            opsets = ", ".join(f"{name or 'ai.onnx'} {version}" for name, version in graph.opset_imports.items())
            lines += [
                f"- file: {request.f if isinstance(request.f, str | os.PathLike) else 'none'}",
                f"- opsets: {opsets}",
                f"- captured: {statistics.strategy}, {statistics.fx_nodes} nodes",
                "",
                *_table("Inputs", ("name", "type"), [(v.name, value_text(v)) for v in graph.inputs]),
                *_table("Outputs", ("name", "type"), [(v.name, value_text(v)) for v in graph.outputs]),
                *_table("Operators", ("operator", "nodes"), list(statistics.operators.items())),
            ]
            if statistics.decomposed:
                lines += [f"torch decomposed the whole program because of {', '.join(statistics.decomposed)}.", ""]
        lines += ["", *_table("Times", ("stage", "seconds"), [(s, f"{t:.3f}") for s, t in self.stages.seconds.items()])]
        if profile is not None:
            lines += ["## Profile", "", f"In `{self._trace.name}` for Perfetto and speedscope.", ""]
            lines += ["```", str(profile), "```", ""]
        if error is not None:
            lines += ["## Error", "", "```", f"{type(error).__name__}: {error}", "```", ""]
        captured = _captured(program, error)
        if captured is not None:
            lines += ["## Captured program", "", "```", str(captured).rstrip(), "```", ""]
        return "\n".join(lines)


def _verification(request: Request, program: OnnxProgram | None, failed_in: str) -> str:
    if not request.verify:
        return "not asked for"
    if failed_in == "verification":
        return "failed"
    return "the same as PyTorch" if program is not None else "not reached"


def _table(title: str, head: tuple[str, str], rows: list[Any]) -> list[str]:
    cells = [tuple(str(cell).replace("|", "\\|") for cell in row) for row in (head, ("---", "---"), *rows)]
    return [f"## {title}", "", *(f"| {left} | {right} |" for left, right in cells), ""]


def _captured(program: OnnxProgram | None, error: BaseException | None) -> torch.export.ExportedProgram | None:
    if program is not None:
        return program.exported_program
    export = error.export if isinstance(error, OnnxplugError) else None
    return export[0].program if export is not None else None


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file: complete or not at all."""
    staged = path.with_name(f".{secrets.token_hex(6)}-{path.name}")
    try:
        write(staged)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
