"""Verification: the exported model against eager PyTorch, at several sizes and values."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from onnxplug import logs
from onnxplug.capture.eager import full_float32, inference
from onnxplug.capture.places import plain_tensors
from onnxplug.capture.signature import Captured, InputKind, OutputKind
from onnxplug.errors import UsageError, VerificationError
from onnxplug.fake import is_fake
from onnxplug.interpret.ranges import ranges
from onnxplug.observers import step
from onnxplug.packages import load
from onnxplug.plugin_api import VerificationCase, VerificationReport, VerificationRequest
from onnxplug.program import OnnxProgram
from onnxplug.run.session import Runner
from onnxplug.run.weights import check_numbers, first_that_differs
from onnxplug.text import counted
from onnxplug.torch_private import pytree
from onnxplug.verification.choices import outputs_of_choices
from onnxplug.verification.compare import compare
from onnxplug.verification.conditioning import Widening, slack_by_runs
from onnxplug.verification.differences import ComparedInputs
from onnxplug.verification.eager import copied, state_of, tensors_of
from onnxplug.verification.inputs import ATTEMPTS, Sizes, clone_leaves, generated_inputs, integers, sized
from onnxplug.verification.outputs import (
    MODEL,
    Outputs,
    Replay,
    Tolerances,
    compare_all,
    outputs_of,
    size_text,
    where_text,
)
from onnxplug.warn import warn

_LOGGER = logs.logger("verify")

ROUNDING_HINT = (
    "PyTorch's own results change by as much where inputs and weights change by one unit of rounding, so these inputs do not "
    "tell whether the export is right. Verify it on others (verify(args=…)), or in float64."
)

#: ``(leaves, failed) -> verdict``: says who is wrong on flattened inputs; ``failed``: the outputs differ.
Judge = Callable[[Sequence[Any], bool], Any]


class Refused(Exception):
    """Eager PyTorch rejects the inputs; the cause has the reason."""


class NotFinite(Exception):
    """No element of eager PyTorch's results in floats is finite at generated inputs, and some are at the example inputs."""


class Uncertain(Exception):
    """Eager PyTorch's results at the inputs change with rounding as much as ONNX's differ; the cause has the difference."""


def verify(program: OnnxProgram, request: VerificationRequest) -> VerificationReport:
    """Compares a program with eager PyTorch: on the export's inputs (or given inputs), and on generated inputs.

    Raises:
        UsageError: The verdict on intermediate values is asked of a program without a captured graph, or in another precision.
        VerificationError: An output differs, the model has other outputs than PyTorch, or either does not run.
    """
    if request.intermediates and program.recipe is None:
        raise UsageError("intermediates=True needs a program that to_onnx made: this one has no captured graph")
    if request.intermediates and program.precision is not None:
        raise UsageError(
            "intermediates=True is about the translation, in the model's own precision",
            hint="Export it without dtype= and quantize=.",
        )
    if program.unquantised is not None:
        plain = copy.copy(program)
        plain.model, plain.unquantised, plain.precision, plain.half = program.unquantised, None, None, None
        report = verify(plain, request)
        report.quantised = program.precision
        return report
    args, kwargs = request.args, request.kwargs
    tolerances = Tolerances(rtol=request.rtol, atol=request.atol, precision=program.half)
    judge = partial(load("intermediates="), program) if request.intermediates else None
    replay = None
    if program.recipe is not None and program.half is None:
        replay = partial(outputs_of_choices, program.model, program.recipe, program.host)
    captured, exported = _captured(program)
    sets = [(args or (), kwargs or {})]
    if args is None and kwargs is None:
        sets = [(captured.args, captured.kwargs), *captured.examples]
    if not any(sets[0]) and any(s.kind is InputKind.USER for s in program.inputs):
        raise VerificationError(
            "verification needs example inputs, and the ExportedProgram carries none", hint="program.verify(args=…)"
        )
    inputs = [program.flatten(*example) for example in sets]
    pair = _Pair.of_program(program, inputs[0], tolerances, judge, replay=replay)
    values = _recorded(program)
    sizes = Sizes.of(
        inputs[0], values, exported.range_constraints, captured.dim_names, captured.conditions, captured.multiples
    )

    def draw(seed: int, attempt: int) -> tuple[list[Any], Mapping[str, int]] | None:
        chosen = sizes.draw(seed, attempt)
        if not sizes.allows(chosen, values):
            return None
        return generated_inputs(inputs[0], values, chosen, seed, attempt), pair.named(chosen)

    report = _verify(pair, inputs, request.seeds, draw)
    if judge is not None:
        report.intermediates = judge(inputs[0], False)
    return report


