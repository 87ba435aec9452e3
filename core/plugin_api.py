"""The imports of a plugin module: hook markers and the plain records of hooks that an export reads.

The records for the command line, for tests and for the choice of plugins are in ``onnxplug.plugins.api``.

Nothing here imports torch, onnx or onnx_ir, so that importing a plugin stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pluggy

from onnxplug.errors import UsageError
from onnxplug.kinds import check_flags, check_kind, check_lists, check_mappings, check_seeds

PROJECT_NAME = "onnxplug"
ENTRY_POINT_GROUP = "onnxplug"
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)

Mentions = Callable[[Callable[[str], bool]], bool]
"""A function of a predicate: whether it holds for any name in the model's code."""


@dataclass(frozen=True)
class CaptureRequest:
    """The second argument of a patch, after the captured module.

    Attributes:
        module, args, kwargs: The captured module and its example inputs.
        options: The export's options, a :class:`onnxplug.options.ExportOptions`.
        registry: The export's rules, an :class:`onnxplug.OnnxRegistry`.
        mentions: The names in the model's code.
        strict: torch.export's mode, of an attempt.
        below: Whether an attempt records the model's operators below autograd and functorch.
        counts: Counts by patches of an attempt, for the statistics: ``"repeated"``.
        warnings: Warnings by patches of an attempt, which are given if its program is the exported one.
        shared: What patches keep for all attempts at a capture, by name.
    """

    module: Any = None
    args: Any = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Any = None
    registry: Any = None
    mentions: Mentions = lambda _: False
    strict: bool = False
    below: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptureMode:
    """A way to capture a model. A patch may offer a list of modes: the first in which the capture succeeds is used.

    Attributes:
        context: Makes the context manager that holds meanwhile.
        strict: torch.export's mode, where the user names none; ``None`` for either.
    """

    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    strict: bool | None = None


Patch = AbstractContextManager[Any] | Callable[..., AbstractContextManager[Any] | Sequence[CaptureMode]]
"""A patch during capture: a context manager, or a function that returns one, or a list of :class:`CaptureMode`. A function with a
parameter gets the captured module, with two also a :class:`CaptureRequest`; an :class:`AttemptPatch` is called anew for each
attempt."""


@dataclass(frozen=True)
class AttemptPatch:
    """A patch that holds for one attempt at a capture; there may be several, in either of torch.export's modes.

    Attributes:
        enter: Makes the context manager from a :class:`CaptureRequest` with the attempt's mode.
    """

    enter: Callable[[CaptureRequest], AbstractContextManager[Any]]

    def __call__(self, module: Any, request: CaptureRequest) -> AbstractContextManager[Any]:
        """The context manager of an attempt."""
        return self.enter(request)


@dataclass(frozen=True)
class LibraryPatch:
    """A patch for models of a library, made only where the process has imported the library.

    Attributes:
        modules: Names of the library's modules, one of which is enough.
        patch: The patch, or ``"package.module:attribute"``, imported at its first use.
    """

    modules: Sequence[str]
    patch: Patch | str


@dataclass(frozen=True)
class Domain:
    """An ONNX operator domain that a plugin emits.

    Attributes:
        name: The domain's name, e.g. ``"com.acme"``.
        version: The version imported when the user names none.
        schemas: ``onnx.defs.OpSchema`` objects of its operators; nodes of operators without a schema are not checked.
    """

    name: str
    version: int = 1
    schemas: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"Domain: the name is a text such as 'com.acme', got {self.name!r}")
        if not isinstance(self.version, int) or self.version < 1:
            raise UsageError(f"Domain {self.name!r}: the version is a positive number, got {self.version!r}")


@dataclass(frozen=True)
class OnnxOperator:
    """What the builder knows of an ONNX operator; the functions may each be left out.

    Attributes:
        name, domain: The operator; ``""`` is ai.onnx.
        infer: ``(inputs, attributes, spec) -> [(dtype, dims), …]``: dtype and dimensions of each output, cheaply, of values, of
            attributes by name and of the ``onnxplug.build.spec.OpSpec``. A ``None`` dtype means the schema's, ``None`` dims an
            unknown rank, and a ``None`` dimension an unknown size. Without it, onnx's own inference is used.
        simplify: ``(g, inputs, attributes) -> Value | None``: a value that is bit for bit the node's result, or ``None`` to emit
            the node. Of operators with a schema.
        fold: ``(arrays, attributes) -> array | None``: the result for constants, as ONNX defines it; ``None`` leaves it to
            the runtime. Of operators with a schema and one output.
    """

    name: str
    domain: str = ""
    infer: Callable[..., Any] | None = None
    simplify: Callable[..., Any] | None = None
    fold: Callable[..., Any] | None = None


@dataclass(frozen=True)
class OrtLibrary:
    """An ONNX Runtime custom-operator library.

    Attributes:
        path: Path of the shared library, or a function that returns it (``None``: there is no library on this machine).
        providers: Execution providers, any of which serves the library's kernels; empty for all providers.
        domains: ONNX domains whose operators it implements; the plugin's declared domains when empty.
    """

    path: str | os.PathLike[str] | Callable[[], str | os.PathLike[str] | None]
    providers: Sequence[str] = ()
    domains: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) and not callable(self.path):
            raise UsageError(f"OrtLibrary: the path of a library, or a function that returns it, got {self.path!r}")


