"""What is checked before submodules are exported as pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from onnxplug.capture.dynamic import DynamicShapes
from onnxplug.capture.failure import first_lines
from onnxplug.errors import UsageError, WeightsError
from onnxplug.fake import is_fake
from onnxplug.text import counted
from onnxplug.torch_private import DimHint
from onnxplug_tools.pieces.record import Run


def submodules_of(model: torch.nn.Module, pieces: Sequence[str]) -> dict[str, torch.nn.Module]:
    """The submodules by their paths."""
    if isinstance(pieces, str) or not isinstance(pieces, Sequence) or not pieces:
        raise UsageError(f"pieces must be a list of names of submodules, got {pieces!r}")
    known = dict(model.named_modules(remove_duplicate=False))
    submodules: dict[str, torch.nn.Module] = {}
    for path in pieces:
        if not isinstance(path, str) or not path or path not in known:
            near = get_close_matches(str(path), known, 1)
            some = ", ".join(name for name, _ in model.named_children())
            raise UsageError(
                f"the model has no submodule {path!r}; it has {some or 'none'}",
                hint=f"Did you mean {near[0]!r}?" if near and near[0] else None,
            )
        if path in submodules:
            raise UsageError(f"pieces names {path!r} twice")
        for other, module in submodules.items():
            if path.startswith(f"{other}.") or other.startswith(f"{path}."):
                raise UsageError(f"of the pieces {other!r} and {path!r} one lies within the other")
            if module is known[path]:
                raise UsageError(f"the pieces {other!r} and {path!r} are one module")
        submodules[path] = known[path]
    return submodules


def check_weights(model: torch.nn.Module) -> None:
    """Checks that the weights of a model have numbers."""
    names = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_fake(tensor)]
    if names:
        raise WeightsError(
            f"pieces= runs the model, to find what its submodules get, and {counted(len(names), 'weight')} of it "
            f"{'has' if len(names) == 1 else 'have'} no numbers, {names[0]!r} for one",
            names=names,
            hint="Load the weights into the model first.",
        )


def is_static(wanted: Any) -> bool:
    """Whether a request for a dimension or a number is that it is static."""
    return wanted is None or isinstance(wanted, int) or (isinstance(wanted, DimHint) and wanted.type.name == "STATIC")


def check_no_numbers(shapes: DynamicShapes, leaves: Sequence[Any]) -> None:
    """Refuses numbers that are to stay inputs: a chain passes on tensors."""
    for path, spec, leaf in zip(shapes.paths, shapes.leaves, leaves, strict=True):
        hint = spec.type.name if isinstance(spec, DimHint) else ""
        if not isinstance(leaf, torch.Tensor) and (isinstance(spec, str) or hint == "DYNAMIC"):
            raise UsageError(
                f"pieces= can't keep the number {path} an input: what a chain passes on are tensors",
                hint="Give it as a tensor, or leave it out of dynamic_shapes.",
            )


def check_resized(
    shapes: DynamicShapes, axes: Mapping[int, Mapping[int, str]], runs: Sequence[Run], refused: Sequence[Exception]
) -> None:
    """Checks that the model ran with another size of each dimension that must be dynamic."""
    for leaf, axis, _ in shapes.must_be_dynamic():
        name = axes[leaf][axis]
        if len({run.sizes.get(name) for run in runs}) > 1:
            continue
        why = f": {type(refused[-1]).__name__}: {first_lines(refused[-1])}" if refused else ""
        raise UsageError(
            f"{shapes.name(leaf, axis)} was declared dynamic, but the model does not run in PyTorch with any other size that was "
            f"tried{why}",
            hint="Make the dimension static, or change the model.",
        )
