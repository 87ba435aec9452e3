"""``diagnose``: why a model can't be exported, submodule by submodule, and what can be done about it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from onnxplug import arguments
from onnxplug.capture.capture import as_module, is_script
from onnxplug.capture.dynamic import parse_dynamic_shapes
from onnxplug.capture.eager import copied, run_eagerly
from onnxplug.capture.failure import first_lines, place_in_user_code
from onnxplug.errors import CaptureError, MissingRuleError, OnnxplugError, UsageError
from onnxplug.exporter import to_onnx
from onnxplug.fake import is_fake
from onnxplug.kinds import check_kind, check_lists, check_mappings
from onnxplug.observers import step
from onnxplug.opsets import resolve_opsets
from onnxplug.patches.unchanged import unchanged
from onnxplug.plugins.submodules import LIMIT, Call, capture_pieces
from onnxplug.progress import showing
from onnxplug.text import counted, type_with_article
from onnxplug_tools.diagnosis.draft import DraftFinding, draft_findings
from onnxplug_tools.examples import with_examples

Progress = Callable[[str], None]
#: Options of ``to_onnx`` that are about the inputs, outputs and submodules of the whole model.
_OF_THE_MODEL = ("examples", "functions", "input_names", "output_names")


@dataclass(frozen=True)
class PieceFinding:
    """A submodule that was exported by itself, with the inputs that it gets in the model.

    Attributes:
        path: Its name in the model (``"encoder.layers.0"``).
        class_name: Its class.
        captured: Whether torch.export captures it.
        converted: Whether it converts to ONNX too.
        error: The error in one line; ``None`` where nothing fails.
        place: The user's ``file:line`` of the fault; ``None`` where it is not known.
        like: The path of an equal submodule with equal inputs, which was exported in its stead.
        is_cause: Whether it can't be captured though all submodules within it can.
    """

    path: str
    class_name: str
    captured: bool
    converted: bool
    error: str | None = None
    place: str | None = None
    like: str | None = None
    is_cause: bool = False


@dataclass
class Diagnosis:
    """The reasons why a model can't be exported.

    Attributes:
        runs: Whether the model runs in PyTorch on its example inputs.
        captured: Whether torch.export captures it with the given options and dynamic shapes.
        converted: Whether it converts to ONNX.
        captured_static: Whether it is captured with static sizes; ``None`` where that was not tried.
        error: The error; ``None`` where nothing fails.
        submodule, place: The path of the submodule that can't be captured, and the user's ``file:line``.
        tries: The outcome of each attempt at capture, in one line each.
        pieces: The submodules, where the model itself can't be captured.
        missing: Operators without a rule to the lines where they are used.
        draft: The findings of ``torch.export.draft_export``, where the model can't be captured.
        draft_error: The error of ``draft_export`` itself; ``None`` where it does not fail.
        warnings: The warnings of the export.
        hints: What can be done.
    """

    runs: bool = True
    captured: bool = False
    converted: bool = False
    captured_static: bool | None = None
    error: str | None = None
    submodule: str | None = None
    place: str | None = None
    tries: list[str] = field(default_factory=list)
    pieces: list[PieceFinding] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    draft: list[DraftFinding] = field(default_factory=list)
    draft_error: str | None = None
    warnings: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def exports(self) -> bool:
        """Whether nothing keeps the model from being exported."""
        return self.runs and self.captured and self.converted

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain data, for JSON."""
        return {"exports": self.exports, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += _section("Tried", self.tries if len(self.tries) > 1 else ())
        if self.captured_static:
            lines += ["", "With static sizes it is captured."]
        lines += _section(
            "Operators without a rule", [f"{name} at {', '.join(places)}" for name, places in self.missing.items()]
        )
        lines += _section("Submodules, each exported by itself", _rows(self.pieces))
        lines += _section("torch.export.draft_export", [*map(str, self.draft), *([self.draft_error or ""])])
        lines += _section("Warnings", self.warnings)
        lines += _section("What to do", self.hints)
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.exports:
            return "Nothing is wrong: the model is captured and converted."
        if not self.runs:
            return f"The model does not run in PyTorch: {self.error}"
        return f"The model {'does not convert' if self.captured else 'is not captured'}: {self.error}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    kept = [line for line in lines if line]
    return ["", title, *(f"  {line}" for line in kept)] if kept else []


def _rows(pieces: Sequence[PieceFinding]) -> list[str]:
    """One line for each submodule, in columns."""
    cells = []
    for piece in pieces:
        state = "fails" if not piece.captured else "converts" if piece.converted else "captured"
        note = piece.error or ""
        if piece.like:
            note = f"like {piece.like}"
        elif not piece.captured and not piece.is_cause:
            note = "a submodule of it fails"
        elif piece.place:
            note += f" at {piece.place}"
        cells.append((state, piece.path, piece.class_name, note))
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(3)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in cells]


