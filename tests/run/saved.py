"""Common parts of the tests of saving: two programs that differ in a weight."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import onnx
import torch

import onnxplug


def program(value: float) -> onnxplug.OnnxProgram:
    model = torch.nn.Linear(32, 32)
    torch.nn.init.constant_(model.weight, value)
    return onnxplug.to_onnx(model.eval(), (torch.randn(1, 32),))


def weight(path: Path) -> float:
    model = onnx.load(path)
    array = onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "weight"))
    assert np.all(array == array.flat[0]), "a mixture"
    return float(array.flat[0])


def age(folder: Path) -> None:
    """Makes files look as if they had been written two days ago."""
    for path in folder.rglob("*"):
        os.utime(path, times=(time.time() - 48 * 3600,) * 2, follow_symlinks=False)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())
