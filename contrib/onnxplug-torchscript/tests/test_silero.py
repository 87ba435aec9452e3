"""silero-vad as it is shipped: a saved script with branches, checks, two models and a state."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import CaptureError
from tests.support.tolerances import looser

CHUNKS = 20
RATES = {16000: 512, 8000: 256}


@pytest.fixture
def silero() -> Any:
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or spec.origin is None:
        pytest.skip("silero-vad is not installed; `make .venv` installs what the tests need")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(Path(spec.origin).parent / "data" / "silero_vad.jit")).eval()


def speech(size: int, chunks: int) -> list[torch.Tensor]:
    """Chunks of a voiced sound: harmonics of a gliding tone in bursts, with noise."""
    torch.manual_seed(0)
    time = torch.arange(size * chunks) / (size * 31.25)
    tone = sum(torch.sin(time * 2 * torch.pi * k * (120 + 40 * time)) / k for k in range(1, 12))
    loud = (torch.sin(time * 9) > -0.3).float()
    return list((0.1 * tone * loud + 0.01 * torch.randn(size * chunks)).reshape(chunks, 1, size).unbind(0))


@pytest.mark.long
@pytest.mark.parametrize("rate", [16000, 8000])
def test_a_stream_of_chunks(silero: Any, rate: int) -> None:
    chunks = speech(RATES[rate], CHUNKS)
    with torch.no_grad():
        silero(chunks[0], rate)  # the state has its shape from the first chunk on
        silero._state, silero._context = torch.zeros_like(silero._state), torch.zeros_like(silero._context)
        program = onnxplug.to_onnx(silero, (chunks[0], rate), verify=True)
        names = [value.name for value in program.model.graph.outputs]
        assert names[1:] == ["_context_out", "_state_out"]
        assert {"_state", "_context"} <= set(program.model.graph.initializers)
        silero.reset_states()
        probabilities = []
        for chunk in chunks:
            wanted = silero(chunk, rate)
            got, *state = program(chunk, rate)
            torch.testing.assert_close(got, wanted, **looser("branches and loops"))
            for name, value in zip(names[1:], state, strict=True):
                torch.testing.assert_close(value, getattr(silero, name.removesuffix("_out")), **looser("streams"))
            program.apply_weights(
                {name.removesuffix("_out"): value for name, value in zip(names[1:], state, strict=True)}
            )
            probabilities.append(float(got))
    assert max(probabilities) - min(probabilities) > 0.05, "the state has no effect"


def test_the_error_for_a_state_that_changes_its_shape(silero: Any) -> None:
    with pytest.raises(
        CaptureError, match=r"vad_annotator.py:\d+ changes its attribute '_context' from a tensor of shape \[0\]"
    ):
        onnxplug.to_onnx(silero, (torch.zeros(1, 512), 16000))


def test_a_wrong_size_is_the_scripts_own_error(silero: Any) -> None:
    with pytest.raises(CaptureError, match=r"vad_annotator.py:\d+: ValueError: Provided number of samples is 600"):
        onnxplug.to_onnx(silero, (torch.zeros(1, 600), 16000))
