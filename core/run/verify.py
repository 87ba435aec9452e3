"""Verification: the exported model against eager PyTorch, at several sizes and values."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import onnx_ir as ir
import torch

from onnxplug import logs
from onnxplug.capture.eager import inference
from onnxplug.capture.signature import Captured, InputKind, InputSlot, OutputKind, OutputSlot, present_name
from onnxplug.errors import VerificationError
from onnxplug.fake import is_fake
from onnxplug.host import RuntimeHost
from onnxplug.observers import step
from onnxplug.run.compare import compare
from onnxplug.run.differences import begin_case
from onnxplug.run.inputs import ATTEMPTS, Sizes, clone_leaves, generated_inputs, integers, resized_inputs, sized
from onnxplug.run.outputs import MODEL, Replay, Tolerances, compare_all, outputs_of, size_text, where_text
from onnxplug.run.report import VerificationCase, VerificationReport
from onnxplug.run.session import Runner
from onnxplug.run.weights import check_numbers
from onnxplug.text import counted
from onnxplug.torch_private import pytree


class Verifiable(Protocol):
    """What verification reads of an exported program: :class:`onnxplug.OnnxProgram` has it.

    Attributes:
        model: The ONNX model.
        exported_program: The captured program.
        captured: The capture, with the eager model and the example inputs.
        inputs: What the graph's inputs stand for.
        slots: What the captured graph returns, in order; ``None`` for a result that is not an output of the ONNX graph.
        host: The plugins that run custom operators.
    """

    model: ir.Model
    exported_program: torch.export.ExportedProgram | None
    captured: Captured | None
    inputs: list[InputSlot]
    slots: list[OutputSlot]
    host: RuntimeHost | None

    def feed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The graph's inputs for a call of the PyTorch model."""

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs of a call of the PyTorch model in a row."""


_LOGGER = logs.logger("verify")

#: ``(leaves, failed) -> verdict``: says who is wrong on flattened inputs; ``failed``: the outputs differ.
Judge = Callable[[Sequence[Any], bool], Any]


class Refused(Exception):
    """Eager PyTorch rejects the inputs; the cause says why."""


def verify_program(
    program: Verifiable,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    tolerances: Tolerances = MODEL,
    seeds: Sequence[int] = (0, 1, 2),
    judge: Judge | None = None,
    replay: Replay | None = None,
) -> VerificationReport:
    """See :meth:`OnnxProgram.verify`; ``judge`` says who is wrong, ``replay`` what PyTorch has for ONNX's choices among equals."""
    captured, exported = _captured(program)
    further: Sequence[tuple[Any, Any]] = ()
    if args is None and kwargs is None:
        args, kwargs, further = captured.args, captured.kwargs, captured.examples
    if not args and not kwargs and any(s.kind is InputKind.USER for s in program.inputs):
        raise VerificationError(
            "verification needs example inputs, and the ExportedProgram carries none", hint="program.verify(args=…)"
        )
    leaves = program.flatten(args or (), kwargs or {})
    sets = 1 + len(further) + len(seeds)
    step(f"inputs 1 of {sets}", 0, sets)
    try:
        comparer = _Comparer(program, tolerances, judge, replay)
    except VerificationError as error:  # the model does not load
        error.inputs = list(leaves)
        if judge is None:
            raise
        raise _judged(error, judge, leaves) from error
    report = VerificationReport(
        [comparer.given(leaves)], intermediates=judge(leaves, False) if judge is not None else None
    )
    for example in further:
        step(f"inputs {len(report.cases) + 1} of {sets}", len(report.cases), sets)
        report.cases.append(comparer.given(program.flatten(*example)))
    sizes = Sizes.of(leaves, comparer.values, exported.range_constraints, captured.dim_names, captured.conditions)
    for number, seed in enumerate(seeds, 2 + len(further)):
        step(f"inputs {number} of {sets}", number - 1, sets)
        tried = len(report.skipped)
        for attempt in range(ATTEMPTS):
            chosen = sizes.draw(seed, attempt)
            if not sizes.allows(chosen, comparer.values):
                continue
            fresh = generated_inputs(leaves, comparer.values, chosen, seed)
            try:
                report.cases.append(comparer.compare(fresh, comparer.named(chosen), seed))
                break
            except Refused as refusal:
                report.skipped.append(f"{size_text(comparer.named(chosen))}: {_reason(refusal.__cause__)}")
                _LOGGER.debug("other sizes are drawn, PyTorch rejects %s", report.skipped[-1])
        else:
            _warn_none_fits(seed, report.skipped[tried:])
    return report


