"""``to_onnx(pieces=[…])``: submodules as models of their own, chained as the model calls them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onnxplug.capture.dynamic import DynamicShapes, name_of, parse_dynamic_shapes
from onnxplug.capture.eager import copied, inference
from onnxplug.capture.failure import first_lines
from onnxplug.capture.patching import patched
from onnxplug.capture.signature import InputKind, OutputKind
from onnxplug.errors import ConversionError, OnnxplugError, SaveError, UsageError, VerificationError
from onnxplug.kinds import check_seeds
from onnxplug.observers import span, stage
from onnxplug.options import ExportOptions
from onnxplug.patches.unchanged import unchanged
from onnxplug.program import OnnxProgram
from onnxplug.run.files import write_whole
from onnxplug.text import type_with_article
from onnxplug.torch_private import pytree
from onnxplug.verification.compare import compare
from onnxplug.verification.inputs import ATTEMPTS
from onnxplug.version import VERSION
from onnxplug_tools.folders import folder_path
from onnxplug_tools.pieces.checks import check_no_numbers, check_resized, check_weights, is_static, submodules_of
from onnxplug_tools.pieces.inputs import check_alike, dynamic_inputs, fed, leaves_of, names_of, source_of
from onnxplug_tools.pieces.record import RecordedCall, Run, Source, form_of, record
from onnxplug_tools.pieces.script import Step, program_text
from onnxplug_tools.pieces.stamp import KEY, stamp
from onnxplug_tools.pieces.triton import check_name, ensemble_text, piece_name, piece_text
from onnxplug_tools.verification import resized_inputs

CHAIN = "chain.py"
CONSTANTS = "constants.npz"
_SEEDS = (0, 1, 2)
_NOT_OF_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class PiecesReport:
    """The result of comparing a chain with the whole model.

    Attributes:
        sizes: For each set of inputs the sizes of the named dimensions.
        max_abs_difference: The largest difference of two elements.
    """

    sizes: list[dict[str, int]]
    max_abs_difference: float


@dataclass
class OnnxPieces:
    """Submodules of a model, each exported by itself, and how the model chains them.

    A call runs the chain. Where :attr:`gaps` has computations between the pieces, the model's own Python code runs in
    PyTorch, and ONNX Runtime computes the pieces.

    Attributes:
        model: The model.
        programs: The exported pieces by the paths of the submodules.
        calls: The calls in a run on the example inputs, in order.
        gaps: The computations between the pieces, in words; empty where the pieces make the whole model.
        chain_file: The program that runs the pieces, once it is saved.
        profile: Where the time of the export went, with ``profile=True``.
    """

    model: torch.nn.Module
    programs: dict[str, OnnxProgram]
    calls: list[RecordedCall]
    gaps: list[str]
    _example: Run
    _spec: Any
    _names: list[str]
    _axes: dict[int, dict[int, str]] = field(default_factory=dict)
    chain_file: Path | None = None
    profile: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs the chain on inputs of the PyTorch model.

        Returns:
            The model's outputs, flattened.

        Raises:
            UsageError: The inputs have another structure than the example inputs, a size that a piece does not take, or another
                number where the pieces make the whole model.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise UsageError(
                "the inputs have another structure than the example inputs",
                hint="Give them as they were given to to_onnx: positional and keyword inputs alike.",
            )
        if not self.gaps:
            self._check_fixed(leaves)
        return self._run(leaves)

    def _check_fixed(self, leaves: Sequence[Any]) -> None:
        """Checks that inputs that are no tensors have the values of the example: the pieces were exported with these."""
        for name, leaf, fixed in zip(self._names, leaves, self._example.leaves, strict=True):
            if form_of(leaf) != form_of(fixed):
                raise UsageError(f"the input {name!r} is {form_of(fixed)} in the exported pieces, got {form_of(leaf)}")

    def _state(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        if self.gaps:
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}  # the code may write them
            with unchanged(self.model, alone=True), self.attached(), inference():
                args, kwargs = pytree.tree_unflatten(copied(list(leaves)), self._spec)
                return list(pytree.tree_leaves(torch.func.functional_call(self.model, buffers, args, kwargs)))
        state = self._state()
        results: list[list[Any]] = []

        def value(source: Source | None, otherwise: Any) -> Any:
            if source is None:
                return otherwise
            if source.kind == "state":
                return state[str(source.place)].detach()
            return leaves[int(source.place)] if source.kind == "input" else results[source.call][int(source.place)]

        for call in self.calls:
            structure = pytree.tree_structure((call.args, call.kwargs))
            taken = [value(source, leaf) for source, leaf in zip(call.sources, leaves_of(call), strict=True)]
            args, kwargs = pytree.tree_unflatten(taken, structure)
            program = self.programs[call.path]
            results.append(_results(program, call, program(*args, **kwargs)))
        example = self._example
        return [value(source, leaf) for source, leaf in zip(example.sources, example.outputs, strict=True)]

    @contextmanager
    def attached(self) -> Iterator[torch.nn.Module]:
        """The model, its pieces computed by ONNX Runtime while the context lasts. Nothing is trained there."""
        with ExitStack() as stack:
            for path, program in self.programs.items():
                call = next(call for call in self.calls if call.path == path)
                module = self.model.get_submodule(path)
                stack.enter_context(patched(module, "forward", _forward_of(program, call)))
                for hooks in ("_forward_pre_hooks", "_forward_hooks"):  # the exported piece has done what they do
                    stack.enter_context(patched(module, hooks, {}))
            yield self.model

    def verify(self, seeds: Sequence[int] = _SEEDS) -> PiecesReport:
        """Compares the chain with the whole model in PyTorch, on the example inputs and on generated inputs.

        Args:
            seeds: A set of generated inputs for each seed.

        Raises:
            UsageError: The seeds are no seeds.
            VerificationError: An output differs.
        """
        check_seeds(seeds)
        runs = [
            self._example,
            *_generated_runs(self.model, self.programs, self._example, self._spec, self._axes, seeds),
        ]
        worst = 0.0
        for run in runs:
            with torch.random.fork_rng(devices=[]):
                got = self._run(run.leaves)
            for position, (actual, expected) in enumerate(zip(got, run.outputs, strict=True)):
                if not isinstance(expected, torch.Tensor):
                    continue
                comparison = compare(actual, expected)
                if not comparison.equal:
                    sizes = ", ".join(f"{name}={size}" for name, size in run.sizes.items())
                    raise VerificationError(
                        f"output {position} of the chain {comparison}{f'; sizes {sizes}' if sizes else ''}",
                        hint="The pieces' own verify() tells which of them differs.",
                    )
                worst = max(worst, comparison.max_abs_difference)
        return PiecesReport([run.sizes for run in runs], worst)

    def save(self, folder: str | os.PathLike[str], *, external_data: bool | None = None) -> list[Path]:
        """Saves each piece as ``PATH.onnx``, and ``chain.py``, which runs them with ONNX Runtime and NumPy alone.

        There is no ``chain.py`` where something is computed between the pieces (:attr:`gaps`), where a tensor that
        a piece takes or returns is of a dtype that NumPy lacks (bfloat16), and where an input or output of the model, or a weight
        that it gives to a piece, is complex.

        Args:
            folder: The folder; it is made where it is not there, files in it of these names are replaced.
            external_data: As ``OnnxProgram.save`` takes it.

        Returns:
            The files.

        Raises:
            SaveError: A file can't be written.
            UsageError: The folder is no path.
        """
        folder = check_folder(folder)
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise SaveError(f"the folder {folder} can't be made: {error}") from error
        chained = not self.gaps and self._fits_numpy()
        steps, constants = self._steps() if chained else ([], [])
        state = self._state()
        arrays = {_state_name(name): state[name].detach().cpu().numpy() for name in constants}
        mark = stamp(self.programs, arrays, repr((steps, self._outputs())) if chained else "")
        files = []
        for path, program in self.programs.items():
            files.append(folder / _file(path))
            program.save(files[-1], external_data=external_data)
        return files + self._save_chain(folder, steps, arrays, mark) if chained else files

    def save_triton(
        self, folder: str | os.PathLike[str], name: str, *, external_data: bool | None = None
    ) -> list[Path]:
        """Saves a model repository of Triton's server: each piece as the model ``NAME_PATH``, the chain as the ensemble ``NAME``.

        The ensemble takes the model's inputs, by the same names, and returns ``output``, or ``output_0``, ``output_1``
        and so on.

        Args:
            folder: The repository; it is made where it is not there, models in it of these names are replaced.
            external_data: As ``OnnxProgram.save`` takes it.

        Returns:
            The files.

        Raises:
            SaveError: A file can't be written.
            UsageError: The pieces can't be an ensemble: something is computed between them, a weight of the model goes to one of
                them, or a tensor is a scalar or of a type that Triton lacks.
        """
        self.check_triton(folder, name)
        folder = Path(os.fsdecode(folder))
        if self.gaps:
            raise UsageError(
                f"the pieces can't be an ensemble: {self.gaps[0]}", hint="Make a submodule of that, and a piece."
            )
        steps, constants = self._steps()
        if constants:
            raise UsageError(
                f"the pieces can't be an ensemble: the model gives its weight {constants[0]!r} to one of them",
                hint="Make the weight one of the submodule's own.",
            )
        paths = [call.path for call in self.calls]
        texts = {name: ensemble_text(name, steps, self._outputs(), self.programs, paths)}
        texts |= {piece_name(name, path): piece_text(name, path, p) for path, p in self.programs.items()}
        files = []
        try:
            for model in texts:
                (folder / model / "1").mkdir(parents=True, exist_ok=True)
            for path, program in self.programs.items():
                files.append(folder / piece_name(name, path) / "1" / "model.onnx")
                program.save(files[-1], external_data=external_data)
            for model, text in reversed(texts.items()):
                files.append(folder / model / "config.pbtxt")
                write_whole(files[-1], lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
        except OSError as error:
            raise SaveError(f"the repository {folder} can't be written: {error}") from error
        return files

    @staticmethod
    def check_triton(folder: str | os.PathLike[str], name: str) -> None:
        """Checks the arguments of :meth:`save_triton`, before anything is exported.

        Raises:
            SaveError: The folder is a file or can't be written, or its parent is not there.
            UsageError: The name can't be the name of a model, or the folder is no path.
        """
        check_name(name)
        check_folder(folder)

    def _fits_numpy(self) -> bool:
        passed = pytree.tree_leaves([(call.args, call.kwargs, call.results) for call in self.calls])
        taken = [
            (leaf, source) for call in self.calls for leaf, source in zip(leaves_of(call), call.sources, strict=True)
        ]
        given = [leaf for leaf, source in taken if source is not None and source.kind == "state"]
        ends = [
            leaf for leaf in (*self._example.leaves, *self._example.outputs, *given) if isinstance(leaf, torch.Tensor)
        ]
        return not any(leaf.is_complex() for leaf in ends) and all(
            leaf.dtype not in _NOT_OF_NUMPY for leaf in passed if isinstance(leaf, torch.Tensor)
        )

    def _save_chain(
        self, folder: Path, steps: Sequence[Step], arrays: Mapping[str, np.ndarray], mark: str
    ) -> list[Path]:
        used = [self._names[i] for i, leaf in enumerate(self._example.leaves) if isinstance(leaf, torch.Tensor)]
        name = type(self.model).__name__
        text = program_text(name, VERSION, used, self._outputs(), list(arrays), mark, steps)
        written = []
        try:
            if arrays:
                written.append(folder / CONSTANTS)
                write_whole(
                    written[-1], lambda file: np.savez(file, allow_pickle=False, **arrays, **{KEY: np.array(mark)})
                )
            written.append(folder / CHAIN)
            write_whole(written[-1], lambda file: file.write(text.encode()))
        except OSError as error:
            raise SaveError(f"{written[-1]} can't be written: {error}") from error
        self.chain_file = written[-1]
        return written

    def _value_name(self, source: Source) -> str:
        """The name of a value in the chain."""
        if source.kind == "input":
            return self._names[int(source.place)]
        if source.kind == "state":
            return _state_name(str(source.place))
        call = self.calls[source.call]
        return f"{call.path}#{source.call}.{source.place}"

    def _steps(self) -> tuple[list[Step], list[str]]:
        steps, constants = [], []
        for number, call in enumerate(self.calls):
            program = self.programs[call.path]
            inputs = {}
            for slot in program.inputs:
                source = source_of(program, call, slot) if slot.kind is InputKind.USER else None
                if source is None:
                    continue
                inputs[slot.name] = self._value_name(source)
                if source.kind == "state":
                    constants.append(str(source.place))
            places = [place for place, slot in enumerate(program.slots) if slot.value is not None]
            names = [str(value.name) for value in program.model.graph.outputs]
            outputs = {
                name: self._value_name(Source("result", number, place))
                for name, place in zip(names, places, strict=True)
                if isinstance(call.results[place], torch.Tensor)
            }
            steps.append(Step(_file(call.path), inputs, outputs))
        return steps, list(dict.fromkeys(constants))

    def _outputs(self) -> list[str]:
        return [self._value_name(source) for source in self._example.sources if source is not None]


def export_pieces(
    model: Any,
    args: Any,
    folder: str | os.PathLike[str] | None,
    options: ExportOptions,
    export: Callable[..., OnnxProgram],
) -> OnnxPieces:
    """Exports submodules of a model as models of their own, with the inputs that they get when the model runs.

    The model runs on the example inputs and, where dimensions are dynamic, on inputs of other sizes: a dimension of a piece's
    input is dynamic where it differs.

    Args:
        model, args: As ``to_onnx`` takes them; the model is a module.
        folder: The folder in which they are saved; ``None``: they are not saved.
        options: The options of the call; ``pieces`` has the paths of the submodules, and ``verify`` compares the chain
            with the whole model.
        export: ``to_onnx``, which exports one piece.
    """
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            f"pieces= takes submodules of a torch.nn.Module, but the model is {type_with_article(model)}",
            hint="Give the module that it was made of.",
        )
    assert options.pieces is not None
    submodules = submodules_of(model, options.pieces)
    check_weights(model)
    if folder is not None:
        check_folder(folder)
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keywords = dict(options.kwargs or {})
    shapes = parse_dynamic_shapes(options.dynamic_shapes, model, positional, keywords)
    leaves, spec = pytree.tree_flatten((positional, keywords))
    check_no_numbers(shapes, leaves)
    axes = _axes_of(shapes)
    with span("runs of the model"):
        runs = _runs(model, submodules, leaves, spec, axes, shapes)
    example = runs[0]
    user_names = {name for _, _, wanted in shapes.requested_axes() if (name := name_of(wanted))}
    common = {**options.common(), "rules": tuple(options.rules), "runtime": tuple(options.runtime)}
    programs = {path: _program(path, module, runs, user_names, export, common) for path, module in submodules.items()}
    pieces = OnnxPieces(model, programs, example.calls, _gaps(model, programs, runs), example, spec, shapes.paths, axes)
    if options.verify:
        with stage("verification", "verify", what="the chain"):
            pieces.verify()
    if folder is not None:
        pieces.save(folder, external_data=options.external_data)
    return pieces


def _axes_of(shapes: DynamicShapes) -> dict[int, dict[int, str]]:
    """Leaf to axis to the name of its dimension, for each dimension that may be dynamic."""
    axes: dict[int, dict[int, str]] = {}
    for leaf, axis, wanted in shapes.requested_axes():
        if not is_static(wanted):
            axes.setdefault(leaf, {})[axis] = name_of(wanted) or f"{shapes.paths[leaf]}[{axis}]"
    return axes


def _runs(
    model: torch.nn.Module,
    submodules: Mapping[str, torch.nn.Module],
    leaves: Sequence[Any],
    spec: Any,
    axes: Mapping[int, Mapping[int, str]],
    shapes: DynamicShapes,
) -> list[Run]:
    """The run on the example inputs, and those on generated inputs."""
    sizes = {
        name: int(leaves[leaf].shape[axis])
        for leaf, named in axes.items()
        for axis, name in named.items()
        if isinstance(leaves[leaf], torch.Tensor)
    }
    example = _example(model, submodules, leaves, spec, sizes)
    for path, module in submodules.items():
        calls = [call for call in example.calls if call.path == path]
        if not calls:
            raise UsageError(f"the model does not call its submodule {path!r} on these inputs")
        check_alike(path, module, calls)
    refused: list[Exception] = []
    # With static sizes too, as the model may call its pieces otherwise for other numbers.
    runs = [example, *_generated_runs(model, submodules, example, spec, axes, _SEEDS, refused)]
    check_resized(shapes, axes, runs, refused)
    return runs


def check_folder(place: str | os.PathLike[str]) -> Path:
    """The path of a folder, which is refused if it can't be written."""
    folder = folder_path("folder", place)
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder} is a file", hint="pieces= writes several files: name a folder.")
    outer = folder if folder.exists() else folder.absolute().parent
    if not outer.is_dir():
        raise SaveError(f"there is no folder {outer}", hint=f"Make it: mkdir -p {outer}")
    if not os.access(outer, os.W_OK | os.X_OK):
        raise SaveError(f"the folder {outer} can't be written")
    return folder


