"""``onnx_check``: a model exported at several opsets and compared with eager PyTorch at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxplug.errors import OnnxplugError, UsageError

if TYPE_CHECKING:
    from onnxplug.program import OnnxProgram


def check_model(
    model: Callable[..., Any],
    args: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    opsets: Sequence[int | Mapping[str, int]] = (),
    inputs: Sequence[tuple[Any, ...]] = (),
    rtol: float | None = None,
    atol: float | None = None,
    optimize: Sequence[bool] = (True, False),
    seeds: Sequence[int] = (0, 1, 2),
    **options: Any,
) -> OnnxProgram:
    """Exports a model and compares it with eager PyTorch: at each opset, optimised and plain, at several sizes and values.

    Args:
        model: A function or module.
        args: Example inputs; a single tensor may stand by itself.
        kwargs: Keyword inputs.
        dynamic_shapes: As ``to_onnx`` takes them; other sizes, 1 among them, are tried along these dimensions.
        opsets: The opsets to export for; the default opset alone when empty.
        inputs: Further positional inputs to compare on: edge cases.
        rtol, atol: Tolerances; onnxplug's own by dtype unless given.
        optimize: The values of ``to_onnx``'s ``optimize`` to export with.
        seeds: A set of random inputs for each seed; ``()`` where random values mean nothing to the model.
        options: Passed on to ``to_onnx``.

    Returns:
        The program of the first opset, exported in the first way.

    Raises:
        UsageError: ``optimize`` is empty.
        OnnxplugError: An export failed or a result differs; the message says at which opset.
    """
    import torch

    from onnxplug.exporter import to_onnx

    if not optimize:
        raise UsageError("onnx_check: optimize must hold at least one of True and False")
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    first: OnnxProgram | None = None
    for opset in opsets or (None,):
        for way in optimize:
            try:
                program = to_onnx(
                    model,
                    args,
                    kwargs=kwargs,
                    dynamic_shapes=dynamic_shapes,
                    opset_version=opset,
                    optimize=way,
                    **options,
                )
                program.verify(rtol=rtol, atol=atol, seeds=seeds)
                for other in inputs:
                    program.verify(args=other, kwargs=kwargs or {}, rtol=rtol, atol=atol, seeds=())
            except OnnxplugError as error:
                where = "" if opset is None and way else f"opset {opset or 'default'}, optimize={way}"
                if where:
                    error.add_note(f"onnx_check: at {where}")
                raise
            first = first or program
    assert first is not None
    return first