def verify_inputs(
    program: Verifiable, sets: Iterable[tuple[Sequence[Any], Mapping[str, Any]]], tolerances: Tolerances
) -> VerificationReport:
    """Compares a program with eager PyTorch on given inputs alone.

    Args:
        program: The program.
        sets: Positional and keyword inputs.
        tolerances: How far results may differ.

    Raises:
        VerificationError: A result differs, or one of both does not run.
    """
    comparer = _Comparer(program, tolerances)
    return VerificationReport([comparer.given(program.flatten(args, kwargs)) for args, kwargs in sets])


def _captured(program: Verifiable) -> tuple[Captured, torch.export.ExportedProgram]:
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


def _judged(error: VerificationError, judge: Judge, leaves: Sequence[Any]) -> VerificationError:
    """An error with what a judge says of it."""
    verdict = judge(leaves, True)
    new = VerificationError(f"{error.message}\n{verdict}")
    new.verdict, new.inputs = verdict, list(leaves)
    return new


class _Comparer:
    """Runs both models of a program on inputs and compares every output."""

    def __init__(
        self, program: Verifiable, tolerances: Tolerances, judge: Judge | None = None, replay: Replay | None = None
    ) -> None:
        captured, exported = _captured(program)
        self._judge, self._replay = judge, replay
        self._program = program
        self._tolerances = tolerances
        self._names = captured.dim_names
        self._assumptions = captured.assumptions
        self._spec: Any = exported.call_spec.in_spec
        self._reference = captured.reference if captured.reference is not None else exported.module()
        self._runner = Runner(program.model, program.host)
        self.values = [slot.node.meta.get("val") for slot in program.inputs if slot.position is not None]

    def named(self, sizes: Mapping[Any, int]) -> dict[str, int]:
        """Sizes by the user's names for the symbols."""
        return {self._names.get(str(symbol), str(symbol)): size for symbol, size in sizes.items()}

    def given(self, leaves: Sequence[Any]) -> VerificationCase:
        """Compares on inputs that were given.

        Raises:
            VerificationError: A result differs, or one of both models does not run.
        """
        try:
            return self.compare(leaves, self.named(self._symbols(leaves)), None)
        except Refused as refusal:
            error = refusal.__cause__
            raise VerificationError(f"the PyTorch model does not run on its own inputs: {error}") from error

    def compare(self, leaves: Sequence[Any], sizes: Mapping[str, int], seed: int | None) -> VerificationCase:
        """Compares on some inputs.

        Raises:
            Refused: The PyTorch model does not run on them.
            VerificationError: A result differs, there are other outputs, or the ONNX model does not run. With a judge it has the
                attribute ``verdict``, and its text at the end of its message.
        """
        try:
            case = self._compare(leaves, sizes, seed)
            _LOGGER.debug(
                "the same %s: %.1e at most, by %s", where_text(sizes, seed), case.max_abs_difference, case.runtime
            )
            return case
        except VerificationError as error:
            error.inputs = list(leaves)
            if self._judge is None:
                raise
            raise _judged(error, self._judge, leaves) from error

    def _compare(self, leaves: Sequence[Any], sizes: Mapping[str, int], seed: int | None) -> VerificationCase:
        program, runner = self._program, self._runner
        try:
            expected = eager_outputs(program, self._reference, clone_leaves(leaves), self._spec)
        except VerificationError:
            raise
        except Exception as error:
            raise Refused from error
        args, kwargs = pytree.tree_unflatten(clone_leaves(leaves), self._spec)
        where = where_text(sizes, seed)
        try:
            got = runner(program.feed(args, kwargs))
        except VerificationError as error:
            raise VerificationError(f"{error.message} ({where})", hint=error.hint or self._why(leaves)) from error
        outputs = outputs_of(
            dict(zip(runner.output_names, got, strict=True)),
            expected,
            lambda model, given: eager_outputs(program, model, given, self._spec),
            self._reference,
            leaves,
            self._replay,
            program.exported_program,
        )
        begin_case(sizes, seed, runner.runtime)
        try:
            worst, unstable, ties = compare_all(outputs, self._tolerances, sizes, seed)
        except VerificationError as error:
            if (reason := self._assumed(leaves) or self._unsteady(leaves, expected)) is None:
                raise
            raise VerificationError(error.message, hint=reason) from error
        return VerificationCase(sizes, seed, worst, runner.runtime, unstable, ties)

    def _assumed(self, leaves: Sequence[Any]) -> str | None:
        """A hint, where the inputs have a size of 1 and the model's code has a branch for it."""
        sizes = self._symbols(leaves)
        for assumption in self._assumptions:
            if assumption.symbols <= sizes.keys() and not assumption.allows(integers(sizes)):
                return (
                    f"The model's code asks {assumption.text(self._names)} at {assumption.place}, and the exported model has the "
                    "branch of the larger sizes. If that is the cause, declare the range (torch.export.Dim(name, min=2)) or use "
                    "torch.where or torch.cond."
                )
        return None

    def _unsteady(self, leaves: Sequence[Any], expected: Sequence[tuple[str, Any]]) -> str | None:
        """A hint, where PyTorch itself has other results when it runs again."""
        before = attributes_of(self._reference)
        again = eager_outputs(self._program, self._reference, clone_leaves(leaves), self._spec)
        for (name, first), (_, second) in zip(expected, again, strict=True):
            if isinstance(first, torch.Tensor) and not compare(first, second, rtol=0, atol=0).equal:
                after = attributes_of(self._reference)
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

    def _symbols(self, leaves: Sequence[Any]) -> dict[Any, int]:
        """torch's symbols to the sizes of the inputs."""
        return {
            wanted.node.expr: int(size)
            for wanted, size in sized(leaves, self.values)
            if isinstance(wanted, torch.SymInt) and wanted.node.expr.is_Symbol
        }

    def _why(self, leaves: Sequence[Any]) -> str | None:
        """A hint, where torch's own exported program does not run on the inputs either."""
        exported = self._program.exported_program
        assert exported is not None
        args, kwargs = pytree.tree_unflatten(clone_leaves(leaves), self._spec)
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


