"""Verification of every element type, of the ends of their ranges, and of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxplug_tools.verification import verify_file

import onnxplug
from onnxplug import VerificationError
from onnxplug.verification.compare import compare
from onnxplug.verification.inputs import generated_inputs

INTEGERS = [
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]
FLOATS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
FLOATS += [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def ends(dtype: torch.dtype) -> torch.Tensor:
    """The least and the largest number, and 5."""
    info = np.iinfo(str(dtype).removeprefix("torch."))
    return torch.from_numpy(np.array([[info.min, info.max, 5]], dtype=info.dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.reshape(-1), x.to(torch.float64)

    for example in (torch.tensor([[1, 2, 3]]).to(dtype), ends(dtype), torch.zeros(0, 3, dtype=dtype)):
        shapes = {"dynamic_shapes": ({0: "n"},)} if len(example) else {}
        report = onnxplug.to_onnx(model, (example,), **shapes).verify(intermediates=True)
        assert len(report.cases) == 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(dtype: torch.dtype) -> None:
    example = torch.tensor([[1.0, -2.5, 0.03]]).to(dtype)
    report = onnxplug.to_onnx(lambda x: (x.reshape(-1), x.float() * 2), (example,)).verify(intermediates=True)
    assert len(report.cases) == 4


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_generated_integers_lie_in_the_examples_range(dtype: torch.dtype) -> None:
    whole, part = ends(dtype), torch.tensor([3, 9]).to(dtype)
    for example in (whole, part, whole[:, 1:2], whole[:, :1]):
        value = torch.empty(200, dtype=dtype, device="meta")
        (fresh,) = generated_inputs([example], [value], {}, 0)
        assert fresh.dtype == dtype
        assert int(fresh.numpy().min()) >= int(example.numpy().min())
        assert int(fresh.numpy().max()) <= int(example.numpy().max())
    (fresh,) = generated_inputs([part], [torch.empty(200, dtype=dtype, device="meta")], {}, 0)
    assert set(fresh.numpy().tolist()) == {3, 4, 5, 6, 7, 8, 9}


def test_the_largest_floats_make_no_infinities() -> None:
    example = torch.tensor([1e308, -1e308], dtype=torch.float64)
    (fresh,) = generated_inputs([example], [torch.empty(2, device="meta")], {}, 0)
    assert fresh.isfinite().any()


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_neighbours_of_eight_bits_are_equal_and_others_not(dtype: torch.dtype) -> None:
    numbers = torch.arange(1, 100, dtype=torch.uint8).view(dtype)
    following = torch.arange(2, 101, dtype=torch.uint8).view(dtype)
    third = torch.arange(4, 103, dtype=torch.uint8).view(dtype)
    assert compare(following, numbers).equal
    assert compare(numbers, following).equal
    assert compare(third, numbers).count > 70
    assert not compare((-numbers.float()).to(dtype), numbers).equal


def text(x: torch.Tensor) -> dict[str, Any]:
    return {"y": x + 1, "kind": "größe", "none": None, "count": 3}


def test_text(tmp_path: Path) -> None:
    for options in ({}, {"optimize": False}):
        program = onnxplug.to_onnx(text, (torch.ones(3),), dynamic_shapes=({0: "n"},), report=True, **options)
        assert len(program.verify(intermediates=True).cases) == 4
        y, kind, count = program(torch.ones(2))
        assert (y.tolist(), kind.item(), int(count)) == ([2, 2], "größe", 3)
        program.save(tmp_path / "model.onnx", external_data=True)
        assert len(verify_file(str(tmp_path / "model.onnx"), text, (torch.ones(3),), {}).cases) == 4


def test_other_text_is_a_difference(tmp_path: Path) -> None:
    onnxplug.to_onnx(text, (torch.ones(3),), tmp_path / "model.onnx")
    for other in ("grösse", "", 3.0):
        with pytest.raises(VerificationError, match="output 'kind' is"):
            verify_file(str(tmp_path / "model.onnx"), lambda x, o=other: text(x) | {"kind": o}, (torch.ones(3),), {})
    assert not compare(torch.ones(()), "one").equal
    assert not compare(np.array("1", dtype=object), torch.ones(())).equal
