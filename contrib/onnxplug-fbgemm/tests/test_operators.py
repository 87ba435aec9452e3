"""README's table of operators fits the installed library; all but tables, which are no inputs, have samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fbgemm_gpu", reason="`make packages` tests with it, in an environment of its own")

import fbgemm_gpu
import onnxplug_fbgemm
import torch
from onnxplug_fbgemm import operators
from onnxplug_fbgemm.samples import samples

import onnxplug

#: Operators whose samples would need a device as input: tests/test_jagged.py calls them in a model.
WITH_DEVICES = {"all_to_one_device", "merge_pooled_embeddings", "sum_reduce_to_one"}


@pytest.mark.onnxplug("onnxplug-fbgemm")
def test_sample(onnx_sample: Any) -> None:
    onnx_sample.check()


def test_the_table() -> None:
    text = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    assert operators.written(text) == text, "python -m onnxplug_fbgemm.operators README.md"


def test_an_outcome_for_each() -> None:
    names = operators.registered()
    assert [name for name in names if operators.outcome(name) is None] == []
    translated = {*onnxplug_fbgemm.FUNCTIONS, *onnxplug_fbgemm.CONVERTERS}
    assert translated <= set(names)
    assert {sample.op.removeprefix("fbgemm::") for sample in samples()} == set(onnxplug_fbgemm.FUNCTIONS) - WITH_DEVICES
    assert set(onnxplug_fbgemm.TRACED) <= set(names)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(lengths: torch.Tensor) -> Any:
        return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)

    monkeypatch.setattr(fbgemm_gpu, "__version__", "1.9.0")
    with pytest.raises(
        onnxplug.OnnxplugError, match=r"knows the operators of fbgemm-gpu>=1.8,<1.9; 1.9.0 is installed"
    ):
        onnxplug.to_onnx(model, (torch.tensor([1, 2]),))
    onnxplug.to_onnx(torch.nn.Linear(4, 2), (torch.zeros(2, 4),))