def _example(
    model: torch.nn.Module,
    submodules: Mapping[str, torch.nn.Module],
    leaves: Sequence[Any],
    spec: Any,
    sizes: dict[str, int],
) -> Run:
    try:
        return record(model, submodules, leaves, spec, sizes)
    except Exception as error:
        raise UsageError(
            f"the model does not run in PyTorch on its example inputs: {type(error).__name__}: {first_lines(error)}"
        ) from error


def _generated_runs(
    model: torch.nn.Module,
    pieces: Mapping[str, Any],
    example: Run,
    spec: Any,
    axes: Mapping[int, Mapping[int, str]],
    seeds: Sequence[int],
    refused: list[Exception] | None = None,
) -> Iterator[Run]:
    """Runs on generated inputs of other sizes, for each seed on the first draw that the model takes.

    Args:
        refused: Gets the errors of the draws that it does not take.
    """
    submodules = {path: model.get_submodule(path) for path in pieces}
    for seed in seeds:
        for attempt in range(ATTEMPTS):
            leaves, sizes = resized_inputs(example.leaves, axes, seed, attempt)
            try:
                yield record(model, submodules, leaves, spec, sizes)
                break
            except Exception as error:  # sizes that the model does not take
                if refused is not None:
                    refused.append(error)


def _program(
    path: str,
    module: torch.nn.Module,
    runs: Sequence[Run],
    names: set[str],
    export: Callable[..., OnnxProgram],
    options: Mapping[str, Any],
) -> OnnxProgram:
    """Exports a piece, its dimensions and ints dynamic where they differ between calls."""
    call, shapes = dynamic_inputs(module, path, runs, names)
    try:
        with span(f"the piece {path}"):
            program = export(module, call.args, kwargs=call.kwargs or None, dynamic_shapes=shapes, **options)
    except OnnxplugError as error:
        error.add_place(f"the piece {path!r}")
        raise
    written = [slot for slot in program.outputs if slot.kind is not OutputKind.USER]
    if written:
        raise ConversionError(
            f"the piece {path!r} writes {', '.join(repr(slot.target) for slot in written)}; what a chain passes on are the "
            "results of its pieces alone",
            hint="Let the submodule return the new value.",
        )
    return program


