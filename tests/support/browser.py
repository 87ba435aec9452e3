"""A real browser, driven by the DevTools protocol over two pipes: Chromium without a window, and no library besides."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The name of Debian's package, and names elsewhere.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Chromium reads commands from descriptor 3 and answers on 4.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 20) for number in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root can't have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The path of a browser; ``None`` where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A page that is open.

    Attributes:
        requests: The addresses of everything that the page asked for.
        messages: Errors and warnings of the page's scripts, and requests that its policy forbade.
    """

    def __init__(self, write: int, read: int) -> None:
        self.requests: list[str] = []
        self.messages: list[str] = []
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = 60.0, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result.

        Raises:
            RuntimeError: It failed.
        """
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        until = time.monotonic() + timeout
        while True:
            answer = self._next(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                results: dict[str, Any] = answer["result"]
                return results

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._read, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path, timeout: float = 60.0) -> float:
        """Opens a file; returns the seconds until it is loaded and its scripts have run."""
        started = time.monotonic()
        self.navigate(path, timeout)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - started

    def navigate(self, path: Path | str, timeout: float = 60.0) -> None:
        """Opens a file or an address, and waits until it is loaded."""
        until = time.monotonic() + timeout
        self._loaded = False
        self.call("Page.navigate", url=path if isinstance(path, str) else path.as_uri())
        while not self._loaded:
            self._next(until)

    def run(self, script: str, timeout: float = 60.0) -> Any:
        """Runs a script in the page and returns its value.

        Raises:
            RuntimeError: It threw.
        """
        result = self.call("Runtime.evaluate", timeout, expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Sets the size of the window, and the colours that the user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """Presses a key, as ``"ArrowDown"``."""
        codes = {"ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36, "PageDown": 34, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Writes a picture of the page as PNG.

        Args:
            path: The file.
            whole: Whether the picture is of the whole page, not of the window.
        """
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Page]:
    """A page of a browser of its own, with an empty profile.

    Raises:
        FileNotFoundError: No browser is installed.
    """
    program = find()
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed")
    commands, write = os.pipe()
    read, answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}")
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(commands), str(answers), program, *flags, "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile},
        )
        os.close(commands)
        os.close(answers)
        try:
            page = Page(write, read)
            page.resize(width, height)
            yield page
        finally:
            os.close(write)
            os.close(read)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
