"""Verification on data: metrics, thresholds, and faults that they find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxplug_fleet.data import Sample
from onnxplug_fleet.metrics import METRICS
from onnxplug_fleet.verification import keep_thresholds, kept_thresholds, measure_data, verify_data
from torch import nn

import onnxplug
from onnxplug import OnnxProgram, UsageError, VerificationError
from tests.support.zoo import ZOO

SAMPLES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]
MODEL = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).eval()


@pytest.fixture
def program() -> OnnxProgram:
    return onnxplug.to_onnx(MODEL, (torch.randn(3, 8),), dynamic_shapes=({0: "batch"},))


def test_a_right_model_raises_no_alarm(program: OnnxProgram, tmp_path: Path) -> None:
    limits = {"top1": 1.0, "largest": 1e-5, "mean": 1e-6, "cosine": 0.9999, "token_match": 1.0, "wer": 0.0, "iou": 1.0}
    assert verify_data(program, MODEL, SAMPLES, thresholds=limits).samples == 6
    keep_thresholds(program, limits)
    program.save(tmp_path / "model.onnx")
    assert kept_thresholds(tmp_path / "model.onnx") == limits
    assert verify_data(tmp_path / "model.onnx", MODEL, SAMPLES).accepted


def test_a_program_compares_itself_with_its_model(program: OnnxProgram, tmp_path: Path) -> None:
    report = program.verify(data=SAMPLES, metric=["top1", "largest"], thresholds={"top1": 1.0})
    assert report == verify_data(program, MODEL, SAMPLES, ["top1", "largest"], thresholds={"top1": 1.0})
    program.release()
    change(program, "2.bias", lambda bias: bias + np.eye(5)[1] * 1e-2)
    with pytest.raises(VerificationError, match=r"largest is 0\.01"):
        program.verify(data=SAMPLES, thresholds={"largest": 1e-4}, save=tmp_path)
    with pytest.raises(UsageError, match="no argument 'metric' without data="):
        program.verify(metric="top1")
    with pytest.raises(UsageError, match="knows no PyTorch model"):
        OnnxProgram(program.model, program.exported_program).verify(data=SAMPLES)


#: The values that a right model reaches on few samples, for every metric except ``box_iou``.
RIGHT = {
    "top1": 1.0,
    "iou": 1.0,
    "token_match": 1.0,
    "wer": 0.0,
    "cosine": 0.99999,
    "largest": 1e-3,
    "mean": 1e-5,
}


@pytest.mark.parametrize(
    "name", [n if n in ("resnet18", "bert", "t5") else pytest.param(n, marks=pytest.mark.long) for n in ZOO]
)
def test_no_model_of_the_zoo_raises_an_alarm(name: str) -> None:
    case = ZOO[name]
    sizes = [{}, dict.fromkeys(case.sizes, 1), {dimension: size + 2 for dimension, size in case.sizes.items()}]
    samples = [Sample(f"seed {seed}", *case.inputs(seed=seed, **of)) for seed, of in enumerate(sizes)]
    module, args, kwargs, shapes = case()
    program = onnxplug.to_onnx(module, args, kwargs=kwargs, dynamic_shapes=shapes)
    assert verify_data(program, module, samples, thresholds=RIGHT).samples == 3
    with pytest.raises(VerificationError, match="the worst of 3 samples is seed"):
        verify_data(program, lambda *a, **k: 1.01 * _first(module(*a, **k)), samples, thresholds=RIGHT)


def _first(results: Any) -> torch.Tensor:
    return results if isinstance(results, torch.Tensor) else results[0]


def change(program: OnnxProgram, name: str, make: object) -> None:
    value = program.model.graph.initializers[name]
    value.const_value = ir.tensor(make(value.const_value.numpy()).astype(np.float32), name=name)  # type: ignore[operator]


def test_a_wrong_bias_is_an_error_and_the_worst_sample_saved(program: OnnxProgram, tmp_path: Path) -> None:
    program.release()
    change(program, "2.bias", lambda bias: bias + np.eye(5)[1] * 1e-2)
    with pytest.raises(VerificationError, match=r"largest is 0\.01.*the worst of 6 samples is sample \d"):
        verify_data(program, MODEL, SAMPLES, thresholds={"largest": 1e-4}, save=tmp_path)
    saved = np.load(tmp_path / "worst-largest.npz")
    assert abs(saved["pytorch_0"] - saved["onnx_0"]).max() == pytest.approx(1e-2, rel=1e-3)
    assert saved["input_0"].shape == (4, 8)


def test_swapped_classes_are_an_error(program: OnnxProgram) -> None:
    order = [1, 0, 2, 3, 4]
    change(program, "2.bias", lambda bias: bias[order])
    weight = next(n for n in program.model.graph.initializers if n.startswith("2.weight"))
    change(program, weight, lambda w: w[order] if w.shape[0] == 5 else w[:, order])
    report = measure_data(program, MODEL, SAMPLES, thresholds={"top1": 0.99, "token_match": 0.99})
    assert not report.measured[0].accepted
    assert not report.measured[1].accepted


def test_a_crop_off_by_one_is_an_error() -> None:
    class Crop(nn.Module):
        def __init__(self, start: int) -> None:
            super().__init__()
            self.start = start

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :, self.start : self.start + 8, self.start : self.start + 8]

    images = [torch.randn(1, 3, 12, 12) for _ in range(3)]
    program = onnxplug.to_onnx(Crop(2), (images[0],))
    assert verify_data(program, Crop(2), images, ["iou", "largest"], thresholds={"iou": 1.0, "largest": 0.0}).accepted
    with pytest.raises(VerificationError, match=r"iou is 0\."):
        verify_data(program, Crop(1), images, thresholds={"iou": 0.9})


def test_functions_files_and_errors(program: OnnxProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", input=SAMPLES[0].numpy())
    (tmp_path / "own.py").write_text(
        "def error(a, b): return float((a[0] - b[0]).abs().sum())\nerror.higher_is_better = False"
    )
    report = measure_data(program, MODEL, "*.npz", "own.py:error", thresholds={"own.py:error": 1e-3})
    assert report.accepted
    assert report.measured[0].worst == "a.npz"
    for data, message in (("*.npy", "no glob"), ([3], "sample 0 of the data is an int"), ([], "no sample")):
        with pytest.raises(UsageError, match=message):
            measure_data(program, MODEL, data)
    with pytest.raises(UsageError, match="is no metric"):
        measure_data(program, MODEL, SAMPLES, "top2")


def test_thresholds_of_functions(program: OnnxProgram, tmp_path: Path) -> None:
    """A threshold has the function's name, and the direction that the function has."""

    def half(expected: Any, actual: Any) -> float:
        return 0.5

    def error(expected: Any, actual: Any) -> float:
        return 0.5

    error.higher_is_better = False  # type: ignore[attr-defined]
    for limit, accepted in ((0.4, {"half": True, "error": False}), (0.6, {"half": False, "error": True})):
        limits = {"half": limit, "error": limit, "top1": 1.0}
        report = measure_data(program, MODEL, SAMPLES, [half, error], thresholds=limits)
        assert {row.metric: row.accepted for row in report.measured} == {**accepted, "top1": True}
        assert report == measure_data(program, MODEL, SAMPLES, [half, error, "top1"], thresholds=limits)
    keep_thresholds(program, {"half": 0.6})
    program.save(tmp_path / "model.onnx")
    assert not measure_data(tmp_path / "model.onnx", MODEL, SAMPLES, half).accepted


