"""What pieces take and return beside tensors of one form: numbers, ``None``, complex tensors, state of the model around them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onnxplug import OnnxPieces, UsageError
from onnxplug.exporter import to_onnx

DYNAMIC: Any = {"x": {0: "rows"}}


class Scaled(nn.Module):
    """A tensor and a number."""

    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by


class Around(nn.Module):
    """Calls its submodule ``block`` as a function says."""

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.call(self.block, x, *others)


def exported(block: nn.Module, call: Callable[..., Any], *args: Any, **options: Any) -> tuple[OnnxPieces, nn.Module]:
    model = Around(block, call).eval()
    return to_onnx(model, args, options.pop("f", None), pieces=["block"], **options), model


def agrees(pieces: OnnxPieces, model: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*args))
    got = pieces(*args)
    assert [type(leaf) for leaf in got] == [type(leaf) for leaf in expected]
    torch.testing.assert_close(got, expected)


def test_a_number_that_depends_on_a_size() -> None:
    pieces, model = exported(
        Scaled(), lambda b, x: b(x, x.shape[0]), torch.ones(2, 3), dynamic_shapes=DYNAMIC, verify=True
    )
    assert any("another number in other calls" in gap for gap in pieces.gaps)
    for rows in (1, 2, 5):
        agrees(pieces, model, torch.randn(rows, 3))


def test_a_number_that_differs_between_calls(tmp_path: Path) -> None:
    pieces, model = exported(Scaled(), lambda b, x: b(b(x, 2), 5), torch.ones(2, 3), f=tmp_path, verify=True)
    assert not (tmp_path / "chain.py").exists()
    agrees(pieces, model, torch.randn(2, 3))


def test_a_number_of_the_model_is_fixed() -> None:
    pieces, model = exported(Scaled(), lambda b, x, n: b(x, n), torch.ones(2, 3), 3)
    agrees(pieces, model, torch.randn(2, 3), 3)
    with pytest.raises(UsageError, match=r"'others\[0\]' is int 3 in the exported pieces, got int 7"):
        pieces(torch.ones(2, 3), 7)


@pytest.mark.parametrize("spec", ["n", torch.export.Dim.DYNAMIC])
def test_a_number_that_is_to_stay_an_input_is_refused(spec: Any) -> None:
    with pytest.raises(UsageError, match="can't keep the number"):
        exported(Scaled(), lambda b, x, n: b(x, n), torch.ones(2, 3), 3, dynamic_shapes={"x": None, "others": (spec,)})


def test_a_number_that_the_model_returns() -> None:
    def call(block: nn.Module, x: torch.Tensor) -> Any:
        return block(x, 2.0), x.shape[0]

    pieces, model = exported(Scaled(), call, torch.ones(2, 3), dynamic_shapes=DYNAMIC, verify=True)
    for rows in (1, 5):
        agrees(pieces, model, torch.randn(rows, 3))


class Several(nn.Module):
    """Returns ``None``, a size, a number and a tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        return None, x.shape[0], {"three": 3, "y": x * 2}


def test_results_that_are_no_tensors(tmp_path: Path) -> None:
    pieces, _ = exported(Several(), lambda b, x: b(x)[2]["y"], torch.ones(2, 3), f=tmp_path)
    (got,) = runpy.run_path(str(tmp_path / "chain.py"))["run"]({"x": np.full((2, 3), 4, np.float32)})
    assert (got == 8).all()

    def call(block: nn.Module, x: torch.Tensor) -> Any:
        nothing, rows, rest = block(x)
        assert nothing is None
        return rest["y"] + rows * rest["three"], rows

    pieces, model = exported(Several(), call, torch.ones(2, 3), dynamic_shapes=DYNAMIC, verify=True)
    for rows in (1, 5):
        agrees(pieces, model, torch.randn(rows, 3))


class Cell(nn.Module):
    """A recurrent cell, whose first call has no state."""

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tanh(x if state is None else x + state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b, x: b(x, b(x, None)), "state is None in call 1 and a tensor of float32 and rank 2 in call 2"),
        (lambda b, x: b(b(x, x), None), "state is a tensor of float32 and rank 2 in call 1 and None in call 2"),
        (lambda b, x: b(x, b(x)), "another structure"),
        (lambda b, x: b(x, b(x, x)[None]), "rank 2 in call 1 and a tensor of float32 and rank 3 in call 2"),
        (lambda b, x: b(x, b(x, x).double()), "float32 and rank 2 in call 1 and a tensor of float64"),
    ],
)
@pytest.mark.parametrize("shapes", [None, DYNAMIC])
def test_calls_of_two_kinds_are_refused(call: Callable[..., Any], message: str, shapes: Any) -> None:
    with pytest.raises(UsageError, match=message):
        exported(Cell(), call, torch.ones(2, 3), dynamic_shapes=shapes)
    with pytest.raises(UsageError, match=r"by is float 0\.5 in call 1 and float 2.0 in call 2"):
        exported(Scaled(), lambda b, x: b(b(x, 0.5), 2.0), torch.ones(2, 3), dynamic_shapes=shapes)


