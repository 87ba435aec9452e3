"""Submodules exported as models of their own, and the chain of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import ConversionError, OnnxPieces, SaveError, UsageError, VerificationError
from onnxplug.exporter import to_onnx

SRC, TGT = torch.randint(0, 20, (2, 5)), torch.randint(0, 20, (2, 7))
DYNAMIC: Any = {"src": {0: "batch", 1: "source"}, "tgt": {0: "batch", 1: "target"}}
PIECES = ["encoder", "embedding", "decoder", "head"]


class Translator(nn.Module):
    """Encoder, decoder and head; ``glue`` computes something between them."""

    def __init__(self, glue: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
        self.embedding = nn.Embedding(20, 8)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 20)
        self.glue = glue

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.encoder(src)
        if self.glue:
            memory = memory * 2
        return {"logits": self.head(self.decoder(self.embedding(tgt), memory=memory)), "memory": memory}


def exported(model: nn.Module, args: Any, pieces: Any = None, **options: Any) -> OnnxPieces:
    return to_onnx(model.eval(), args, pieces=PIECES if pieces is None else pieces, **options)


def agrees(pieces: OnnxPieces, model: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*args))
    torch.testing.assert_close(pieces(*args), expected)


@pytest.mark.parametrize("glue", [False, True])
@pytest.mark.long
def test_encoder_and_decoder(glue: bool) -> None:
    model = Translator(glue)
    pieces = exported(model, (SRC, TGT), dynamic_shapes=DYNAMIC, verify=True)
    assert list(pieces.programs) == PIECES
    for batch, source, target in ((2, 5, 7), (1, 3, 9), (4, 1, 1)):
        agrees(pieces, model, torch.randint(0, 20, (batch, source)), torch.randint(0, 20, (batch, target)))
    shapes = {path: [str(v.shape) for v in p.model.graph.inputs] for path, p in pieces.programs.items()}
    assert shapes["encoder"] == ["[batch,source]"]
    assert shapes["decoder"] == ["[batch,target,8]", "[batch,source,8]"]
    assert bool(pieces.gaps) == glue
    if glue:
        assert any("'memory' of 'decoder'" in gap for gap in pieces.gaps)
    assert len(pieces.verify(seeds=(5, 6)).sizes) == 3


@pytest.mark.long
def test_the_program_that_chains_them_needs_onnxruntime_alone(tmp_path: Path) -> None:
    model = Translator()
    pieces = exported(model, (SRC, TGT), f=tmp_path / "pieces", dynamic_shapes=DYNAMIC)
    assert pieces.chain_file == tmp_path / "pieces" / "chain.py"
    src, tgt = torch.randint(0, 20, (3, 4)), torch.randint(0, 20, (3, 6))
    np.savez(tmp_path / "inputs.npz", src=src.numpy(), tgt=tgt.numpy())
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("torch", "onnxplug"):
        (blocked / f"{name}.py").write_text("raise ImportError('not here')", encoding="utf-8")
    subprocess.run(
        [sys.executable, str(pieces.chain_file), "inputs.npz", "outputs.npz"],
        cwd=tmp_path,
        check=True,
        env={"PYTHONPATH": str(blocked)},
    )
    outputs = np.load(tmp_path / "outputs.npz")
    with torch.no_grad():
        expected = model(src, tgt)
    torch.testing.assert_close(torch.from_numpy(outputs["output_0"]), expected["logits"])
    torch.testing.assert_close(torch.from_numpy(outputs["output_1"]), expected["memory"])


class Scaled(nn.Module):
    """Two tensors and a number."""

    def forward(self, x: torch.Tensor, start: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return torch.tanh(x * by) + start


class Shared(nn.Module):
    """Calls one block several times, with a parameter and a number from outside."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.block = Scaled()
        self.start = nn.Parameter(torch.randn(1, 4))
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.block(x, self.start, by=0.5)
        return x


