"""``torch.compile(model, backend="onnxplug_debug")``: graphs run by the evaluator in NumPy, node by node, and compared."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnxplug_reference import ExtendedReferenceEvaluator
from onnxplug_tools.diagnosis.verdict import judge
from onnxplug_tools.diagnosis.walk import walk

from onnxplug.build.dtypes import as_array, to_torch
from onnxplug.errors import OnnxplugError, VerificationError
from onnxplug.host import Kernels, RuntimeHost
from onnxplug.plugins.runtime import kernels_for
from onnxplug.run.alignment import Alignment, Recipe
from onnxplug.run.kernels import custom_operators
from onnxplug.run.protobuf import to_proto
from onnxplug.verification.eager import feed_of, placeholder_values
from onnxplug_compile.backend import Compiled, StoredGraph, compile_graphs, recipe_for
from onnxplug_compile.binding import Executable, RunError, laid_out
from onnxplug_compile.dump import Dump
from onnxplug_compile.lowering import Lowered
from onnxplug_compile.options import DebugOptions, parse_options

_numbers = itertools.count()


class DifferenceError(RunError, VerificationError):
    """An operator of a compiled graph computes another result than PyTorch; ``verdict`` names the culprit."""


def onnxplug_debug_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """The backend ``onnxplug_debug`` of ``torch.compile``.

    Args:
        module: The graph that Dynamo captured.
        example_inputs: Its inputs, fake or not.
        options: See :class:`~onnxplug_compile.options.DebugOptions`.
        mode: Accepted as torch's modes are; changes nothing.

    Returns:
        A function that runs the graph.

    Raises:
        UsageError: An option is unknown or malformed.
        OnnxplugError: The graph can't be converted, or the evaluator lacks an operator.
    """
    parsed = parse_options(options, mode, DebugOptions)
    return compile_graphs(module, example_inputs, parsed, _executable)


def _executable(lowered: Lowered, options: DebugOptions, stored: StoredGraph) -> Executable:
    if not lowered.functional.outputs:
        return Executable(None, lowered)
    recipe, transformed, host = recipe_for(lowered, options)
    alignment = Alignment()
    stored.model = transformed(recipe.convert(recipe.optimize, recipe.without, alignment))
    return DebugExecutable(lowered, stored, options, alignment, recipe, host)


class DebugExecutable(Executable):
    """A graph run by the evaluator.

    Args:
        options: The options for comparing and writing.
        alignment: The alignment of FX nodes with the model's values.
    """

    def __init__(
        self,
        lowered: Lowered,
        stored: StoredGraph,
        options: DebugOptions,
        alignment: Alignment,
        recipe: Recipe,
        host: RuntimeHost,
    ) -> None:
        super().__init__(None, lowered)
        assert stored.model is not None
        self._functional = lowered.functional
        self._model: ir.Model = stored.model
        self._options = options
        self._alignment = alignment
        self._recipe = recipe
        self._host = host
        self._title = f"graph {next(_numbers)} ({stored.kind})"
        self._calls = 0
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._write: Callable[[str], None] | None = options.write if callable(options.write) else None
        if self._write is None and options.write is not None:
            self._write = self._lines.append
        custom = custom_operators(self._model)
        kernels = kernels_for(custom, host) if custom.domains else Kernels()
        self._session = ExtendedReferenceEvaluator(
            to_proto(self._model),
            verbose=options.verbose,
            new_ops=kernels.reference.values(),
            plugins=(),
            write=self._write,
        )
        self._dump = Dump(options.dump, self._model, lowered.functional, stored.kind) if options.dump else None

    def _run(self, values: Sequence[Any], numbers: Sequence[int]) -> list[torch.Tensor]:
        with self._lock:  # so that the texts of calls do not mix
            try:
                computed = self._evaluated(values)
            finally:
                self._flush()
        return [
            laid_out(
                torch.view_as_complex(computed[name]) if output.dtype.is_complex else computed[name], output, numbers
            )
            for name, _, output in self._outputs
        ]

    def _evaluated(self, values: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The results of a call by name, compared with PyTorch's where the options ask for it."""
        if self._dump is not None:
            self._dump.add(values)
        if self._options.verbose:
            (self._write or print)(f"{self._title}, call {self._calls}")
        self._calls += 1
        taken = {value.name for value in self._model.graph.inputs}
        feed = {n: as_array(v) for n, v in feed_of(self._functional, values).items() if n in taken}
        names = [str(value.name) for value in self._model.graph.outputs]
        if self._options.compare:
            known = {*taken, *self._model.graph.initializers}
            known |= {value.name for node in self._model.graph for value in node.outputs}
            wanted = {name for parts in self._alignment.names.values() for name in parts}
            names += sorted((wanted & known).difference(names))
        try:
            results = self._session.run(names, feed)
        except OnnxplugError as error:
            raise RunError(f"the evaluator failed: {error.message}", hint=error.hint) from error
        # NumPy's transposes are views; ONNX's results are contiguous.
        computed = {name: to_torch(value).contiguous() for name, value in zip(names, results, strict=True)}
        if self._options.compare:
            self._compare(values, computed)
        return computed

    def _compare(self, values: Sequence[Any], computed: Mapping[str, torch.Tensor]) -> None:
        done = walk(self._functional, placeholder_values(self._functional, values), self._alignment, computed)
        if self._options.verbose:
            (self._write or print)(f"{self._title}: {done}")
        if done.differences:
            verdict = judge(self._model, self._recipe, self._host, values)
            error = DifferenceError(f"{self._title} differs from PyTorch\n{verdict}")
            error.verdict, error.inputs = verdict, list(values)
            raise error

    def _flush(self) -> None:
        if self._lines and not callable(self._options.write):
            text = "".join(f"{line}\n" for line in self._lines)
            self._lines.clear()
            try:
                with Path(str(self._options.write)).open("a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                raise RunError(f"the run can't be written to {self._options.write}: {error}") from error