def test_code_that_depends_on_data_is_a_gap_with_static_sizes_too() -> None:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x, int(x.argmax()))

    pieces, model = exported(Scaled(), call, torch.tensor([1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    assert pieces.gaps
    agrees(pieces, model, torch.arange(9.0))


@dataclass
class Two:
    """A container that torch.export knows by registration alone."""

    one: torch.Tensor
    other: torch.Tensor


torch.export.register_dataclass(Two)


def test_containers_that_are_registered() -> None:
    class Sum(nn.Module):
        def forward(self, two: Two, three: Any) -> torch.Tensor:
            return two.one + two.other * three[1]["x"]

    pieces, model = exported(
        Sum(), lambda b, x: b(Two(x, x), three=(x, {"x": x})), torch.ones(2, 3), dynamic_shapes=DYNAMIC, verify=True
    )
    assert not pieces.gaps
    agrees(pieces, model, torch.randn(5, 3))


class Spectrum(nn.Module):
    """Real in, complex out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x)


class Signal(nn.Module):
    """Complex in, real out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(x).real


def test_complex_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(Spectrum(), Signal())
    x = torch.randn(2, 4)
    pieces = to_onnx(model, (x,), tmp_path, pieces=["0", "1"], verify=True)
    agrees(pieces, model, x)
    (got,) = runpy.run_path(str(tmp_path / "chain.py"))["run"]({"input": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), x)
    for number, given in ((0, x), (1, torch.randn(2, 4, dtype=torch.complex64))):
        pieces = to_onnx(
            model[number : number + 1], (given,), tmp_path / str(number), pieces=[str(number)], verify=True
        )
        agrees(pieces, model[number], given)
        assert pieces.chain_file is None


class Offset(nn.Module):
    """Gives a parameter of the name of an input to a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.start, self.file = Pair(), nn.Parameter(torch.full((3,), 100.0)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(self.block(x, start), self.start), self.file)


class Pair(nn.Module):
    """A difference."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


def test_a_parameter_with_the_name_of_an_input(tmp_path: Path) -> None:
    model = Offset()
    x, start = torch.randn(3), torch.randn(3)
    to_onnx(model, (x, start), tmp_path, pieces=["block"], verify=True)
    (got,) = runpy.run_path(str(tmp_path / "chain.py"))["run"]({"x": x.numpy(), "start": start.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(x, start).detach())


class Counting(nn.Module):
    """Counts its calls in a buffer, between pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.seen.append(x)
        return torch.nn.functional.dropout(self.block(x) * self.calls, 0.5)


def test_the_model_stays_as_it_was() -> None:
    model = Counting().eval()
    pieces = to_onnx(model, (torch.ones(2, 3),), pieces=["block"], dynamic_shapes={"x": {0: "rows"}}, verify=True)
    before = torch.get_rng_state()
    pieces.verify()
    assert torch.equal(torch.get_rng_state(), before)
    pieces(torch.ones(4, 3))
    assert model.calls.item() == 0
    assert not model.seen


def test_hooks_of_a_piece_run_once() -> None:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    for glue in (False, True):
        linear = nn.Linear(3, 3)
        linear.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
        linear.register_forward_hook(lambda _, args, result: result + 1)
        pieces, model = exported(linear, (lambda b, x: b(x) * 2) if glue else call, torch.ones(2, 3), verify=True)
        assert bool(pieces.gaps) == glue
        agrees(pieces, model, torch.randn(2, 3))
        assert len(linear._forward_hooks) == len(linear._forward_pre_hooks) == 1


def test_a_dimension_that_only_one_size_fits_is_not_dynamic() -> None:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 7:
            raise ValueError("seven, please")
        return block(x, 2.0)

    with pytest.raises(UsageError, match=r"axis 0 of the input x \('rows'\) was declared dynamic.*seven, please"):
        exported(Scaled(), call, torch.ones(7, 3), dynamic_shapes=DYNAMIC)
    hints: Any = {"x": {0: torch.export.Dim.STATIC, 1: torch.export.Dim.AUTO}}
    pieces, _ = exported(Scaled(), call, torch.ones(7, 3), dynamic_shapes=hints)
    assert str(pieces.programs["block"].model.graph.inputs[0].shape).startswith("[7,")
