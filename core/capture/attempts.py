"""The attempts of a capture: torch.export in the few modes and readings of the dynamic shapes that are worth a try.

Two examples, exported with 4 rows and ``{0: "n"}``. The first error decides which attempt comes next::

    x * math.sin(x.shape[0])      non-strict   n == 4 is a constant: FixedExpressionError
                                  strict       the graph has a sine of n: captured
    x * max(x.sum().item(), 1.0)  non-strict   a guard on a number that depends on data, which the model computes with
                                  strict       the number is a value of the graph: captured
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import sympy
import torch

from onnxplug import logs
from onnxplug.capture.branches import Branches
from onnxplug.capture.data_dependent import asks_of_a_size, is_computed_with, is_data_dependent
from onnxplug.capture.dynamic import (
    DynamicShapes,
    RequestedSize,
    check_dynamic,
    declared_multiples,
    declared_ranges,
    equates_one_name,
    follows_from_multiples,
    follows_from_names,
    requested_sizes,
    size_names,
)
from onnxplug.capture.eager import copied
from onnxplug.capture.early_returns import LIMIT as EARLY_RETURNS, EarlyReturn, may_be_included
from onnxplug.capture.failure import Try, explained
from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patches import Trace, torch_patched
from onnxplug.capture.patching import made_by
from onnxplug.capture.questions import Fixing, Recorded
from onnxplug.capture.quiet import quiet
from onnxplug.capture.refusals import LIMIT as REFUSALS, Answers, Doubt, Refusal, Zero, refusal_texts
from onnxplug.capture.release import forget_compiled_wrappers, release_inputs
from onnxplug.capture.replaced import replaced_texts
from onnxplug.capture.size_guards import (
    Condition,
    FixedExpressionError,
    at_least_two,
    bound_warnings,
    conditions_of_decompositions,
    fixed_by,
    fixed_by_operator,
    is_own,
    narrowed,
    outside_declared,
    size_guards,
    small_sizes,
    text_warnings,
    truth_warnings,
    used_size_text,
    used_sizes,
    warning_text,
)
from onnxplug.capture.squeezes import KeptAxis, kept_axes, squeezed_sizes, squeezed_text
from onnxplug.capture.transforms import (
    check_constants,
    check_tangents,
    names_transforms,
    traced_below,
    transforms_closed,
)
from onnxplug.errors import CaptureError, FixedDimensionError
from onnxplug.observers import span, stage, step
from onnxplug.plugin_api import CaptureRequest, Patch
from onnxplug.torch_private import ValueRanges, fx_config, int_oo
from onnxplug.warn import warn

_LOGGER = logs.logger("capture")
#: How often a model that can't be captured is traced, refined dynamic shapes included.
LIMIT = 3
_ABOUT_SIZES = ("Constraints violated", "specialized", "size of tensor", "inferred a static shape", "ranges")


class Attempt(NamedTuple):
    """A successful capture.

    Attributes:
        strategy: The mode and the reading of the dynamic shapes that it was captured in.
        conditions: The conditions of the model's code on the sizes.
        assumptions: Its conditions that only the size 1 does not fulfil.
        repeated: How many operator calls repeated the nodes of an equal call.
        bounds: The largest sizes that the model accepts.
        names: torch's symbols to the user's names, for sizes that torch replaced by equal sizes.
        numbers: The buffers from which the model's code read numbers, by their names.
    """

    program: torch.export.ExportedProgram
    strategy: str
    conditions: list[Condition]
    assumptions: list[Condition]
    repeated: int
    bounds: list[Condition]
    names: Mapping[str, str]
    numbers: Mapping[str, torch.Tensor]


class _Way(NamedTuple):
    """The mode of an attempt.

    Attributes:
        tied: Whether equal names mean equal sizes.
        oblivious: Whether the sizes 0 and 1 are kept symbolic.
        below: Whether the model's operators are recorded below autograd and functorch.
        general: Whether operators that ask whether a size is 1 get the answer for other sizes.
    """

    strict: bool
    tied: bool = True
    oblivious: bool = True
    below: bool = False
    general: bool = True

    def text(self) -> str:
        """In words."""
        parts = ["strict" if self.strict else "non-strict"]
        if not self.tied:
            parts.append("sizes of one name not tied")
        if not self.oblivious:
            parts.append("sizes 0 and 1 as torch takes them")
        if self.below:
            parts.append("below autograd and functorch")
        if not self.general:
            parts.append("operators asked about sizes of 1")
        return ", ".join(parts)


def export_program(
    module: torch.nn.Module,
    args: Any,
    kwargs: Any,
    shapes: DynamicShapes,
    strict: bool | None,
    mentions: Mentions | None = None,
    patches: Sequence[Patch] = (),
    request: CaptureRequest | None = None,
) -> Attempt:
    """Captures a module.

    Args:
        strict: torch.export's mode; ``None`` for either.
        mentions: The names in the model's code; read off the module when ``None``.
        patches: Plugins' patches of attempts.
        request: The export's options and rules, for patches.

    Returns:
        The first attempt that succeeded.

    Raises:
        CaptureError: No attempt succeeded; at most three are made, four for a model that names a transform of functions. After an
            error that depends only on data, another attempt is made if the model computes with the number, and none if the
            number decides a branch.
    """
    mentions = mentions if mentions is not None else Mentions(module)
    capture = _Capture(module, args, kwargs, shapes, mentions, patches, request)
    tries: list[Try] = []
    remaining = [_Way(bool(strict))]
    while capture.left and remaining:
        way = remaining.pop(0)
        try:
            if tries:
                step(f"attempt {len(tries) + 1}, {way.text()}")
            with stage("attempt", "capture", mode=way.text()) as attempt:
                program = capture.refined(way, capture.shapes.reading(way.tied))
                with span("conditions on sizes"):
                    program = capture.settle_sizes(program, way)
                    check_dynamic(program, shapes)
        except Exception as error:
            tries.append(Try(way.text(), error))
            attempt.about["why"] = tries[-1].text().removeprefix(f"{way.text()}: ")
            _LOGGER.debug("attempt %d, %s, failed: %s: %s", len(tries), way.text(), type(error).__name__, error)
            if len(tries) == 1:
                remaining = _other_attempts(error, shapes, strict)
                if capture.is_generalized:
                    remaining.insert(0, _Way(bool(strict), general=False))
                    capture.left += 1
                if not strict and names_transforms(mentions):
                    remaining.insert(0, _Way(False, below=True))
                    capture.left += 1
            elif is_data_dependent(error) and not (way.oblivious and asks_of_a_size(error)):
                break
        else:
            capture.warn()
            conditions, assumptions = capture.conditions, capture.assumptions
            return Attempt(
                program,
                way.text(),
                conditions,
                assumptions,
                capture.repeated,
                capture.bounds,
                capture.names,
                capture.numbers,
            )
    # The error about a static dimension tells more than torch's errors in the other modes.
    for failed in tries:
        if isinstance(failed.error, CaptureError):
            raise failed.error
    if any(text in str(tries[0].error) for text in _ABOUT_SIZES) and (fixed := capture.fixed_by_operator()) is not None:
        fixed.tries = [failed.text() for failed in tries]
        raise fixed from tries[0].error
    raise explained(tries, module, shapes, capture.doubt) from tries[0].error


def _other_attempts(error: Exception, shapes: DynamicShapes, strict: bool | None) -> list[_Way]:
    """The attempts that are worth a try after the first attempt's error."""
    in_strict_mode = [_Way(True)] if strict is None else []
    if is_data_dependent(error) and not asks_of_a_size(error):
        # The strict mode keeps float(tensor) a number of the graph; the other readings would fail alike.
        return in_strict_mode if is_computed_with(error) else []
    if isinstance(error, FixedExpressionError):
        return in_strict_mode  # which keeps more functions of sizes an expression
    mode = bool(strict)
    attempts = [_Way(mode, oblivious=False)] if any(True for _ in shapes.requested_axes()) else []  # some need it
    not_tied = [_Way(mode, tied=False)] if shapes.shared else []
    about_sizes = any(text in str(error) for text in _ABOUT_SIZES)
    return attempts + (not_tied + in_strict_mode if about_sizes else in_strict_mode + not_tied)


