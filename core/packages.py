"""Names of ``onnxplug`` that packages of their own bring."""

from __future__ import annotations

import importlib
from typing import Any

from onnxplug.errors import MissingPackageError

#: Name in ``onnxplug`` → its module in the package, ``"module"``, or what it is there, ``"module:attribute"``.
PACKAGES = {
    "reference": "onnxplug_reference",
}


def load(name: str) -> Any:
    """What a package brings under a name of ``onnxplug``.

    Args:
        name: A key of :data:`PACKAGES`.

    Raises:
        MissingPackageError: The package is not installed.
    """
    module, _, attribute = PACKAGES[name].partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise missing_package(name) from None
    return getattr(found, attribute) if attribute else found


def missing_package(name: str, what: str | None = None) -> MissingPackageError:
    """The error for a package that is not installed.

    Args:
        name: A key of :data:`PACKAGES`.
        what: What needs the package; ``onnxplug.NAME`` when ``None``.
    """
    package = PACKAGES[name].partition(":")[0].partition(".")[0].replace("_", "-")
    return MissingPackageError(
        f"{what if what is not None else f'onnxplug.{name}'} needs the package {package}, which is not installed",
        hint=f"pip install {package}",
    )
