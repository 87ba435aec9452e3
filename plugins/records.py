"""The records of installed plugins, and the selection of those in use."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

from packaging.requirements import InvalidRequirement, Requirement

from onnxplug.errors import PluginError, UnknownPluginError
from onnxplug.plugin_api import PROJECT_NAME
from onnxplug.plugins.api import TargetInfo
from onnxplug.text import did_you_mean

BUILTIN = "builtin"
ENVIRONMENT = "ONNXPLUG_PLUGINS"
_NAME = re.compile(r"^Name: *(\S+)", re.MULTILINE)
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


@dataclass
class PluginRecord:
    """One entry point of the group ``onnxplug``, and whether it loaded.

    Attributes:
        name: The entry point's name.
        distribution, version: The distribution that installed it.
        value: The entry point's value, ``package.module:attribute``.
        status: ``"loaded"``, ``"failed"``, ``"blocked"`` or ``"not loaded"``.
        error: Why it failed, with the traceback.
        seconds: Time that importing it took.
        loaded: When it was loaded, in seconds since the epoch.
        hooks: The hooks it implements.
        rules: Number of its rules; ``None`` for the builtin rules, whose tables are imported for the first export.
        namespaces: The torch namespaces that it declares to translate.
        requires: The requirements that it declares.
        targets: The runtimes that it declares.
        libraries: The libraries that it declares to serve.
        replaced: The operators that it declares its patches to replace.
    """

    name: str
    distribution: str
    version: str
    value: str
    status: str = "not loaded"
    error: str | None = None
    seconds: float = 0.0
    loaded: float = 0.0
    hooks: list[str] = field(default_factory=list)
    rules: int | None = 0
    namespaces: Sequence[str] = ()
    requires: Sequence[str] = ()
    targets: Sequence[TargetInfo] = ()
    libraries: Sequence[str] = ()
    replaced: Sequence[str] = ()

    @property
    def is_builtin(self) -> bool:
        """Whether it is the plugin that ships with onnxplug."""
        return self.name == BUILTIN and self.distribution == PROJECT_NAME

    @property
    def label(self) -> str:
        """Its name, distribution and version, for messages."""
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Selection:
    """Which plugins to use.

    Attributes:
        only: Entry-point or distribution names; ``None`` means all.
        without: Names never imported.
        require: Requirements (``"onnxplug-acme>=1.2"``) that must be installed and loaded.
        strict: A broken plugin, or a refused rule, is an error instead of a warning.
    """

    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    strict: bool = False

    @classmethod
    def from_environment(cls, plugins: Sequence[str] | None = None) -> Selection:
        """The selection of ``plugins=`` or the variable ``ONNXPLUG_PLUGINS``: names, or ``-name`` to leave a plugin out."""
        without: list[str] = []
        only: tuple[str, ...] | None = None
        value = os.environ.get(ENVIRONMENT)
        if value is not None:
            names = [n.strip() for n in value.split(",") if n.strip()]
            without = [n[1:] for n in names if n.startswith("-")]
            kept = tuple(n for n in names if not n.startswith("-"))
            only = kept if kept or not without else None
        if plugins is not None:
            only = tuple(plugins)
        return cls(only, tuple(without))


def check_selection(selection: Selection, records: Sequence[PluginRecord]) -> None:
    """Checks that the plugins that a selection names are installed.

    Raises:
        PluginError: One is not, or a required one is of another version.
    """
    installed = sorted({r.name for r in records} | {r.distribution for r in records})
    for name in (*(selection.only or ()), *selection.without):
        if name not in installed:
            others = [n for n in installed if n not in (BUILTIN, PROJECT_NAME)]
            listed = f"Installed plugins: {', '.join(others) or 'none'}."
            raise UnknownPluginError(
                f"no plugin {name!r} is installed", hint=did_you_mean(name, others, otherwise=listed)
            )
    for text in selection.require:
        _check_requirement(text, records)


def _check_requirement(text: str, records: Sequence[PluginRecord]) -> None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise UnknownPluginError(f"--require-plugin {text!r} is not a valid requirement: {error}") from None
    for record in records:
        if requirement.name in (record.name, record.distribution):
            if not requirement.specifier.contains(record.version, prereleases=True):
                raise PluginError(f"plugin {record.name} is version {record.version}, but {text} is required")
            return
    raise PluginError(f"the required plugin {text} is not installed", hint=f"pip install '{text}'")


def distribution_of(point: EntryPoint) -> tuple[str, str]:
    """Name and version of an entry point's distribution; read by hand, as ``dist.name`` parses the whole metadata."""
    dist = point.dist
    if dist is None:
        return "?", "0"
    read_text = getattr(dist, "read_text", None)
    header = (read_text("METADATA") if read_text is not None else None) or ""
    name = _NAME.search(header)
    version = _VERSION.search(header)
    return (name[1], version[1]) if name is not None and version is not None else (dist.name, dist.version)
