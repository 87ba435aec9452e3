"""Runs: repeated exports and their reasons, killed runners, limits of processes, and the files of a run."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import types
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from onnxplug_fleet import identity
from onnxplug_fleet.compare import compared
from onnxplug_fleet.executors import Here, Processes
from onnxplug_fleet.manifest import Job, read_manifest
from onnxplug_fleet.runner import is_fine, run_fleet
from onnxplug_fleet.serve import make_server
from onnxplug_fleet.state import Run, State
from onnxplug_fleet.store import Store

MODEL = """
import torch
import fleet_scale
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.a.load_state_dict(torch.load("net.pt"))
    def forward(self, x):
        return fleet_scale.scale(torch.relu(self.a(x)))
def make():
    return Net(), (torch.ones(2, 4),)
def samples():
    return [torch.ones(2, 4), torch.zeros(2, 4)]
"""
MANIFEST = '[[models]]\nname = "net"\ntarget = "fleet_net.py:make"\ndata = "fleet_net.py:samples"\nthresholds = { largest = 1e-5 }\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import torch

    (tmp_path / "fleet_net.py").write_text(MODEL)
    (tmp_path / "fleet_scale.py").write_text("def scale(x):\n    return x * 2\n")
    (tmp_path / "fleet.toml").write_text(MANIFEST)
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "net.pt")
    for name in [name for name in sys.modules if name.startswith("fleet_")]:  # another test's, in its folder
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, **settings: Any) -> Run:
    return run_fleet(
        read_manifest(folder / "fleet.toml"), folder / "fleet", settings.pop("executor", Here()), **settings
    )


def result_of(run: Run, name: str = "net") -> dict[str, Any]:
    result = run.results[name]
    assert result is not None
    return result


def test_changed_models_are_exported_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    first = run(folder)
    assert is_fine(first)
    assert result_of(first)["reasons"] == ["it is the first export"]
    assert result_of(first)["operators"] == {"Gemm": 1, "Relu": 1, "Mul": 1}
    assert result_of(run(folder))["status"] == "unchanged"

    state = torch.load("net.pt")
    state["bias"][2] += 1
    torch.save(state, "net.pt")
    second = result_of(run(folder))
    assert second["status"] == "exported"
    assert second["reasons"] == ["weight a.bias changed", "file net.pt changed"]

    import fleet_scale

    monkeypatch.setattr(fleet_scale, "scale", lambda x: x + 3)
    (folder / "fleet_scale.py").write_text("def scale(x):\n    return x + 3\n")
    third = run(folder)
    assert "code fleet_scale.py changed" in result_of(third)["reasons"]
    changes = [row.changes for row in compared(first, third)]
    assert {"operators: Mul 1 → 0", "operators: Add 0 → 1"} <= set(changes[0])

    monkeypatch.setattr("onnxplug_fleet.identity._version", lambda name: "9.9" if name == "onnxruntime" else "1")
    reasons = result_of(run(folder))["reasons"]
    assert any(text.startswith("version onnxruntime: ") and text.endswith(" became 9.9") for text in reasons)


@pytest.mark.long
def test_changed_rules_are_exported_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin whose version is the same and whose code has changed."""
    rules = folder / "fleet_rules"
    rules.mkdir()
    (rules / "__init__.py").write_text("from fleet_rules.gelu import NODES\n")
    (rules / "gelu.py").write_text("NODES = 1\n")
    importlib.import_module("fleet_rules")
    records = [types.SimpleNamespace(status="loaded", distribution="acme", value="fleet_rules:plugin", version="1.0")]
    host = types.SimpleNamespace(records=lambda: records)

    def plugins(_: Any) -> dict[str, str]:
        identity._code_of_package.cache_clear()  # as in a new process
        return plugins_text(host)

    plugins_text = identity.plugins_text
    monkeypatch.setattr(identity, "plugins_text", plugins)
    run(folder)
    assert result_of(run(folder))["status"] == "unchanged"
    (rules / "gelu.py").write_text("NODES = 2\n")
    changed = result_of(run(folder))
    assert (changed["status"], changed["reasons"]) == (
        "exported",
        ["plugin acme: its code changed, which has the rules"],
    )
    records[0].version = "1.1"
    assert result_of(run(folder))["reasons"] == ["plugin acme: 1.0 became 1.1"]
    records.clear()
    assert result_of(run(folder))["reasons"] == ["plugin acme is gone"]


