"""torchaudio's functions, against its own kernels for the CPU."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_torchaudio import FUNCTIONS, alignment, filters
from torch import Tensor

import onnxplug

F = pytest.importorskip("torchaudio.functional")
#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "float32": (
        {"rtol": 1e-4, "atol": 5e-5},
        "the library's recursion rounds each sample to float32, with poles near 1",
    ),
}
PLAIN = {"rtol": 1.3e-6, "atol": 2e-6}
AUTO = torch.export.Dim.AUTO
WAVES = {0: AUTO, 1: AUTO}
#: Channels and samples: a block and a part, one block, one sample, many blocks.
SIZES = ((2, 500), (1, 64), (3, 1), (1, 20000))


def check(
    model: Callable[..., Any], inputs: Sequence[tuple[Tensor, ...]], shapes: Any, tolerance: Any = PLAIN, **options: Any
) -> onnxplug.OnnxProgram:
    """Exports with the first inputs; the file gives the library's results for all inputs."""
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, **options)
    for args in inputs:
        wanted = model(*args)
        for result, value in zip(program(*args), [wanted] if isinstance(wanted, Tensor) else wanted, strict=True):
            torch.testing.assert_close(result, value, **tolerance)
    return program


def waves(*sizes: tuple[int, ...]) -> list[tuple[Tensor]]:
    return [(torch.rand(size) * 2 - 1,) for size in sizes]


BIQUADS: dict[str, Callable[[Tensor], Tensor]] = {
    "lowpass": lambda x: F.lowpass_biquad(x, 16000, 1000.0),
    "highpass": lambda x: F.highpass_biquad(x, 16000, 1000.0),
    "allpass": lambda x: F.allpass_biquad(x, 16000, 1000.0),
    "bandpass": lambda x: F.bandpass_biquad(x, 16000, 2000.0, const_skirt_gain=True),
    "bandreject": lambda x: F.bandreject_biquad(x, 16000, 2000.0),
    "band": lambda x: F.band_biquad(x, 16000, 2000.0, noise=True),
    "bass": lambda x: F.bass_biquad(x, 16000, 10.0),
    "treble": lambda x: F.treble_biquad(x, 16000, 10.0),
    "equalizer": lambda x: F.equalizer_biquad(x, 16000, 1000.0, -6.0),
    "deemph": lambda x: F.deemph_biquad(x, 44100),
    "riaa": lambda x: F.riaa_biquad(x, 44100),
}


@pytest.mark.parametrize("name", BIQUADS)
def test_biquads(name: str) -> None:
    program = check(BIQUADS[name], waves(*SIZES), (WAVES,), LOOSER["float32"][0])
    assert program.statistics.operators["Scan"] == 1


@pytest.mark.parametrize("opset", [16, 23])
@pytest.mark.parametrize(("clamp", "order"), [(True, 1), (False, 3), (False, 70)])
def test_filters(order: int, clamp: bool, opset: int) -> None:
    """Filters of orders below and above a block."""
    a, b = torch.randn(order + 1) * 0.5 / order, torch.randn(order + 1)
    a[0] = 1.5

    def model(x: Tensor) -> Tensor:
        return F.lfilter(x, a, b, clamp)

    check(model, waves(*SIZES[:3]), (WAVES,), LOOSER["float32"][0], opset_version=opset)


@pytest.mark.parametrize("batching", [True, False])
def test_banks_of_filters(batching: bool) -> None:
    a, b = torch.tensor([[1.0, -1.2, 0.5, 0.1], [2.0, 0.3, -0.1, 0.0]]), torch.randn(2, 4)

    def model(x: Tensor) -> Tensor:
        return F.lfilter(x, a, b, False, batching)

    inputs = waves((3, 2, 100), (1, 2, 7), (2, 2, 130)) if batching else waves(*SIZES[:3])
    check(model, inputs, ({0: AUTO, 2: AUTO} if batching else WAVES,), LOOSER["float32"][0])


