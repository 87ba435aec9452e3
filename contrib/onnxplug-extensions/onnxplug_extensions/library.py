"""The installed onnxruntime-extensions: one error where it is absent, or of a version whose operators are not known here."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from packaging.requirements import Requirement

from onnxplug import PluginError
from onnxplug_extensions import REQUIRED


@cache
def check_library() -> None:
    """Looks for onnxruntime-extensions.

    Raises:
        PluginError: It is absent, or of another version than this package is for.
    """
    requirement = Requirement(REQUIRED)
    hint = f"pip install '{REQUIRED}'"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError as error:
        raise PluginError(f"onnxplug-extensions needs {REQUIRED}, and it is not installed", hint=hint) from error
    if not requirement.specifier.contains(version, prereleases=True):
        raise PluginError(f"onnxplug-extensions is for {REQUIRED}, and {version} is installed", hint=hint)


def library_path() -> str:
    """The library that ONNX Runtime loads.

    Raises:
        PluginError: As :func:`check_library`.
    """
    check_library()
    from onnxruntime_extensions import get_library_path

    return str(get_library_path())
