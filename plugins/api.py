"""Plain records that hooks return for the command line, for tests and for the choice of plugins.

Nothing here imports torch, onnx or onnx_ir, so that importing a plugin stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxplug.kinds import check_lists
from onnxplug.plugin_api import API_VERSION


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

    def __post_init__(self) -> None:
        check_lists(**{name: value for name, value in vars(self).items() if name != "api"})