HELD = """
import dataclasses, functools, torch
from fleet_settings import SCALE

@dataclasses.dataclass
class Settings:
    scale: float

class Net(torch.nn.Module):
    def __init__(self, scaled, **fields):
        super().__init__()
        self.scaled = scaled
        vars(self).update(fields)
    def forward(self, x):
        return self.scaled(self, x)

{0}

def make():
    return {1}, (torch.ones(2, 4),)
"""
#: Places of a number that a model's code does not show: the code before ``make``, and the model that it returns.
PLACES = {
    "a private attribute": ("", "Net(lambda net, x: x * net._scale, _scale=SCALE.value)"),
    "an object": ("", "Net(lambda net, x: x * net.settings.scale, settings=Settings(SCALE.value))"),
    "an array in a list": (
        "import numpy",
        "Net(lambda net, x: x * float(net.held[0]), held=[numpy.array(SCALE.value)])",
    ),
    "a partial": ("", "Net(functools.partial(lambda scale, net, x: x * scale, SCALE.value))"),
    "a closure": ("def bound(scale): return lambda x: x * scale", "bound(SCALE.value)"),
    "a global number": ("scale = SCALE.value", "Net(lambda net, x: x * scale)"),
    "a class": ("class Fixed: scale = SCALE.value", "Net(lambda net, x: x * Fixed.scale)"),
    "a choice among objects": (
        "class Pair:\n    def __init__(self, scale): self.scale = scale",
        "Net(lambda net, x: x * net.chosen.scale, pairs=(p := [Pair(2.0), Pair(3.0)]), chosen=p[int(SCALE.value) - 2])",
    ),
    "a module of a closure": (
        "def closed(net):\n    torch.nn.init.constant_(net.weight, SCALE.value)\n    return lambda x: net(x)",
        "closed(torch.nn.Linear(4, 4, bias=False))",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_is_in_no_file_is_found(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number such as an environment variable's; here it is set by hand, between two runs of this process."""
    settings = types.ModuleType("fleet_settings")
    vars(settings)["SCALE"] = types.SimpleNamespace(value=2.0)
    monkeypatch.setitem(sys.modules, "fleet_settings", settings)
    (folder / "fleet_net.py").write_text(HELD.format(*PLACES[place]))
    (folder / "fleet.toml").write_text('[[models]]\nname = "net"\ntarget = "fleet_net.py:make"\n')

    def again(scale: float) -> dict[str, Any]:
        settings.SCALE.value = scale
        sys.modules.pop("fleet_net", None)
        return result_of(run(folder))

    first = again(2.0)
    assert first["status"] == "exported", first
    assert again(2.0)["status"] == "unchanged"
    changed = again(3.0)
    assert changed["status"] == "exported"
    assert len(changed["reasons"]) == 1, changed["reasons"]
    assert again(2.0)["status"] == "unchanged"


def test_the_code_and_attributes_of_a_script_are_parts() -> None:
    """A script may be loaded from a file by C++ code, which no hook of Python sees."""
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    class Negated(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x * self.scale

    def parts(module: torch.nn.Module) -> dict[str, str]:
        script = torch.jit.script(torch.nn.Sequential(module))
        watched = identity.Watched("net", fresh=False)
        return identity.parts_of({"model": script, "args": (torch.ones(2),)}, None, watched)

    first = parts(Scaled(2.0))
    assert identity.changes(first, parts(Scaled(2.0))) == []
    assert identity.changes(first, parts(Scaled(3.0))) == ["graph changed"]
    assert "graph changed" in identity.changes(first, parts(Negated(2.0)))


@pytest.mark.parametrize("nested", [False, True])
def test_samples_and_metrics_that_change(folder: Path, nested: bool) -> None:
    """Samples are read from a file that is no part of the code, nested in a list or not; a metric is a function of a file."""
    import torch

    text = "import torch\ndef make(): return Net(), (torch.ones(2, 4), [torch.ones(2, 4)])\n" if nested else MODEL
    if nested:
        text += "class Net(torch.nn.Module):\n    def forward(self, x, others): return x + others[0]\n"
        text += "def samples(): return [(torch.ones(2, 4), [torch.load('sample.pt') * 1])]\n"
    (folder / "fleet_net.py").write_text(text)
    (folder / "fleet_metric.py").write_text("def near(expected, actual): return 1.0\n")
    (folder / "fleet.toml").write_text(MANIFEST + 'metrics = ["fleet_metric.py:near"]\n')
    torch.save(torch.ones(2, 4), "sample.pt")
    assert is_fine(run(folder))
    assert result_of(run(folder))["status"] == "unchanged"
    if nested:
        torch.save(torch.zeros(2, 4), "sample.pt")
        assert result_of(run(folder))["reasons"] == ["file sample.pt changed", "data changed"]
    (folder / "fleet_metric.py").write_text("def near(expected, actual): return 0.25\n")
    changed = result_of(run(folder))
    assert changed["status"] == "exported"
    assert changed["reasons"] == ["code fleet_metric.py changed"]
    assert {row["metric"]: row["value"] for row in changed["data"]}["fleet_metric.py:near"] == 0.25


def test_what_the_store_has_or_lacks_is_said(folder: Path) -> None:
    import shutil

    run(folder)
    (folder / "fleet.toml").write_text(MANIFEST + MANIFEST.replace('"net"', '"same"'))
    second = run(folder)
    assert result_of(second, "same")["reasons"] == ["the store has an export of equal contents"]
    assert result_of(second)["reasons"] == []
    shutil.rmtree(folder / "fleet" / "keys")
    assert result_of(run(folder))["reasons"] == ["the store has no export of it any more"]


def test_failures_and_thresholds(folder: Path) -> None:
    (folder / "broken.py").write_text("def make():\n    raise ValueError('no weights')\n")
    text = MANIFEST.replace("fleet_net.py:make", "broken.py:make") + MANIFEST.replace('"net"', '"strict"').replace(
        "1e-5", "-1"
    )
    (folder / "fleet.toml").write_text(text.replace("largest = -1", "cosine = 2.0"))
    done = run(folder)
    assert not is_fine(done)
    assert (result_of(done)["status"], result_of(done, "strict")["status"]) == ("failed", "different")
    assert "raised ValueError at" in result_of(done)["error"]
    assert "cosine is 1, the threshold 2" in result_of(done, "strict")["error"]
    files = folder / "fleet" / "runs" / "1"
    suite = ElementTree.parse(files / "junit.xml").getroot()[0]
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "2")
    sarif = json.loads((files / "fleet.sarif").read_text())["runs"][0]
    assert {"onnxplug/error", "onnxplug/fleet-data"} <= {entry["ruleId"] for entry in sarif["results"]}
    page = (files / "index.html").read_text()
    assert "no weights" in page
    assert "report.html" in page


def test_a_store_of_fsspec_and_its_server(folder: Path) -> None:
    assert is_fine(run(folder, store="memory://fleet-test"))
    assert result_of(run(folder, store="memory://fleet-test"))["status"] == "unchanged"
    store = Store("memory://fleet-test")
    with make_server(folder / "fleet", store, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        page = urllib.request.urlopen(base).read().decode()
        (link,) = {part.split('"')[0] for part in page.split('href="') if part.split('"')[0].endswith("model.onnx")}
        assert len(urllib.request.urlopen(base + link).read()) > 100
        with pytest.raises(OSError, match="404"):
            urllib.request.urlopen(f"{base}/store/keys/../../fleet.db")
        server.shutdown()


class Stub:
    """Does jobs without exporting, and counts them in a file."""

    def results(self, jobs: Sequence[Job], store: str) -> Iterator[tuple[Job, dict[str, Any]]]:
        for job in jobs:
            with open("done.txt", "a") as file:
                file.write(f"{job.name}\n")
            result = {"status": "exported", "parts": {}, "late": {}, "seconds": 0.0, "object": "objects/x", "data": []}
            yield job, result


def test_a_runner_killed_anywhere_goes_on(folder: Path) -> None:
    (folder / "fleet.toml").write_text("".join(MANIFEST.replace('"net"', f'"net{i}"') for i in range(6)))
    manifest = read_manifest(folder / "fleet.toml")

    def die_at(point: int) -> None:
        """Runs the fleet, and kills the process before the line of this number in the modules that write."""
        import sys

        lines = 0

        def count(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.endswith(("state.py", "runner.py", "outputs.py", "store.py")):
                return None
            lines += event == "line"
            if lines == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        sys.settrace(count)
        run_fleet(manifest, folder / "fleet", Stub())

    point, killed = 20, 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                die_at(point)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            break
        killed += 1
        point += 7
    assert killed > 10
    state = State(folder / "fleet")
    assert state.run(state.runs()[-1]).ended is not None
    for number in state.runs():
        assert all(result is not None for result in state.run(number).results.values())
    done = (folder / "done.txt").read_text().splitlines()
    assert len(done) <= 6 * len(state.runs()) + killed  # a job is done twice only where its runner was killed within it


def test_a_run_that_goes_on_after_a_change(folder: Path) -> None:
    """Jobs that are done in the interrupted run are done again where their code has changed, and only there."""
    (folder / "fleet.toml").write_text(MANIFEST + MANIFEST.replace('"net"', '"same"'))

    def interrupted(name: str, result: Any, done: int, count: int) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # the second run goes on with the other job
        with pytest.raises(KeyboardInterrupt):
            run(folder, ended=interrupted)
    ended: list[str] = []
    assert len(State(folder / "fleet").runs()) == 1
    (folder / "net.pt").write_bytes((folder / "net.pt").read_bytes())
    assert is_fine(run(folder, ended=lambda name, *_: ended.append(name)))
    assert ended == []

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(folder, ended=interrupted)
    (folder / "fleet_scale.py").write_text("def scale(x):\n    return x * 4.0\n")
    sys.modules.pop("fleet_scale", None)
    assert is_fine(run(folder, ended=lambda name, *_: ended.append(name)))
    assert ended == ["net", "same"]
    assert len(State(folder / "fleet").runs()) == 2


LIMITS = """
import os, time, torch
def slow(): time.sleep(100)
def large():
    x = torch.ones(200_000_000); time.sleep(50)
def crash(): os.kill(os.getpid(), 9)
def once():
    if not os.path.exists("tried"):
        open("tried", "w").close(); os.kill(os.getpid(), 11)
    return torch.nn.ReLU(), (torch.ones(2),)
def fails(): raise RuntimeError("always")
"""


def test_limits_of_processes(folder: Path) -> None:
    (folder / "limits.py").write_text(LIMITS)
    table = '[[models]]\nname = "{0}"\ntarget = "limits.py:{0}"\n{1}\n'
    extra = {
        "slow": "timeout = 5\nretries = 0",
        "large": 'memory = "900MB"\nretries = 0',
        "crash": "",
        "once": "",
        "fails": "",
    }
    (folder / "fleet.toml").write_text("".join(table.format(name, keys) for name, keys in extra.items()))
    done = run(folder, executor=Processes(2))
    result = {name: (result_of(done, name)["status"], result_of(done, name)["attempts"]) for name in extra}
    assert result == {
        "slow": ("killed", 1),
        "large": ("killed", 1),
        "crash": ("killed", 2),
        "once": ("exported", 2),
        "fails": ("failed", 1),
    }
    assert "took longer than 5 s" in result_of(done, "slow")["error"]
    assert "900 MB are allowed" in result_of(done, "large")["error"]
    assert "SIGKILL" in result_of(done, "crash")["error"]


def test_jobs_have_the_environment_of_their_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are set and removed after the server of processes was started."""
    (folder / "wide.py").write_text(
        "import os, torch\ndef make():\n    return torch.nn.Linear(int(os.environ['FLEET_WIDTH']), 4), (torch.ones(2, 3),)\n"
    )
    (folder / "fleet.toml").write_text('[[models]]\nname = "net"\ntarget = "wide.py:make"\n')
    results = []
    for width in (None, "3", None):
        if width is not None:
            monkeypatch.setenv("FLEET_WIDTH", width)
        else:
            monkeypatch.delenv("FLEET_WIDTH", raising=False)
        results.append(result_of(run(folder, executor=Processes(1))))
    assert [result["status"] for result in results] == ["failed", "exported", "failed"]
    assert "FLEET_WIDTH" in results[2]["error"]
