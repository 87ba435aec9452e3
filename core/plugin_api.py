"""What a plugin module imports: hook markers and the plain records that hooks return.

Nothing here imports torch, onnx or onnx_ir, so that importing a plugin stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pluggy

PROJECT_NAME = "onnxplug"
ENTRY_POINT_GROUP = "onnxplug"
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


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


@dataclass(frozen=True)
class ReferenceOp:
    """A Python kernel of a custom operator.

    Attributes:
        kernel: An ``onnx.reference.op_run.OpRun`` subclass, named as the operator, or ``"package.module:Class"``, which is
            imported when a model uses a domain of the plugin.
    """

    kernel: type | str


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
class PluginInfo:
    """What a plugin says about itself.

    Attributes:
        api: The version of onnxplug's plugin API that the plugin was written for.
        requires: Requirement strings (PEP 508) of packages that must be installed beside it.
        namespaces: torch namespaces whose operators it translates; used to explain errors when it is broken.
        targets: Runtimes that it knows, by name or as :class:`TargetInfo`. The names that its rules and rewrites are for
            need not be said again.
    """

    api: int = API_VERSION
    requires: Sequence[str] = ()
    namespaces: Sequence[str] = ()
    targets: Sequence[str | TargetInfo] = ()
