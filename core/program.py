"""OnnxProgram: the exported model, which runs, saves and verifies itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnxplug import logs
from onnxplug.build.collection import collection_held
from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.build.stored import META, Origin
from onnxplug.calls import leaves_of
from onnxplug.capture.dimensions import in_names
from onnxplug.capture.signature import Captured, InputKind, InputSlot, OutputKind, OutputSlot
from onnxplug.errors import UsageError
from onnxplug.host import RuntimeHost, plugin_host
from onnxplug.kinds import check_flags
from onnxplug.observers import Observer, Span, observed, stage
from onnxplug.packages import load
from onnxplug.plugin_api import VerificationRequest
from onnxplug.progress import Show, StageNames, reporting, showing
from onnxplug.run.alignment import Recipe
from onnxplug.run.protobuf import to_proto
from onnxplug.run.save import Progress, check_settings, save_model
from onnxplug.run.session import Runner
from onnxplug.run.weights import check_numbers, named, replacements
from onnxplug.text import counted, type_with_article, value_text
from onnxplug.torch_private import pytree
from onnxplug.warn import warn

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class ExportStatistics:
    """Statistics of an export: times, and numbers of nodes.

    Attributes:
        capture_seconds, conversion_seconds: Wall-clock time of torch.export, and of everything after it.
        fx_nodes, onnx_nodes: Number of nodes before and after.
        operators: Operator type to the number of its nodes, most frequent first; calls of functions count, not their nodes.
        opset: Version of ai.onnx.
        repeated: How many operator calls repeated the nodes of an equal call (``capture="calls"``).
        strategy: The mode of capture: ``"given"``, ``"non-strict"``, ``"strict"``, …
        decomposed: The operators because of which torch decomposed the whole program: operators that nothing else translates,
            or that ``decompositions`` names.
        functions: Function to the number of module calls that it replaces (``functions=``).
        packages: Distribution to the number of nodes that its rules emitted, including onnxplug's own.
    """

    capture_seconds: float = 0.0
    conversion_seconds: float = 0.0
    fx_nodes: int = 0
    onnx_nodes: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)
    opset: int = 0
    repeated: int = 0
    strategy: str = "given"
    decomposed: Sequence[str] = ()
    functions: Mapping[str, int] = field(default_factory=dict)
    packages: Mapping[str, int] = field(default_factory=dict)


class OnnxProgram(torch.onnx.ONNXProgram):
    """An exported model; a ``torch.onnx.ONNXProgram``, so that code for that class accepts it.

    Attributes:
        model: The ``onnx_ir.Model``.
        exported_program: The captured program.
        inputs, outputs: The slots of the graph's inputs, state and outputs.
        slots: As ``outputs``, with the results that are ``None`` and so no outputs of the graph.
        captured: The capture, with the example inputs; ``None`` for a program made by hand.
        statistics: Times and numbers of nodes.
        host: The plugins of the export, whose libraries and kernels run custom operators; all installed plugins when
            ``None``.
        recipe: Converts the captured graph again, for :meth:`verify` to find who is wrong; ``None`` for a program made by
            hand.
        observers: The export's observers of :meth:`save` and :meth:`verify`.
        profile: The profile, with ``profile=True``.
        report: The report, with ``report=True``.
        precision: The effect of ``dtype`` or ``quantize``, with the nodes that stay in float32.
        half: The type of half precision that the model computes in; ``None`` where it does not.
        folded: The weights that :meth:`optimize` has computed with, by their names in PyTorch.
        applied: The weights that :meth:`apply_weights` was given, in order.
        unquantised: The model before it was quantised, which :meth:`verify` compares; ``None`` where it was not.
    """

    def __init__(
        self,
        model: ir.Model,
        exported_program: torch.export.ExportedProgram | None,
        *,
        inputs: Sequence[InputSlot] = (),
        outputs: Sequence[OutputSlot] = (),
        captured: Captured | None = None,
        statistics: ExportStatistics | None = None,
        host: RuntimeHost | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(model, exported_program)
        self.inputs = list(inputs)
        self.outputs = [slot for slot in outputs if slot.value is not None]
        self.slots = list(outputs)
        self.captured = captured
        self.statistics = statistics if statistics is not None else ExportStatistics()
        self.host = host
        self.recipe = recipe
        self.observers: list[Observer] = []
        self.profile: Any = None
        self.report: Any = None
        self.precision: Any = None
        self.half: torch.dtype | None = None
        self.unquantised: ir.Model | None = None
        self._runner: Runner | None = None
        self.folded: set[str] = set()
        self.applied: list[Any] = []

    @property
    def model_proto(self) -> onnx.ModelProto:
        """The model as ONNX's protocol buffer.

        Raises:
            WeightsError: A weight has no numbers.
        """
        check_numbers(self.model.graph.initializers.values(), "the model has no protocol buffer")
        with collection_held():
            return to_proto(self.model)

    # -- running -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        """Runs the model by ONNX Runtime on the PyTorch model's inputs; plugins' libraries run custom operators.

        Returns:
            The graph's outputs in order: the flattened user outputs without ``None``, then mutated state.

        Raises:
            UsageError: The inputs do not fit the model.
            PluginError: A plugin's library is missing or does not load.
            VerificationError: The model does not run.
        """
        if self._inference_session is not None:  # a session that the user made
            return super().__call__(*self.feed(args, kwargs).values())
        feed = self.feed(args, kwargs)
        if self._runner is None:
            self._runner = Runner(self.model, self.host)
        return tuple(self._runner(feed))

    @property
    def runtime(self) -> str | None:
        """The runtime of the last call of the program: ``"onnxruntime"``, or an evaluator where ONNX Runtime lacks a kernel.

        ``"onnxplug.reference"`` is the evaluator of the package onnxplug-reference, ``"onnx.reference"`` onnx's own.

        ``None`` before the first call and after :meth:`release`.
        """
        if self._inference_session is not None:  # a session that the user made
            return "onnxruntime"
        return self._runner.runtime if self._runner is not None else None

    def call_reference(self, *args: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
        """Runs the model by the evaluator of onnxplug-reference, else by onnx's own.

        Custom operators are run by the plugins' reference kernels.

        Args:
            args, kwargs: The inputs of the PyTorch model.

        Returns:
            The graph's outputs in order, as :meth:`__call__` returns them.

        Raises:
            UsageError: The inputs do not fit the model.
            VerificationError: An operator has no kernel.
        """
        return tuple(Runner(self.model, self.host, reference=True)(self.feed(args, kwargs)))

    def release(self) -> None:
        """Releases the inference session."""
        self._runner = None
        super().release()

    def optimize(self) -> None:
        """Runs onnxscript's optimizer over the model, in place. Weights that it computes with can't be replaced later.

        Raises:
            WeightsError: A weight has no numbers.
        """
        check_numbers(self.model.graph.initializers.values(), "optimize() computes with the weights")
        self.release()
        before = self._weight_uses()
        super().optimize()
        after = self._weight_uses()
        self.folded.update(target for target, uses in before.items() if after.get(target) != uses)

    def _weight_uses(self) -> dict[str, list[tuple[str | None, int]]]:
        """The initializers made of each tensor of the PyTorch model, and how often they are read."""
        uses: dict[str, list[tuple[str | None, int]]] = {}
        for value in self.model.graph.initializers.values():
            origin: Origin | None = value.meta.get(META)
            for target in origin.targets if origin is not None else ():
                uses.setdefault(target, []).append((value.name, len(value.uses())))
        return uses

    def apply_weights(
        self,
        state_dict: Mapping[str, torch.Tensor] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        strict: bool | None = None,
    ) -> None:
        """Replaces weights by their names in PyTorch, all of them or none.

        An initializer that is stored in another form (``encoder.weight.transposed``) is made anew from the new tensor. Tensors
        are cast to the weight's dtype, as by ``load_state_dict``, but not between floating-point numbers, 8-bit floats, integers
        and bools. Files are read each time that their tensors are needed, and must stay until then.

        Args:
            state_dict: Tensors by name, as from ``module.state_dict()``; or files: ``.safetensors``, files of ``torch.save``, an
                ``.index.json`` of several, or a folder that has one.
            strict: Whether every weight must be given, and nothing else. ``None``: yes for files; a mapping may hold some of the
                weights, and unknown names give a warning.

        Raises:
            WeightsError: A tensor has another shape or a dtype that isn't converted, doesn't fit the form in which it is stored,
                or has two different values for a tied weight; a weight is missing or unexpected, with ``strict``; a
                file is missing, truncated or of another kind.
            UsageError: :meth:`optimize` has computed with a weight, or the model's code has read a number from a buffer in the
                export, and the new one is another.
            OnnxplugError: The weights are in safetensors files, and safetensors is not installed.
            MissingPackageError: onnxplug-tools, which reads files, is not installed.
        """
        self.release()
        contents, unexpected = replacements(self, state_dict, strict)
        for value, tensor in contents.items():
            value.const_value = tensor
        self.applied.append(state_dict)
        if unexpected:
            assert isinstance(state_dict, Mapping)
            super().apply_weights({name: state_dict[name] for name in unexpected})  # it warns of each

    def feed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The graph's inputs for a call of the PyTorch model.

        Args:
            args, kwargs: The inputs of the PyTorch model.

        Returns:
            Input name to tensor or number; complex tensors as real tensors with a last axis of size 2.

        Raises:
            UsageError: The structure, a rank, a dtype or a static size is not the model's, or a value differs from its fixed value
                in the export.
        """
        leaves = self.flatten(args, kwargs)
        feed: dict[str, Any] = {}
        for slot in self.inputs:
            if slot.position is None:
                continue
            leaf = leaves[slot.position]
            if slot.kind is InputKind.USER:
                feed[slot.name] = _checked(slot, leaf)
            elif slot.kind is InputKind.NONE and leaf is not None:
                raise UsageError(f"the input {slot.name!r} was None when the model was exported; it takes no value")
            elif slot.kind is InputKind.STATIC and not _is_fixed_value(slot.value, leaf):
                raise UsageError(
                    f"the input {slot.name!r} is fixed at {slot.value!r} in the exported model, got {leaf!r}",
                    hint="Export it with Dim.DYNAMIC to keep an int an input." if type(slot.value) is int else None,
                )
        self._check_sizes(leaves)
        return feed if self.half is None else self._narrowed(feed, self.half)

    def _narrowed(self, feed: dict[str, Any], half: torch.dtype) -> dict[str, Any]:
        """PyTorch's inputs in the half precision of the model."""
        kinds = {value.name: value.dtype for value in self.model.graph.inputs}
        is_half = {name: kinds.get(name) == to_onnx_dtype(half) for name in feed}
        return {name: value.to(half) if is_half[name] else value for name, value in feed.items()}

    def _check_sizes(self, leaves: Sequence[Any]) -> None:
        """Checks the sizes of the inputs against their names: equal names mean equal sizes, an expression its value."""
        slots = [slot for slot in self.inputs if slot.kind is InputKind.USER and slot.position is not None]
        names = self.captured.dim_names if self.captured is not None else {}
        known: dict[Any, int] = {}
        later: list[tuple[InputSlot, int, Any, int]] = []
        for slot in slots:
            value, leaf = slot.node.meta.get("val"), leaves[slot.position or 0]
            for axis, wanted in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(wanted, torch.SymInt):
                    expr = in_names(names, wanted.node.expr)
                    later.append((slot, axis, expr, int(leaf.shape[axis])))
                    if expr.is_Symbol:
                        known.setdefault(expr, int(leaf.shape[axis]))
        for slot, axis, expr, size in later:
            expected = expr.subs(known)
            if expected.is_Integer and int(expected) != size:
                raise UsageError(
                    f"axis {axis} of the input {slot.name!r} is {expr} in the exported model, which is {expected} here, got "
                    f"{size}"
                )

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs of a call of the PyTorch model as a flat list, in the order of the exported program.

        Args:
            args, kwargs: The inputs of the PyTorch model.

        Raises:
            UsageError: Their structure is not that of the exported model.
        """
        program = self.exported_program
        spec = program.call_spec.in_spec if program is not None else None
        if spec is None:
            return list(pytree.tree_leaves((tuple(args), dict(kwargs))))
        reference = self.captured.reference if self.captured is not None else None
        return leaves_of(args, kwargs, spec, reference)

    def unflatten(self, results: Sequence[torch.Tensor]) -> Any:
        """The results of a call in the PyTorch model's own structure, with constants and ``None``."""
        remaining = iter(results)
        leaves: list[Any] = []
        for slot in self.slots:
            if slot.kind is not OutputKind.USER:
                continue
            if slot.value is None:
                leaves.append(None)
            elif isinstance(slot.value, torch.fx.Node):
                leaves.append(next(remaining))
            else:
                next(remaining)
                leaves.append(slot.value)
        spec = self.exported_program.call_spec.out_spec if self.exported_program is not None else None
        return pytree.tree_unflatten(leaves, spec) if spec is not None else leaves

    # -- saving and verifying ------------------------------------------------------------------------------------------

    def save(
        self,
        destination: str | os.PathLike[str] | IO[bytes],
        *,
        include_initializers: bool = True,
        keep_initializers_as_inputs: bool = False,
        external_data: bool | None = None,
        weights: Mapping[str, torch.Tensor] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        strict: bool | None = None,
        shard: int | str | None = None,
        external: str | None = None,
        progress: bool | Progress | None = None,
    ) -> None:
        """Saves the model: complete or not at all.

        Weights are written to the file one by one, and are never twice in memory. docs/saving.md has the state of the folder
        when a save fails or is killed.

        Args:
            destination: A path, or a binary file object. A symbolic link stays; its target is replaced.
            include_initializers: Store the weights. Constants, which ``state_dict()`` does not have, are always stored.
            keep_initializers_as_inputs: List the weights as inputs too, so that a run may replace them.
            external_data: Weights in a separate file, ``model.onnx.data`` for ``model.onnx``; ``None`` does so above 1.5 GB. While
                there is a file of this name, or a model in the folder mentions it, ``model.onnx.data.2`` is next, so that no
                model is ever paired with weights of another. Data files that no model mentions any more are removed.
            weights: The weights to save, as for :meth:`apply_weights`; the program keeps its own.
            strict: As in :meth:`apply_weights`.
            shard: The largest size of a data file, a number of bytes or ``"2GB"``; more data files are made as needed.
            external: ``"safetensors"``: the model refers to weights that safetensors files hold in the model's form, and only
                the other weights are written, into a data file. The files must be in the model's folder or below, and stay there.
            progress: A progress bar on standard error, if that is a terminal, or a function of the written bytes and the bytes
                of the whole. ``None``: a bar from a gigabyte on.

        Raises:
            SaveError: It can't be written; the old file is untouched.
            UsageError: An argument is malformed, or two contradict each other.
            WeightsError: Weights are missing, don't fit, or can't be read.
        """
        check_flags(include_initializers=include_initializers, keep_initializers_as_inputs=keep_initializers_as_inputs)
        check_settings(external_data, include_initializers, shard, external)
        if weights is None and strict is not None:
            raise UsageError("strict= is about weights=, which is not given")
        if weights is not None and not include_initializers:
            raise UsageError("weights= can't be given together with include_initializers=False, which leaves them out")
        contents, unexpected = replacements(self, weights, strict) if weights is not None else ({}, [])
        if unexpected:
            warn(f"the model has no weights {named(unexpected)}, which are left out")
        about = {"file": os.fspath(destination)} if isinstance(destination, str | os.PathLike) else {}
        with self._stage("saving", "save", about) as work, collection_held(), reporting(progress) as shown:
            save_model(
                self.model,
                destination,
                external_data=external_data,
                without=() if include_initializers else self._weight_names(),
                keep_initializers_as_inputs=keep_initializers_as_inputs,
                weights=contents,
                shard=shard,
                external=external,
                progress=shown,
            )
            work.result = destination

    def _weight_names(self) -> list[str]:
        """The initializers that hold a tensor of ``state_dict()``, or are made from one; all where this is not known."""
        initializers = self.model.graph.initializers
        if self.exported_program is None:
            return list(initializers)
        state = self.exported_program.state_dict
        origins = {name: value.meta.get(META) for name, value in initializers.items()}
        return [
            name
            for name, origin in origins.items()
            if origin is not None and not state.keys().isdisjoint(origin.targets)
        ]

    def verify(
        self,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        seeds: Sequence[int] = (0, 1, 2),
        seed: int | None = None,
        intermediates: bool = False,
        progress: bool = False,
        data: Any = None,
        **settings: Any,
    ) -> Any:
        """Compares the model with eager PyTorch: on the export's inputs (or given inputs), and on generated inputs.

        Elements are compared one by one, ``|ONNX - PyTorch| <= atol + rtol * |PyTorch|``; ``docs/verification.md`` says how.

        Args:
            args, kwargs: Inputs to use instead of the export's.
            rtol, atol: Tolerances; by dtype, and ``atol`` by the size of the ordinary elements, when ``None``.
            seeds: A set of generated inputs for each seed, of other sizes along dynamic dimensions, including 1. Sizes that
                eager PyTorch rejects are drawn again.
            seed: A single seed instead of ``seeds``, such as the seed in the message of a failure.
            intermediates: Compare the result of every operator too, in ONNX Runtime and in the evaluator, and find who is wrong:
                ``report.intermediates``, or ``error.verdict`` and the end of its message. See docs/who-is-wrong.md.
            progress: Show on standard error, if that is a terminal, the set of inputs that is compared.
            data, settings: Samples, and ``metric=`` and the other arguments of ``onnxplug_fleet.verify_data``, which compares
                the model on them, and whose ``DataReport`` is returned instead of a :class:`VerificationReport`.

        For a quantised model, the model before quantising is compared; the report notes it, and the quantised model's accuracy.
        A plugin may verify models of its kind in another way (``onnxplug_verifier``).

        Raises:
            PluginError: A plugin's library is missing or does not load.
            UsageError: ``intermediates=True``, and the program was not made by ``to_onnx``.
            VerificationError: An output differs (the message names it, the index, both values, sizes and seed), the
                model has other outputs than PyTorch, or it does not run.
        """
        if data is not None:
            return load("data=", "verify(data=)")(self, data, **settings)
        if settings:
            raise UsageError(f"verify has no argument {next(iter(settings))!r} without data=")
        request = VerificationRequest(
            args, kwargs, rtol, atol, seeds=seeds if seed is None else (seed,), intermediates=intermediates
        )
        verifier = (self.host if self.host is not None else plugin_host()).verifier(self)
        with showing(bool(progress)) as shown, self._stage("verification", "verify", show=shown) as work:
            report = work.result = verifier(self, request)
        return report

    @contextmanager
    def _stage(
        self, name: str, log: str, about: Mapping[str, Any] | None = None, *, show: Show | None = None
    ) -> Iterator[Span]:
        """A stage of work with the program; ``show`` is called with its name."""
        logs.configure()
        names = [StageNames(show)] if show is not None else []
        with observed(*self.observers, *names, ends=False), stage(name, log, subject=self, **(about or {})) as work:
            yield work

    def __repr__(self) -> str:
        graph = self.model.graph
        opsets = ", ".join(f"{name or 'ai.onnx'} {version}" for name, version in graph.opset_imports.items())
        lines = [f"OnnxProgram({opsets}; {graph.num_nodes()} nodes, {len(graph.initializers)} initializers)"]
        lines += [f"  input  {v.name}: {value_text(v)}" for v in graph.inputs]
        lines += [f"  output {v.name}: {value_text(v)}" for v in graph.outputs]
        calls = self.statistics.functions if self.model.functions else {}
        lines += [f"  function {name}: {counted(count, 'call')}" for name, count in calls.items()]
        return "\n".join(lines)


