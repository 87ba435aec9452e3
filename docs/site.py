"""What mkdocs makes itself: the reference of the public API, of the command line and of the errors, from the code."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File

#: Public names by section: all of ``onnxplug.__all__`` but the errors, which have a page, and pluggy's two markers.
SECTIONS = {
    "Export": "to_onnx export as_torch_onnx fake_weights Functions Metadata",
    "What comes out": "OnnxProgram OnnxPieces",
    "When something goes wrong": "diagnose Diagnosis bisect",
    "Rules and rewrites": "Rule Rewrite FxNode GraphBuilder OnnxRegistry DynamoInterpreter",
    "Plugins": "PluginInfo Domain OrtLibrary ReferenceOp OpSample ModelSource ExportRequest ExportedFile TargetInfo",
}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls it with the files of the documentation: three are added."""
    pages = {"api": api(), "command-line": command_line(), "errors": errors()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def api() -> str:
    """Every public name with its docstring.

    Raises:
        LookupError: A name stands in no section, or a section has one that isn't public.
    """
    elsewhere = {"__version__", "hookimpl", "hookspec", *(kind.__name__ for kind in _errors())}
    public = set(importlib.import_module("onnxplug").__all__) - elsewhere
    differ = public.symmetric_difference(" ".join(SECTIONS.values()).split())
    if differ:
        raise LookupError(f"docs/site.py: SECTIONS and the public names differ by {sorted(differ)}")
    lines = [
        "# Public API",
        "",
        "Everything here is imported from `onnxplug` itself, as are `hookimpl` and `hookspec`, the markers of [hooks](../hooks.md),",
        "and the [errors](errors.md).",
    ]
    for title, names in SECTIONS.items():
        lines += ["", f"## {title}"]
        for name in names.split():
            lines += ["", f"::: onnxplug.{name}"]
    return "\n".join(lines) + "\n"


def errors() -> str:
    """The errors, each with its base and its docstring."""
    lines = [
        "# Errors",
        "",
        "Every error that onnxplug raises on purpose derives from `OnnxplugError`. Its text says what is wrong and where, in the",
        "user's own lines where they are to blame; `hint` is what to do about it.",
    ]
    for kind in _errors():
        lines += [
            "",
            f"::: onnxplug.errors.{kind.__name__}",
            "    options: {heading_level: 2, show_bases: true, members: false}",
        ]
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """What ``--help`` says of every command."""
    command = [sys.executable, "-m", "typer", "onnxplug.cli.app", "utils", "docs", "--name", "onnxplug"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text.replace("# `onnxplug`", "# Command line", 1)


def _errors() -> Iterator[type]:
    module = importlib.import_module("onnxplug.errors")
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and issubclass(kind, Exception):
            yield kind
