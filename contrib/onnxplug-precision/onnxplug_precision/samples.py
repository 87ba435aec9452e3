"""Inputs on which a model runs during a conversion: the data of ``calibrate=``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug import OnnxProgram, UsageError
from onnxplug.build.dtypes import ONNX_TO_TORCH
from onnxplug.text import did_you_mean

#: The inputs of a call: by name, or as ``examples=`` takes them.
Call = Mapping[str, Any] | Sequence[Any] | torch.Tensor


def data_of(calibration: Any) -> list[Call]:
    """The calls of ``calibrate=``.

    Args:
        calibration: Calls, the path of a ``.npz`` file with one call's inputs by name, or of a folder of such files.

    Raises:
        UsageError: It is of another kind, empty, or can't be read.
    """
    if isinstance(calibration, str | os.PathLike):
        return [*_read(Path(calibration))]
    if not isinstance(calibration, Sequence) or isinstance(calibration, bytes):
        raise UsageError(f"calibrate= takes a list of inputs, a .npz file or a folder of such, got {calibration!r}")
    if not calibration:
        raise UsageError("calibrate= has no data")
    return list(calibration)


def _read(path: Path) -> list[dict[str, torch.Tensor]]:
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise UsageError(
            f"the folder {path} has no .npz files", hint="Each has one call's inputs by name: numpy.savez."
        )
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    calls = []
    for file in files:
        try:
            with np.load(file, allow_pickle=False) as stored:  # pickled objects are code
                calls.append({name: torch.from_numpy(np.array(stored[name])) for name in stored.files})
        except Exception as error:
            raise UsageError(
                f"{file} can't be read: {error}", hint="It is a .npz file with one call's inputs by name: numpy.savez."
            ) from error
    return calls


def calls_of(program: OnnxProgram, calls: Sequence[Call]) -> list[dict[str, torch.Tensor]]:
    """The calls' inputs by the names of a program's inputs.

    Raises:
        UsageError: A call doesn't fit the model.
    """
    from onnxplug_precision.program import tensors

    names = {str(value.name) for value in program.model.graph.inputs}
    feeds = []
    for number, call in enumerate(calls):
        if isinstance(call, Mapping) and (
            call.keys() <= names or all(isinstance(v, np.ndarray) for v in call.values())
        ):
            feeds.append(checked(program.model, call, f"call {number} of calibrate="))
            continue
        args, kwargs = ((), dict(call)) if isinstance(call, Mapping) else (call, {})
        args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        try:
            feeds.append(tensors(program.feed(args, kwargs)))
        except UsageError as error:
            raise UsageError(f"call {number} of calibrate= does not fit the model: {error.message}") from error
    return feeds


def checked(model: ir.Model, call: Mapping[str, Any], what: str) -> dict[str, torch.Tensor]:
    """A call's inputs by name, checked against the model's inputs.

    Raises:
        UsageError: An input is unknown or missing, or its dtype or shape doesn't fit.
    """
    inputs = {str(v.name): v for v in model.graph.inputs if v.name not in model.graph.initializers}
    for name in call:
        if name not in inputs:
            hint = did_you_mean(name, list(inputs), otherwise=f"They are {', '.join(inputs)}.")
            raise UsageError(f"{what} has {name!r}, which is no input of the model", hint=hint)
    missing = [name for name in inputs if name not in call]
    if missing:
        raise UsageError(f"{what} lacks the input {missing[0]!r}", hint=f"The model takes {', '.join(inputs)}.")
    return {name: _fitting(value, inputs[name], what) for name, value in call.items()}


def _fitting(value: Any, wanted: ir.Value, what: str) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))
    dtype = ONNX_TO_TORCH.get(wanted.dtype) if wanted.dtype is not None else None
    if dtype is not None and tensor.dtype != dtype:
        raise UsageError(f"{what}: the input {wanted.name!r} is {tensor.dtype}, the model takes {dtype}")
    dims = list(wanted.shape) if wanted.shape is not None else list(tensor.shape)
    fits = len(dims) == tensor.dim() and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(dims, tensor.shape, strict=False)
    )
    if not fits:
        raise UsageError(
            f"{what}: the input {wanted.name!r} has the shape {list(tensor.shape)}, the model takes {list(map(str, dims))}"
        )
    return tensor
