"""Run as a script: a process that has imported torch, and forks a process that runs Python code for each request.

Importing torch and an export's modules takes three seconds; a fork takes hundredths. It is a process of its own: its
modules, warnings, plugins and environment are its own, and it ends as Python does. No plugin and no converter is imported here.

Requests are lines of JSON on standard input, with the keys ``arguments`` (``-c CODE …``, ``-m MODULE …`` or ``FILE …``, and
``-W`` before them), ``environment``, ``folder``, ``stdout`` and ``stderr`` (files). The answer is a line with the exit status.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import json
import os
import runpy
import sys
import threading
import types
import warnings
from typing import Any, NoReturn

#: Modules that an export imports. None of them starts a thread, which a fork would lose; onnxruntime does.
PRELOADED = """
    numpy torch torch._dynamo torch._export.non_strict_utils torch._functorch.aot_autograd torch.export._trace
    torch.fx.experimental.validator torch._inductor.sizevars pluggy
    onnx onnx_ir onnxscript typer rich.table packaging.requirements
    onnxplug.exporter onnxplug.cli.app onnxplug.cli.report onnxplug.plugins.manager
""".split()


def serve() -> dict[str, Any] | None:
    """Answers requests; returns in each fork with its request, and in the server with nothing when there are no more."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with open(requests, encoding="utf-8") as lines:
        while line := lines.readline():
            with open("/proc/self/stat", encoding="utf-8") as stat:
                threads = int(stat.read().rpartition(")")[2].split()[17])
            assert threads == 1, f"{threads} threads: a fork has only the one that forks"
            fork = os.fork()
            if fork == 0:
                os.close(answers)
                break
            status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            os.write(answers, f"{status}\n".encode())
    return json.loads(line) if line else None


def become(request: dict[str, Any]) -> None:
    """Does what ``python ARGUMENTS`` does, with the folder, environment and files of the request."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = list(request["arguments"])
    while arguments[0] == "-W":
        action, _, category = arguments[1].partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))
        del arguments[:2]
    option = arguments[0]
    first = {"-c": "", "-m": request["folder"]}.get(option, os.path.dirname(os.path.abspath(option)))
    # In place of the folder of this file.
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    if option not in ("-c", "-m"):
        sys.argv = arguments
        runpy.run_path(option, run_name="__main__")
        return
    program = arguments.pop(1)
    sys.argv = arguments
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), main.__dict__)


def end(error: BaseException | None) -> NoReturn:
    """Ends the process as Python does, but leaves torch's modules to the system: taking them down takes two seconds."""
    code = error.code if isinstance(error, SystemExit) else error
    if not isinstance(error, SystemExit) and error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    elif code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    for _name in PRELOADED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    _request = serve()
    if _request is not None:
        try:
            become(_request)
        except BaseException as _error:
            end(_error)
        end(None)