def verify_inputs(
    program: OnnxProgram, sets: Iterable[tuple[Sequence[Any], Mapping[str, Any]]], tolerances: Tolerances
) -> VerificationReport:
    """Compares a program with eager PyTorch only on given inputs.

    Args:
        program: The program.
        sets: Positional and keyword inputs.
        tolerances: How far results may differ.

    Raises:
        VerificationError: A result differs, or either model does not run.
    """
    inputs = [program.flatten(args, kwargs) for args, kwargs in sets]
    return _verify(_Pair.of_program(program, inputs[0], tolerances), inputs, (), lambda seed, attempt: None)


def verify_runner(
    runner: Runner,
    model: Any,
    eager: Callable[[Any, list[Any]], list[tuple[str, Any]]],
    feed: Callable[[list[Any]], Mapping[str, Any]],
    leaves: Sequence[Any],
    seeds: Sequence[int],
    draw: Callable[[int, int], tuple[list[Any], Mapping[str, int]] | None],
    replay: Replay | None = None,
) -> VerificationReport:
    """Compares an ONNX model that no export made here with a PyTorch model.

    Args:
        runner: Runs the ONNX model.
        model: The PyTorch model.
        eager: Runs it on flattened inputs, which it may write: its results by the names of the ONNX model's.
        feed: The ONNX model's inputs, of flattened ones.
        leaves: The flattened example inputs.
        seeds: One set of generated inputs a seed.
        draw: Generates inputs and their sizes for a seed and an attempt; ``None`` where the sizes are not the model's.
        replay: What PyTorch has for ONNX's choices among equal elements.

    Raises:
        VerificationError: An output differs, or one of both models does not run.
    """
    return _verify(_Pair(runner, model, eager, feed, replay=replay), [leaves], seeds, draw)


@full_float32
def _verify(
    pair: _Pair,
    examples: Sequence[Sequence[Any]],
    seeds: Sequence[int],
    draw: Callable[[int, int], tuple[list[Any], Mapping[str, int]] | None],
) -> VerificationReport:
    """Compares both models on inputs.

    Args:
        pair: The models.
        examples: Flattened inputs that the PyTorch model must take.
        seeds: A set of generated inputs for each seed, of sizes that the PyTorch model accepts.
        draw: Generates inputs and their sizes for a seed and an attempt; ``None`` where the sizes are not the model's.

    Raises:
        VerificationError: A result differs, or either model does not run.
    """
    report = VerificationReport()
    sets = len(examples) + len(seeds)
    for number, leaves in enumerate(examples):
        step(f"inputs {number + 1} of {sets}", number, sets)
        try:
            report.cases.append(pair.compare(leaves, pair.named(pair.sizes(leaves)), None))
        except Refused as refusal:
            error = refusal.__cause__
            why = f"the PyTorch model does not run on its own inputs: {error}"
            raise VerificationError(why, hint=pair.assumed(leaves)) from error
    for number, seed in enumerate(seeds, len(examples)):
        step(f"inputs {number + 1} of {sets}", number, sets)
        tried = len(report.skipped)
        failure: BaseException | None = None
        of_examples = False
        for attempt in range(ATTEMPTS):
            drawn = draw(seed, attempt) if attempt >= ATTEMPTS // 2 or not of_examples else None
            if drawn is None:
                continue
            try:
                report.cases.append(pair.compare(*drawn, seed))
                break
            except Refused as refusal:
                report.skipped.append(f"{size_text(drawn[1])}: {_reason(refusal.__cause__)}")
                _LOGGER.debug("other sizes are drawn, PyTorch rejects %s", report.skipped[-1])
            except NotFinite:  # NaN is equal to NaN: nothing was compared
                of_examples = True  # the later attempts draw from the elements of the examples
                report.skipped.append(f"{size_text(drawn[1])}: no element of PyTorch's results is finite")
                _LOGGER.debug("other inputs are drawn: %s", report.skipped[-1])
            except Uncertain as uncertain:  # such inputs prove neither that the model is right nor that it is wrong
                failure = failure or uncertain.__cause__
                report.skipped.append(f"{size_text(drawn[1])}: rounding alone changes PyTorch's own results by as much")
                _LOGGER.debug("other inputs are drawn: %s", report.skipped[-1])
        else:
            if failure is not None:
                raise failure
            why = f"; the last one: {report.skipped[-1]}" if len(report.skipped) > tried else ""
            warn(
                f"verification: nothing was compared for seed {seed}, none of {ATTEMPTS} draws of sizes fits the model{why}"
            )
    return report


