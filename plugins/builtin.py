"""The builtin plugin: onnxplug's own rules, rewrites and patches, found by its entry point like any other plugin."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from onnxplug.observers import Observer
from onnxplug.plugin_api import AttemptPatch, CaptureRequest, Evaluator, LibraryPatch, OnnxOperator, hookimpl
from onnxplug.plugins.api import ModelSource, PluginInfo, TargetInfo
from onnxplug.registry.rule import Rule


def families() -> list[ModuleType]:
    """The modules of ``onnxplug.converters``, each with a table ``RULES``."""
    package = importlib.import_module("onnxplug.converters")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]


@hookimpl
def onnxplug_rules() -> Iterable[Rule]:
    """Every rule of ``onnxplug.converters``."""
    return [rule for family in families() for rule in family.RULES]


@hookimpl
def onnxplug_decompositions() -> Mapping[str, Callable[..., Any] | None]:
    """Decompositions of backward operators and of others for which torch has none."""
    from onnxplug.converters import attention, gradients, gradients_sampling, linear

    families = (gradients, gradients_sampling, linear, attention)
    return {name: function for family in families for name, function in family.DECOMPOSITIONS.items()}


@hookimpl
def onnxplug_rewrites() -> Iterable[Any]:
    """The builtin rewrites."""
    from onnxplug.rewrites import attention, columns, convolution, norms, onnxruntime, patterns, quantised, rows

    modules = (patterns, onnxruntime, quantised, norms, columns, convolution, attention, rows)
    return [rewrite for module in modules for rewrite in module.REWRITES]


@hookimpl
def onnxplug_operators() -> Iterable[OnnxOperator]:
    """The operators of ai.onnx."""
    from onnxplug.operators.table import OPERATORS

    return OPERATORS


@hookimpl
def onnxplug_patches() -> Iterable[Any]:
    """The patches of torch, and of the modules of quantisation-aware training."""
    return [
        _of_capture,
        LibraryPatch(("torch.ao.quantization.fake_quantize",), "onnxplug.patches.fake_quantisers:fake_quantisers"),
        AttemptPatch(_of_attempt),
    ]


def _of_capture(_: Any, request: CaptureRequest) -> AbstractContextManager[None]:
    from onnxplug.patches.table import torch_patched

    return torch_patched("capture", request)


def _of_attempt(request: CaptureRequest) -> AbstractContextManager[None]:
    from onnxplug.patches.table import torch_patched

    return torch_patched("attempt", request)


@hookimpl
def onnxplug_observers() -> Iterable[Callable[[Any], Observer]]:
    """The observers that warn of a model in training and of kernels that ONNX Runtime lacks, and complete errors of capture."""
    return [_training_warnings, _kernel_warnings, _library_advice, _faulty_submodule]


def _training_warnings(_: Any) -> Observer:
    from onnxplug.plugins.training import TrainingWarnings

    return TrainingWarnings()


def _kernel_warnings(_: Any) -> Observer:
    from onnxplug.plugins.lacking import KernelWarnings

    return KernelWarnings()


def _library_advice(_: Any) -> Observer:
    from onnxplug.plugins.advice import LibraryAdvice

    return LibraryAdvice()


def _faulty_submodule(_: Any) -> Observer:
    from onnxplug.plugins.submodules import FaultySubmodule

    return FaultySubmodule()


@hookimpl
def onnxplug_sources() -> Iterable[ModelSource]:
    """The models of timm."""
    return [ModelSource("timm", "onnxplug.plugins.timm:load", help="NAME is one of timm.list_models().")]


@hookimpl
def onnxplug_missing(node: Any) -> Callable[..., Any] | None:
    """Operators that users have registered in torch's namespace ``onnx`` are operators of ONNX."""
    if not str(node.op_name).startswith("onnx::"):
        return None
    from onnxplug.converters.onnx_ops import operator_of_onnx

    return operator_of_onnx


@hookimpl
def onnxplug_evaluators() -> Iterable[Evaluator]:
    """onnx's own evaluator."""
    return [Evaluator("onnx.reference", "onnxplug.plugins.evaluator:onnx_evaluator")]


@hookimpl
def onnxplug_refusals() -> Iterable[str]:
    """The dtypes that kernels of aten refuse."""
    return ["onnxplug.plugins.refused:refusal"]


@hookimpl(trylast=True)
def onnxplug_verifier(program: Any) -> Callable[[Any, Any], Any]:
    """The comparison with eager PyTorch, which leaves the model as it was."""
    from onnxplug.plugins.verifier import verify

    return verify


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The builtin plugin's namespaces and targets."""
    cpu = TargetInfo("onnxruntime:cpu", kernels="onnxplug.plugins.onnxruntime_cpu:KERNELS")
    return PluginInfo(namespaces=("aten", "prims"), targets=("onnxruntime", cpu))
