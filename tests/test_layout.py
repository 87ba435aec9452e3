"""The shape of the repository: the packaged folders, the imports between them, and the cost of an import."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import onnxplug
from onnxplug.packages import PACKAGES, public_names
from tests.support.child import run_child
from tests.support.distributions import copy_source

ROOT = Path(__file__).resolve().parents[1]
# Folder of the checkout to its package, in the direction of imports: each may import the folders above it.
LAYERS = {
    "core": "onnxplug",
    "converters": "onnxplug.converters",
    "operators": "onnxplug.operators",
    "rewrites": "onnxplug.rewrites",
    "verification": "onnxplug.verification",
    "patches": "onnxplug.patches",
    "plugins": "onnxplug.plugins",
    "cli": "onnxplug.cli",
}
#: onnxplug's own packages beside the engine, which is complete without them.
BESIDE = (
    *(
        "onnxplug_compile",
        "onnxplug_fleet",
        "onnxplug_precision",
        "onnxplug_quantized",
        "onnxplug_sharding",
        "onnxplug_targets",
        "onnxplug_tools",
        "onnxplug_torch_onnx",
    ),
    "onnxplug_torchscript",
)
#: Folders of the builtin plugin: they import core, and not each other.
SIDE_BY_SIDE = ("converters", "operators", "rewrites", "verification", "patches")
FORBIDDEN = {
    "core": (
        *(f"onnxplug.{folder}" for folder in SIDE_BY_SIDE),
        "onnxplug.plugins",
        "onnxplug.cli",
        *BESIDE,
    ),
    **{
        folder: (*(f"onnxplug.{other}" for other in (*SIDE_BY_SIDE, "plugins", "cli") if other != folder), *BESIDE)
        for folder in SIDE_BY_SIDE
    },
    "plugins": ("onnxplug.cli", *BESIDE),
    "cli": BESIDE,
}
#: The folders of core, for the stages of an export and their surroundings, each with the folders that it may import.
STAGES = {
    "registry": (),
    "capture": (),
    "functionalize": ("capture",),
    "build": ("registry",),
    "interpret": ("registry", "capture", "functionalize", "build"),
    "rewrite": ("registry", "build"),
    "finish": ("build",),
    "run": ("registry", "capture", "build"),
}
MAX_LINES = 600
CODE = (*LAYERS, "tests", "benchmarks", "docs")


def _sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


@cache
def _imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Every module that a file names in an import, at any depth, with its line; relative imports start with a dot."""
    return tuple(_read_imports(path))


