"""Python in a process of its own."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import forking


def run_child(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python in an empty folder, and returns what it printed.

    Args:
        arguments: Arguments of the interpreter, as ``"-c", code``.
        options: Passed on to ``subprocess.run``.
    """
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, *arguments], **{"cwd": folder, "capture_output": True, "text": True, **options}
        )


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks, for all tests of the current process."""
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, str(forking.__file__)], stdin=pipe, stdout=pipe, text=True)

    @atexit.register
    def end() -> None:
        server.communicate()

    return server


def run_fork(*arguments: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in the fork of a process that has imported torch already; one at a time.

    For tests of onnxplug in a process of its own. Tests of its imports need :func:`run_child`.

    Args:
        arguments: Arguments of the interpreter: ``"-c", code``, ``"-m", module`` or a file, and what follows; ``-W`` before them.
        env: All environment variables.
        cwd: The working folder.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, name)) for name in ("stdout", "stderr")}
        request = {"arguments": arguments, "environment": env, "folder": str(cwd), **files}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the process that forks has ended"
        printed = [Path(file).read_text(encoding="utf-8") for file in files.values()]
    return subprocess.CompletedProcess(list(arguments), int(answer), *printed)
