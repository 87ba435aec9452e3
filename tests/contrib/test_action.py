"""contrib/action: action.yml and its script have the same inputs, and the step runs a library's tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "contrib/action"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text(encoding="utf-8"))

_TESTS = """
import onnx, pytest, torch

def save(model, path):
    torch.onnx.export(model, (torch.ones(2, 3),), str(path), dynamo=False, opset_version=11)
    return onnx.load(str(path))

def test_ours(tmp_path):
    proto = save(torch.nn.Softmax(0), tmp_path / "m.onnx")
    assert (proto.producer_name, proto.opset_import[0].version) == ("onnxplug", 11)

def test_refused(tmp_path):
    with pytest.raises(torch.onnx.OnnxExporterError):
        save(torch.nn.CELU(), tmp_path / "m.onnx")
"""


def step(folder: Path, **inputs: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Runs the action's step as GitHub does, in a shell, with the inputs in variables; returns also the summary."""
    (only,) = ACTION["runs"]["steps"]
    values = {name: inputs.pop(name, spec["default"]) for name, spec in ACTION["inputs"].items()}
    assert not inputs, f"the action has no inputs {sorted(inputs)}"

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], text)

    summary = folder / "summary.md"
    environment = {
        **os.environ,
        **{name: filled(value) for name, value in only["env"].items()},
        "GITHUB_ACTION_PATH": str(FOLDER),
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [only["shell"], "-e", "-c", only["run"]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, summary.read_text(encoding="utf-8") if summary.exists() else ""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_onnx.py").write_text(_TESTS)
    return tmp_path


# The entry point of the pytest plugin is that of the installed package, and the checkout's may differ.
_PLUGIN = "-p onnxplug_tools.testing.plugin -p no:onnxplug"


@pytest.mark.long
def test_the_step_runs_the_tests_by_onnxplug(library: Path) -> None:
    done, summary = step(library, arguments=f"{_PLUGIN} -q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "onnxplug: 2 exports, 1 failed" in done.stdout
    assert "tests/test_onnx.py::test_refused: OpsetError: the model has no form in opset 11" in done.stdout
    assert re.search(r"^\| installed \| 2 \| 1 \| 2 passed.* \|$", summary, re.MULTILINE)


def test_a_failing_test_fails_the_step(library: Path) -> None:
    (library / "tests/test_other.py").write_text("def test_wrong(): assert False\n")
    done, summary = step(library, tests="tests/test_other.py", arguments=_PLUGIN)
    assert done.returncode == 1
    assert "| installed | 0 | 0 | 1 failed" in summary


def test_each_version_gets_an_environment(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for pip and pytest writes down its arguments: no torch is fetched."""
    seen = library / "seen.txt"
    wrapper = library / "wrapper.py"
    wrapper.write_text(
        "import runpy, subprocess, sys\n"
        "def run(command, **options):\n"
        f"    open({str(seen)!r}, 'a').write(' '.join(command[1:]) + '\\n')\n"
        "    return subprocess.CompletedProcess(command, 0, 'onnxplug: 3 exports, 0 failed\\n3 passed\\n', '')\n"
        "subprocess.run = run\n"
        f"sys.argv = [{str(FOLDER / 'run.py')!r}]\n"
        f"runpy.run_path({str(FOLDER / 'run.py')!r}, run_name='__main__')\n"
    )
    (only,) = ACTION["runs"]["steps"]
    monkeypatch.setitem(only, "run", f'"{sys.executable}" "{wrapper}"')
    done, summary = step(library, versions="2.9.1 2.13.0", library="./acme[onnx]")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = seen.read_text().splitlines()
    index = ACTION["inputs"]["index"]["default"]
    for number, version in enumerate(("2.9.1", "2.13.0")):
        venv, pip, tests = lines[3 * number : 3 * number + 3]
        assert venv.startswith("-m venv ")
        requested = f"--extra-index-url {index} torch=={version} pytest ./acme[onnx] onnxplug[all]"
        assert pip == f"-m pip install --quiet {requested}"
        assert tests == "-m pytest --as-torch-onnx tests"
        assert f"| {version} | 3 | 0 | 3 passed |" in summary


def test_inputs_and_variables_belong_together() -> None:
    (only,) = ACTION["runs"]["steps"]
    used = set(re.findall(r"inputs\.(\w+)", " ".join(only["env"].values())))
    assert used == set(ACTION["inputs"])
    read: Any = set(re.findall(r"ONNXPLUG_[A-Z]+", (FOLDER / "run.py").read_text(encoding="utf-8")))
    assert set(only["env"]) - read == {"ONNXPLUG_TESTS", "ONNXPLUG_ARGUMENTS"}  # named by a loop


def test_the_fixture(as_torch_onnx: list[Any], tmp_path: Path) -> None:
    import torch

    torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), str(tmp_path / "m.onnx"), dynamo=False)
    assert [export.file for export in as_torch_onnx] == [str(tmp_path / "m.onnx")]


def test_the_readme_has_every_input() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert table == list(ACTION["inputs"])
