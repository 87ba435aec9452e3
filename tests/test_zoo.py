"""Whole models: exported with dynamic dimensions and verified against PyTorch at several sizes."""

from __future__ import annotations

import warnings

import pytest
import torch

import onnxplug
from onnxplug.capture.eager import run_eagerly
from tests.support.zoo import ZOO


@pytest.mark.parametrize(  # one model of timm by default, not its largest
    "name", [pytest.param(n, marks=pytest.mark.long) if n.startswith("swin") else n for n in ZOO]
)
def test_model_exports_and_verifies(name: str) -> None:
    case = ZOO[name]()
    before = run_eagerly(case.module, case.args, case.kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = onnxplug.to_onnx(case.module, case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes)
    torch.testing.assert_close(run_eagerly(case.module, case.args, case.kwargs), before, rtol=0, atol=0)
    report = program.verify()
    sizes = [tuple(c.sizes.values()) for c in report.cases]
    assert len(set(sizes)) >= 3, f"only {sizes} ran; skipped: {report.skipped}"
    assert any(1 in s for s in sizes)
    for dimension in ZOO[name].sizes:
        assert dimension in str([i.shape for i in program.model.graph.inputs])


#: Opsets that the default run tries on two models; `make zoo` runs them all.
OPSETS = (13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24)
QUICK = {(name, opset) for name in ("resnet18", "bert") for opset in (13, 17, 18, 20, 23)}


@pytest.mark.parametrize(
    ("name", "opset"),
    [
        pytest.param(name, opset, marks=() if (name, opset) in QUICK else pytest.mark.long)
        for name in ZOO
        for opset in OPSETS
    ],
)
def test_model_exports_at_opset(name: str, opset: int) -> None:
    case = ZOO[name]()
    program = onnxplug.to_onnx(
        case.module, case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes, opset_version=opset
    )
    assert program.model.opset_imports[""] == opset
    assert program.verify(seeds=(0,)).cases


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_plain_and_optimized_translations_agree(name: str) -> None:
    case = ZOO[name]()
    options = {"kwargs": case.kwargs, "dynamic_shapes": case.dynamic_shapes}
    plain = onnxplug.to_onnx(case.module, case.args, optimize=False, **options)
    optimized = onnxplug.to_onnx(case.module, case.args, **options)
    assert plain.verify(seeds=(1,)).cases
    assert optimized.statistics.onnx_nodes < plain.statistics.onnx_nodes