def _warn_none_fits(seed: int, reasons: Sequence[str]) -> None:
    why = f"; the last one: {reasons[-1]}" if reasons else ""
    warnings.warn(
        f"verification: nothing was compared for seed {seed}, none of {ATTEMPTS} draws of sizes fits the model{why}",
        stacklevel=4,
    )


def eager_outputs(
    program: Verifiable, reference: Callable[..., Any], leaves: list[Any], spec: Any
) -> list[tuple[str, Any]]:
    """What PyTorch computes for each output of the ONNX graph, by its name: mutated inputs and buffers included.

    Args:
        program: The program.
        reference: The eager model; a module that writes its buffers is copied first.
        leaves: The flattened inputs; the model may write them.
        spec: Their structure.

    Raises:
        VerificationError: The eager model has other results than the captured one, or nothing in it is what an output
            of the ONNX graph stands for.
    """
    model: Any = reference
    if isinstance(reference, torch.nn.Module) and any(s.kind is OutputKind.BUFFER_MUTATION for s in program.slots):
        model = copy.deepcopy(reference)
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
        state = state_of(model, slot.target or "") if slot.kind is OutputKind.BUFFER_MUTATION else None
        if state is not None:
            expected.append((slot.name, state))
        elif slot.kind is OutputKind.INPUT_MUTATION and source is not None and source.position is not None:
            expected.append((slot.name, leaves[source.position]))
        else:
            raise VerificationError(
                f"the output {slot.name!r} holds the new value of {slot.target!r}, which the PyTorch model does not have"
            )
    return expected


def state_of(model: Any, name: str) -> torch.Tensor | None:
    """What a model holds by the name of a buffer; of a ScriptModule also a tensor in another attribute, or in a list there."""
    if not isinstance(model, torch.nn.Module):
        return None
    buffer = dict(model.named_buffers(remove_duplicate=False)).get(name)
    if buffer is not None or not isinstance(model, torch.jit.ScriptModule):
        return buffer
    owner: Any = model
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if isinstance(owner, list | tuple | dict):
        tensors = [leaf for leaf in pytree.tree_leaves(owner) if isinstance(leaf, torch.Tensor)]
        return tensors[int(last)] if last.isdigit() and int(last) < len(tensors) else None
    found = getattr(owner, last, None)
    return found if isinstance(found, torch.Tensor) else None


