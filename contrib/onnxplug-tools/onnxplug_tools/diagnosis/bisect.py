"""``bisect``: from a model that fails or is wrong to the smallest graph that still does."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

import onnxplug
from onnxplug.capture.locations import source_location
from onnxplug.capture.signature import Captured
from onnxplug.errors import OnnxplugError, SaveError, UsageError, VerificationError
from onnxplug.exporter import to_onnx
from onnxplug.host import RuntimeHost
from onnxplug.kinds import check_lists, check_mappings, check_seeds
from onnxplug.observers import step
from onnxplug.progress import showing
from onnxplug.registry.names import qualified_name
from onnxplug.run.alignment import Recipe
from onnxplug.run.files import write_by_torch
from onnxplug.run.save import save_model
from onnxplug.text import counted
from onnxplug.torch_private import child_of, pytree
from onnxplug.verification.eager import feed_of
from onnxplug_tools.diagnosis.delta import minimised
from onnxplug_tools.diagnosis.pieces import Piece, Recording
from onnxplug_tools.diagnosis.script import NAME, NotExpressed, Script, dynamic_shapes_of, script_of, script_of_model
from onnxplug_tools.diagnosis.trouble import Kind, Trouble, trouble_of
from onnxplug_tools.diagnosis.verdict import Verdict, judge, judge_program
from onnxplug_tools.folders import folder_path

Progress = Callable[[str], None]
#: Seconds that a script is given to show the fault.
_PATIENCE = 600


@dataclass
class Bisection:
    """The part of a model that is left, and that fails or is wrong like the model.

    Attributes:
        trouble: The fault; ``None`` for a model without fault.
        verdict: The culprit, where the model can be converted.
        operators: The operators that are left.
        nodes: The FX nodes that are left, as text.
        before: Number of operators of the whole model.
        examined: Number of graphs that were looked at.
        files: The files that were written.
        reproduces: Whether the script was run and showed the fault; ``None`` where there is no script.
        note: The reason why a step could not be done; empty where there is none.
    """

    trouble: Trouble | None = None
    verdict: Verdict | None = None
    operators: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    before: int = 0
    examined: int = 0
    files: list[Path] = field(default_factory=list)
    reproduces: bool | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.trouble is None:
            return "no fault: the model is converted, runs, and computes what PyTorch does"
        lines = [f"{self.trouble.kind.value}: {self.trouble.text}"]
        if self.nodes:
            tries = "1 try" if self.examined == 1 else f"{self.examined} tries"
            lines.append(f"{len(self.operators)} of {counted(self.before, 'operator')} left, after {tries}:")
            lines += [f"  {text}" for text in self.nodes]
        if self.verdict is not None:
            lines.append(str(self.verdict))
        lines += [f"note: {self.note}"] if self.note else []
        return "\n".join(lines)


@dataclass
class _Case:
    """A model that fails, and inputs on which it fails."""

    captured: Captured
    recipe: Recipe
    host: RuntimeHost | None
    leaves: list[Any]
    trouble: Trouble
    program: Any = None


def bisect(
    model: Any,
    args: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    output: str | os.PathLike[str] | None = None,
    dynamic_shapes: Any = None,
    seeds: Sequence[int] = (0, 1, 2),
    imports: Sequence[str] = (),
    prefer: Mapping[str, str] | None = None,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Bisection:
    """Reduces a model that can't be converted, or computes something else than PyTorch, to the smallest graph that still does.

    Args:
        model, args, kwargs, dynamic_shapes: As ``to_onnx`` takes them.
        output: A folder, which must be empty or not there yet, for a script of 30 lines at most, its data and the ONNX model;
            nothing is written when ``None``.
        seeds: As ``program.verify`` takes them.
        imports: Modules that the script imports, which define the model's custom operators.
        prefer: As ``to_onnx`` takes it; with ``registry=`` only the script repeats it.
        progress: ``True``: a spinner on a terminal; a function is called with the name of each stage as it begins.
        options: Further arguments of ``to_onnx``: ``opset_version``, ``target``, ``exact``, ``optimize``, ``rules``, ``plugins`` …

    Returns:
        The part of the model that is left, and the culprit.

    Raises:
        UsageError: An argument is malformed, the model has no example inputs, or the folder is in use.
        CaptureError: torch.export can't capture the model; there is no graph to reduce then.
        SaveError: The folder can't be written.
    """
    for name in ("f", "verify", "report", "pieces"):
        if options.get(name):
            raise UsageError(
                f"bisect takes no {name}=",
                hint="It verifies one whole model by itself; output= names the folder for what it writes.",
            )
    check_seeds(seeds)
    check_lists(imports=imports)
    check_mappings(kwargs=kwargs, prefer=prefer)
    folder = folder_path("output", output) if output is not None else None
    if folder is not None:
        _check_folder(folder)
    if options.get("registry") is None:
        options["prefer"] = prefer
    with showing(progress) as show:
        stage = show if show is not None else lambda _: None
        stage("looking for the fault")
        case = _case(model, args, kwargs, dynamic_shapes, seeds, options)
        if case is None:
            return Bisection()
        stage("reducing the graph")
        bisection, piece, recipe = _reduced(case, model, options)
        if piece is None:
            return bisection
        onnx_model = trouble_of(piece, recipe, case.host)[1]
        if onnx_model is not None:
            stage("finding out who is wrong")
            bisection.verdict = judge(onnx_model, _part(recipe, piece), case.host, piece.leaves, failed=True)
        if folder is not None:
            stage("writing")
            _write(
                bisection,
                piece,
                onnx_model,
                folder,
                {**_shown(options), **({"prefer": prefer} if prefer else {})},
                imports,
            )
        return bisection


def _case(
    model: Any, args: Any, kwargs: Any, dynamic_shapes: Any, seeds: Sequence[int], options: Mapping[str, Any]
) -> _Case | None:
    """The first failure of a model; ``None`` where there is none."""
    try:
        program = to_onnx(model, args, kwargs=kwargs, dynamic_shapes=dynamic_shapes, **options)
    except OnnxplugError as error:
        if error.export is None:
            raise
        captured, recipe, host = error.export
        return _Case(captured, recipe, host, _leaves(captured), Trouble(Kind.CONVERSION, error.message, error))
    captured = program.captured
    assert captured is not None
    assert program.recipe is not None
    try:
        program.verify(seeds=seeds)
    except VerificationError as error:
        if not error.inputs and any(slot.position is not None for slot in program.inputs):
            raise
        trouble = Trouble(Kind.DIFFERENCE, error.message, error)
        return _Case(captured, program.recipe, program.host, list(error.inputs), trouble, program)
    return None


def _leaves(captured: Captured) -> list[Any]:
    """The example inputs of a captured program in its order."""
    spec = captured.program.call_spec.in_spec
    names = list(child_of(spec, 1).context or ()) if spec is not None else []
    kwargs = {name: captured.kwargs[name] for name in names} if set(names) == set(captured.kwargs) else captured.kwargs
    leaves = list(pytree.tree_leaves((tuple(captured.args), dict(kwargs))))
    if spec is not None and len(leaves) != spec.num_leaves:
        raise UsageError(
            "a graph is reduced on example inputs, and the exported program carries none", hint="Give args=."
        )
    return leaves


def _reduced(case: _Case, model: Any, options: Mapping[str, Any]) -> tuple[Bisection, Piece | None, Recipe]:
    """The smallest piece that fails like the model, and how it is converted."""
    bisection = Bisection(case.trouble)
    recording, recipe, trouble = _start(case, model, options)
    bisection.before = len(recording.operators)
    if trouble is None:
        if case.program is not None:
            bisection.verdict = judge_program(case.program, case.leaves, failed=True)
        bisection.note = "the fault does not show in the captured graph by itself, so there is nothing to reduce"
        return bisection, None, recipe

    def fails(piece: Piece | None) -> bool:
        bisection.examined += 1
        step(f"{counted(bisection.examined, 'graph')} tried")
        return piece is not None and trouble.is_like(trouble_of(piece, recipe, case.host)[0])

    kept = minimised(recording.operators, lambda some: fails(recording.piece(some)))
    piece = recording.piece(kept)
    assert piece is not None
    names = [slot.value.name for slot in piece.functional.outputs]
    left = minimised(names, lambda some: fails(recording.piece(kept, some)))
    piece = recording.piece(kept, left) or piece
    bisection.trouble = trouble_of(piece, recipe, case.host)[0] or trouble
    bisection.operators = [qualified_name(node.target) for node in piece.operators]
    bisection.nodes = [
        f"{node.format_node()}  # {source_location(node) or 'unknown source'}" for node in piece.operators
    ]
    return bisection, piece, recipe


def _start(case: _Case, model: Any, options: Mapping[str, Any]) -> tuple[Recording, Recipe, Trouble | None]:
    """The recording, recipe and fault to start from: with static sizes, if the model fails with them too."""
    recording = Recording(case.recipe.functional, case.leaves)
    whole = recording.piece(recording.operators)
    trouble = trouble_of(whole, case.recipe, case.host)[0] if whole is not None else None
    if trouble is None or whole is None or dynamic_shapes_of(whole) is None:
        return recording, case.recipe, trouble
    try:
        args, kwargs = pytree.tree_unflatten(case.leaves, case.captured.program.call_spec.in_spec)
        source = model.module() if isinstance(model, torch.export.ExportedProgram) else model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                recipe = to_onnx(source, args, kwargs=kwargs, **options).recipe
            except OnnxplugError as error:
                recipe = error.export[1] if error.export is not None else None
        if recipe is not None:
            static = Recording(recipe.functional, case.leaves)
            part = static.piece(static.operators)
            if part is not None and trouble.is_like(again := trouble_of(part, recipe, case.host)[0]):
                return static, recipe, again
    except Exception:  # the model does not take sizes as constants
        pass
    return recording, case.recipe, trouble


def _part(recipe: Recipe, piece: Piece) -> Recipe:
    return Recipe(piece.functional, recipe.build, recipe.optimize, recipe.without)


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``to_onnx`` that a script repeats; options at their default are left out."""
    shown = {name: value for name, value in options.items() if name not in _NOT_SHOWN}
    if options.get("registry") is not None:
        records = [record for record in options["registry"][1].records() if not record.is_builtin]
        shown["plugins"] = [record.name for record in records if record.status == "loaded"] if records else None
    defaults = inspect.signature(to_onnx).parameters
    return {name: value for name, value in shown.items() if name in defaults and value != defaults[name].default}