def diagnose(
    model: Any,
    args: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    limit: int = LIMIT,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Diagnosis:
    """Finds what keeps a model from being exported: runs it, captures and converts it, and then its submodules one by one.

    Args:
        model, args, kwargs, dynamic_shapes: As ``to_onnx`` takes them; with ``examples`` the first of them is run.
        limit: How many submodules are captured at most.
        progress: ``True``: a spinner on a terminal; a function is called with the name of each stage as it begins.
        options: Further arguments of ``to_onnx``: ``opset_version``, ``target``, ``rules``, ``plugins``, ``strict`` …

    Returns:
        The findings, as data and, by ``str``, as text. Nothing is raised for a model that fails.

    Raises:
        UsageError: An argument is malformed.
        OpsetError: The opset is unknown.
    """
    for name in ("f", "verify", "report", "progress", "pieces"):
        if options.get(name):
            raise UsageError(f"diagnose takes no {name}=", hint="It looks at the model alone; nothing is saved.")
    resolve_opsets(options.get("opset_version"))
    check_kind("limit", limit, int, "a number of submodules")
    if limit < 0:
        raise UsageError(f"limit= takes a number of submodules, got {limit}")
    check_mappings(kwargs=kwargs)
    if not callable(model) and not isinstance(model, torch.export.ExportedProgram):
        raise UsageError(f"{type_with_article(model)} is not a model")
    with showing(progress) as show:
        stage = show if show is not None else lambda _: None
        args, kwargs = arguments.positional_and_named(model, args, kwargs)
        if options.get("examples") is not None:
            args, kwargs, _ = with_examples(model, args, kwargs, options["examples"])
        check_lists(args=args)
        positional = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        keywords = dict(kwargs or {})
        diagnosis = Diagnosis()
        if not isinstance(model, torch.export.ExportedProgram):
            stage("running the model")
            error = _error_of_run(model, positional, keywords)
            if error is not None:
                diagnosis.runs, diagnosis.error, diagnosis.place = False, _one_line(error), place_in_user_code(error)
                weights = chain(model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
                diagnosis.hints.append(
                    "Load the model's weights: diagnose runs it, and they have no numbers."
                    if any(map(is_fake, weights))
                    else "Give inputs on which the model runs: args= holds the positional ones, kwargs= the named ones."
                )
                return diagnosis
        stage("exporting the model")
        failure = _export(diagnosis, model, positional, keywords, dynamic_shapes, options)
        if not isinstance(failure, CaptureError):
            return diagnosis
        _look_closer(diagnosis, model, positional, keywords, dynamic_shapes, options, limit, stage)
        return diagnosis


def _look_closer(
    diagnosis: Diagnosis,
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    options: Mapping[str, Any],
    limit: int,
    stage: Progress,
) -> None:
    """Looks for the reason why a model is not captured: with static sizes, in its submodules, by draft_export."""
    if dynamic_shapes is not None or options.get("examples") is not None:
        stage("capturing the model with static sizes")
        static = _failure(model, args, kwargs, {**options, "examples": None})
        diagnosis.captured_static = not isinstance(static, CaptureError)
        if diagnosis.captured_static:
            diagnosis.hints.append("Make fewer dimensions dynamic: with static sizes the model is captured.")
    if is_script(model):  # its submodules have no Python code, and draft_export does not take it
        return
    module = as_module(model)
    if not diagnosis.captured_static:
        stage("exporting submodules")
        of_all = {name: value for name, value in options.items() if name not in _OF_THE_MODEL}
        _look_at_submodules(diagnosis, module, args, kwargs, of_all, limit)
    stage("torch.export.draft_export")
    shapes = parse_dynamic_shapes(dynamic_shapes, module, args, kwargs).reading(tied=True)
    diagnosis.draft, diagnosis.draft_error = draft_findings(module, args, kwargs, shapes)


def _error_of_run(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    """The error that the model raises in PyTorch on its example inputs; ``None`` where it runs."""
    try:
        positional, named = copied((args, dict(kwargs)))
        if isinstance(model, torch.nn.Module) and not is_script(model):
            with unchanged(model, alone=True):
                run_eagerly(model, positional, named)
        else:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model(*positional, **named)
    except Exception as error:
        return error
    return None


def _export(
    diagnosis: Diagnosis,
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    options: Mapping[str, Any],
) -> OnnxplugError | None:
    """Exports the model with the given options, notes the outcome, and returns the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        failure = _failure(model, args, kwargs, options, dynamic_shapes)
    diagnosis.warnings = list(dict.fromkeys(str(w.message) for w in caught if w.category is UserWarning))
    diagnosis.captured, diagnosis.converted = not isinstance(failure, CaptureError), failure is None
    if failure is not None:
        diagnosis.error = failure.message.partition("\nTried:")[0]
        diagnosis.hints += [failure.hint] if failure.hint else []
    if isinstance(failure, CaptureError):
        diagnosis.submodule, diagnosis.place, diagnosis.tries = failure.submodule, failure.place, list(failure.tries)
    if isinstance(failure, MissingRuleError):
        diagnosis.missing = failure.missing
    return failure


def _failure(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: Mapping[str, Any], dynamic_shapes: Any = None
) -> OnnxplugError | None:
    """The error of onnxplug that ``to_onnx`` raises, ``None`` where it raises none; a ``UsageError`` is not caught."""
    try:
        to_onnx(model, args, kwargs=dict(kwargs) or None, dynamic_shapes=dynamic_shapes, **options)
    except UsageError:
        raise
    except OnnxplugError as error:
        return error
    return None


def _look_at_submodules(
    diagnosis: Diagnosis,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    limit: int,
) -> None:
    """Exports submodules by themselves with static sizes: the model's own, and the submodules of each that fails."""
    of_conversion: dict[int, OnnxplugError] = {}
    looked_at: list[Call] = []

    paths = {id(module): path for path, module in model.named_modules()}

    def fails(call: Call) -> Exception | None:
        step(f"{paths.get(id(call.module), type(call.module).__name__)}, {len(looked_at) + 1} of at most {limit}")
        looked_at.append(call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                failure = _failure(call.module, call.args, call.kwargs, options)
            except UsageError as error:  # its inputs can't be exported
                failure = error
        if failure is None or isinstance(failure, CaptureError | UsageError):
            return failure
        of_conversion[id(call.module)] = failure
        if isinstance(failure, MissingRuleError):
            for name, places in failure.missing.items():
                diagnosis.missing.setdefault(name, places)
        return None

    for piece in capture_pieces(model, args, kwargs, fails, limit):
        submodule = model.get_submodule(piece.like or piece.path)
        failure = piece.error or of_conversion.get(id(submodule))
        diagnosis.pieces.append(
            PieceFinding(
                piece.path,
                piece.class_name,
                captured=piece.error is None,
                converted=failure is None,
                error=_one_line(failure) if failure is not None else None,
                place=failure.place if isinstance(failure, CaptureError) else None,
                like=piece.like,
                is_cause=piece.is_cause,
            )
        )
    causes = [piece.path for piece in diagnosis.pieces if piece.is_cause]
    if causes:
        others = [piece.path for piece in diagnosis.pieces if piece.captured and not piece.converted]
        if others:
            rest = f"Of the others {', '.join(others)} can't be converted: the list says why."
        elif len(looked_at) == limit:
            seen = f"{counted(limit, 'submodule')} {'was' if limit == 1 else 'were'} looked at, and no more (limit=)"
            rest = f"The fault may be in a submodule within, and others may have one: {seen}."
        else:
            rest = "All others can be exported, also by themselves (pieces=[…])."
        diagnosis.hints.append(f"Change {', '.join(causes)}, which torch.export can't capture. {rest}")


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, CaptureError) and error.__cause__ is not None else error
    if isinstance(cause, MissingRuleError):
        return f"no rule for {', '.join(cause.missing)}"
    if isinstance(cause, OnnxplugError):
        return cause.message.splitlines()[0]
    return f"{type(cause).__name__}: {first_lines(cause).splitlines()[0]}"