def test_coefficients_as_inputs() -> None:
    def model(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.lfilter(x, a, b)

    inputs = [
        (x, torch.tensor(a), torch.randn(3))
        for (x,), a in zip(waves((2, 100), (1, 300)), ([1.0, -1.2, 0.5], [3.0, 0.2, -0.1]), strict=True)
    ]
    check(model, inputs, (WAVES, None, None), LOOSER["float32"][0])


def test_filters_that_grow() -> None:
    def model(x: Tensor) -> Tensor:
        return F.lfilter(x, torch.tensor([1.0, -1.05]), torch.tensor([1.0, 0.0]), clamp=False)

    check(model, waves((2, 200), (1, 100)), (WAVES,), LOOSER["float32"][0])


def test_filtfilt() -> None:
    a, b = torch.tensor([1.0, -1.2, 0.5]), torch.tensor([0.1, 0.2, 0.1])
    check(lambda x: F.filtfilt(x, a, b), waves(*SIZES), (WAVES,), LOOSER["float32"][0])


def test_numbers_are_those_of_float64() -> None:
    """With poles near 1 the library's numbers in float32 are not those of float64."""
    a, b = torch.tensor([1.0, -1.9921875, 0.9924]), torch.tensor([1.0, 0.0, 0.0])
    (x,) = waves((1, 20000))[0]

    def model(x: Tensor) -> Tensor:
        return F.lfilter(x, a, b, clamp=False)

    wanted = F.lfilter(x.double(), a.double(), b.double(), clamp=False)
    (ours,), theirs = onnxplug.to_onnx(model, (x,), verify=False)(x), model(x)
    torch.testing.assert_close(ours, wanted.float())
    assert (ours - wanted).abs().max() * 10 < (theirs - wanted).abs().max()


def test_overdrive() -> None:
    check(lambda x: F.overdrive(x, 20, 30), waves(*SIZES), (WAVES,), LOOSER["float32"][0])
    check(lambda x: F.overdrive(x), waves((300,), (65,)), ({0: AUTO},), LOOSER["float32"][0])


def align(scores: Tensor, targets: Tensor) -> Any:
    return F.forced_align(scores, targets)


def labels(frames: int, classes: int, count: int, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    """Scores, and labels with repetitions."""
    targets = torch.randint(1, classes, (1, count), dtype=dtype)
    targets[:, 1::3] = targets[:, : targets[:, 1::3].shape[1] * 3 : 3]
    return torch.randn(1, frames, classes).log_softmax(-1), targets


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("opset", [16, 23])
def test_forced_align(opset: int, dtype: torch.dtype) -> None:
    inputs = [labels(*size, dtype) for size in ((20, 5, 6), (60, 9, 25), (1, 4, 1), (300, 30, 80), (12, 7, 6))]
    check(align, inputs, ({1: AUTO, 2: AUTO}, {1: AUTO}), opset_version=opset)


def test_forced_align_without_a_frame_to_spare() -> None:
    scores = torch.randn(1, 7, 4).log_softmax(-1)
    pairs = [
        torch.tensor([[1, 1, 2, 3, 2]]),
        torch.tensor([[1, 2, 3, 1, 2, 3, 1]]),
    ]  # frames: as many as labels and repetitions
    for targets in pairs:
        check(align, [(scores[:, : targets.shape[1] + targets.diff().eq(0).sum()], targets)], None)


def test_forced_align_of_ties_and_another_blank() -> None:
    def model(scores: Tensor, targets: Tensor) -> Any:
        return F.forced_align(scores, targets, blank=3)

    scores = [(torch.randint(-2, 1, (1, n, 5)) / 2).float() for n in (12, 30, 9)]
    inputs = [
        (x, torch.tensor([t])) for x, t in zip(scores, ([1, 2, 2, 0, 4], [1, 1, 1, 0, 4, 4, 2], [2]), strict=True)
    ]
    check(model, inputs, ({1: AUTO}, {1: AUTO}))


def test_kernels_beside_those_of_the_library() -> None:
    """Every function of the table exists in torchaudio; parameters and results are the library's."""
    places = {f"{module.__name__}:{name}" for module, name, _ in FUNCTIONS.places()}
    assert set(FUNCTIONS.functions) <= places
    assert "torchaudio.functional:forced_align" in places
    assert list(inspect.signature(alignment.forced_align).parameters) == list(
        inspect.signature(F.forced_align).parameters
    )
    a = torch.tensor([[0.3, -0.5, 1.0]])
    x, (ours, theirs) = torch.randn(2, 1, 150), torch.zeros(2, 2, 1, 152)
    filters.lfilter_core_loop(x, a, ours)
    torch.ops.torchaudio._lfilter_core_loop(x, a, theirs)
    torch.testing.assert_close(ours, theirs, **LOOSER["float32"][0])


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchaudio.__version__", "2.1.0")
    with pytest.raises(onnxplug.OnnxplugError, match=r"torchaudio>=2.10,<2.12 are translated; 2.1.0 is installed"):
        onnxplug.to_onnx(lambda x: F.lowpass_biquad(x, 16000, 300.0), (torch.rand(2, 100),))


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block, {"__name__": "readme"})
