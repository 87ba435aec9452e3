"""``onnxplug run``: a third-party program, whose exports onnxplug makes."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxplug.cli.inputs import check_file
from onnxplug.cli.options import (
    ExactOption,
    RuntimeOption,
    parse_runtime,
    preferences,
    selection,
)
from onnxplug.errors import UsageError
from onnxplug.registry.rule import load_object
from onnxplug.registry.target import DEFAULT_RUNTIME
from onnxplug.text import counted

if TYPE_CHECKING:
    from onnxplug_torch_onnx.install import Exported

#: Everything after SCRIPT is the script's, options too.
SETTINGS = {"allow_interspersed_args": False}


def run(
    script: Annotated[str, typer.Argument(help="A Python file; with -m a module", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's arguments", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module, as with python -m")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every export with PyTorch")] = False,
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    exact: ExactOption = False,
) -> None:
    """Run a script as python does, with onnxplug in the place of torch.onnx.export."""
    from onnxplug_torch_onnx.install import replaced

    target = parse_runtime(runtime)
    chosen, preferred = selection(), preferences()

    def options() -> Mapping[str, Any]:
        registry_for = load_object("onnxplug.plugins.manager:registry_for", "the plugin manager")
        registry = functools.partial(registry_for, prefer=preferred, selection=chosen)
        return {"registry": registry, "target": target, "exact": exact, "verify": verify}

    program = _module_of(script) if module else _file_of(script)
    sys.argv = [script, *(arguments or ())]
    with replaced(options) as exports:
        try:
            program()
        except SystemExit:
            raise  # the script's exit code is that of the process
        except BaseException as error:
            # As Python prints it, from the script's own line on.
            error = error.with_traceback(_of_the_script(error.__traceback__))
            sys.excepthook(type(error), error, error.__traceback__)
            raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
        finally:
            with contextlib.suppress(OSError, ValueError):  # the script may have closed it
                sys.stdout.flush()
            _say(exports)


def _module_of(name: str) -> Callable[[], Any]:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)


def _file_of(script: str) -> Callable[[], Any]:
    """Makes a function that runs a file as ``python script.py`` does, with the file's folder first in ``sys.path``."""
    path = Path(script)
    if os.path.isdir(script):  # with a __main__.py; run_path puts the folder into sys.path
        if not (path / "__main__.py").is_file():
            raise UsageError(f"the folder {script} has no __main__.py")
        return lambda: runpy.run_path(script, run_name="__main__")
    check_file(script, hint="With -m, SCRIPT names a module.")
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(path.resolve().parent)

    file = os.path.abspath(script)

    def program() -> None:
        main = ModuleType("__main__")
        main.__file__ = file
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
        main.__dict__.update(__builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = main
        with io.open_code(file) as source:
            code = compile(source.read(), file, "exec", dont_inherit=True)
        exec(code, main.__dict__)

    return program


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that lead to the script."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback


def _say(exports: list[Exported]) -> None:
    """Lists the exports of onnxplug on standard error."""
    from onnxplug.cli.report import note

    made = [exported for exported in exports if exported.error is None]
    failed = [exported for exported in exports if exported.error is not None]
    lines = [f"{counted(len(made), 'export')} by onnxplug" if exports else "the script called no torch.onnx.export"]
    lines += [
        f"  {exported.file or 'not to a path'}: opset {exported.opset}, {counted(exported.nodes, 'node')}"
        for exported in made
    ]
    lines += [f"{counted(len(failed), 'export')} failed"] if failed else []
    lines += [f"  {exported.file or 'not to a path'}: {exported.error}" for exported in failed]
    note("\n".join(lines))