def _any_finite(values: Iterable[Any]) -> bool | None:
    """Whether an element of the floats is finite; ``None`` where there are no floats."""
    floats = [
        v for v in values if isinstance(v, torch.Tensor) and v.numel() and (v.is_floating_point() or v.is_complex())
    ]
    if any(v.dtype == torch.float4_e2m1fn_x2 for v in floats):  # which has no other numbers
        return True
    wide = (v.float() if v.element_size() == 1 else v for v in floats)  # torch has few functions of 8-bit floats
    return any(bool(v.isfinite().any()) for v in wide) if floats else None


def _captured(program: OnnxProgram) -> tuple[Captured, torch.export.ExportedProgram]:
    if program.captured is None or program.exported_program is None:
        raise VerificationError("the program has no PyTorch model to compare with")
    model = program.captured.reference
    tensors = chain(model.parameters(), model.buffers()) if isinstance(model, torch.nn.Module) else ()
    if any(map(is_fake, (*program.exported_program.state_dict.values(), *tensors))):
        check_numbers(program.model.graph.initializers.values(), "the model can't be verified")
        raise VerificationError(
            "there is nothing to compare with: the weights of the PyTorch model have no numbers, even where the program was "
            "given some",
            hint="Load the weights into a PyTorch model and compare that with the file: `onnxplug verify model.onnx TARGET`.",
        )
    return program.captured, program.exported_program


def _check_weights(program: OnnxProgram) -> None:
    """Checks that a program was given no other weights than the PyTorch model has.

    Raises:
        VerificationError: It was.
    """
    captured, exported = _captured(program)
    state = exported.state_dict
    if isinstance(captured.reference, torch.nn.Module):
        state = {**state, **tensors_of(captured.reference)}
    if (name := first_that_differs(program.applied, state)) is not None:
        raise VerificationError(
            f"there is nothing to compare with: the program was given other weights than the PyTorch model has, {name!r} for "
            "example",
            hint="Give the model the same weights (model.load_state_dict), or compare a PyTorch model that has them with the file: "
            "`onnxplug verify model.onnx TARGET`.",
        )


def _recorded(program: OnnxProgram) -> list[Any]:
    """torch's record of each of the flattened inputs."""
    return [slot.node.meta.get("val") for slot in program.inputs if slot.position is not None]


def _judged(error: VerificationError, judge: Judge | None, leaves: Sequence[Any]) -> VerificationError:
    """An error with its inputs, and with a judge's verdict on them."""
    error.inputs = list(leaves)
    if judge is None:
        return error
    verdict = judge(leaves, True)
    judged = VerificationError(f"{error.message}\n{verdict}")
    judged.verdict, judged.inputs = verdict, list(leaves)
    return judged