@dataclass(frozen=True)
class ReferenceOp:
    """A Python kernel of a custom operator.

    Attributes:
        kernel: An ``onnx.reference.op_run.OpRun`` subclass, named as the operator, or ``"package.module:Class"``, which is
            imported when a model uses a domain of the plugin.
    """

    kernel: type | str

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, type | str):
            raise UsageError(f"ReferenceOp: an OpRun class or 'package.module:Class', got {self.kernel!r}")


@dataclass(frozen=True)
class Evaluator:
    """An evaluator that runs models node by node where ONNX Runtime lacks a kernel, and for ``call_reference``.

    Attributes:
        name: Its name in reports and ``OnnxProgram.runtime``.
        make: A function of the model (a file's path, or the bytes) and of the ``OpRun`` classes of its custom operators, or
            ``"package.module:function"``. It returns an object with ``input_names``, ``output_names`` and
            ``run(output_names, feeds)``, like an ``onnx.reference.ReferenceEvaluator``, and raises where it lacks a kernel:
            the next evaluator is tried then.
    """

    name: str
    make: Callable[[str | bytes, Sequence[type]], Any] | str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"Evaluator: the name is a text such as 'acme.reference', got {self.name!r}")
        if not callable(self.make) and not (isinstance(self.make, str) and self.make.count(":") == 1):
            raise UsageError(
                f"Evaluator {self.name!r}: make is a function or 'package.module:function', got {self.make!r}"
            )


@dataclass(frozen=True)
class VerificationRequest:
    """The arguments of :meth:`onnxplug.OnnxProgram.verify`, which explains them.

    Raises:
        UsageError: One is malformed.
    """

    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    rtol: float | None = None
    atol: float | None = None
    seeds: Sequence[int] = (0, 1, 2)
    intermediates: bool = False

    def __post_init__(self) -> None:
        check_flags(intermediates=self.intermediates)
        check_seeds(self.seeds)
        for name, tolerance in (("rtol", self.rtol), ("atol", self.atol)):
            check_kind(name, tolerance, (int, float, type(None)), "a number")
            if tolerance is not None and not tolerance >= 0:
                raise UsageError(f"{name}= takes a number of at least 0, got {tolerance!r}")
        check_lists(args=() if self.args is None else self.args)
        check_mappings(kwargs=self.kwargs)


@dataclass(frozen=True)
class VerificationCase:
    """A set of inputs that both models ran on.

    Attributes:
        sizes: Size of each dynamic dimension.
        seed: Seed of the generated inputs; ``None`` for the export's own.
        max_abs_difference: Largest difference over all outputs.
        runtime: The runtime or evaluator that ran the model.
        unstable: Number of elements that differ by more than the tolerance, but by no more than rounding of the inputs
            and weights changes them in PyTorch itself, or than PyTorch's own result is from its result in float64.
        ties: Whether PyTorch's results were computed with ONNX's choices among equal elements (topk, sort …).
    """

    sizes: Mapping[str, int]
    seed: int | None
    max_abs_difference: float
    runtime: str
    unstable: int = 0
    ties: bool = False


@dataclass
class VerificationReport:
    """The report of verification.

    Attributes:
        cases: The sets of inputs on which both agree.
        skipped: Drawn sizes that eager PyTorch itself rejects, with its reason; other sizes were drawn instead.
        intermediates: The ``onnxplug_tools.diagnosis.verdict.Verdict`` on the first of these sets, with ``intermediates=True``.
        quantised: The later effect of quantising the model (``program.precision``), where the model before quantising was compared.
    """

    cases: list[VerificationCase] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    intermediates: Any = None
    quantised: Any = None

    @property
    def max_abs_difference(self) -> float:
        """Largest difference over all cases."""
        return max((case.max_abs_difference for case in self.cases), default=0.0)

    @property
    def about_quantising(self) -> str | None:
        """A note that the model before quantising was compared, and how far quantising moved results; else ``None``."""
        if self.quantised is None:
            return None
        moved = [f"output {accuracy}" for accuracy in self.quantised.accuracy] or ["no output is in floating point"]
        return "\n".join(
            [
                f"compared is the model before quantising, not the quantised one ({self.quantised.kind}); how far that is from the "
                "model before quantising, on the example inputs and the data of calibrate=:",
                *moved,
            ]
        )

    def __str__(self) -> str:
        lines = [
            f"{', '.join(f'{name}={size}' for name, size in case.sizes.items()) or 'static sizes'}, "
            f"{'the inputs of the export' if case.seed is None else f'seed {case.seed}'}: "
            f"largest difference {case.max_abs_difference:.1e} ({case.runtime})"
            for case in self.cases
        ]
        lines += [f"skipped: {reason}" for reason in self.skipped]
        return "\n".join([*lines, *filter(None, [self.about_quantising])])


#: Compares an ``OnnxProgram`` with PyTorch; raises a ``VerificationError`` where they differ.
Verifier = Callable[[Any, VerificationRequest], VerificationReport]