def test_a_piece_that_is_called_several_times_with_a_parameter(tmp_path: Path) -> None:
    model = Shared()
    pieces = exported(model, (torch.randn(2, 4),), ["block"], f=tmp_path, dynamic_shapes={"x": {0: "rows"}})
    assert len(pieces.calls) == 3
    assert not pieces.gaps
    agrees(pieces, model, torch.randn(5, 4))
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "chain.py"), "__name__": "chain"}
    exec((tmp_path / "chain.py").read_text(encoding="utf-8"), namespace)
    x = torch.randn(3, 4)
    (got,) = namespace["run"]({"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x).detach())
    with pytest.raises(ValueError, match="inputs are missing: x"):
        namespace["run"]({})


class Deciding(nn.Module):
    """Python code that torch.export can't capture, around pieces that it captures."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        while float(x.abs().max()) > 1:
            x = self.second(x) / 4
        return x


def test_python_code_between_the_pieces_runs_in_pytorch(tmp_path: Path) -> None:
    model = Deciding()
    x = torch.randn(2, 4) * 10
    with pytest.raises(onnxplug.CaptureError):
        to_onnx(model, (x,))
    pieces = exported(model, (x,), ["first", "second"], f=tmp_path / "pieces", dynamic_shapes={"x": {0: "rows"}})
    assert pieces.gaps
    assert pieces.chain_file is None
    assert sorted(path.name for path in (tmp_path / "pieces").iterdir()) == ["first.onnx", "second.onnx"]
    for scale in (0.01, 5, 50):
        agrees(pieces, model, torch.randn(3, 4) * scale)
    with pieces.attached() as attached:
        assert attached is model
        assert "forward" in vars(model.first)
    assert "forward" not in vars(model.first)


class Writing(nn.Module):
    """Writes the tensor that two pieces read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x.add_(1)
        return self.second(x)


def test_a_tensor_that_is_written_between_pieces_is_not_the_same() -> None:
    model = Writing()
    pieces = exported(model, (torch.randn(2, 4),), ["first", "second"], verify=True)
    assert any("'second'" in gap for gap in pieces.gaps)
    agrees(pieces, model, torch.randn(2, 4))


@pytest.mark.long
def test_a_chain_that_differs_is_an_error() -> None:
    model = Translator()
    pieces = exported(model, (SRC, TGT), dynamic_shapes=DYNAMIC)
    weight = model.head.weight.detach().clone()
    pieces.programs["head"].apply_weights({"weight": weight * 2})
    with pytest.raises(VerificationError, match="output 0 of the chain"):
        pieces.verify()


class Counting(nn.Module):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def test_a_piece_that_writes_a_buffer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting())
    with pytest.raises(ConversionError, match="'1' writes 'calls'"):
        exported(model, (torch.randn(2, 4),), ["1"])
    assert model[1].calls.item() == 0


def test_a_piece_that_fails_is_named() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else x.flip(0)

    with pytest.raises(onnxplug.CaptureError, match="the piece '1'"):
        exported(nn.Sequential(nn.Linear(4, 4), Branch()), (torch.randn(2, 4),), ["0", "1"])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (["encode"], "no submodule 'encode'.*\nHint: Did you mean 'encoder'"),
        ([""], "no submodule ''"),
        ("encoder", "must be a list"),
        ([], "must be a list"),
        (["encoder", "encoder"], "twice"),
        (["encoder", "encoder.0"], "within the other"),
        (["decoder.dropout1", "encoder.0", "unused"], "does not call its submodule 'unused'"),
    ],
)
def test_malformed_pieces(pieces: Any, message: str) -> None:
    model = Translator()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=message):
        exported(model, (SRC, TGT), pieces)


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="input_names="):
        exported(Translator(), (SRC, TGT), input_names=["a", "b"])
    with pytest.raises(UsageError, match="examples="):
        exported(Translator(), (SRC, TGT), examples=[(SRC, TGT)])
    with pytest.raises(UsageError, match="function"):
        to_onnx(lambda x: x, (SRC,), pieces=["encoder"])
    with pytest.raises(UsageError, match="does not run in PyTorch"):
        exported(Translator(), (SRC, TGT[0, 0]))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SaveError, match="is a file"):
        exported(Translator(), (SRC, TGT), f=tmp_path / "file")
    with pytest.raises(SaveError, match="there is no folder"):
        exported(Translator(), (SRC, TGT), f=tmp_path / "a" / "b")


def test_inputs_of_another_structure_are_refused() -> None:
    pieces = exported(Translator(), (SRC, TGT))
    with pytest.raises(UsageError, match="another structure"):
        pieces(SRC)


@pytest.mark.parametrize("seeds", [5, ["a"]])
def test_seeds_that_are_none(seeds: Any) -> None:
    pieces = exported(nn.Sequential(nn.ReLU()), (torch.ones(2),), ["0"])
    with pytest.raises(UsageError, match="seeds"):
        pieces.verify(seeds=seeds)


def test_each_piece_loads(tmp_path: Path) -> None:
    pieces = exported(Translator(), (SRC, TGT), f=tmp_path)
    paths = list(tmp_path.glob("*.onnx"))
    assert len(paths) == len(pieces.programs)
    for path in paths:
        onnxruntime.InferenceSession(str(path))
