"""Names of ``onnxplug``, commands and arguments that separate packages supply."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from onnxplug.errors import MissingPackageError

#: Name in ``onnxplug``, command or argument → its module in the package, ``"module"``, or its object there, ``"module:attribute"``.
PACKAGES = {
    "reference": "onnxplug_reference",
    "testing": "onnxplug_tools.testing",
    "runtime": "onnxplug_tools.runtime",
    "compat": "onnxplug_torch_onnx.compat",
    "export": "onnxplug_torch_onnx.export:export",
    "as_torch_onnx": "onnxplug_torch_onnx.install:as_torch_onnx",
    "custom_translation_table=": "onnxplug_torch_onnx.table:table_rules",
    "onnxplug run": "onnxplug_torch_onnx",
    "bisect": "onnxplug_tools.diagnosis.bisect:bisect",
    "diagnose": "onnxplug_tools.diagnosis.diagnose:diagnose",
    "Diagnosis": "onnxplug_tools.diagnosis.diagnose:Diagnosis",
    "report=": "onnxplug_tools.report.observer:observer",
    "profile=": "onnxplug_tools.profiling.observer:observer",
    "intermediates=": "onnxplug_tools.diagnosis.verdict:judge_program",
    "ONNXPLUG_LOG=": "onnxplug_tools.logs:show",
    "progress=": "onnxplug_tools.progress",
    "pieces=": "onnxplug_tools.pieces.pieces:export_pieces",
    "weights=": "onnxplug_tools.checkpoint:open_checkpoint",
    "fake_weights": "onnxplug_tools.fake_weights:fake_weights",
    "external=": "onnxplug_tools.checkpoint:in_safetensors",
    "metadata=full": "onnxplug_torch_onnx.program_metadata:FullMetadata",
    "--profile": "onnxplug_tools.profiling.command:profiled",
    "--report": "onnxplug_tools.report.command:reporting",
    "examples=": "onnxplug_tools.examples",
    "checks=": "onnxplug_tools.checks:insert",
    "functions=": "onnxplug_tools.outline.outline:outline",
    "Functions": "onnxplug_tools.outline.request:Functions",
    "dtype=": "onnxplug_precision.program:conversion",
    "quantize=": "onnxplug_precision.program:conversion",
    "onnxplug convert": "onnxplug_precision",
    "onnxplug fleet": "onnxplug_fleet",
    "onnxplug shardings": "onnxplug_sharding",
    "data=": "onnxplug_fleet.verification:verify_program",
    "OnnxPieces": "onnxplug_tools.pieces.pieces:OnnxPieces",
    **{
        f"target={name}": "onnxplug_targets" for name in ("openvino", "webgpu", "qnn", "coreml", "tensorrt", "directml")
    },
    **{
        f"onnxplug {name}": "onnxplug_tools"
        for name in ("verify", "inspect", "compare", "bench", "diagnose", "bisect", "why", "ops", "plugins")
    },
}


def load(name: str, needed_by: str | None = None) -> Any:
    """The object that a package supplies under a name.

    Args:
        name: A key of :data:`PACKAGES`.
        needed_by: The feature that needs the package, for the error.

    Raises:
        MissingPackageError: The package is not installed.
    """
    module, _, attribute = PACKAGES[name].partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise missing_package(name, needed_by) from None
    return getattr(imported, attribute) if attribute else imported


def members_of(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module of ``onnxplug`` whose content a package supplies.

    Args:
        name: The module's name, a key of :data:`PACKAGES`.
    """

    def member(attribute: str) -> Any:
        if attribute.startswith("__") and attribute not in ("__all__", "__path__"):
            raise AttributeError(f"module 'onnxplug.{name}' has no attribute {attribute!r}")
        return getattr(load(name), attribute)

    return member, lambda: dir(load(name))


def is_installed(name: str) -> bool:
    """Whether the package that supplies a key of :data:`PACKAGES` is there."""
    return find_spec(distribution_of(name).replace("-", "_")) is not None


def missing_package(name: str, needed_by: str | None = None) -> MissingPackageError:
    """The error for a package that is not installed.

    Args:
        name: A key of :data:`PACKAGES`.
        needed_by: The feature that needs the package; when ``None``, ``name``, with ``onnxplug.`` before a public name.
    """
    package = distribution_of(name)
    needs = needed_by if needed_by is not None else f"onnxplug.{name}" if name.isidentifier() else name
    return MissingPackageError(
        f"{needs} needs the package {package}, which is not installed", hint=f"pip install {package}"
    )


def distribution_of(name: str) -> str:
    """The distribution that supplies a key of :data:`PACKAGES`."""
    return PACKAGES[name].partition(":")[0].partition(".")[0].replace("_", "-")


def public_modules() -> list[str]:
    """The keys that are modules of ``onnxplug``, whether their packages are installed or not."""
    return [name for name, place in PACKAGES.items() if name.isidentifier() and ":" not in place]


def public_names() -> list[str]:
    """The keys of installed packages that are names of ``onnxplug`` itself, without modules."""
    return [name for name, place in PACKAGES.items() if name.isidentifier() and ":" in place and is_installed(name)]
