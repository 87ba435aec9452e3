"""An onnxplug plugin: runtimes to export for, and the nodes of a model that a runtime would not compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxplug import PluginInfo, Rewrite, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TARGETS", "fallbacks"]

#: The names for ``to_onnx(target=...)``; each has a table in ``data``.
TARGETS = ("openvino", "webgpu", "qnn", "coreml", "tensorrt", "directml")


def fallbacks(model: Any, target: str) -> list[Any]:
    """The nodes of a model that a target does not compute: :class:`onnxplug_targets.prediction.Fallback` records.

    Args:
        model: An ``OnnxProgram``, an ``onnx_ir.Model`` or the path of a file.
        target: A name of :data:`TARGETS`, alone or after ``"onnxruntime:"``.

    Raises:
        UsageError: The target is unknown, or the file can't be read.
    """
    from onnxplug_targets.prediction import fallbacks_of

    return fallbacks_of(model, target)


def _observer(options: Any) -> Any:
    """The observer of an export for one of the targets."""
    target = str(options.target or "").removeprefix("onnxruntime:")
    if target not in TARGETS:
        return None
    from onnxplug_targets.observer import TargetObserver

    converted = options.dtype is not None or options.quantize is not None
    return TargetObserver(target, "precision" if converted else "conversion")


@hookimpl
def onnxplug_observers() -> list[Callable[[Any], Any]]:
    """The observers that report the nodes that an export's target would not compute."""
    return [_observer]


@hookimpl
def onnxplug_rewrites() -> list[Rewrite]:
    """The rewrites of nodes that a target does not compute into forms that it computes."""
    from onnxplug_targets import rewrites

    rows = [
        (
            "scatter_rows",
            "ScatterND",
            rewrites.scatter_rows,
            (16, None),
            "a session with a reduction of ScatterND fails",
        ),
        ("clipped_below", "Clip", rewrites.clipped_below, (13, None), "Clip of int64 without an upper bound is wrong"),
        (
            "grid_sample",
            "GridSample",
            rewrites.grid_sample,
            (20, None),
            "a session with GridSample of mode linear fails",
        ),
    ]
    target = ("openvino", "onnxruntime:openvino")
    narrow = ("qnn", "onnxruntime:qnn", "coreml", "onnxruntime:coreml")
    return [
        *(
            Rewrite(f"openvino_{name}", op, apply, opset=opset, target=target, reason=reason)
            for name, op, apply, opset, reason in rows
        ),
        *(
            Rewrite(
                f"openvino_counted_from_the_end_{op}",
                op,
                rewrites.counted_from_the_end,
                target=target,
                reason="the largest element of a Concat of two parts is taken for the larger ones of both",
            )
            for op in ("ReduceMax", "ReduceMin")
        ),
        Rewrite(
            "moved_in_fewer_axes",
            "Reshape",
            rewrites.moved_in_fewer_axes,
            target=narrow,
            reason="tensors of more than five axes are left",
        ),
    ]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The targets: alone, and as providers of ONNX Runtime, whose CPU computes the rest."""
    return PluginInfo(targets=[*TARGETS, *(f"onnxruntime:{target}" for target in TARGETS)])
