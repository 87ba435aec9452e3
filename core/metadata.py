"""How much metadata a model has about its origin: ``metadata=`` of an export."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from onnxplug.errors import UsageError

LEVELS = ("none", "short", "full")
DEFAULT_LEVEL = "short"
#: The level of an export without the option.
VARIABLE = "ONNXPLUG_METADATA"


@dataclass(frozen=True)
class Metadata:
    """

    Attributes:
        level: ``"none"``: nothing. ``"short"``: each node's modules, operator and source line, and the rewrites that led to it.
            ``"full"``: also everything that ``torch.onnx.export`` writes, the rules, and the captured program.
        absolute_paths: Name source files by their whole paths; otherwise they are named relative to their project or to the
            folder that packages are installed in.

    Raises:
        UsageError: There is no such level.
    """

    level: str = DEFAULT_LEVEL
    absolute_paths: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.level, str) or self.level not in LEVELS:
            raise _unknown("metadata=", self.level)
        if not isinstance(self.absolute_paths, bool):
            raise UsageError(f"Metadata: absolute_paths takes True or False, got {self.absolute_paths!r}")

    @property
    def is_full(self) -> bool:
        """Whether everything is written."""
        return self.level == "full"

    @property
    def is_none(self) -> bool:
        """Whether nothing is."""
        return self.level == "none"

    @property
    def nodes(self) -> bool | None:
        """Whether nodes have full metadata; ``None`` where they have none."""
        return None if self.is_none else self.is_full

    @classmethod
    def of_option(cls, metadata: Any) -> Metadata:
        """The metadata of an export's argument ``metadata``; ``None`` is the environment variable's level, else the default.

        Raises:
            UsageError: There is no such level.
        """
        if isinstance(metadata, Metadata):
            return metadata
        if metadata is not None:
            return cls(metadata)
        level = os.environ.get(VARIABLE) or DEFAULT_LEVEL
        if level not in LEVELS:
            raise _unknown(f"the environment variable {VARIABLE}", level)
        return cls(level)


def _unknown(where: str, level: Any) -> UsageError:
    return UsageError(
        f"{where} takes 'none', 'short' or 'full', not {level!r}",
        hint="short: modules, operators and source lines of the nodes; full: all that torch.onnx.export writes, and the rules; "
        "onnxplug.Metadata('full', absolute_paths=True) also has whole paths.",
    )