def _is_fixed_value(value: Any, leaf: Any) -> bool:
    """Whether an input has its value in the export; the text of a float tells -0.0 from 0.0, and a NaN is itself."""
    if type(leaf) is not type(value):
        return False
    return repr(leaf) == repr(value) if isinstance(value, float) else bool(leaf == value)


def _checked(slot: InputSlot, leaf: Any) -> Any:
    """A leaf that fits the input.

    Raises:
        UsageError: It doesn't.
    """
    expected = slot.node.meta.get("val")
    if not isinstance(expected, torch.Tensor):
        if not isinstance(leaf, int | float | bool):
            raise UsageError(f"the input {slot.name!r} is a number, got {type_with_article(leaf)}")
        return leaf
    if not isinstance(leaf, torch.Tensor):
        raise UsageError(f"the input {slot.name!r} is a tensor, got {type_with_article(leaf)}")
    dims = ", ".join(str(d) for d in expected.shape)
    if leaf.dtype != expected.dtype or leaf.dim() != expected.dim():
        raise UsageError(
            f"the input {slot.name!r} is {expected.dtype} of shape [{dims}], got {leaf.dtype} of shape {list(leaf.shape)}"
        )
    for axis, (size, wanted) in enumerate(zip(leaf.shape, expected.shape, strict=True)):
        if isinstance(wanted, int) and size != wanted:
            raise UsageError(f"axis {axis} of the input {slot.name!r} is {wanted} in the exported model, got {size}")
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
