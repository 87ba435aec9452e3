"""``to_onnx(pieces=[…])``: submodules as models of their own, chained as the model calls them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onnxplug.capture.dynamic import inputs_by_name, name_of, parse_dynamic_shapes
from onnxplug.capture.eager import copied, inference
from onnxplug.capture.failure import first_lines
from onnxplug.capture.patching import patched
from onnxplug.capture.signature import InputKind, InputSlot, OutputKind
from onnxplug.errors import ConversionError, OnnxplugError, SaveError, UsageError, VerificationError, WeightsError
from onnxplug.fake import is_fake
from onnxplug.observers import span, stage
from onnxplug.options import ExportOptions
from onnxplug.program import OnnxProgram
from onnxplug.run.files import write_whole
from onnxplug.text import counted, type_with_article
from onnxplug.torch_private import pytree
from onnxplug.verification.compare import compare
from onnxplug.verification.inputs import ATTEMPTS
from onnxplug.version import VERSION
from onnxplug_tools.folders import folder_path
from onnxplug_tools.pieces.record import RecordedCall, Run, Source, record
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
            UsageError: The inputs have another structure than the example inputs, or a size that a piece does not take.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise UsageError(
                "the inputs have another structure than the example inputs",
                hint="Give them as they were given to to_onnx: positional and keyword inputs alike.",
            )
        return self._run(leaves)

    def _state(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _run(self, leaves: Sequence[Any]) -> list[Any]:
        if self.gaps:
            with self.attached(), inference():
                args, kwargs = pytree.tree_unflatten(copied(list(leaves)), self._spec)
                return list(pytree.tree_leaves(self.model(*args, **kwargs)))
        state = self._state()
        results: list[list[Any]] = []

        def value(source: Source | None, otherwise: Any) -> Any:
            if source is None:
                return otherwise
            if source.kind == "state":
                return state[str(source.place)].detach()
            return leaves[int(source.place)] if source.kind == "input" else results[source.call][int(source.place)]

        for call in self.calls:
            call_leaves = pytree.tree_leaves((call.args, call.kwargs))
            structure = pytree.tree_structure((call.args, call.kwargs))
            taken = [value(source, leaf) for source, leaf in zip(call.sources, call_leaves, strict=True)]
            args, kwargs = pytree.tree_unflatten(taken, structure)
            results.append(_with_tensors(call.results, self.programs[call.path](*args, **kwargs)))
        example = self._example
        return [value(source, leaf) for source, leaf in zip(example.sources, example.outputs, strict=True)]

    @contextmanager
    def attached(self) -> Iterator[torch.nn.Module]:
        """The model, its pieces computed by ONNX Runtime while the context lasts. Nothing is trained there."""
        with ExitStack() as stack:
            for path, program in self.programs.items():
                call = next(call for call in self.calls if call.path == path)
                stack.enter_context(patched(self.model.get_submodule(path), "forward", _forward_of(program, call)))
            yield self.model

    def verify(self, seeds: Sequence[int] = _SEEDS) -> PiecesReport:
        """Compares the chain with the whole model in PyTorch, on the example inputs and on generated inputs.

        Args:
            seeds: A set of generated inputs for each seed.

        Raises:
            VerificationError: An output differs.
        """
        runs = [
            self._example,
            *_generated_runs(self.model, self.programs, self._example, self._spec, self._axes, seeds),
        ]
        worst = 0.0
        for run in runs:
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

        There is no ``chain.py`` where something is computed between the pieces (:attr:`gaps`), and where a tensor that
        a piece takes or returns is of a dtype that NumPy lacks (bfloat16).

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
        arrays = {name: state[name].detach().cpu().numpy() for name in constants}
        mark = stamp(self.programs, arrays)
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
        return all(leaf.dtype not in _NOT_OF_NUMPY for leaf in passed if isinstance(leaf, torch.Tensor))

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
            return str(source.place)
        call = self.calls[source.call]
        return f"{call.path}#{source.call}.{source.place}"

    def _steps(self) -> tuple[list[Step], list[str]]:
        steps, constants = [], []
        for number, call in enumerate(self.calls):
            program = self.programs[call.path]
            inputs = {}
            for slot in program.inputs:
                source = _source_of(program, call, slot) if slot.kind is InputKind.USER else None
                if source is None:
                    continue
                inputs[slot.name] = self._value_name(source)
                if source.kind == "state":
                    constants.append(str(source.place))
            tensors = [i for i, leaf in enumerate(call.results) if isinstance(leaf, torch.Tensor)]
            names = [str(value.name) for value in program.model.graph.outputs]
            outputs = {
                name: self._value_name(Source("result", number, place))
                for name, place in zip(names, tensors, strict=True)
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
    submodules = _submodules(model, options.pieces)
    _check_numbers(model)
    if folder is not None:
        check_folder(folder)
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keywords = dict(options.kwargs or {})
    shapes = parse_dynamic_shapes(options.dynamic_shapes, model, positional, keywords)
    leaves, spec = pytree.tree_flatten((positional, keywords))
    axes: dict[int, dict[int, str]] = {}
    for leaf, axis, wanted in shapes.requested_axes():
        axes.setdefault(leaf, {})[axis] = name_of(wanted) or f"{shapes.paths[leaf]}[{axis}]"
    sizes = {
        name: int(leaves[leaf].shape[axis])
        for leaf, named in axes.items()
        for axis, name in named.items()
        if isinstance(leaves[leaf], torch.Tensor)
    }
    with span("runs of the model"):
        example = _example(model, submodules, leaves, spec, sizes)
        for path in submodules:
            if all(call.path != path for call in example.calls):
                raise UsageError(f"the model does not call its submodule {path!r} on these inputs")
        runs = [example, *_generated_runs(model, submodules, example, spec, axes, _SEEDS if axes else ())]
    user_names = {name for _, _, wanted in shapes.requested_axes() if (name := name_of(wanted))}
    common = {**options.common(), "rules": tuple(options.rules), "runtime": tuple(options.runtime)}
    programs = {path: _program(path, module, runs, user_names, export, common) for path, module in submodules.items()}
    pieces = OnnxPieces(model, programs, example.calls, _gaps(model, runs), example, spec, shapes.paths, axes)
    if options.verify:
        with stage("verification", "verify", what="the chain"):
            pieces.verify()
    if folder is not None:
        pieces.save(folder, external_data=options.external_data)
    return pieces


def _check_numbers(model: torch.nn.Module) -> None:
    """Checks that the weights of a model have numbers."""
    names = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_fake(tensor)]
    if names:
        raise WeightsError(
            f"pieces= runs the model, to find what its submodules get, and {counted(len(names), 'weight')} of it "
            f"{'has' if len(names) == 1 else 'have'} no numbers, {names[0]!r} for one",
            names=names,
            hint="Load the weights into the model first.",
        )


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


def _submodules(model: torch.nn.Module, pieces: Sequence[str]) -> dict[str, torch.nn.Module]:
    """The submodules by their paths."""
    if isinstance(pieces, str) or not isinstance(pieces, Sequence) or not pieces:
        raise UsageError(f"pieces must be a list of names of submodules, got {pieces!r}")
    known = dict(model.named_modules(remove_duplicate=False))
    submodules: dict[str, torch.nn.Module] = {}
    for path in pieces:
        if not isinstance(path, str) or not path or path not in known:
            near = get_close_matches(str(path), known, 1)
            some = ", ".join(name for name, _ in model.named_children())
            raise UsageError(
                f"the model has no submodule {path!r}; it has {some or 'none'}",
                hint=f"Did you mean {near[0]!r}?" if near and near[0] else None,
            )
        if path in submodules:
            raise UsageError(f"pieces names {path!r} twice")
        for other, module in submodules.items():
            if path.startswith(f"{other}.") or other.startswith(f"{path}."):
                raise UsageError(f"of the pieces {other!r} and {path!r} one lies within the other")
            if module is known[path]:
                raise UsageError(f"the pieces {other!r} and {path!r} are one module")
        submodules[path] = known[path]
    return submodules


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
) -> Iterator[Run]:
    """Runs on generated inputs of other sizes, for each seed on the first draw that the model takes."""
    submodules = {path: model.get_submodule(path) for path in pieces}
    for seed in seeds:
        for attempt in range(ATTEMPTS):
            leaves, sizes = resized_inputs(example.leaves, axes, seed, attempt)
            try:
                yield record(model, submodules, leaves, spec, sizes)
                break
            except Exception:  # sizes that the model does not take
                continue


def _program(
    path: str,
    module: torch.nn.Module,
    runs: Sequence[Run],
    names: set[str],
    export: Callable[..., OnnxProgram],
    options: Mapping[str, Any],
) -> OnnxProgram:
    """Exports a piece, its dimensions dynamic where they differ between calls."""
    calls = [(run, call) for run in runs for call in run.calls if call.path == path]
    first = calls[0][1]
    structure = pytree.tree_structure((first.args, first.kwargs))
    flat = [(run, pytree.tree_leaves((call.args, call.kwargs))) for run, call in calls]
    specs: list[Any] = []
    for position, leaf in enumerate(flat[0][1]):
        alike = [(run, leaves[position]) for run, leaves in flat if len(leaves) == len(flat[0][1])]
        specs.append(_dynamic_axes(leaf, alike, names))
    args, kwargs = pytree.tree_unflatten(specs, structure)
    shapes = inputs_by_name(module, args, kwargs) if any(specs) else None
    try:
        with span(f"the piece {path}"):
            program = export(module, first.args, kwargs=first.kwargs or None, dynamic_shapes=shapes, **options)
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


def _dynamic_axes(leaf: Any, seen: Sequence[tuple[Run, Any]], names: set[str]) -> dict[int, Any] | None:
    """The axes of an input whose sizes differ between calls, with their dynamic dimensions.

    An axis gets the name of the user's dimension whose size it always has, if there is one.
    """
    if not isinstance(leaf, torch.Tensor):
        return None
    axes: dict[int, Any] = {}
    for axis in range(leaf.dim()):
        sizes = [(run.sizes, tensor.shape[axis]) for run, tensor in seen if tensor.dim() == leaf.dim()]
        if len({size for _, size in sizes}) < 2:
            continue
        same = [n for n in sorted(names) if all(known.get(n) == size for known, size in sizes)]
        axes[axis] = same[0] if same and same[0].isidentifier() else torch.export.Dim.DYNAMIC
    return axes or None


def _gaps(model: torch.nn.Module, runs: Sequence[Run]) -> list[str]:
    """The computations between the pieces, in words."""
    example = runs[0]
    gaps = []
    for call in example.calls:
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        paths = parse_dynamic_shapes(None, model.get_submodule(call.path), call.args, call.kwargs).paths
        for position, (leaf, source) in enumerate(zip(leaves, call.sources, strict=True)):
            if isinstance(leaf, torch.Tensor) and source is None:
                gaps.append(f"the input {paths[position]!r} of {call.path!r} is computed between the pieces")
    for position, (leaf, source) in enumerate(zip(example.outputs, example.sources, strict=True)):
        if isinstance(leaf, torch.Tensor) and source is None:
            gaps.append(f"the output {position} of the model is computed after the pieces")
    if any(run.wiring() != example.wiring() for run in runs[1:]):
        gaps.append("the model calls the pieces otherwise for other inputs")
    return gaps


def _source_of(program: OnnxProgram, call: RecordedCall, slot: InputSlot) -> Source | None:
    """The source of the tensor that an input of a piece takes."""
    structure = pytree.tree_structure((call.args, call.kwargs))
    # torch.export may have keyword inputs in another order.
    args, kwargs = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    assert slot.position is not None
    return call.sources[program.flatten(args, kwargs)[slot.position]]


def _forward_of(program: OnnxProgram, call: RecordedCall) -> Any:
    """A ``forward`` that ONNX Runtime computes."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        results = _with_tensors(call.results, program(*args, **kwargs))
        return pytree.tree_unflatten(results, call.structure)

    return forward


def _with_tensors(leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The leaves of a result with other tensors in it."""
    fresh = iter(tensors)
    return [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _file(path: str) -> str:
    return f"{path}.onnx"
