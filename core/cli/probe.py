"""Loads plugins in a child process, so that one that hangs or ends the process is reported like any other failure.

The parent calls :func:`probe`. The child says which plugin it is about to load, and at the end what became of each; a
plugin that takes too long is given up, and a new child loads the others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from onnxplug.errors import PluginError
from onnxplug.registry.rule import load_object

HOST = "onnxplug.plugins.manager"
#: Seconds that importing one plugin and calling its hooks may take.
TIMEOUT = 10.0
#: Seconds for the child to start.
START = 60.0
FIELDS = ("name", "distribution", "version", "value", "status", "error", "seconds", "hooks", "rules", "namespaces")
_CHILD = "import sys, json; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; from onnxplug.cli.probe import child; child(a)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"<]+)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


def probe(selection: Any, timeout: float = TIMEOUT, contents_of: str | None = None) -> list[dict[str, Any]]:
    """The status of every plugin of a selection; nothing is imported into this process.

    Args:
        selection: Which plugins to load.
        timeout: Seconds that a plugin may take.
        contents_of: Name of the plugin whose contents are wanted too.

    Returns:
        One mapping a plugin, with the keys of ``PluginRecord`` and, for the plugin asked for, ``contents``.

    Raises:
        PluginError: A name is not installed, or the child does not start.
    """
    manager = load_object(f"{HOST}:PluginManager", "the plugin manager")(selection)  # checks names and requirements
    order = [(r.distribution, r.name) for r in manager.records()]
    given_up: dict[int, dict[str, Any]] = {}
    while True:
        request = {
            "path": sys.path,
            "only": selection.only,
            "without": selection.without,
            "skip": [order[i] for i in given_up],
            "timeout": timeout,
            "contents_of": contents_of,
        }
        records, loading, trouble = _one_child(request, timeout)
        if records is not None:
            return [given_up.get(i, record) for i, record in enumerate(records)]
        if loading is None or loading in given_up:
            raise PluginError(f"the process that loads the plugins {trouble['error']}")
        record = manager.records()[loading]
        given_up[loading] = {**{f: getattr(record, f) for f in FIELDS}, **trouble}


def _one_child(request: dict[str, Any], timeout: float) -> tuple[list[dict[str, Any]] | None, int | None, Any]:
    """The records, or the plugin at which the child process stopped, and how."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder, "stack")
        text = json.dumps({**request, "dump": str(dump)})
        errors = Path(folder, "errors")
        with (
            errors.open("wb") as stderr,
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, text], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=stderr
            ) as process,
        ):
            try:
                return _listen(process, timeout, dump, errors)
            finally:
                process.kill()


def _listen(
    process: subprocess.Popen[bytes], timeout: float, dump: Path, errors: Path
) -> tuple[list[dict[str, Any]] | None, int | None, Any]:
    lines: queue.Queue[bytes] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    loading: int | None = None
    wait = START
    while True:
        try:
            line = lines.get(timeout=wait)
        except queue.Empty:
            stack = dump.read_text(encoding="utf-8", errors="replace") if dump.is_file() else ""
            error = f"did not end within {wait:.0f} s{_innermost(stack)}"
            return None, loading, {"status": "hangs", "error": f"its import {error}", "seconds": wait}
        if not line:
            status = process.wait()
            last = errors.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
            return None, loading, {"status": "failed", "error": f"ended with status {status}: {last}".rstrip(": ")}
        message = json.loads(line)
        if "records" in message:
            return message["records"], None, None
        # The builtin plugin imports torch.
        loading, wait = message["starting"], START if message["builtin"] else timeout


def _read(pipe: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def _innermost(stack: str) -> str:
    """The plugin's code position when it was stopped."""
    for match in _FRAME.finditer(stack):
        if "importlib" not in match["file"] and f"{os.sep}threading.py" not in match["file"]:
            return f"; it was at {match['file']}:{match['line']}, in {match['name']}"
    return ""


# -- the child ---------------------------------------------------------------------------------------------------------


def child(request: dict[str, Any]) -> None:
    """Loads plugins one by one and reports."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the output of plugins is kept out of the report
    warnings.simplefilter("ignore")
    selection_class = load_object("onnxplug.plugins.records:Selection", "the plugin manager")
    only = request["only"]
    chosen = selection_class(None if only is None else tuple(only), tuple(request["without"]))
    manager = load_object(f"{HOST}:PluginManager", "the plugin manager")(chosen)
    if any(not record.is_builtin for record in manager.records()):
        import torch  # noqa: F401  an export imports torch anyway: no plugin's time includes it
    positions = {id(record): position for position, record in enumerate(manager.records())}

    with open(request["dump"], "w", encoding="utf-8") as dump:

        def starting(record: Any) -> None:
            faulthandler.dump_traceback_later(0.9 * request["timeout"], file=dump)
            report.write(json.dumps({"starting": positions[id(record)], "builtin": record.is_builtin}) + "\n")
            report.flush()

        manager.load(skip=frozenset(map(tuple, request["skip"])), starting=starting, timeouts=False)
        faulthandler.cancel_dump_traceback_later()
    records = []
    for record in manager.records():
        row = {f: getattr(record, f) for f in FIELDS}
        if request["contents_of"] in (record.name, record.distribution):
            row["contents"] = {hook: describe(hook, value) for hook, value in manager.supplied(record).items()}
        records.append(row)
    report.write(json.dumps({"records": records}) + "\n")
    report.flush()
    os._exit(0)  # threads that a plugin started do not delay the exit


def describe(hook: str, value: Any) -> list[str]:
    """What a hook returned, a line an item."""
    kind = hook.removeprefix("onnxplug_")
    if kind == "rules":
        return [rule_text(rule) for rule in value]
    if kind == "decompositions":
        return [f"{op}: {_name(f) if f is not None else 'forbidden'}" for op, f in value.items()]
    if kind == "domains":
        return [f"{d.name} {d.version}" + (f", {len(d.schemas)} schemas" if d.schemas else "") for d in value]
    if kind == "samples":
        return [s.op + (f" at opsets {', '.join(map(str, s.opsets))}" if s.opsets else "") for s in value]
    return list(_names(value))


def _names(value: Iterable[Any]) -> Iterable[str]:
    for item in value:
        if hasattr(item, "kernel"):
            yield f"Python kernel {_name(item.kernel)}"
        elif hasattr(item, "providers"):
            path = item.path if isinstance(item.path, str) else f"{_name(item.path)}()"
            yield f"library {path}" + (f" for {', '.join(item.providers)}" if item.providers else "")
        elif hasattr(item, "op") and hasattr(item, "name"):
            yield f"{item.name} at {item.op}"
        else:
            yield _name(item)


def _name(item: Any) -> str:
    name = getattr(item, "__qualname__", getattr(item, "name", None))
    return f"{getattr(item, '__module__', '?')}:{name}" if name else repr(item)


def rule_text(rule: Any) -> str:
    """A rule and its conditions on one line."""
    since, until = rule.opset
    notes = []
    if since is not None or until is not None:
        notes.append(f"opset {since or 'any'} to {until or 'the newest'}")
    notes += [f"{name} {version}" for name, version in rule.domains.items()]
    notes += [f"for {' or '.join(rule.target)}"] if rule.target else []
    notes += ["exact"] if rule.exact else ["not exact"] if rule.exact is False else []
    notes += ["conditional"] if rule.when is not None else []
    notes += ["override"] if rule.override else []
    notes += [f"priority {rule.priority}"] if rule.priority else []
    return f"{rule.op}: {rule.name}" + (f" ({', '.join(notes)})" if notes else "")
