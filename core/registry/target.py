"""The target of an export: opsets, a runtime, and whether special values must be exact."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onnxplug.errors import UsageError
from onnxplug.packages import PACKAGES, is_installed, missing_package

#: The default runtime of an export.
DEFAULT_RUNTIME = "onnxruntime"

_NAME = re.compile(r"[a-z0-9][a-z0-9_.\-]*(:[a-z0-9][a-z0-9_.\-]*)*")


@dataclass(frozen=True)
class Target:
    """The target of an export.

    Attributes:
        opset: Version of ai.onnx.
        opsets: Version of every requested domain, ``""`` included.
        runtime: The program that runs the model, ``"onnxruntime"``, or a part of it, ``"onnxruntime:cpu"``; ``None`` is
            portable ONNX: no form that serves a single runtime.
        exact: Whether NaN, infinities, ties and integers beyond 2**53 must be as in PyTorch where that costs time.
    """

    opset: int
    opsets: Mapping[str, int] = field(default_factory=dict)
    runtime: str | None = DEFAULT_RUNTIME
    exact: bool = False


def checked_names(owner: str, target: str | Sequence[str] | None) -> tuple[str, ...]:
    """A condition's target names as a tuple; empty when it holds for every target.

    Raises:
        UsageError: A name is malformed.
    """
    names = (target,) if isinstance(target, str) else tuple(target or ())
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"{owner}: a target is a lower-case name such as 'onnxruntime' or 'onnxruntime:cpu', got {name!r}"
            )
    return names


def closeness(names: Sequence[str], runtime: str | None) -> int | None:
    """How closely a condition's target names fit a runtime.

    Targets nest: a condition on ``"onnxruntime"`` holds for ``"onnxruntime:cpu"`` too, and the longer name is closer.

    Args:
        names: The names of the condition; none hold for every runtime and for portable ONNX.
        runtime: The runtime; ``None`` is portable ONNX.

    Returns:
        The number of parts of the closest name that fits, 0 for a condition without names, ``None`` when no name fits.
    """
    if not names:
        return 0
    fitting = [n for n in names if runtime is not None and (runtime == n or runtime.startswith(f"{n}:"))]
    return max((name.count(":") + 1 for name in fitting), default=None)


def is_onnxruntime_cpu(runtime: str | None) -> bool:
    """Whether a model is made for ONNX Runtime's CPU: also if the target is ``"onnxruntime"`` without a part."""
    return runtime in (DEFAULT_RUNTIME, f"{DEFAULT_RUNTIME}:cpu")


def intersect(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether some runtime fits both conditions' target names."""
    if not one or not other:
        return True
    return any(closeness([a], b) is not None or closeness([b], a) is not None for a in one for b in other)


def with_outer(names: Iterable[str]) -> set[str]:
    """Target names and the names that contain them: ``"onnxruntime:cpu"`` is also a part of ``"onnxruntime"``."""
    nested: set[str] = set()
    for name in names:
        parts = name.split(":")
        nested |= {":".join(parts[: i + 1]) for i in range(len(parts))}
    return nested


def check_runtime(runtime: str | None, known: Iterable[str]) -> str | None:
    """The requested runtime, if some rule, rewrite or plugin knows it.

    Args:
        runtime: The user's runtime; ``None`` is portable ONNX.
        known: The declared target names; the default target is always known.

    Raises:
        MissingPackageError: A package provides the target and is not installed.
        UsageError: It is unknown; the hint lists similar and known names.
    """
    if runtime is None:
        return None
    names = sorted(with_outer([DEFAULT_RUNTIME, *known]))
    if runtime in names:
        return runtime
    package = f"target={str(runtime).removeprefix(f'{DEFAULT_RUNTIME}:')}"
    if package in PACKAGES and not is_installed(package):
        raise missing_package(package, f"target={runtime!r}")
    near = difflib.get_close_matches(str(runtime).lower(), names, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(
        f"target={runtime!r} is unknown",
        hint=f"{hint}Known targets: {', '.join(map(repr, names))}, and None for portable ONNX. A plugin adds its own by "
        "PluginInfo(targets=[...]), or by a rule with target=....",
    )
