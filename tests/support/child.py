"""Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Any


def run_child(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python in an empty folder, and returns what it printed.

    Not in the checkout's parent folder: a checkout called ``onnxplug`` is a namespace package there, and Python takes it
    before the editable install.

    Args:
        arguments: Arguments of the interpreter, as ``"-c", code``.
        options: Passed on to ``subprocess.run``.
    """
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, *arguments], **{"cwd": folder, "capture_output": True, "text": True, **options}
        )
