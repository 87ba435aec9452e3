"""What onnxplug's other packages bring, by the names under which users ask for it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from onnxplug.errors import MissingPackageError

_TOOLS = "onnxplug-tools"
#: Commands, arguments, options and public names, by the package that has them.
PACKAGES = {
    **dict.fromkeys(("onnxplug inspect", "onnxplug bench", "onnxplug compare"), _TOOLS),
    **dict.fromkeys(("onnxplug bisect", "onnxplug diagnose"), _TOOLS),
    **dict.fromkeys(("onnxplug.bisect", "onnxplug.diagnose", "onnxplug.Diagnosis"), _TOOLS),
    **dict.fromkeys(("report=", "--report", "intermediates=True"), _TOOLS),
}
#: Public names of ``onnxplug`` that are in other packages, by their modules.
HOMES = {
    "bisect": "onnxplug_tools.diagnosis.bisect",
    "diagnose": "onnxplug_tools.diagnosis.diagnose",
    "Diagnosis": "onnxplug_tools.diagnosis.diagnose",
}


def absent(name: str) -> MissingPackageError:
    """The error for what is asked for and not installed.

    Args:
        name: A key of :data:`PACKAGES`.
    """
    package = PACKAGES[name]
    return MissingPackageError(
        f"{name} is in the package {package}, which is not installed", hint=f"pip install {package}"
    )


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return find_spec(package.replace("-", "_")) is not None


def load(path: str, name: str) -> Any:
    """A module of another package, or something in it.

    Args:
        path: The module, ``"onnxplug_tools.report.collect"``, and after a colon the name in it.
        name: What the user asked for, a key of :data:`PACKAGES`.

    Raises:
        MissingPackageError: The package is not installed.
    """
    if not is_installed(PACKAGES[name]):
        raise absent(name)
    home, _, attribute = path.partition(":")
    module = importlib.import_module(home)
    return getattr(module, attribute) if attribute else module
