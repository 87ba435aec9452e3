"""Files of one save of pieces are distinguished from the files of another save."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import onnxplug


class Chain(nn.Module):
    """Two pieces, the second of which takes a parameter from outside."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Bilinear(3, 3, 2)
        self.start = nn.Parameter(torch.zeros(1, 3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(by)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x), self.start)


def _saved(folder: Path, by: float) -> Path:
    onnxplug.to_onnx(Chain(by).eval(), (torch.ones(1, 3),), folder, pieces=["first", "second"])
    return folder


def test_equal_pieces_make_equal_files(tmp_path: Path) -> None:
    one, two = _saved(tmp_path / "one", 1.0), _saved(tmp_path / "two", 1.0)
    names = {path.name for path in one.iterdir()}
    assert names == {"first.onnx", "second.onnx", "constants.npz", "chain.py"}
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize("name", ["first.onnx", "second.onnx", "constants.npz", "chain.py"])
def test_files_of_two_saves_are_not_run(name: str, tmp_path: Path) -> None:
    one, two = _saved(tmp_path / "one", 1.0), _saved(tmp_path / "two", 2.0)
    x = torch.ones(1, 3)
    (got,) = runpy.run_path(str(one / "chain.py"))["run"]({"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), Chain(1.0)(x).detach())
    shutil.copy(two / name, one / name)
    with pytest.raises(RuntimeError, match="different saves"):
        runpy.run_path(str(one / "chain.py"))["run"]({"x": x.numpy()})


def test_pieces_that_are_saved_again_after_a_change(tmp_path: Path) -> None:
    pieces = onnxplug.to_onnx(Chain(1.0).eval(), (torch.ones(1, 3),), tmp_path, pieces=["first", "second"])
    before = (tmp_path / "chain.py").read_text(encoding="utf-8")
    pieces.save(tmp_path)
    assert (tmp_path / "chain.py").read_text(encoding="utf-8") == before
    with torch.no_grad():
        pieces.model.start.add_(1)
    pieces.save(tmp_path)
    x = torch.ones(1, 3)
    (got,) = runpy.run_path(str(tmp_path / "chain.py"))["run"]({"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), pieces.model(x).detach())
    assert (tmp_path / "chain.py").read_text(encoding="utf-8") != before


class Twice(nn.Module):
    """Chains two pieces in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.ReLU(), nn.Tanh()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x * 2) if self.way == "glue" else self.second(self.second(x) if self.way == "more" else x)


@pytest.mark.parametrize("way", ["glue", "more"])
def test_a_program_of_other_code_between_the_same_pieces_is_not_run(way: str, tmp_path: Path) -> None:
    """The pieces themselves are the same, and with a gap there is no new program."""
    x = torch.randn(2, 3)
    onnxplug.to_onnx(Twice("once"), (x,), tmp_path, pieces=["first", "second"])
    program = (tmp_path / "chain.py").read_text(encoding="utf-8")
    pieces = onnxplug.to_onnx(Twice(way), (x,), tmp_path, pieces=["first", "second"])
    assert bool(pieces.gaps) == (way == "glue")
    (tmp_path / "chain.py").write_text(program, encoding="utf-8")
    with pytest.raises(RuntimeError, match="different saves"):
        runpy.run_path(str(tmp_path / "chain.py"))["run"]({"x": x.numpy()})