@dataclass
class _Pair:
    """Both models.

    Attributes:
        runner: Runs the ONNX model.
        model: The eager model.
        eager: Runs a PyTorch model on flattened inputs, which it may write: its results by the names of the ONNX model's.
        feed: Makes the ONNX model's inputs of flattened inputs.
        tolerances: How far results may differ.
        judge: Decides who is wrong.
        replay: Gives PyTorch's results for ONNX's choices among equal elements.
        program: The exported program; its capture explains differences. ``None`` for a model from a file.
        has_finite: Whether an element of a result was finite at the inputs so far.
    """

    runner: Runner
    model: Any
    eager: Callable[[Any, list[Any]], list[tuple[str, Any]]]
    feed: Callable[[list[Any]], Mapping[str, Any]]
    tolerances: Tolerances = MODEL
    judge: Judge | None = None
    replay: Replay | None = None
    program: OnnxProgram | None = None
    has_finite: bool = False

    @classmethod
    def of_program(
        cls,
        program: OnnxProgram,
        leaves: Sequence[Any],
        tolerances: Tolerances,
        judge: Judge | None = None,
        **options: Any,
    ) -> _Pair:
        """The pair of a program; ``leaves`` are the inputs for errors."""
        captured, exported = _captured(program)
        _check_weights(program)
        spec: Any = exported.call_spec.in_spec
        try:
            runner = Runner(program.model, program.host)
        except VerificationError as error:
            raise _judged(error, judge, leaves) from error.__cause__
        return cls(
            runner,
            captured.reference if captured.reference is not None else exported.module(),
            lambda model, leaves: eager_outputs(program, model, leaves, spec),
            lambda leaves: program.feed(*pytree.tree_unflatten(leaves, spec)),
            tolerances,
            judge,
            program=program,
            **options,
        )

    def sizes(self, leaves: Sequence[Any]) -> dict[Any, int]:
        """The sizes of inputs, by torch's symbols; empty for a file."""
        if self.program is None:
            return {}
        return {
            wanted.node.expr: int(size)
            for wanted, size in sized(leaves, _recorded(self.program))
            if isinstance(wanted, torch.SymInt) and wanted.node.expr.is_Symbol
        }

    def named(self, sizes: Mapping[Any, int]) -> dict[str, int]:
        """Sizes by the user's names for the symbols."""
        names = _captured(self.program)[0].dim_names if self.program is not None else {}
        return {names.get(str(symbol), str(symbol)): size for symbol, size in sizes.items()}

    def compare(self, leaves: Sequence[Any], sizes: Mapping[str, int], seed: int | None) -> VerificationCase:
        """Compares on some inputs.

        Raises:
            Refused: The PyTorch model does not run on them.
            VerificationError: A result differs, there are other outputs, or the ONNX model does not run. With a judge it has the
                attribute ``verdict``, and its text at the end of its message.
        """
        try:
            case = self._compare(leaves, sizes, seed)
        except VerificationError as error:
            raise _judged(error, self.judge, leaves) from error.__cause__
        _LOGGER.debug(
            "the same %s: %.1e at most, by %s", where_text(sizes, seed), case.max_abs_difference, case.runtime
        )
        return case

    def _compare(self, leaves: Sequence[Any], sizes: Mapping[str, int], seed: int | None) -> VerificationCase:
        runner = self.runner
        if seed is not None and any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves):
            self._check_indices(leaves)
        try:
            expected = self.eager(self.model, clone_leaves(leaves))
        except VerificationError:
            raise
        except Exception as error:
            raise Refused from error
        try:
            values = runner(self.feed(clone_leaves(leaves)))
        except VerificationError as error:
            where = where_text(sizes, seed)
            raise VerificationError(
                f"{error.message} ({where})", hint=error.hint or self.assumed(leaves) or self._why(leaves)
            ) from error
        outputs = outputs_of(
            dict(zip(runner.output_names, values, strict=True)),
            expected,
            self.eager,
            self.model,
            leaves,
            self.replay,
            self.program.exported_program if self.program is not None else None,
            self.tolerances.precision,
        )
        compared = ComparedInputs.begun(sizes, seed, runner.runtime)
        try:
            worst, unstable, ties = compare_all(outputs, self.tolerances, sizes, seed, compared)
        except VerificationError as error:
            if (reason := self.assumed(leaves) or self._unsteady(leaves, expected)) is not None:
                compared.finish()
                raise VerificationError(error.message, hint=reason) from error
            if not self._wavers(outputs, leaves):
                compared.finish()
                raise
            unsure = VerificationError(error.message, hint=ROUNDING_HINT)
            if seed is not None:
                raise Uncertain from unsure
            raise unsure from error
        compared.finish()
        finite = _any_finite(value for _, value in expected)
        if finite is False and seed is not None and self.has_finite:
            raise NotFinite
        self.has_finite |= bool(finite)
        return VerificationCase(sizes, seed, worst, runner.runtime, unstable, ties)

    def _check_indices(self, leaves: Sequence[Any]) -> None:
        """Asks ONNX Runtime first: an index beyond a table ends all use of the GPU in this process where PyTorch meets it.

        Raises:
            Refused: ONNX Runtime meets an index beyond a table.
        """
        try:
            self.runner(self.feed(clone_leaves(leaves)))
        except VerificationError as error:
            if re.search(r"\bind(ex|ices|ice)\b", error.message):
                raise Refused from error

    def _wavers(self, outputs: Outputs, leaves: Sequence[Any]) -> bool:
        """Whether PyTorch's results change as much as ONNX's differ, where inputs and weights change by one unit of rounding.

        Unlike in a comparison, choices may flip.
        """
        slack = Widening(slack_by_runs(self.eager, self.model, leaves, self.tolerances.precision, same_choices=False))
        try:
            compare_all(replace(outputs, slack=slack, ties=lambda: None), self.tolerances, {}, None)
        except VerificationError:
            return False
        return True

    def _unsteady(self, leaves: Sequence[Any], expected: Sequence[tuple[str, Any]]) -> str | None:
        """A hint, where PyTorch itself gives other results when it runs again."""
        before = attributes_of(self.model)
        again = self.eager(self.model, clone_leaves(leaves))
        for (name, first), (_, second) in zip(expected, again, strict=True):
            if isinstance(first, torch.Tensor) and not compare(first, second, rtol=0, atol=0).equal:
                after = attributes_of(self.model)
                changed = [path for path, value in after.items() if before.get(path, self) != value]
                if changed:
                    return (
                        f"PyTorch's own {name!r} differs from run to run: forward changes {', '.join(changed[:3])}, of which the "
                        "export has the value of then. Register what the model writes as a buffer, or make it an input."
                    )
                return (
                    f"PyTorch's own {name!r} differs from run to run: the model draws random numbers, and can't be compared. Call "
                    "model.eval() first if dropout is meant to be off."
                )
        return None

    def assumed(self, leaves: Sequence[Any]) -> str | None:
        """A hint, where the model is not right for the sizes of the inputs, as beyond a range, or may not be for a size of 1."""
        if self.program is None:
            return None
        captured, sizes = _captured(self.program)[0], self.sizes(leaves)
        named, allowed = self.named(sizes), ranges(captured)
        for name in named.keys() & allowed.keys():
            size, high = named[name], allowed[name].high
            if size < allowed[name].low or (high is not None and size > high):
                return f"The exported model is right only where {name} is {allowed[name].text()}; here it is {size}."
        for condition in captured.conditions:
            if condition.symbols <= sizes.keys() and not condition.allows(integers(sizes)):
                return (
                    f"The exported model is right only where {condition.text(captured.size_names())}, as the export warned"
                    f"{f' ({condition.place})' if condition.place else ''}."
                )
        for assumption in captured.assumptions:
            if assumption.symbols <= sizes.keys() and not assumption.allows(integers(sizes)):
                return (
                    f"The model's code asks {assumption.text(captured.size_names())} at {assumption.place}, and the exported model "
                    "has the branch of the larger sizes. If that is the cause, declare the range (torch.export.Dim(name, min=2)) "
                    "or use torch.where or torch.cond."
                )
        return None

    def _why(self, leaves: Sequence[Any]) -> str | None:
        """A hint, where torch's own exported program does not run on the inputs either."""
        if self.program is None:
            return None
        _, exported = _captured(self.program)
        args, kwargs = pytree.tree_unflatten(clone_leaves(leaves), exported.call_spec.in_spec)
        try:
            exported.module()(*args, **kwargs)
        except Exception as error:
            return (
                f"torch.export's program does not run on these inputs either ({_reason(error)}). Name a dimension whose size "
                "depends on others by an expression of their names ('past + sequence')."
            )
        return None


