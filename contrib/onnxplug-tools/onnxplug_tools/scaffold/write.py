"""``onnxplug plugins new``: a complete plugin package from the templates beside this file."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplug.errors import OnnxplugError, SaveError, UsageError

_TEMPLATES = Path(__file__).parent / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([._-][A-Za-z0-9]+)*")
#: Names of files have at most 255 bytes, and the longest of the package's is longer than its own name.
_LONGEST_NAME = 200
#: The prefix of the name of a package's folder until it is complete.
_UNFINISHED = ".making-"
_OP = re.compile(r"(?P<namespace>[A-Za-z_]\w*)::(?P<name>[A-Za-z_]\w*)")
#: Namespaces that torch itself owns.
_TAKEN = ("aten", "prim", "prims", "torch", "onnx", "quantized", "quantized_decomposed", "inductor", "higher_order")


@dataclass(frozen=True)
class Package:
    """The files that were written."""

    folder: Path
    op: str


def write_package(name: str, folder: Path, op: str | None = None) -> Package:
    """Writes a package with a custom operator, its rule, samples, tests and README.

    Args:
        name: The distribution's name, e.g. ``"onnxplug-acme"``.
        folder: Where the package's own folder, of that name, is made.
        op: The operator's qualified name; ``"acme::soft_clip"`` after the distribution's name unless given.
    """
    values = module_names(name)
    named = op if op is not None else f"{values['short']}::soft_clip"
    match = _OP.fullmatch(named)
    if match is None or any(keyword.iskeyword(part) for part in match.groups()):
        given = f"--op {op!r}" if op is not None else f"{named!r}, by the name {name},"
        raise UsageError(f"{given} is not the name of an operator", hint="Write --op acme::soft_clip.")
    if match["namespace"] in _TAKEN:
        raise UsageError(
            f"the namespace {match['namespace']} is torch's own", hint="Choose another: --op acme::soft_clip"
        )
    values |= {"namespace": match["namespace"], "op": match["name"]}
    return Package(write_files(folder, name, render(values, _TEMPLATES)), match[0])


def module_names(name: str) -> dict[str, Any]:
    """The names of a distribution, its module and its entry point."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise UsageError(f"{name!r} is not a valid name of a distribution", hint="For example: onnxplug-acme")
    module = re.sub(r"[.-]", "_", name).lower()
    if keyword.iskeyword(module) or module == "onnxplug":
        raise UsageError(f"{name!r} is not a valid name of a module", hint="For example: onnxplug-acme")
    # Installing the package would hide that module, or replace the distribution of this name.
    found = None if module.startswith("onnxplug_") else importlib.util.find_spec(module)
    if found is not None and found.origin is not None:  # a folder of the name has none
        raise UsageError(
            f"{name!r} is the name of a module that there is already, {module}", hint=f"For example: onnxplug-{name}"
        )
    return {"name": name, "module": module, "short": module.removeprefix("onnxplug_")}


def write_files(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """Writes a package's files into a folder of its name: all of them, or none."""
    target = folder / name
    if target.exists():
        raise SaveError(f"{target} is already there", hint="Choose another name, or another folder with --output.")
    made = folder / f"{_UNFINISHED}{name}"  # the same for each try: the rest of a killed process is replaced
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if made.exists():
            shutil.rmtree(made)
        for path, text in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        made.rename(target)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise SaveError(f"can't write {target}: {error}") from error
    return target


def render(values: Mapping[str, Any], templates: Path) -> dict[str, str]:
    """The files of a folder of templates by their paths; names of files are templates too, and empty files are left out."""
    try:
        import jinja2
    except ImportError as error:
        raise OnnxplugError(
            "`onnxplug plugins new` needs jinja2, which is not installed", hint="pip install jinja2"
        ) from error
    environment: Any = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["title"] = lambda text: text.replace("_", " ").title()
    files = {}
    for template in environment.list_templates(extensions=["jinja"]):
        path = environment.from_string(template.removesuffix(".jinja")).render(values)
        files[path] = environment.get_template(template).render(values)
    return {path: text for path, text in files.items() if text.strip()}
