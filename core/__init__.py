"""onnxplug: PyTorch to ONNX, every translation a rule in a registry.

Every public name is importable from here and loaded at first use, so that ``import onnxplug`` stays cheap.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from onnxplug.packages import PACKAGES, load, public_modules, public_names
from onnxplug.version import VERSION as __version__

_HOME = {
    "to_onnx": "exporter",
    "OnnxProgram": "program",
    "Rule": "registry.rule",
    "Rewrite": "rewrite.rewrite",
    "Metadata": "metadata",
    "Observer": "observers",
    "LibraryFunctions": "plugins.library_functions",
    "string_tensor": "strings",
    "string_array": "strings",
    "OnnxRegistry": "registry.registry",
    "GraphBuilder": "build.builder",
    "FxNode": "interpret.node",
    "DynamoInterpreter": "interpret.interpreter",
    **dict.fromkeys(
        (
            "AttemptPatch",
            "LibraryPatch",
            "CaptureMode",
            "CaptureRequest",
            "Domain",
            "OnnxOperator",
            "OrtLibrary",
            "ReferenceOp",
            "Evaluator",
            "VerificationCase",
            "VerificationReport",
            "VerificationRequest",
            "hookspec",
            "hookimpl",
        ),
        "plugin_api",
    ),
    **dict.fromkeys(
        ("ExportedFile", "ExportRequest", "ModelSource", "OpSample", "PluginInfo", "TargetInfo"), "plugins.api"
    ),
    **dict.fromkeys(
        (
            "Decline",
            "Unsupported",
            "OnnxplugError",
            "UsageError",
            "CaptureError",
            "FixedDimensionError",
            "MissingRuleError",
            "ConversionError",
            "OutputMismatchError",
            "RuleConflictError",
            "PluginError",
            "OpsetError",
            "VerificationError",
            "EvaluationError",
            "MissingPackageError",
            "SaveError",
            "WeightsError",
        ),
        "errors",
    ),
}

__all__ = ["__version__", *sorted({*_HOME, *public_names()})]

if TYPE_CHECKING:
    from onnxplug_tools.diagnosis.bisect import bisect as bisect
    from onnxplug_tools.diagnosis.diagnose import Diagnosis as Diagnosis, diagnose as diagnose
    from onnxplug_tools.fake_weights import fake_weights as fake_weights
    from onnxplug_tools.outline.request import Functions as Functions
    from onnxplug_tools.pieces.pieces import OnnxPieces as OnnxPieces
    from onnxplug_torch_onnx.export import export as export
    from onnxplug_torch_onnx.install import as_torch_onnx as as_torch_onnx

    from onnxplug.build.builder import GraphBuilder as GraphBuilder
    from onnxplug.errors import (
        CaptureError as CaptureError,
        ConversionError as ConversionError,
        Decline as Decline,
        EvaluationError as EvaluationError,
        FixedDimensionError as FixedDimensionError,
        MissingPackageError as MissingPackageError,
        MissingRuleError as MissingRuleError,
        OnnxplugError as OnnxplugError,
        OpsetError as OpsetError,
        OutputMismatchError as OutputMismatchError,
        PluginError as PluginError,
        RuleConflictError as RuleConflictError,
        SaveError as SaveError,
        Unsupported as Unsupported,
        UsageError as UsageError,
        VerificationError as VerificationError,
        WeightsError as WeightsError,
    )
    from onnxplug.exporter import to_onnx as to_onnx
    from onnxplug.interpret.interpreter import DynamoInterpreter as DynamoInterpreter
    from onnxplug.interpret.node import FxNode as FxNode
    from onnxplug.metadata import Metadata as Metadata
    from onnxplug.observers import Observer as Observer
    from onnxplug.plugin_api import (
        AttemptPatch as AttemptPatch,
        CaptureMode as CaptureMode,
        CaptureRequest as CaptureRequest,
        Domain as Domain,
        Evaluator as Evaluator,
        LibraryPatch as LibraryPatch,
        OnnxOperator as OnnxOperator,
        OrtLibrary as OrtLibrary,
        ReferenceOp as ReferenceOp,
        VerificationCase as VerificationCase,
        VerificationReport as VerificationReport,
        VerificationRequest as VerificationRequest,
        hookimpl as hookimpl,
        hookspec as hookspec,
    )
    from onnxplug.plugins.api import (
        ExportedFile as ExportedFile,
        ExportRequest as ExportRequest,
        ModelSource as ModelSource,
        OpSample as OpSample,
        PluginInfo as PluginInfo,
        TargetInfo as TargetInfo,
    )
    from onnxplug.plugins.library_functions import LibraryFunctions as LibraryFunctions
    from onnxplug.program import OnnxProgram as OnnxProgram
    from onnxplug.registry.registry import OnnxRegistry as OnnxRegistry
    from onnxplug.registry.rule import Rule as Rule
    from onnxplug.rewrite.rewrite import Rewrite as Rewrite
    from onnxplug.strings import string_array as string_array, string_tensor as string_tensor


#: Names of ``torch.onnx`` as of 2023, with their replacements here.
_FORMER = {
    "dynamo_export": "onnxplug.to_onnx",
    "ExportOptions": "the arguments of onnxplug.to_onnx",
    "DiagnosticOptions": "ONNXPLUG_LOG and report=",
    "ExportOutput": "onnxplug.OnnxProgram",
    "ExportOutputSerializer": "OnnxProgram.save",
    "ONNXProgram": "onnxplug.OnnxProgram",
    "ONNXRuntimeOptions": 'torch.compile(backend="onnxplug", options={...})',
    "ONNXFakeContext": "onnxplug.fake_weights",
    "enable_fake_mode": "onnxplug.fake_weights",
}


def __getattr__(name: str) -> Any:
    if name in public_modules():
        return importlib.import_module(f"onnxplug.{name}")
    home = _HOME.get(name)
    if name in PACKAGES:
        value = load(name)
    elif home is not None:
        value = getattr(importlib.import_module(f"onnxplug.{home}"), name)
    else:
        text = f"module 'onnxplug' has no attribute {name!r}"
        if name in _FORMER:
            text += f"; there is {_FORMER[name]} for it, see docs/recipes/coming-from-other-exporters.md"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *public_modules()})