def _reason(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def eager_outputs(
    program: OnnxProgram, reference: Callable[..., Any], leaves: list[Any], spec: Any
) -> list[tuple[str, Any]]:
    """PyTorch's result for each output of the ONNX graph, by its name, including mutated inputs and buffers.

    Args:
        program: The program.
        reference: The eager model; a module that writes its buffers is copied first.
        leaves: The flattened inputs; the model may write them.
        spec: Their structure.

    Raises:
        VerificationError: The eager model has other results than the captured model, or an output of the ONNX graph has no
            counterpart in it.
    """
    model: Any = reference
    if isinstance(reference, torch.nn.Module) and any(s.kind is OutputKind.BUFFER_MUTATION for s in program.slots):
        model = copied(reference)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with inference():
        returned = pytree.tree_leaves(model(*args, **kwargs))
    users = [slot for slot in program.slots if slot.kind is OutputKind.USER]
    if len(returned) != len(users):
        raise VerificationError(
            f"PyTorch returns {counted(len(returned), 'result')} where the exported program has {len(users)}",
            hint="The model returns something else when it is exported: see torch.compiler.is_exporting().",
        )
    expected: list[tuple[str, Any]] = []
    for slot, value in zip(users, returned, strict=True):
        if (slot.value is None) != (value is None):
            raise VerificationError(f"PyTorch returns {value!r} where the exported program has {slot.value!r}")
        if value is not None:
            expected.append((slot.name, value))
    inputs = {slot.node.name: slot for slot in program.inputs} | {slot.name: slot for slot in program.inputs}
    for slot in program.slots:
        if slot.kind is OutputKind.USER or slot.value is None:
            continue
        source = inputs.get(slot.target or "")
        state = None
        if slot.kind is OutputKind.BUFFER_MUTATION:
            state = state_of(model, _name_in(reference, slot.target or "", program))
        if state is not None:
            expected.append((slot.name, state))
        elif slot.kind is OutputKind.INPUT_MUTATION and source is not None and source.position is not None:
            expected.append((slot.name, leaves[source.position]))
        else:
            raise VerificationError(
                f"the output {slot.name!r} holds the new value of {slot.target!r}, which the PyTorch model does not have"
            )
    return expected


def _name_in(reference: Any, target: str, program: OnnxProgram) -> str:
    """The name in the model of a tensor of the captured program, which counts those that are in lists of modules."""
    constant = _captured(program)[1].constants.get(target)
    if constant is None or not isinstance(reference, torch.nn.Module):
        return target
    return next((str(place) for place, tensor in plain_tensors(reference) if tensor is constant), target)


def attributes_of(model: Any) -> dict[str, Any]:
    """A fingerprint that shows whether a run has changed a model: the attributes of its modules by path, tensors by version."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {
        f"{path}.{name}".removeprefix("."): _state_of_attribute(value)
        for path, module in model.named_modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if name not in ("_parameters", "_buffers", "_modules")
    }


def _state_of_attribute(value: Any, depth: int = 3) -> Any:
    """The state of an attribute, and of the items in a list or dict as deep as that."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, int | float | str | complex | None):
        return type(value), repr(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return id(value), [_state_of_attribute(item, depth - 1) for item in items] if depth else len(items)
