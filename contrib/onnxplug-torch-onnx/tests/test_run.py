"""``onnxplug run``: a script as python runs it, whose exports onnxplug makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnxplug.cli.app import run
from tests.support.child import run_child, run_fork

SCRIPT = '''
"""A script."""
import json, os, sys
import beside
from dataclasses import dataclass

@dataclass
class Told:
    arguments: list
told = Told(sys.argv)
print(json.dumps([__name__, __file__, __doc__, sys.argv, sys.path[0], sys.modules["__main__"].told is told, beside.HERE]))
if "--export" in sys.argv:
    import torch
    torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), "relu.onnx")
    torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), dynamo=True)
if "--fail" in sys.argv:
    torch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), "/nowhere/relu.onnx")
if "--error" in sys.argv:
    def broken():
        return 1 / 0
    broken()
if "--exit" in sys.argv:
    sys.exit(int(sys.argv[-1]))
if "--say" in sys.argv:
    sys.exit("that was wrong")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "deep" / "beside.py").write_text("HERE = 'beside'\n", encoding="utf-8")
    return tmp_path


def ours(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_fork("-m", "onnxplug", "run", *arguments, env=dict(os.environ), cwd=folder)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--help", "-m", "x y"), 0),
        (("--exit", "7"), 7),
        (("--say",), 1),
        (("--error",), 1),
    ],
)
def test_as_python_does(folder: Path, arguments: tuple[str, ...], status: int) -> None:
    theirs = run_child("deep/script.py", *arguments, cwd=folder)
    done = ours(folder, "deep/script.py", *arguments)
    assert done.stdout == theirs.stdout
    assert done.returncode == theirs.returncode == status
    # Python's output with the whole traceback, and one line of onnxplug's (before the message of sys.exit).
    note = "note: the script called no torch.onnx.export\n"
    assert note in done.stderr
    assert done.stderr.replace(note, "") == theirs.stderr


def test_exports_of_the_script(folder: Path) -> None:
    done = ours(folder, "deep/script.py", "--export")
    assert done.returncode == 0
    assert (folder / "relu.onnx").is_file()
    assert "2 exports by onnxplug\n  relu.onnx: opset 21, 1 node\n  not to a path: opset 21, 1 node\n" in done.stderr
    done = ours(folder, "--verify", "--target", "none", "--exact", "deep/script.py", "--export", "--fail")
    assert done.returncode == 1
    assert "1 export failed\n  /nowhere/relu.onnx: SaveError: can't write" in done.stderr
    assert "onnxplug.errors.SaveError" in done.stderr


def test_its_warnings_are_shown_as_onnxplugs(folder: Path) -> None:
    script = "import torch\ntorch.onnx.export(torch.nn.ReLU(), (torch.ones(2),), 'relu.onnx', opset_version=8)\n"
    (folder / "old.py").write_text(script, encoding="utf-8")
    assert (
        "warning: the model has opset 13, not 8, which is older than the oldest, 9\n" in ours(folder, "old.py").stderr
    )


def test_plugin_flags(folder: Path) -> None:
    done = ours(folder, "--no-plugin", "nothing", "deep/script.py", "--export")
    assert done.returncode == 1
    assert "PluginError: no plugin 'nothing' is installed" in done.stderr


def test_a_module(folder: Path) -> None:
    theirs = run_child(
        "-m", "deep.script", "--exit", "3", cwd=folder, env={**os.environ, "PYTHONPATH": str(folder / "deep")}
    )
    done = run_fork(
        *("-m", "onnxplug", "run", "-m", "deep.script", "--exit", "3"),
        env={**os.environ, "PYTHONPATH": str(folder / "deep")},
        cwd=folder,
    )
    assert theirs.returncode == done.returncode == 3, done.stderr
    assert done.stdout.replace("-m", "") == theirs.stdout


def test_a_folder_with_a_main(folder: Path) -> None:
    (folder / "deep" / "__main__.py").write_text("import beside, sys; print(__name__, beside.HERE, sys.argv[1:])")
    assert ours(folder, "deep", "a").stdout == run_child("deep", "a", cwd=folder).stdout == "__main__ beside ['a']\n"


def test_missing_scripts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = list(sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", before)
    assert run(["run", str(tmp_path / "none.py")]) == 2
    printed = capsys.readouterr().err
    assert "there is no file" in printed
    assert "With -m, SCRIPT names a module." in printed
    assert run(["run"]) == 2
    assert "SCRIPT" in capsys.readouterr().err
    (tmp_path / "wrong.py").write_text("def f(:\n", encoding="utf-8")
    assert run(["run", str(tmp_path / "wrong.py")]) == 1
    assert "SyntaxError" in capsys.readouterr().err
    assert run(["run", "-m", "no_such_module_anywhere"]) == 1
    assert "No module named" in capsys.readouterr().err


@pytest.mark.long
def test_a_script_sets_the_environment_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "import os, sys\nassert not {'torch', 'numpy', 'onnx'} & set(sys.modules)\nos.environ['OMP_NUM_THREADS'] = '1'\n"
        "import torch\nprint(torch.get_num_threads())\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = run_child("-m", "onnxplug", "run", str(tmp_path / "early.py"), env=environment)
    assert done.stdout == "1\n", done.stderr
