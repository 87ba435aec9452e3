"""An onnxplug plugin: exports of all models of a manifest, changes since the last run, and verification on data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxplug import PluginInfo, hookimpl

if TYPE_CHECKING:
    from onnxplug_fleet.verification import (
        DataReport as DataReport,
        measure_data as measure_data,
        verify_data as verify_data,
    )

__all__ = ["DataReport", "measure_data", "verify_data"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from onnxplug_fleet import verification

        return getattr(verification, name)
    raise AttributeError(f"module 'onnxplug_fleet' has no attribute {name!r}")


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description of itself."""
    return PluginInfo()


@hookimpl
def onnxplug_commands(app: Any) -> None:
    """``onnxplug fleet run``, ``status``, ``diff`` and ``serve``."""
    from onnxplug_fleet.cli import fleet_app

    app.add_typer(fleet_app, name="fleet")
