"""The index of the packages in a folder: ``python docs/packages.py``, from the root of the checkout.

Writes ``docs/packages.md``, and in ``plugins/libraries.py`` which package is for which library, both from what the packages say:
pyproject.toml, their hooks, and the operators that the installed libraries register. What depends on a library that isn't installed
stays as the page has it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onnxplug_tools.library.operators import distribution_and_version, namespace_of, read_library
from packaging.requirements import Requirement

from onnxplug import LibraryFunctions
from onnxplug.errors import UsageError
from onnxplug.plugin_api import ENTRY_POINT_GROUP
from onnxplug.plugins.loading import load_plugin
from onnxplug.registry.names import packet_of, without_prefix
from onnxplug.text import counted

PAGE, TABLE = Path("docs/packages.md"), Path("plugins/libraries.py")
#: The rows of a section that depend on the library.
_COUNTED, _LEFT = "| of the library's |", "| not translated |"
_INTRODUCTION = """\
# Packages

What onnxplug's own packages translate beside PyTorch's operators, and the libraries that they serve. `make index` writes this
page from the packages themselves. An export that meets an operator of one of these libraries names the package to install;
packages that others publish are not known here, nor to the error.

`onnxplug plugins new onnxplug-acme --for acme` writes the first version of a package for another library, and
`onnxplug plugins check acme` says what a package still lacks: see [Write a plugin](write-a-plugin.md).

Models of segment-anything export without a package: its operators of masks and boxes, and a small model whole, are tested with
onnxplug-torchvision (`make test-torchvision`), and so are functions of kornia that need no onnxplug-kornia. detectron2, which is not
on PyPI, is served by onnxplug-mmcv, whose tests compare its operators with mmcv's kernels."""


@dataclass(frozen=True)
class Package:
    """A package that is a plugin.

    Attributes:
        namespaces, libraries: torch namespaces that it translates, and import names of libraries that it serves.
        versions: Requirements of libraries that it serves without needing them.
        samples: How many inputs its operators are tested with.
        files: Each file with translations to the operators that it translates.
    """

    name: str
    description: str
    namespaces: tuple[str, ...]
    libraries: tuple[str, ...]
    needs: list[str]
    versions: list[str]
    tests: list[str]
    samples: int
    files: dict[str, list[str]] = field(default_factory=dict)
    runtime: str = ""

    @property
    def operators(self) -> set[str]:
        """Qualified names of what it translates, without overloads."""
        return {op for ops in self.files.values() for op in ops}

    def foreign(self) -> list[str]:
        """Namespaces and libraries of others: not of its own operators."""
        own = self.name.replace("-", "_")
        return sorted({*self.namespaces, *self.libraries} - {own})


def packages_in(folder: Path) -> list[Package]:
    """The plugins in a folder that translate operators or serve a library, in the order of their names."""
    packages = (read_package(project.parent) for project in sorted(folder.glob("*/pyproject.toml")))
    return [p for p in packages if p is not None and (p.files or p.foreign())]


def read_package(folder: Path) -> Package | None:
    """What a package says of itself; ``None`` where it is no plugin, or an example of one."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
    if not points or "example" in project.get("keywords", ()):
        return None
    sys.path.insert(0, str(folder))
    try:
        loaded = [load_plugin(EntryPoint(name, value, ENTRY_POINT_GROUP), {}) for name, value in points.items()]
    finally:
        sys.path.remove(str(folder))
    infos = [plugin.info for plugin in loaded]
    values = [plugin.values for plugin in loaded]
    needs = [*project.get("dependencies", ()), *(text for info in infos for text in info.requires)]
    return Package(
        project["name"],
        project["description"],
        namespaces=tuple(name for info in infos for name in info.namespaces),
        libraries=tuple(name for info in infos for name in info.libraries),
        needs=_of_others(needs),
        versions=list(dict.fromkeys(f.requires for hooks in values for f in _functions(hooks))),
        tests=_of_others([*project.get("optional-dependencies", {}).get("test", ()), *_installed_alone(folder)]),
        samples=sum(len(hooks.get("onnxplug_samples", ())) for hooks in values),
        files=_files(values, [op for info in infos for op in info.replaced]),
        runtime=_runtime(values),
    )


def _functions(hooks: Mapping[str, Any]) -> list[LibraryFunctions]:
    return [patch for patch in hooks.get("onnxplug_patches", ()) if isinstance(patch, LibraryFunctions)]


def _installed_alone(folder: Path) -> list[str]:
    """The versions that the checkout's Makefile tests a package with and its pyproject.toml can't name: ``ALONE_NAME := …``."""
    makefile = folder.parents[1] / "Makefile"
    name = folder.name.removeprefix("onnxplug-")
    text = makefile.read_text(encoding="utf-8").replace("\\\n", " ") if makefile.exists() else ""
    found = re.search(rf"^ALONE_{re.escape(name)} := (.*)", text, re.MULTILINE)
    return [word for word in found[1].split() if "==" in word] if found else []


def _of_others(requirements: Iterable[str]) -> list[str]:
    """Requirements of other packages than onnxplug's and pytest, each once."""
    kept = (text for text in requirements if not Requirement(text).name.startswith(("onnxplug", "pytest")))
    return list(dict.fromkeys(kept))