class _Capture:
    """The attempts at one model; each call of torch.export is counted."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        shapes: DynamicShapes,
        mentions: Mentions,
        patches: Sequence[Patch] = (),
        request: CaptureRequest | None = None,
    ) -> None:
        self.module = module
        self._patches = patches
        self._request = replace(
            request or CaptureRequest(), module=module, args=args, kwargs=kwargs, mentions=mentions, shared={}
        )
        self.args = args
        self.kwargs = kwargs
        self.shapes = shapes
        self.left = LIMIT
        self.repeated = 0
        self.conditions: list[Condition] = []
        self.assumptions: list[Condition] = []
        self.bounds: list[Condition] = []
        self.names: dict[str, str] = {}
        self._recorded = Recorded(oblivious=True)
        self._fixings: list[list[Fixing]] = []
        self._warnings: list[str] = []
        self._mentions = mentions
        self._refusals: list[Refusal] = []
        self._zeros = 0
        self._branches = Branches(mentions)
        self.doubt: Doubt | None = None
        self._of_patches: list[str] = []

    def refined(self, way: _Way, spec: Any) -> torch.export.ExportedProgram:
        """Exports; where torch finds a narrower range or a relation for a dimension that is only named, adopts it."""
        from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

        while True:
            try:
                return self._once(way, spec)
            except Exception as error:
                text = str(error).partition("Suggested fixes:\n")[2].partition("\n\n")[0]
                fixes = [f.strip() for f in text.splitlines()]
                fixed = {fix.partition(" = ")[0] for fix in fixes}
                constant = any(fix.partition(" = ")[2].isdigit() for fix in fixes)
                if not self.left or not fixes or constant or not fixed & self.shapes.shared:
                    raise
                _LOGGER.debug("captured again, with what torch suggests of the sizes: %s", "; ".join(fixes))
                try:
                    spec = refine_dynamic_shapes_from_suggested_fixes("Suggested fixes:\n" + "\n".join(fixes), spec)
                except AttributeError:
                    # It can't hold Dim.DYNAMIC or Dim.AUTO together with named dimensions.
                    raise error from None

    def settle_sizes(self, program: torch.export.ExportedProgram, way: _Way) -> torch.export.ExportedProgram:
        """The program; captured again where a ``Dim.AUTO`` dimension must be static because the model depends on its size.

        Raises:
            FixedDimensionError: A dimension that must be dynamic is fixed by the model's Python code.
        """
        self._warnings, self.conditions, self.assumptions = [], [], []
        sizes = requested_sizes(program, self.shapes)
        static = self._squeezed(program, sizes) if way.oblivious else set()
        static |= self._fixed(program, sizes, way)
        if not static:
            return program
        _LOGGER.debug(
            "captured again, the model depends on sizes of Dim.AUTO: static are %s",
            ", ".join(self.shapes.name(leaf, axis) for leaf, axis in sorted(static)),
        )
        self.shapes = self.shapes.with_static(static)
        self.left = max(self.left, 1)
        program = self.refined(way, self.shapes.reading(way.tied))
        return self.settle_sizes(program, way)

    def _squeezed(self, program: torch.export.ExportedProgram, sizes: Sequence[RequestedSize]) -> set[tuple[int, int]]:
        """The ``Dim.AUTO`` dimensions of size 1 that the model squeezes."""
        static: set[tuple[int, int]] = set()
        for kept in kept_axes(program, {row[3].node.expr for row in sizes}):
            for leaf, axis, must_be_dynamic, _ in _concerned(sizes, kept.symbols):
                if must_be_dynamic:
                    self._warnings.append(_squeeze_text(self.shapes.name(leaf, axis), kept))
                else:
                    static.add((leaf, axis))
        return static

    def _fixed(
        self, program: torch.export.ExportedProgram, sizes: Sequence[RequestedSize], way: _Way
    ) -> set[tuple[int, int]]:
        """The ``Dim.AUTO`` dimensions in an expression that the model's code turns into a constant."""
        names = size_names(program, self.shapes, sizes)
        replaced = sizes[0][3].node.shape_env.replacements if sizes else {}
        self.names = {str(symbol): names[str(symbol)] for symbol in replaced if str(symbol) in names}
        ranges = declared_ranges(self.shapes, sizes)
        self.conditions += at_least_two(ranges)
        self._warnings += [*text_warnings(self._recorded.texts), *truth_warnings(self._recorded.truths)]
        guards = size_guards(program, ranges, self._recorded)
        static = self._broadcast(program, sizes, names)
        self.bounds = guards.bounds
        self._apply_bounds(program, sizes, ranges, names)
        self.assumptions = [a for a in guards.assumptions if not self._follows_from_names(way, sizes, names, a)]
        self._warnings += [warning_text(a, names) for a in self.assumptions if is_own(a.place)]
        conditions = guards.conditions
        if way.oblivious:
            conditions = [*small_sizes(program, [row[3] for row in sizes], self._recorded.places), *conditions]
        if way.below:
            known = {condition.expr for condition in conditions}
            in_decompositions = conditions_of_decompositions(program, ranges, since=sys.maxsize)
            conditions += [condition for condition in in_decompositions if condition.expr not in known]
        for condition in squeezed_sizes(program, narrowed(ranges, self.bounds)):
            self.conditions.append(condition)
            self._warnings.append(squeezed_text(condition, names))
        multiples = declared_multiples(program, self.shapes)
        for condition in conditions:
            if self._follows_from_names(way, sizes, names, condition):
                continue
            if follows_from_multiples(multiples, condition.expr):
                continue
            concerned = _concerned(sizes, condition.symbols) if condition.fixed else []
            for leaf, axis, must_be_dynamic, size in concerned:
                if must_be_dynamic:
                    raise fixed_by(self.shapes.name(leaf, axis), condition, names, size.node.hint)
                static.add((leaf, axis))
            if not concerned:
                self.conditions.append(condition)
                self._warnings += [warning_text(condition, names)] if condition.of_code else []
        return static

    def _broadcast(
        self, program: torch.export.ExportedProgram, sizes: Sequence[RequestedSize], names: Mapping[str, str]
    ) -> set[tuple[int, int]]:
        """The ``Dim.AUTO`` dimensions of size 1 that are broadcast to a size which the model uses."""
        static: set[tuple[int, int]] = set()
        for broadcast, condition in used_sizes(program, self._recorded.broadcasts):
            concerned = _concerned(sizes, {broadcast.small})
            automatic = {(leaf, axis) for leaf, axis, must_be_dynamic, _ in concerned if not must_be_dynamic}
            if not automatic:
                self.conditions.append(condition)
                self._warnings.append(used_size_text(broadcast, condition, names))
            static |= automatic
        return static

    def _apply_bounds(
        self,
        program: torch.export.ExportedProgram,
        sizes: Sequence[RequestedSize],
        declared: Mapping[Any, tuple[int, int | None]],
        names: Mapping[str, str],
    ) -> None:
        """Applies the bounds of the model to the ranges of the program, and warns of the bounds of its code.

        Raises:
            FixedDimensionError: The user declared sizes beyond an operator's bound.
        """
        for bound in self.bounds:
            low, high = declared.get(bound.expr.lhs, (0, None))
            for leaf, axis, _, _ in _concerned(sizes, bound.symbols):
                if high is not None and not bound.of_code and not bound.allows({bound.expr.lhs: sympy.Integer(high)}):
                    raise outside_declared(self.shapes.name(leaf, axis), bound, names, low, high)
        for symbol, (smallest, largest) in narrowed({}, self.bounds).items():
            known = program.range_constraints.get(symbol, ValueRanges(0, int_oo))
            program.range_constraints[symbol] = known & ValueRanges(smallest, int_oo if largest is None else largest)
        self._warnings += bound_warnings(self.bounds, names)

    @property
    def numbers(self) -> Mapping[str, torch.Tensor]:
        """The buffers from which the model's code read numbers, by their names."""
        return self._request.shared.get("numbers", {})

    @property
    def is_generalized(self) -> bool:
        """Whether an operator got the answer for sizes other than 1, though the example's size is 1."""
        return self._recorded.generalized

    def fixed_by_operator(self) -> FixedDimensionError | None:
        """The error for a dimension that must be dynamic and that an operator of a failed attempt fixes."""
        tensors = {name: t.shape for name, t in (*self.module.named_parameters(), *self.module.named_buffers())}
        for fixing in itertools.chain.from_iterable(self._fixings):
            for leaf, axis, _ in self.shapes.must_be_dynamic():
                if self.shapes.source(leaf, axis) in (fixing.source, f"L{fixing.source}"):
                    return fixed_by_operator(self.shapes.name(leaf, axis), fixing, tensors)
        return None

    def _follows_from_names(
        self, way: _Way, sizes: Sequence[RequestedSize], names: Mapping[str, str], condition: Condition
    ) -> bool:
        """Whether a condition follows from the user's names of the sizes."""
        return way.tied and (
            equates_one_name(self.shapes, sizes, condition.expr) or follows_from_names(names, sizes, condition.expr)
        )

    def warn(self) -> None:
        """Warns of the conditions of the program that is returned."""
        for text in dict.fromkeys((*self._warnings, *refusal_texts(self._refusals), *self._of_patches)):
            warn(text)

    def _once(self, way: _Way, spec: Any) -> torch.export.ExportedProgram:
        self.left -= 1
        forget_compiled_wrappers()
        while True:
            self._refusals, self._zeros = [], 0
            try:
                return self._answered(way, spec, [])
            except Exception as error:
                if way.strict or not self._branches.change(error):
                    raise
                why = str(error).partition("\n")[0]
                _LOGGER.debug("captured again, with other branches on values as selections: %s", why)

    def _answered(
        self, way: _Way, spec: Any, known: list[Refusal | Zero | EarlyReturn]
    ) -> torch.export.ExportedProgram:
        """The program, where questions about values whose answers are known, or can be tried, get these."""
        while True:
            program, found = self._tried(way, spec, known, first := self._refused_last())
            if program is None and (found is None or (isinstance(found, Zero) and found.may_refuse)):
                found = self._tried(way, spec, known, not first)[1]
            answered = self._returned_early(way, spec, known, found) if isinstance(found, Zero) else found
            if answered is None:
                break
            known.append(answered)
            if isinstance(answered, Refusal):
                self._refusals.append(answered)
        for place, early in enumerate(known):
            if program is not None and isinstance(early, EarlyReturn):
                before, after = (
                    [k.size for k in part if isinstance(k, Zero)] for part in (known[:place], known[place:])
                )
                if not early.is_included_in(program, self._asked(program), before, after):
                    program, known = None, known[:place]
        return program or self._export(way, spec, Answers(known))  # once more, for torch's error with its place

    def _returned_early(
        self, way: _Way, spec: Any, known: Sequence[Refusal | Zero | EarlyReturn], zero: Zero
    ) -> EarlyReturn | None:
        """The model for a size of 0 that the data decide, if it can be captured, and may be included in the rest of the model."""
        self._zeros += 1
        is_first = not any(isinstance(k, Zero) for k in known)
        if self._zeros > EARLY_RETURNS:
            return None
        try:
            if is_first and not may_be_included(self._export(way, spec, Answers(known, finds=True)), zero.size):
                return None
            program = self._answered(way, spec, [*known, zero])
        except (Exception, SystemExit):
            return None
        return EarlyReturn(not zero.answer, zero.question, zero.size, program, self._asked(program))

    def _asked(self, program: torch.export.ExportedProgram) -> frozenset[str]:
        """The conditions on sizes of inputs that the capture of a program, the last one, has asked for."""
        recorded, sizes = self._recorded, requested_sizes(program, self.shapes)
        guards = [guard.expr for guard in sizes[0][3].node.shape_env.guards] if sizes else []
        questions = [question.expr for question in recorded.questions]
        return frozenset(map(str, (*guards, *questions, *recorded.fixings, *recorded.broadcasts)))

    def _refused_last(self) -> bool:
        """The first answer to try: the answer that the model refused last, as in a check within a loop."""
        return not self._refusals[-1].answer if self._refusals else True

    def _tried(
        self, way: _Way, spec: Any, known: Sequence[Refusal | Zero | EarlyReturn], answer: bool
    ) -> tuple[torch.export.ExportedProgram | None, Refusal | Zero | None]:
        """Exports, with an answer to the first question about values that has no known answer.

        Returns:
            The program, where there is no such question; else the model's refusal, if it is one, or the size that is asked about.
        """
        answers = None
        if not way.strict and len(known) < REFUSALS:
            answers = Answers(tuple(known), answer)
        try:
            program = self._export(way, spec, answers)
        except (Exception, SystemExit) as error:
            if answers is None or answers.error is None:
                raise
            return None, answers.refused(error) or answers.zero
        finally:
            if answers is not None:
                self.doubt = self.doubt or answers.doubt
                answers.close()
        return (program, None) if answers is None or answers.error is None else (None, answers.zero)

    def _export(self, way: _Way, spec: Any, answers: Answers | None) -> torch.export.ExportedProgram:
        has_empty = way.oblivious and self.shapes.has_empty()
        decides = self._mentions.compares_with_truth
        branches = None if way.strict else self._branches
        trace = Trace(
            strict=way.strict,
            general=way.general,
            has_empty=has_empty,
            answers=answers,
            branches=branches,
            decides=decides,
        )
        request = replace(self._request, strict=way.strict, below=way.below, counts={}, warnings=[])
        with contextlib.ExitStack() as stack:
            with span("preparation"):
                stack.enter_context(quiet())
                stack.enter_context(transforms_closed())
                stack.enter_context(torch.no_grad())
                # Oblivious: sizes 0 and 1 of the example inputs imply nothing about other sizes, and torch doesn't take them for
                # constants.
                stack.enter_context(fx_config.patch(backed_size_oblivious=way.oblivious))
                # Copies: torch.export makes a single input of a tensor that is passed twice, and leaves marks on its inputs.
                args, kwargs = copied((self.args, self.kwargs))
                for patch in self._patches:
                    stack.enter_context(made_by(patch, self.module, request))  # type: ignore[arg-type]
                if way.below:
                    stack.enter_context(traced_below(self.module))
                # Last, so that calls of operators that a plugin's patch answers by itself are observed too.
                records = stack.enter_context(torch_patched(trace))
                if branches is not None:
                    stack.enter_context(branches.applied())
                self._recorded = records["questions"]
                self._fixings.append(self._recorded.fixings)
            with span("torch.export.export"):
                # In a context of its own: context variables that the model's code sets are restored.
                program = contextvars.copy_context().run(
                    torch.export.export, self.module, args, kwargs or None, dynamic_shapes=spec, strict=way.strict
                )
            if self._recorded.unknown is not None:  # the model handled an error that eager PyTorch does not raise
                raise self._recorded.unknown
            check_constants(program)
            if not way.strict and names_transforms(self._mentions):
                check_tangents(program)
            release_inputs(program)
            request.warnings.extend(replaced_texts(program, request.shared.get("replaced", {})))
        self.repeated, self._of_patches = request.counts.get("repeated", 0), request.warnings
        return program


def _concerned(sizes: Sequence[RequestedSize], symbols: Set[Any]) -> list[RequestedSize]:
    return [row for row in sizes if row[3].node.expr.free_symbols & symbols]


def _squeeze_text(name: str, kept: KeptAxis) -> str:
    where = f" at {kept.place}" if kept.place else ""
    return (
        f"squeeze{where} keeps axis {kept.axis} of its input: {name} was declared dynamic, and a model's number of "
        "axes can't depend on a size. PyTorch removes the axis where its size is 1, as in the example inputs; the exported "
        "model does not. Make that dimension static, or name the axes to squeeze."
    )