def _difference(expected: Any, actual: Any) -> float:
    return float((expected[0] - actual[0]).abs().max())


def test_metrics_of_one_name(program: OnnxProgram) -> None:
    """A metric given twice is measured once; two functions of one name would be measured as one."""
    for given in ("top1", f"{__file__}:_difference", _difference):
        assert measure_data(program, MODEL, SAMPLES, [given, given]) == measure_data(program, MODEL, SAMPLES, given)
    with pytest.raises(UsageError, match="two metrics are called '<lambda>'"):
        measure_data(program, MODEL, SAMPLES, [lambda a, b: 1.0, lambda a, b: 0.0])


def test_metrics_of_known_values() -> None:
    def score(name: str, one: object, other: object) -> float:
        return METRICS[name].score([torch.as_tensor(one)], [torch.as_tensor(other)])

    assert score("wer", [1, 2, 3, 4], [1, 3, 4]) == 0.25
    assert score("token_match", [1, 2, 3, 4], [1, 2, 0]) == 0.5
    assert score("iou", [True, True, False], [True, False, False]) == 0.5
    assert score("box_iou", [[0.0, 0, 2, 2]], [[0.0, 0, 2, 1]]) == 0.5
    assert score("box_iou", torch.zeros(0, 4), [[0.0, 0, 2, 1]]) == 0
    assert score("cosine", [[1.0, 0.0]], [[0.0, 1.0]]) == 0
    assert score("largest", [1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert score("mean", [1.0, 3.0], [1.0, 2.0]) == 0.5


@pytest.mark.parametrize("shape", [(1, 0), (0,), (0, 3), (1, 0, 5), (1, 5, 0), (2, 0, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("name", sorted(METRICS.keys() - {"box_iou"}))
def test_metrics_of_samples_without_elements(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Equal results without tokens, scores or rows are right; an element that only one model has is a difference."""
    right = float(METRICS[name].higher_is_better)
    none, some = torch.empty(shape, dtype=dtype), torch.ones([n or 2 for n in shape], dtype=dtype)
    assert METRICS[name].score([none], [none.clone()]) == right
    for pair in ([none], [some]), ([some], [none]):
        assert METRICS[name].is_worse(METRICS[name].score(*pair), right)


def test_samples_without_tokens() -> None:
    model = nn.Embedding(4, 5).eval()
    tokens = [torch.ones(1, n, dtype=torch.int64) for n in (3, 0)]
    program = onnxplug.to_onnx(model, (tokens[0],), dynamic_shapes=({1: "length"},))
    limits = {"top1": 1.0, "token_match": 1.0, "wer": 0.0, "cosine": 0.9999, "iou": 1.0}
    assert verify_data(program, model, tokens, thresholds=limits).samples == 2
