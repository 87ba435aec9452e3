"""Repositories of Triton: pieces that can't be a repository are refused before a file is written.

onnxplug-fleet's tests read repositories by Triton's schema.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import SaveError, UsageError


class Of(nn.Module):
    """Two layers, and a function that calls them."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), Second()
        self.weight = nn.Parameter(torch.ones(4))
        self.call = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


class Second(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 if y is None else x + y


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x: m.b(m.a(x) + 1), "the input 'x' of 'b' is computed between the pieces"),
        (lambda m, x: m.b(m.a(x), m.weight), "gives its weight 'weight'"),
        (lambda m, x: (m.b(m.a(x)), x), "returns 'x' as it is"),
        (lambda m, x: (lambda y: (y, y))(m.b(m.a(x))), "twice"),
    ],
)
def test_refused(forward: Any, message: str, tmp_path: Path) -> None:
    pieces = onnxplug.to_onnx(Of(forward).eval(), (torch.randn(2, 4),), pieces=["a", "b"])
    with pytest.raises(UsageError, match=message):
        pieces.save_triton(tmp_path, "model")
    assert list(tmp_path.iterdir()) == []


def test_scalars_types_names_and_folders(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    class Model(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    scalar = onnxplug.to_onnx(Model(Sum()), (torch.randn(3),), pieces=["part"])
    with pytest.raises(UsageError, match="of the piece 'part' is a scalar"):
        scalar.save_triton(tmp_path, "model")
    small = onnxplug.to_onnx(Model(nn.Identity()), (torch.zeros(3).to(torch.float8_e4m3fn),), pieces=["part"])
    with pytest.raises(UsageError, match=r"FLOAT8E4M3FN, which Triton does not have"):
        small.save_triton(tmp_path, "model")
    fine = onnxplug.to_onnx(Model(nn.ReLU()), (torch.randn(3),), pieces=["part"])
    for name in ("", "a/b", "..", "a b"):
        with pytest.raises(UsageError, match="is no name of a model"):
            fine.save_triton(tmp_path, name)
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="is a file"):
        fine.save_triton(tmp_path / "file", "model")
    save: Any
    for save in (fine.save, lambda folder: fine.save_triton(folder, "model")):
        with pytest.raises(UsageError, match="folder is the path of a file, got 3"):
            save(3)
        for name in ("a\0b", "a" * 5000):
            with pytest.raises(SaveError, match="can't be written"):
                save(name)
        assert save(os.fsencode(tmp_path / "bytes"))[0].is_relative_to(tmp_path / "bytes")


def test_the_files(tmp_path: Path) -> None:
    model = Of(lambda m, x: m.b(m.a(x))).eval()
    pieces = onnxplug.to_onnx(model, (torch.randn(2, 4),), pieces=["a", "b"], dynamic_shapes=({0: "batch"},))
    files = pieces.save_triton(tmp_path / "models", "both")
    assert [file.relative_to(tmp_path / "models").as_posix() for file in files] == [
        "both_a/1/model.onnx",
        "both_b/1/model.onnx",
        "both_b/config.pbtxt",
        "both_a/config.pbtxt",
        "both/config.pbtxt",
    ]
    text = (tmp_path / "models/both/config.pbtxt").read_text()
    assert '{ name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }' in text
    assert text.count("model_name") == 2


def test_an_input_named_as_the_result(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.ReLU()

        def forward(self, output: torch.Tensor) -> torch.Tensor:
            return self.part(output)

    onnxplug.to_onnx(Model(), (torch.randn(3),), pieces=["part"]).save_triton(tmp_path, "model")
    text = (tmp_path / "model/config.pbtxt").read_text()
    assert 'input_map { key: "input" value: "output" }' in text
    assert 'output_map { key: "output" value: "output_" }' in text
    assert text.count('name: "output_" ') == 1
