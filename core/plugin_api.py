"""What a plugin module imports: hook markers and the plain records that hooks return.

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
"""Says of a function of names whether it holds for a name in the model's code."""


@dataclass(frozen=True)
class CaptureRequest:
    """What a patch with a second parameter gets beside the captured module.

    Attributes:
        options: The export's options, a :class:`onnxplug.options.ExportOptions`.
        registry: The export's rules, an :class:`onnxplug.OnnxRegistry`.
        mentions: What the model's code names.
        strict: torch.export's mode, of an attempt.
        below: Whether an attempt records what the model computes below autograd and functorch.
        counts: What patches of an attempt count, for the statistics: ``"repeated"``.
    """

    options: Any = None
    registry: Any = None
    mentions: Mentions = lambda _: False
    strict: bool = False
    below: bool = False
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptureMode:
    """A way to capture a model, of those that a patch offers in a list: the first in which the capture succeeds is taken.

    Attributes:
        context: Makes the context manager that holds meanwhile.
        strict: torch.export's mode, where the user names none; ``None`` for either.
    """

    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    strict: bool | None = None


Patch = AbstractContextManager[Any] | Callable[..., AbstractContextManager[Any] | Sequence[CaptureMode]]
"""What holds during capture: a context manager, or a function that makes one, or a list of :class:`CaptureMode`. Where it has a
parameter, it gets the captured module, and a :class:`CaptureRequest` where it has two; an :class:`AttemptPatch` is asked anew for
each attempt."""


@dataclass(frozen=True)
class AttemptPatch:
    """A patch that holds for one attempt at a capture; there may be several, in either of torch.export's modes.

    Attributes:
        enter: Makes the context manager, of a :class:`CaptureRequest` that says which attempt it is.
    """

    enter: Callable[[CaptureRequest], AbstractContextManager[Any]]

    def __call__(self, module: Any, request: CaptureRequest) -> AbstractContextManager[Any]:
        """The context manager of an attempt."""
        return self.enter(request)


@dataclass(frozen=True)
class Domain:
    """An ONNX operator domain that a plugin emits.

    Attributes:
        name: The domain's name, e.g. ``"com.acme"``.
        version: The version imported when the user names none.
        schemas: ``onnx.defs.OpSchema`` objects of its operators; nodes of operators without one are not checked.
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
class OrtLibrary:
    """An ONNX Runtime custom-operator library.

    Attributes:
        path: Path of the shared library, or a function that returns it (``None``: there is no library on this machine).
        providers: Execution providers, one of which the library's kernels need; empty means any.
        domains: ONNX domains whose operators it implements; those that the plugin declares when empty.
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
    """What runs models node by node where ONNX Runtime lacks a kernel, and for ``call_reference``.

    Attributes:
        name: How reports and ``OnnxProgram.runtime`` call it.
        make: A function of the model (a file's path, or the bytes) and of the ``OpRun`` classes of its custom operators, or
            ``"package.module:function"``. It returns an object with ``input_names``, ``output_names`` and
            ``run(output_names, feeds)``, like an ``onnx.reference.ReferenceEvaluator``, and raises where it lacks a kernel:
            the next evaluator is then asked.
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
        opsets: ai.onnx opsets at which the sample holds; empty means all that the rule claims.
        dynamic_shapes: One entry a positional argument, as ``torch.export`` takes them: the sample is then exported with
            these dimensions dynamic and compared at several sizes.
        others: Further positional arguments to compare on, likewise made by functions or given. ``None``: some of random
            values are drawn; say them, or ``()``, where an operator takes special values alone (indices, regions of an
            image).
        results: Positions of the results that are compared, of an operator with several; the others are not read.
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
    """A runtime that ``to_onnx(target=...)`` may be given, and what its kernels take.

    Attributes:
        name: ``"openvino"``, or a part of a runtime, ``"onnxruntime:cpu"``.
        kernels: Operator of ai.onnx to its kernels (:class:`onnxplug.build.kernels.Kernels` says how they are written), or
            ``"package.module:NAME"`` of such a mapping. An operator without a kernel for an element type is then computed in
            a wider one and cast back. ``None``: every operator is emitted as it is.
    """

    name: str
    kernels: Mapping[str, str] | str | None = None


@dataclass(frozen=True)
class ModelSource:
    """A kind of model that the command line takes, ``onnxplug export SCHEME:NAME`` or ``FILE.SUFFIX``, or that ``to_onnx`` takes.

    Attributes:
        scheme: What stands before the colon, e.g. ``"acme"``: small letters, digits and hyphens. Empty for none.
        load: A function of the name, or of the file's path, that returns a module, ``(module, args)`` or
            ``(module, args, kwargs)``; or ``"package.module:function"``, imported at its first use. A keyword ``pretrained`` says
            whether trained weights were asked for; without one ``--pretrained`` is refused.
        export: A function ``(request, **options)`` that does the whole export instead, for models of several files, or
            ``"package.module:function"``. Its keyword parameters are options of ``onnxplug export`` for this scheme, annotated as
            ``typer`` takes them. It gets an :class:`ExportRequest` and returns :class:`ExportedFile` records.
        help: What NAME or FILE is, in a few words.
        suffixes: Ends of the names of files that are such models, e.g. ``(".acme",)``.
        accepts: A function of an object that says whether ``to_onnx`` is to take it as a model of this kind, or
            ``"package.module:function"``. It is asked for each model that is exported, so it imports nothing heavy.
        module: A function of such a model that returns a Module which computes the same, or ``"package.module:function"``. That is
            captured, in torch.export's non-strict mode; verification compares with the model itself.
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
    """What the options of ``onnxplug export`` say that mean the same for every model.

    Attributes:
        name: What follows the scheme and its colon.
        output: Where to write: a file or a folder, as the source decides.
        verify: Compare with PyTorch.
        external_data: Weights in a file of their own; ``None`` decides by size.
        options: Keyword arguments of ``onnxplug.to_onnx``: ``opset_version``, ``target``, ``optimize``, ``registry``, ...
        stage: To be called with the name of each stage as it begins.
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
        report: What its verification found; ``None`` where it was not asked for.
        notes: What the user should know of it, a sentence each.
    """

    path: Path
    program: Any
    report: Any = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class PluginInfo:
    """What a plugin says about itself.

    Attributes:
        api: The version of onnxplug's plugin API that the plugin was written for.
        requires: Requirement strings (PEP 508) of packages that must be installed beside it.
        namespaces: torch namespaces whose operators it translates; used to explain errors when it is broken.
        targets: Runtimes that it knows, by name or as :class:`TargetInfo`. The names that its rules and rewrites are for
            need not be said again.
        libraries: Import names of the libraries that register those operators, or whose models it serves, where they are
            called otherwise than the namespaces.
        replaced: Operators that its patches replace while a model is captured, so that they need no rule.
    """

    api: int = API_VERSION
    requires: Sequence[str] = ()
    namespaces: Sequence[str] = ()
    targets: Sequence[str | TargetInfo] = ()
    libraries: Sequence[str] = ()
    replaced: Sequence[str] = ()
