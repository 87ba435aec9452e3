"""The opsets that onnxplug emits, and the default opset."""

from __future__ import annotations

from collections.abc import Mapping

from onnxplug.errors import OpsetError
from onnxplug.warn import warn

MIN_OPSET = 13
#: The newest opset that onnxruntime 1.20 loads without a warning about an unreleased opset, and whose operators it and
#: every later version run.
DEFAULT_OPSET = 21

#: The newest opset that the tests cover (torch's operator database); a newer opset is translated with a warning.
TESTED_OPSET = 26


def max_opset() -> int:
    """The newest opset that the installed onnx knows."""
    import onnx.defs

    return int(onnx.defs.onnx_opset_version())


def resolve_opsets(opset_version: int | Mapping[str, int] | None) -> dict[str, int]:
    """The target version of each domain, ``""`` for ai.onnx, from the user's ``opset_version``.

    Raises:
        OpsetError: The opset is outside of onnxplug's range, or isn't a number.
    """
    if opset_version is None:
        opsets: dict[str, int] = {"": DEFAULT_OPSET}
    elif isinstance(opset_version, Mapping):
        opsets = {("" if name == "ai.onnx" else name): version for name, version in opset_version.items()}
        opsets.setdefault("", DEFAULT_OPSET)
    else:
        opsets = {"": opset_version}
    for name, version in opsets.items():
        if not isinstance(name, str):
            raise OpsetError(f"opset_version is given by the names of domains, got {name!r}")
        if isinstance(version, bool) or not isinstance(version, int):
            raise OpsetError(f"opset_version of {name or 'ai.onnx'} must be an int, got {version!r}")
        if version < 1:
            raise OpsetError(f"opset_version of {name or 'ai.onnx'} must be positive, got {version}")
    newest = max_opset()
    if not MIN_OPSET <= opsets[""] <= newest:
        raise OpsetError(
            f"opset {opsets['']} is not supported: onnxplug translates ai.onnx {MIN_OPSET} to {newest}",
            hint=f"{newest} is the newest that the installed onnx knows. The default, {DEFAULT_OPSET}, runs on "
            "onnxruntime 1.20 and later.",
        )
    if opsets[""] > TESTED_OPSET:
        warn(
            f"opset {opsets['']} is newer than those that onnxplug is tested with, {MIN_OPSET} to {TESTED_OPSET}",
        )
    return opsets