def attributes_of(model: Any) -> dict[str, Any]:
    """What tells whether a run of a model has changed it: each attribute of its modules by its path, tensors by their version."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {
        f"{path}.{name}".removeprefix("."): _state_of_attribute(value)
        for path, module in model.named_modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if name not in ("_parameters", "_buffers", "_modules")
    }


def _state_of_attribute(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, int | float | str | complex | None):
        return type(value), repr(value)
    return id(value), len(value) if isinstance(value, list | dict | set) else 0


def verify_file(
    path: str,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    host: RuntimeHost | None = None,
    replay: Replay | None = None,
) -> VerificationReport:
    """Compares an ONNX file with a PyTorch model that is run eagerly; nothing is captured.

    Args:
        path: The file.
        model: A module, function or ExportedProgram.
        args, kwargs: Example inputs; an ExportedProgram's own when there are none.
        dynamic: Input name to axis to the name of its dimension, or to an expression of other names
            (``"past + sequence"``); other sizes are tried along these.
        seeds: One set of generated inputs a seed.
        host: The plugins whose libraries and kernels run custom operators; all that are installed when ``None``.
        replay: What PyTorch has for the file's choices among equal elements (``diagnosis.file_choices``), asked where results
            differ.

    Raises:
        PluginError: A plugin's library is missing or does not load.
        VerificationError: An output differs, the number of inputs or outputs does, or the file does not run.
    """
    if isinstance(model, torch.export.ExportedProgram):
        if not args and not kwargs and model.example_inputs is not None:
            args, kwargs = model.example_inputs
        model = model.module()
    elif isinstance(model, torch.nn.Module):
        model.eval()
    runner = Runner(path, host)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    fed = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(fed) != len(runner.input_names):
        raise VerificationError(
            f"the model takes {len(runner.input_names)} inputs ({', '.join(runner.input_names)}), the target gives "
            f"{len(fed)} tensors",
            hint="Give its inputs with --input.",
        )
    order = input_order(runner.input_names, fed, args, kwargs)
    axes = {order[name]: dict(named) for name, named in (dynamic or {}).items() if name in order}
    unknown = [name for name in dynamic or {} if name not in order]
    if unknown:
        raise VerificationError(f"the model has no input {unknown[0]!r}; it has {', '.join(runner.input_names)}")
    report = VerificationReport()

    def compare_on(inputs: Sequence[Any], sizes: Mapping[str, int], seed: int | None) -> None:
        try:
            expected = _eager_by_name(model, clone_leaves(inputs), spec, runner.output_names, order)
        except VerificationError:
            raise
        except Exception as error:
            raise Refused from error
        got = runner({name: inputs[position] for name, position in order.items()})
        outputs = outputs_of(
            dict(zip(runner.output_names, got, strict=True)),
            expected,
            lambda run, given: _eager_by_name(run, given, spec, runner.output_names, order),
            model,
            inputs,
            replay,
        )
        begin_case(sizes, seed, runner.runtime)
        worst, unstable, ties = compare_all(outputs, MODEL, sizes, seed)
        report.cases.append(VerificationCase(sizes, seed, worst, runner.runtime, unstable, ties))

    try:
        compare_on(leaves, {}, None)
    except Refused as refusal:
        raise VerificationError(f"the PyTorch model does not run: {refusal.__cause__}") from refusal.__cause__
    for number, seed in enumerate(seeds, 2):
        step(f"inputs {number} of {len(seeds) + 1}", number - 1, len(seeds) + 1)
        _draw_until_one_fits(leaves, axes, seed, compare_on, report)
    return report


def _draw_until_one_fits(
    leaves: Sequence[Any],
    axes: Mapping[int, Mapping[int, str]],
    seed: int,
    compare_on: Callable[[Sequence[Any], Mapping[str, int], int | None], None],
    report: VerificationReport,
) -> None:
    tried = len(report.skipped)
    for attempt in range(ATTEMPTS):
        inputs, sizes = resized_inputs(leaves, axes, seed, attempt)
        try:
            compare_on(inputs, sizes, seed)
            return
        except Refused as refusal:
            report.skipped.append(f"{size_text(sizes)}: {_reason(refusal.__cause__)}")
    _warn_none_fits(seed, report.skipped[tried:])


def _eager_by_name(
    model: Any, leaves: list[Any], spec: Any, output_names: Sequence[str], inputs: Mapping[str, int]
) -> list[tuple[str, Any]]:
    """What PyTorch computes for each output of a file: its results in order, then the inputs and buffers that it writes.

    Raises:
        VerificationError: An output beyond the results is not named after an input or buffer, with ``_out`` behind it or as
            ``present_names=True`` calls it.
    """
    copied = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with inference():
        returned = pytree.tree_leaves(copied(*args, **kwargs))
    results = [x for x in returned if isinstance(x, torch.Tensor | bool | int | float | str)]
    expected = list(zip(output_names, results, strict=False))
    presents = {present_name(name): name for name in inputs}
    for name in output_names[len(results) :]:
        written = presents.get(name, name.removesuffix("_out"))
        state = state_of(copied, written) if written != name else None
        if state is not None:
            expected.append((name, state))
        elif written != name and written in inputs:
            expected.append((name, leaves[inputs[written]]))
        else:
            raise VerificationError(
                f"the model has the output {name!r} beyond the {len(results)} results of PyTorch, and no input or buffer is "
                f"called {written!r}"
            )
    expected += [(f"result {index}", x) for index, x in enumerate(results) if index >= len(output_names)]
    return expected


def input_order(
    names: Sequence[str], fed: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """ONNX input name to the leaf that goes there: keywords by name where every name is an input's, else by position."""
    if not args and set(kwargs) == set(names):
        position = {name: index for index, name in enumerate(kwargs)}
        return {name: position[name] for name in names}
    return dict(zip(names, fed, strict=True))
