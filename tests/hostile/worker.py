"""Runs cases, each in a fork of a process that has imported torch, and judges how they are answered.

Run as a script it takes ids of cases on its standard input, and answers each with a line of JSON: the id, the problems that
were found, the seconds and the bytes of memory. ``python -m tests.hostile.worker [PATTERN]`` runs all cases, or the
cases whose id has the pattern, and prints the problems.

Every case must end within the time, in the memory, not by a signal. A command line has an exit status that the case
expects; one error on standard error where that isn't 0; no traceback, no "did not expect"; no character that a terminal
takes for a command. A call raises one of the errors that the case expects, with a message. No file that the case does
not name has come into being, has changed or is gone: neither in its folder, nor beside it, in the home or the folder of
temporary files.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.hostile.case import DONE, MEMORY, SECONDS, Case
from tests.support.forking import PRELOADED

#: Address space beyond the process's own: it ends a case that would take the machine down with it.
_ROOM = 8 << 30
#: The longest text of an error.
_LONGEST = 20_000
#: Files that ONNX Runtime 1.31 makes when it is imported, in any program.
_OF_ONNXRUNTIME = ("tmp/.ses", "home/.cache/Microsoft/DeveloperTools")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ERROR = re.compile(r"^(error: |Error: |╭─ Error)", re.MULTILINE)


def snapshot(root: Path) -> dict[str, list[Any]]:
    """All that is below a folder: links, folders, and files with the digests of their contents."""
    results: dict[str, list[Any]] = {}
    for place, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(place, name)
            status = os.lstat(path)
            about: list[Any] = [stat.S_IFMT(status.st_mode)]
            if stat.S_ISLNK(status.st_mode):
                about.append(os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                about += [status.st_size, status.st_mtime_ns]
                if status.st_size < 1 << 24 and os.access(path, os.R_OK):
                    about.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
            results[os.path.relpath(path, root)] = about
    return results


def _do(case: Case, root: Path, answer: Path) -> None:
    """Runs the case in the fork, and writes its outcome to a file."""
    here = root / "here"
    os.chdir(here)
    os.environ.update(HOME=str(root / "home"), TMPDIR=str(root / "tmp"), COLUMNS="160", ONNXPLUG_METADATA="short")
    tempfile.tempdir = None
    sys.path[:1] = [""]
    job = case.make(here)
    before = snapshot(root)
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (virtual + _ROOM, -1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    started = time.monotonic()
    result: dict[str, Any] = {"before": before, "made": True}
    if callable(job):
        result |= _called(job)
    else:
        from onnxplug.cli import app

        sys.argv = ["onnxplug", *job]
        try:
            app.main()
        except SystemExit as leave:
            result["status"] = leave.code
        except BaseException:
            traceback.print_exc()
            result["status"] = "raised"
    sys.stdout.flush()
    sys.stderr.flush()
    result["seconds"] = time.monotonic() - started
    answer.write_text(json.dumps(result))


def _called(function: Callable[[], Any]) -> dict[str, Any]:
    from onnxplug.errors import OnnxplugError

    try:
        function()
    except BaseException as error:
        classes = [cls.__name__ for cls in type(error).__mro__] if isinstance(error, OnnxplugError) else []
        return {
            "error": classes,
            "message": ascii(str(error))[:100_000],
            "trace": "".join(traceback.format_exception(error))[-3000:],
        }
    return {"error": [""], "message": ""}


def judge(case: Case) -> dict[str, Any]:
    """Runs a case, and finds the problems of the answer."""
    base = Path(tempfile.mkdtemp(prefix="onnxplug-hostile-"))
    root, answer = base / "root", base / "answer"
    for name in ("here", "home", "tmp", "outside"):
        (root / name).mkdir(parents=True)
    (root / "outside" / "kept").write_bytes(b"kept" * 100)
    started = time.monotonic()
    fork = os.fork()
    if fork == 0:
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(base / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            _do(case, root, answer)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)
    late = _await(fork)
    _, status, usage = os.wait4(fork, 0)
    printed = {n: (base / n).read_bytes().decode("utf-8", "surrogateescape") for n in ("stdout", "stderr")}
    result = json.loads(answer.read_text()) if answer.is_file() else {}
    problems = list(_problems(case, result, printed, status, late, usage.ru_maxrss * 1024))
    if result:
        problems += _changes(result["before"], snapshot(root), case)
    for place, folders, _ in os.walk(base):
        for name in folders:
            if not os.path.islink(path := os.path.join(place, name)):
                os.chmod(path, 0o700)
    shutil.rmtree(base, ignore_errors=True)
    about = {"seconds": round(time.monotonic() - started, 2), "megabytes": usage.ru_maxrss // 1024}
    text = printed["stderr"][-1500:] + (f"\n{result.get('trace', '')[-1500:]}" if problems else "")
    return {"id": case.id, "problems": problems, **about, "stderr": text, "message": result.get("message", "")}


def _await(fork: int) -> bool:
    """Waits for a process, and ends it where it takes too long; returns whether it did."""
    descriptor = os.pidfd_open(fork)
    try:
        if select.select([descriptor], [], [], SECONDS)[0]:
            return False
        os.kill(fork, signal.SIGKILL)
        return True
    finally:
        os.close(descriptor)


def _problems(
    case: Case, result: dict[str, Any], printed: dict[str, str], status: int, late: bool, memory: int
) -> list[str]:
    results = []
    if late:
        return [f"it takes more than {SECONDS} s"]
    if os.WIFSIGNALED(status):
        return [f"it ended by {signal.Signals(os.WTERMSIG(status)).name}"]
    if not result.get("made"):
        return ["the case itself could not be made"]
    if memory > MEMORY:
        results.append(f"it takes {memory >> 20} MB")
    text = printed["stderr"] + printed["stdout"]
    if "Traceback" in text:
        results.append("there is a traceback")
    if "status" in result:
        results += _of_command(case, result["status"], printed)
    else:
        names = result["error"]
        text = result["message"]
        if not set(names) & set(case.expected):
            results.append(f"raised {(names or ['a foreign error'])[0] or 'nothing'}, not one of {case.expected}")
        elif names != [""] and len(text) < 10:
            results.append(f"the message says nothing: {text}")
    if len(printed["stderr"]) > _LONGEST or len(result.get("message", "")) > _LONGEST:
        results.append("the text is too long to be read")
    return results + [f"{word!r} isn't said" for word in case.words if word not in text]


def _of_command(case: Case, status: Any, printed: dict[str, str]) -> list[str]:
    results = []
    text = printed["stderr"] + printed["stdout"]
    if status not in case.expected:
        results.append(f"exit status {status}, not one of {case.expected}")
    errors = len(_ERROR.findall(printed["stderr"]))
    if errors != (status != DONE):
        results.append(f"{errors} errors are printed")
    if "did not expect" in text:
        results.append("the error is not one of ours")
    strange = _CONTROL.search(text)
    if strange is not None:
        results.append(f"{strange[0]!a} is printed")
    return results


def _changes(before: dict[str, list[Any]], after: dict[str, list[Any]], case: Case) -> list[str]:
    def allowed(path: str) -> bool:
        return path.startswith(_OF_ONNXRUNTIME) or any(fnmatch(path, f"here/{pattern}") for pattern in case.writes)

    results = [f"{path!r} has come into being" for path in after if path not in before]
    results += [f"{path!r} is gone" for path in before if path not in after]
    results += [f"{path!r} has changed" for path in after if path in before and after[path] != before[path]]
    paths = [*(p for p in after if p not in before), *(p for p in before if p not in after)]
    paths += [p for p in after if p in before and after[p] != before[p]]
    return [
        text
        for text, path in zip(results, paths, strict=True)
        if not allowed(path) and not any(fnmatch(p, f"{path}/*") and allowed(p) for p in after)
    ]


def cases() -> dict[str, Case]:
    """All cases by their ids."""
    results: dict[str, Case] = {}
    for module in sorted(Path(__file__).parent.glob("cases_*.py")):
        for case in importlib.import_module(f"tests.hostile.{module.stem}").CASES:
            assert case.id not in results, f"two cases are called {case.id}"
            results[case.id] = case
    return results


def main(arguments: Sequence[str]) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    known = cases()
    gc.collect()
    gc.freeze()
    if arguments == ["--serve"]:
        answers = os.dup(1)
        os.dup2(2, 1)
        for line in iter(sys.stdin.readline, ""):
            os.write(answers, (json.dumps(judge(known[line.strip()])) + "\n").encode())
        return
    wrong = 0
    for name, case in known.items():
        if not arguments or any(text in name for text in arguments):
            answer = judge(case)
            wrong += bool(answer["problems"])
            if answer["problems"] or "-v" in arguments:
                print(f"== {name}: {answer['problems']} {answer['seconds']} s {answer['megabytes']} MB", flush=True)
                print("   " + (answer["message"] + answer["stderr"])[-900:].replace("\n", "\n   "), flush=True)
            elif answer["seconds"] > 5:
                print(f"-- {name}: {answer['seconds']} s {answer['megabytes']} MB", flush=True)
    print(f"{len(known)} cases, {wrong} with problems")


if __name__ == "__main__":
    main(sys.argv[1:])
