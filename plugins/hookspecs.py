"""The hooks that a plugin may implement. All are optional; all return values and change nothing.

A plugin is a module or object that an installed distribution names under the entry-point group ``onnxplug``:

    [project.entry-points.onnxplug]
    acme = "onnxplug_acme"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onnxplug.observers import Observer
from onnxplug.plugin_api import Domain, Evaluator, OnnxOperator, OrtLibrary, ReferenceOp, hookspec
from onnxplug.plugins.api import ModelSource, OpSample, PluginInfo
from onnxplug.registry.rule import Rule


@hookspec
def onnxplug_rules() -> Iterable[Rule]:  # type: ignore[empty-body]
    """Translations of torch operators."""


@hookspec
def onnxplug_domains() -> Iterable[Domain]:  # type: ignore[empty-body]
    """ONNX domains that the rules emit, with the version imported by default and any schemas."""


@hookspec
def onnxplug_operators() -> Iterable[OnnxOperator]:  # type: ignore[empty-body]
    """What is known of ONNX operators: shape inference, simplification, constant folding. The plugin's own, or ai.onnx's."""


@hookspec
def onnxplug_rewrites() -> Iterable[Any]:  # type: ignore[empty-body]
    """Improvements of the finished graph: ``onnxplug.rewrite.rewrite.Rewrite`` objects."""


@hookspec
def onnxplug_decompositions() -> Mapping[str, Callable[..., Any] | None]:  # type: ignore[empty-body]
    """Qualified operator name to a torch function that computes it by others; ``None`` forbids decomposing it."""


@hookspec
def onnxplug_patches() -> Iterable[Any]:  # type: ignore[empty-body]
    """Context managers that hold during capture, or functions that make one, or a list of ``onnxplug.plugin_api.CaptureMode``.

    A function's first parameter gets the captured module, its second an ``onnxplug.plugin_api.CaptureRequest``.
    """


@hookspec
def onnxplug_runtime() -> Iterable[OrtLibrary | ReferenceOp]:  # type: ignore[empty-body]
    """ONNX Runtime libraries and Python kernels that run the plugin's operators."""


@hookspec
def onnxplug_evaluators() -> Iterable[Evaluator]:  # type: ignore[empty-body]
    """Evaluators that run models node by node where ONNX Runtime lacks a kernel; onnx's own evaluator comes last."""


@hookspec(firstresult=True)
def onnxplug_missing(node: Any) -> Callable[..., Any] | None:
    """A converter for an operator that no rule translates, or ``None``."""


@hookspec(firstresult=True)
def onnxplug_verifier(program: Any) -> Callable[[Any, Any], Any] | None:
    """A function that verifies this program instead of onnxplug's own comparison, or ``None``.

    It takes the :class:`onnxplug.OnnxProgram` and an :class:`onnxplug.VerificationRequest`, and returns an
    :class:`onnxplug.VerificationReport` or raises a :class:`onnxplug.VerificationError`.
    """


@hookspec
def onnxplug_refusals() -> Iterable[Callable[..., str | None] | str]:  # type: ignore[empty-body]
    """Functions, or their names, that tell why eager PyTorch refuses a call that fake tensors accept.

    ``(fx, *, is_doubtful=False, is_unused=False) -> str | None``: PyTorch's error for a call of an operator in the captured graph.
    Each function is called for each call of the model: it must be quick where there is no doubt. ``is_doubtful``: no rule
    translates the call as it is. ``is_unused``: nothing reads its result.
    """


@hookspec
def onnxplug_samples() -> Iterable[OpSample]:  # type: ignore[empty-body]
    """Inputs that the plugin's operators are tested and documented with."""


@hookspec
def onnxplug_sources() -> Iterable[ModelSource]:  # type: ignore[empty-body]
    """Kinds of models that the command line takes by name, ``SCHEME:NAME``."""


@hookspec
def onnxplug_observers() -> Iterable[Observer | Callable[[Any], Observer | None]]:  # type: ignore[empty-body]
    """Observers of every export: ``onnxplug.Observer`` objects, or functions of its options that return an observer or ``None``."""


@hookspec
def onnxplug_commands(app: Any) -> None:
    """Adds subcommands to the command line (a ``typer.Typer``)."""


@hookspec(firstresult=True)
def onnxplug_info() -> PluginInfo:  # type: ignore[empty-body]
    """The plugin's description of itself."""