#: Options that a piece of the graph has no use for.
_NOT_SHOWN = ("input_names", "output_names", "strict", "registry", "progress")


# -- files -----------------------------------------------------------------------------------------------------------------


def _check_folder(folder: Path) -> None:
    """Refuses a folder that is not empty, or whose parent is not there or can't be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}", hint="Name another folder.")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"there is no folder {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"the folder {parent} can't be written")


def _write(
    bisection: Bisection,
    piece: Piece,
    model: ir.Model | None,
    folder: Path,
    options: Mapping[str, Any],
    imports: Sequence[str],
) -> None:
    """Writes script, data and model, all of them or none."""
    trouble = bisection.trouble
    assert trouble is not None
    try:
        made = Path(tempfile.mkdtemp(prefix=".bisect-", dir=folder.absolute().parent))
    except OSError as error:
        raise SaveError(f"{folder} can't be written: {error}") from error
    try:
        made.chmod(0o755)
        if model is not None:
            save_model(model, made / f"{NAME}.onnx")
        operators = ", ".join(bisection.operators)
        title = f"{trouble.kind.value}: {operators} (onnxplug {onnxplug.__version__}, torch {torch.__version__})"
        notes: list[str] = []
        for script in _scripts(piece, title, model, options, imports, notes):
            _put(script, made)
            bisection.reproduces = _shows(made, trouble)
            if bisection.reproduces:
                break
        else:
            bisection.reproduces = False
            bisection.note = f"no script shows the fault by itself{f' ({notes[-1]})' if notes else ''}"
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise SaveError(f"{folder} can't be written: {error}") from error
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    bisection.files = sorted(path for path in folder.iterdir() if path.is_file())


def _scripts(
    piece: Piece,
    title: str,
    model: ir.Model | None,
    options: Mapping[str, Any],
    imports: Sequence[str],
    notes: list[str],
) -> Iterator[Script]:
    """The forms that a script may have, the plainest first; ``notes`` gets the reasons why forms can't be made."""
    dynamic = dynamic_shapes_of(piece)
    for shapes in (None, dynamic) if dynamic is not None else (None,):
        chosen = {**options, **({"dynamic_shapes": shapes} if shapes is not None else {})}
        for stated in (True, False):
            try:
                yield script_of(piece, title, chosen, stated=stated, imports=_imports(piece, imports))
            except NotExpressed as error:
                notes.append(str(error))
            except Exception as error:
                notes.append(f"torch.export of what is left: {type(error).__name__}: {error}")
    if model is not None:
        yield script_of_model(title, feed_of(piece.functional, piece.leaves), piece.expected)


def _imports(piece: Piece, imports: Sequence[str]) -> Sequence[str]:
    """Modules that define custom operators, where the piece has one."""
    own = ("aten::", "prims::", "_operator::", "torch::", "math::")
    return imports if any(not qualified_name(n.target).startswith(own) for n in piece.operators) else ()


def _put(script: Script, folder: Path) -> None:
    (folder / f"{NAME}.py").write_text(script.text, encoding="utf-8")
    write_by_torch(folder / f"{NAME}.pt", lambda file: torch.save(script.data, file))
    saved = folder / f"{NAME}.pt2"
    saved.unlink(missing_ok=True)
    program = script.program
    if program is not None:
        write_by_torch(saved, lambda file: torch.export.save(program, file))


def _shows(folder: Path, trouble: Trouble) -> bool:
    """Whether a script, run by itself, ends with the error."""
    wanted = ["VerificationError", "AssertionError", "ONNXRuntimeError"]
    if trouble.kind is Kind.CONVERSION:
        wanted = [type(trouble.error).__name__]
    try:
        done = subprocess.run(
            [sys.executable, f"{NAME}.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return done.returncode == 1 and any(name in done.stderr for name in wanted)
