"""Runs the tests of a library with one exporter in the place of ``torch.onnx.export``.

``python -m tests.libraries.ways WAY FILE ROOT ARGUMENTS``, from the root of this checkout, runs pytest with the arguments in the folder
ROOT. It appends lines of JSON to the file: the outcome of a test, with the number of exports that it asked for.
Until the test ends, the outcome is ``ended``, which stays where a crash or a time limit ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.vision_kernels import define_vision_kernels

#: The exporters: torch's older exporter, torch's own, and ours in the place of the exporter that the library calls.
WAYS = ("dynamo=False", "dynamo=True", "onnxplug")


def main() -> int:
    """Runs pytest, with the exporter in place before a library is imported."""
    way, outcomes, root, *arguments = sys.argv[1:]
    recorder = Recorder(way, Path(outcomes))
    here = os.getcwd()
    if not Path(root).is_relative_to(here + "/tests"):  # the library has a package named tests of its own
        sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(here)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
    os.chdir(root)
    with recorder.in_place:
        return int(pytest.main(arguments, plugins=[recorder]))


class Recorder:
    """A plugin of pytest that counts exports, and writes outcomes.

    Attributes:
        exports: The number of exports that the running test asked for.
        in_place: Puts torch's function back at its end.
    """

    def __init__(self, way: str, outcomes: Path) -> None:
        define_vision_kernels()
        self.exports, self._test = 0, ""
        self._outcomes = outcomes
        self.in_place = contextlib.ExitStack()
        self._put_in_place(way)

    def _put_in_place(self, way: str) -> None:
        import torch

        if way == "onnxplug":
            import onnxplug

            self.in_place.enter_context(onnxplug.as_torch_onnx())
        export: Any = torch.onnx.export

        @functools.wraps(export)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.exports += 1
            self._write("ended", "its process ended before it")
            if way != "onnxplug":
                kwargs["dynamo"] = way == "dynamo=True"
            return export(*args, **kwargs)

        torch.onnx.export = counted
        self.in_place.callback(setattr, torch.onnx, "export", export)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Resets the count, and notes that the test has begun."""
        self.exports, self._test = 0, item.nodeid
        self._write("ended", "its process ended before it")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the outcome of a test, or of a setup or teardown that did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self._write(report.outcome, _reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Writes the error of a file that cannot be imported."""
        if report.failed:
            self._test = report.nodeid
            self._write("failed", str(report.longrepr).strip().splitlines()[-1])

    def _write(self, outcome: str, reason: str) -> None:
        line = {"test": self._test, "outcome": outcome, "exports": self.exports, "reason": reason}
        with self._outcomes.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    return str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else str(report.longrepr or "")


if __name__ == "__main__":
    sys.exit(main())
