"""What mkdocs makes itself: the reference of the public API, of the command line, of hooks and of the errors, from the code."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File

#: Public names by section: all of ``onnxplug.__all__`` but the errors, which have a page, and pluggy's two markers.
SECTIONS = {
    "Export": "to_onnx export as_torch_onnx fake_weights string_tensor string_array Functions Metadata",
    "What comes out": "OnnxProgram OnnxPieces VerificationReport VerificationCase",
    "When something goes wrong": "diagnose Diagnosis bisect",
    "Rules and rewrites": "Rule Rewrite FxNode GraphBuilder OnnxRegistry DynamoInterpreter",
    "Plugins": "PluginInfo Domain OnnxOperator OrtLibrary ReferenceOp Evaluator VerificationRequest OpSample ModelSource ExportRequest ExportedFile TargetInfo Observer AttemptPatch LibraryPatch LibraryFunctions CaptureMode CaptureRequest",
}


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls it with the files of the documentation: three are added."""
    pages = {"api": api(), "command-line": command_line(), "errors": errors(), "hooks": hooks()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs calls it with each page: long names and paths in tables may be broken after each of their parts."""
    cells = re.split(r"(<td.*?</td>)", html, flags=re.DOTALL)
    cells[1::2] = [re.sub(r"<[^>]*>|(?<=\w)(?:::|[/_.])(?=[A-Za-z])", _with_break, cell) for cell in cells[1::2]]
    return "".join(cells)


def _with_break(part: re.Match[str]) -> str:
    return part[0] if part[0].startswith("<") else f"{part[0]}<wbr>"


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
    """The errors, each with its base and its docstring.

    Raises:
        LookupError: One says nothing of what to do about it.
    """
    lines = [
        "# Errors",
        "",
        "Every error that onnxplug raises on purpose derives from `OnnxplugError`. Its text says what is wrong and where, in the",
        "user's own lines where they are to blame; `hint` is what to do about it in the case at hand. Here is the cause of each kind,",
        "and its remedy.",
    ]
    for kind in _errors():
        if "Remedy:" not in str(kind.__doc__) and kind.__name__ not in ("OnnxplugError", "Decline"):
            raise LookupError(f"{kind.__name__} names no remedy in its docstring")
        lines += [
            "",
            f"::: onnxplug.errors.{kind.__name__}",
            "    options: {heading_level: 2, show_bases: true, members: false}",
        ]
    return "\n".join(lines) + "\n"


def hooks() -> str:
    """The hooks, each with its signature and what it returns."""
    module = importlib.import_module("onnxplug.plugins.hookspecs")
    lines = [
        "# Signatures of hooks",
        "",
        "What a plugin may implement, under the decorator `onnxplug.hookimpl`. [Hooks](../hooks.md) has an example of each.",
    ]
    for name, hook in vars(module).items():
        if name.startswith("onnxplug_"):
            signature = f"def {name}{inspect.signature(hook)}:".replace("'", "")
            text = str(inspect.getdoc(hook)).replace("``", "`")
            first = (
                " Of several plugins' answers the first that isn't `None` counts."
                if hook.onnxplug_spec["firstresult"]
                else ""
            )
            lines += ["", f"## {name}", "", "```text", signature, "```", "", text + first]
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
