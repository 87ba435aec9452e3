"""The imports of a plugin module: hook markers and the plain records that hooks return.

Nothing here imports torch, onnx or onnx_ir, so that importing a plugin stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pluggy

from onnxplug.errors import UsageError

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
class OpSample:
    """Inputs with which a plugin's operator is tested and documented.

    Attributes:
        op: Qualified torch name of the operator.
        args: A function without arguments that makes the positional arguments, or the arguments themselves.
        kwargs: Keyword arguments.
        opsets: ai.onnx opsets at which the sample holds; empty for all opsets of the rule.
        dynamic_shapes: An entry for each positional argument, as for ``torch.export``: the sample is then exported with
            these dimensions dynamic and compared at several sizes.
        others: Other positional arguments to compare on, likewise values or functions that make them. ``None``: random values are
            drawn; give values, or ``()``, where an operator takes only special values (indices, regions of an image).
        results: Positions of the results to compare, for an operator with several; the others are not read.
    """

    op: str
    args: Callable[[], Sequence[Any]] | Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    opsets: Sequence[int] = ()
    dynamic_shapes: Sequence[Any] | None = None
    others: Sequence[Callable[[], Sequence[Any]] | Sequence[Any]] | None = None
    results: Sequence[int] | None = None


@dataclass(frozen=True)
class TargetInfo:
    """A runtime for ``to_onnx(target=...)``, and the element types of its kernels.

    Attributes:
        name: ``"openvino"``, or a part of a runtime, ``"onnxruntime:cpu"``.
        kernels: Operator of ai.onnx to its kernels (in the notation of :class:`onnxplug.build.kernels.Kernels`), or
            ``"package.module:NAME"`` of such a mapping. An operator without a kernel for an element type is then computed in
            a wider type and cast back. ``None``: every operator is emitted as it is.
    """

    name: str
    kernels: Mapping[str, str] | str | None = None


@dataclass(frozen=True)
class ModelSource:
    """A kind of model that the command line takes, ``onnxplug export SCHEME:NAME`` or ``FILE.SUFFIX``, or that ``to_onnx`` takes.

    Attributes:
        scheme: The part before the colon, e.g. ``"acme"``: small letters, digits and hyphens. Empty for none.
        load: A function of the name, or of the file's path, that returns a module, ``(module, args)`` or
            ``(module, args, kwargs)``; or ``"package.module:function"``, imported at its first use. A keyword ``pretrained``
            receives whether trained weights are requested; without it ``--pretrained`` is refused.
        export: A function ``(request, **options)`` that does the whole export instead, for models of several files, or
            ``"package.module:function"``. Its keyword parameters are options of ``onnxplug export`` for this scheme, annotated as
            ``typer`` takes them. It gets an :class:`ExportRequest` and returns :class:`ExportedFile` records.
        help: A few words about NAME or FILE.
        suffixes: Endings of the names of files of such models, e.g. ``(".acme",)``.
        accepts: A function of an object that tells whether it is a model of this kind, or ``"package.module:function"``. It is
            called for each model that is exported, so it must import nothing heavy.
        module: A function of such a model that returns a Module which computes the same, or ``"package.module:function"``. The
            Module is captured, in torch.export's non-strict mode; verification compares with the model itself.
    """

    scheme: str = ""
    load: Callable[..., Any] | str | None = None
    export: Callable[..., Sequence[ExportedFile]] | str | None = None
    help: str = ""
    suffixes: Sequence[str] = ()
    accepts: Callable[[Any], bool] | str | None = None
    module: Callable[[Any], Any] | str | None = None


@dataclass(frozen=True)
class ExportRequest:
    """The options of ``onnxplug export`` that mean the same for every model.

    Attributes:
        name: The part after the scheme and its colon.
        output: Where to write: a file or a folder, as the source decides.
        verify: Compare with PyTorch.
        external_data: Weights in a separate file; ``None`` decides by size.
        options: Keyword arguments of ``onnxplug.to_onnx``: ``opset_version``, ``target``, ``optimize``, ``registry``, ...
        stage: Call it with the name of each stage as it begins.
    """

    name: str
    output: Path
    verify: bool = False
    external_data: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stage: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class ExportedFile:
    """A model that a source has written.

    Attributes:
        path: The file.
        program: The :class:`onnxplug.OnnxProgram` in it.
        report: The report of its verification; ``None`` without verification.
        notes: Notes for the user, a sentence each.
    """

    path: Path
    program: Any
    report: Any = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class PluginInfo:
    """A plugin's description of itself.

    Attributes:
        api: The version of onnxplug's plugin API that the plugin was written for.
        requires: Requirement strings (PEP 508) of other packages that must be installed.
        namespaces: torch namespaces whose operators it translates; used to explain errors when it is broken.
        targets: Runtimes that it knows, by name or as :class:`TargetInfo`. The targets of its rules and rewrites need not be
            repeated.
        libraries: Import names of the libraries that register those operators, or whose models it serves, where they differ
            from the namespaces.
        replaced: Operators that its patches replace while a model is captured, so that they need no rule.
    """

    api: int = API_VERSION
    requires: Sequence[str] = ()
    namespaces: Sequence[str] = ()
    targets: Sequence[str | TargetInfo] = ()
    libraries: Sequence[str] = ()
    replaced: Sequence[str] = ()