def _files(values: Iterable[Mapping[str, Any]], replaced: Iterable[str]) -> dict[str, list[str]]:
    """The files of rules and decompositions, each to the operators that it has."""
    files: dict[str, set[str]] = {}
    for hooks in values:
        for rule in hooks.get("onnxplug_rules", ()):
            files.setdefault(_file(rule.name.partition(":")[0]), set()).add(packet_of(without_prefix(rule.op)))
        for op, function in hooks.get("onnxplug_decompositions", {}).items():
            if function is not None:
                files.setdefault(_file(function.__module__), set()).add(packet_of(op))
        for functions in _functions(hooks):
            for place, ours in functions.functions.items():
                module = ours.partition(":")[0] if isinstance(ours, str) else ours.__module__
                files.setdefault(_file(module), set()).add(place.replace(":", "::"))
    if names := {packet_of(op) for op in replaced}:
        files["replaced during capture"] = names
    return {file: sorted(ops) for file, ops in sorted(files.items())}


def _file(module: str) -> str:
    """The file of a module, as a path in the package."""
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if "/" not in path else f"{path}.py"


def _runtime(values: Iterable[Mapping[str, Any]]) -> str:
    domains = [f"`{domain.name}`" for hooks in values for domain in hooks.get("onnxplug_domains", ())]
    supplied = any(hooks.get("onnxplug_runtime") for hooks in values)
    if not domains:
        return "any: the files are plain ONNX"
    listed = ", ".join(domains)
    return (
        f"{listed}, with kernels that the package loads" if supplied else f"{listed} of ONNX Runtime where it is used"
    )


def page(packages: Iterable[Package], before: str = "") -> str:
    """The page.

    Args:
        before: The page as it is; what depends on libraries that aren't installed is taken from it.
    """
    packages = list(packages)
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", before, re.MULTILINE | re.DOTALL))
    lines = [_INTRODUCTION, "", "| package | for | operators and functions |", "|---|---|---|"]
    texts = [_section(package, sections.get(package.name, "")) for package in packages]
    for package, text in zip(packages, texts, strict=True):
        whom = package.foreign() or [Requirement(need).name for need in package.needs] or ["torch"]
        found = re.search(re.escape(_COUNTED) + r".*?(\d+ of \d+)", text)
        count = found[1] if found else str(len(package.operators)) if package.operators else "none"
        lines.append(f"| [{package.name}](#{package.name}) | {_codes(whom)} | {count} |")
    return "\n".join([*lines, "", "\n".join(texts)])


def _section(package: Package, before: str) -> str:
    count, left = _of_library(package)
    if count is None:
        kept = [line for line in before.splitlines() if line.startswith((_COUNTED, _LEFT))]
        count = next((line for line in kept if line.startswith(_COUNTED)), None)
        left = next((line for line in kept if line.startswith(_LEFT)), None)
    tests = ", ".join(f"`{text}`" for text in package.tests or package.needs) or "PyTorch alone"
    rows = [
        f"| install | `pip install {package.name}` |",
        f"| needs | {_codes(package.needs) or 'nothing beside onnxplug'} |",
        *([f"| for | {_codes(package.versions)} |"] if package.versions else []),
        f"| tested with | {tests}" + (f"; {counted(package.samples, 'sample')} |" if package.samples else " |"),
        f"| runtime | {package.runtime} |",
        *([count] if count else []),
    ]
    lines = [f"## {package.name}", "", f"{package.description.removeprefix('An onnxplug plugin: ')}.", ""]
    lines += ["| | |", "|---|---|", *rows, ""]
    if package.files:
        lines += ["| where | operators and functions |", "|---|---|"]
        lines += [f"| {file} | {_operators(ops)} |" for file, ops in package.files.items()]
        lines += [*([left] if left else []), ""]
    return "\n".join(lines)


def _of_library(package: Package) -> tuple[str | None, str | None]:
    """How many of the library's operators are translated, and which are not; ``None`` where it isn't installed."""
    own = package.name.replace("-", "_")
    libraries = [name for name in (*package.libraries, *package.namespaces) if name != own and find_spec(name)]
    namespaces = set(package.namespaces) - {own}
    if not libraries or not namespaces:
        return None, None
    try:
        operators = [op for op in read_library(*libraries) if namespace_of(op.name) in namespaces]
    except UsageError:  # one that is broken here says nothing
        return None, None
    translated = {op.packet for op in operators} & package.operators
    names = {op.packet for op in operators if op.needs_rule} | translated
    if not names:
        return None, None
    version = next(filter(None, map(distribution_and_version, libraries)), None)
    row = f"{_COUNTED} {len(translated)} of {len(names)}" + (f", of {' '.join(version)} |" if version else " |")
    left = sorted(names - translated)
    return row, f"{_LEFT} {_operators(left)} |" if left else None


def _operators(names: Iterable[str]) -> str:
    """Names of operators, by namespace."""
    spaces: dict[str, list[str]] = {}
    for name in names:
        spaces.setdefault(namespace_of(name), []).append(name.partition("::")[2])
    return "; ".join(f"`{space}`: {_codes(ops)}" for space, ops in spaces.items())


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(packages: Iterable[Package]) -> str:
    """The module that says which package is for which library."""
    rows = sorted((name, package.name) for package in packages for name in package.foreign())
    lines = [
        '"""Which of onnxplug\'s packages is for a library; errors name it where it isn\'t installed.',
        "",
        "Written by ``docs/packages.py`` (`make index`) from what the packages say. Packages that others",
        'publish are not known.\n"""',
        "",
        "from __future__ import annotations",
        "",
        "#: A namespace of torch, or the import name of a library, to the package.",
        "LIBRARIES: dict[str, str] = {",
        *(f'    "{name}": "{package}",' for name, package in rows),
        "}",
    ]
    return "\n".join(lines) + "\n"


def main(root: Path = Path()) -> None:
    """Writes the page and the table of a checkout."""
    packages = packages_in(root / "contrib")
    path = root / PAGE
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(page(packages, before), encoding="utf-8")
    (root / TABLE).write_text(table(packages), encoding="utf-8")


if __name__ == "__main__":
    main()