def _gaps(model: torch.nn.Module, programs: Mapping[str, OnnxProgram], runs: Sequence[Run]) -> list[str]:
    """The computations between the pieces, in words."""
    example = runs[0]
    gaps = []
    for call in example.calls:
        names, inputs = names_of(model.get_submodule(call.path), call), fed(programs[call.path], call)
        for position, (leaf, source) in enumerate(zip(leaves_of(call), call.sources, strict=True)):
            if source is None and (isinstance(leaf, torch.Tensor) or position in inputs):
                what = (
                    "is computed between the pieces"
                    if isinstance(leaf, torch.Tensor)
                    else "is another number in other calls"
                )
                gaps.append(f"the input {names[position]!r} of {call.path!r} {what}")
    for position, (leaf, source) in enumerate(zip(example.outputs, example.sources, strict=True)):
        if isinstance(leaf, torch.Tensor) and source is None:
            gaps.append(f"the output {position} of the model is computed after the pieces")
    if any(run.wiring() != example.wiring() for run in runs[1:]):
        gaps.append("the model calls the pieces otherwise for other inputs")
    return list(dict.fromkeys(gaps))


def _forward_of(program: OnnxProgram, call: RecordedCall) -> Any:
    """A ``forward`` that ONNX Runtime computes."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_unflatten(_results(program, call, program(*args, **kwargs)), call.structure)

    return forward


def _results(program: OnnxProgram, call: RecordedCall, outputs: Sequence[torch.Tensor]) -> list[Any]:
    """The results of a call as the submodule returns them, flattened: numbers as such, complex tensors in one."""
    leaves = pytree.tree_leaves(program.unflatten(outputs))
    return [_like(example, leaf) for example, leaf in zip(call.results, leaves, strict=True)]


def _like(example: Any, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(example, torch.Tensor):
        return type(example)(leaf.item())
    return torch.view_as_complex(leaf.contiguous()) if example.is_complex() and not leaf.is_complex() else leaf


def _state_name(name: str) -> str:
    """The name of a weight among the values of the chain, which no input has."""
    return f"self.{name}"


def _file(path: str) -> str:
    return f"{path}.onnx"