def _read_imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from onnxplug import converters` names onnxplug.converters.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_links_are_laid_out_as_the_wheel() -> None:
    """``src/onnxplug`` links every module and folder of core, and the other folders that are packages of it."""
    wanted = {p.name: p for p in (ROOT / "core").iterdir() if p.name != "__pycache__"}
    wanted |= {name: ROOT / name for name in LAYERS if name != "core"}
    links = {p.name: p.resolve() for p in (ROOT / "src/onnxplug").iterdir() if p.name != "__pycache__"}
    assert links == wanted


def test_import_beside_the_checkout(tmp_path: Path) -> None:
    """A folder called ``onnxplug`` in the working folder, as a clone is, does not hide the installed package."""
    (tmp_path / "onnxplug").symlink_to(ROOT)
    done = run_child("-c", "import onnxplug; print(onnxplug.__version__)", cwd=tmp_path)
    assert done.stdout.strip() == onnxplug.__version__, done.stderr


@pytest.mark.parametrize("folder", LAYERS)
def test_every_folder_with_code_is_a_package(folder: str) -> None:
    folders = {path.parent for path in _sources(folder)}
    assert folders
    assert [p for p in folders if not (p / "__init__.py").is_file()] == []


def test_wheel_holds_every_source(tmp_path: Path) -> None:
    copy = copy_source(tmp_path / "source")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        tmp_path,
        copy,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in LAYERS.items()
        for path in _sources(folder)
    }
    assert packed == expected | {"onnxplug/py.typed"}


@pytest.mark.parametrize("folder", LAYERS)
def test_direction_of_imports(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in _sources(folder)
        # `core/__init__.py` names them for type checkers, `core/__main__.py` is `python -m onnxplug`.
        if path not in (ROOT / "core" / "__init__.py", ROOT / "core" / "__main__.py")
        for line, name in _imports(path)
        if _within(name, FORBIDDEN[folder])
    ]
    assert wrong == []


def test_no_circles_between_modules_of_core() -> None:
    """Imports within functions and for type checkers count. The package itself, which names everything, is left out."""
    modules = _modules_of_core()
    del modules["onnxplug"]
    needs = {
        module: {result for _, name in _imports(path) if (result := _imported(name, modules)) not in (None, module)}
        for module, path in modules.items()
    }
    assert set(graphlib.TopologicalSorter(needs).static_order()) == set(modules)  # CycleError names a circle


def test_families_stand_side_by_side() -> None:
    """A family of converters imports helpers, never a family; helpers import only helpers, and not in a circle."""
    package, helpers = "onnxplug.converters", "onnxplug.converters.helpers"
    needs: dict[str, set[str]] = {}
    wrong = []
    for path in _sources("converters"):
        parts = path.relative_to(ROOT / "converters").with_suffix("").parts
        module = ".".join([package, *parts])
        needs[module] = set()
        for line, name in _imports(path):
            if not _within(name, (package,)):
                continue
            if not _within(name, (helpers,)) or name == helpers:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
            # `from onnxplug.converters.helpers import cephes` names a module, any other import a name in a module.
            needs[module].add(".".join(name.split(".")[:4]))
    assert wrong == []
    order = graphlib.TopologicalSorter(needs).static_order()
    assert set(needs) >= {name for name in order if _within(name, (helpers,))}  # CycleError names a circle


def _modules_of_core() -> dict[str, Path]:
    results = {}
    for path in _sources("core"):
        parts = path.relative_to(ROOT / "core").with_suffix("").parts
        results[".".join(["onnxplug", *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return results


def _imported(name: str, modules: Mapping[str, Path]) -> str | None:
    """The module of core that an imported name is, or is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def test_every_folder_of_core_has_its_place() -> None:
    assert {path.name for path in (ROOT / "core").iterdir() if path.is_dir()} - {"__pycache__"} == set(STAGES)
    seen: set[str] = set()
    for folder, others in STAGES.items():  # from the folders that import nothing upwards
        assert set(others) <= seen, folder
        seen.add(folder)


def test_stages_go_one_way() -> None:
    """Imports within functions and for type checkers count."""
    modules = _modules_of_core()
    wrong = []
    for module, path in modules.items():
        stage = module.split(".")[1] if module.count(".") else ""
        if stage not in STAGES:
            continue
        for line, name in _imports(path):
            imported = _imported(name, modules)
            other = imported.split(".")[1] if imported and imported.count(".") else None
            if other in STAGES and other not in (stage, *STAGES[stage]):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert wrong == []


def _private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Private names of torch that a file imports or reaches by attributes, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Attribute) and node.attr.startswith("_") and re.fullmatch(r"[\w.]+", ast.unparse(node))
        ):
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            private = [part for part in parts if part.startswith("_") and not part.endswith("__")]
            # torch._check is documented, and names of operators are no names of Python's.
            if parts[0] == "torch" and private and parts[1] != "ops" and name != "torch._check":
                yield node.lineno, name


@pytest.mark.parametrize("folder", [*LAYERS, "contrib"])
def test_private_names_of_torch_are_in_one_place(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} reaches {name}"
        for path in _sources(folder)
        if path != ROOT / "core" / "torch_private.py" and "tests" not in path.relative_to(ROOT).parts
        for line, name in _private_names(path)
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", CODE)
def test_the_package_is_imported_by_its_name(folder: str) -> None:
    """``import core`` from the checkout's root makes a second copy of every class; a relative import hides the same."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in _sources(folder)
        for line, name in _imports(path)
        if name.startswith(".") or _within(name, tuple(LAYERS))
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", CODE)
def test_files_stay_short(folder: str) -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in _sources(folder)}
    assert {str(path): n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_every_public_name_resolves() -> None:
    assert len(onnxplug.__all__) == len(set(onnxplug.__all__))
    missing = []
    for name in onnxplug.__all__:
        try:
            getattr(onnxplug, name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []
    with pytest.raises(AttributeError, match="no_such_name"):
        onnxplug.no_such_name  # noqa: B018


def test_public_names_are_known_to_type_checkers() -> None:
    """The lazy table and the imports under ``TYPE_CHECKING`` have the same names."""
    tree = ast.parse(Path(onnxplug.__file__).read_text(encoding="utf-8"))
    typed = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {(f"onnxplug.{home}", name) for name, home in onnxplug._HOME.items()}
    lazy |= {(PACKAGES[name].partition(":")[0], name) for name in public_names()}
    assert typed == lazy


def _loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules, sep='\\n')"
    done = run_child("-c", code, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import onnxplug",
        "import onnxplug.runtime",
        "from onnxplug import Rule, hookimpl, Domain, OpSample, OnnxplugError, Unsupported",
        "from onnxplug import Rewrite, hookimpl; Rewrite('double_abs', 'Abs', lambda g, node: None)",
        "import onnxplug; onnxplug.compat",
    ],
)
def test_import_is_cheap(statement: str) -> None:
    """The imports at the top of a plugin module load no heavy library and no converter."""
    loaded = _loaded_by(statement)
    assert "onnxplug" in loaded
    heavy = {"torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "numpy", "typer", "rich"}
    assert loaded & heavy == set()
    assert [name for name in loaded if _within(name, ("onnxplug.converters",))] == []


def test_the_installed_package_is_this_checkout() -> None:
    """Otherwise the tests run against another copy of the code: install with ``make .venv/installed``."""
    assert Path(onnxplug.__file__).resolve() == ROOT / "core" / "__init__.py"
