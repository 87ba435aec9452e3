"""FastSpeech 2: the number of frames of each token is its duration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {"frames": ({"rtol": 1e-3, "atol": 1e-4}, "two stacks of layers, and sines of positions computed anew")}


def _model(bias: float = 1.0, **changes: Any) -> nn.Module:
    """A model whose durations differ; with a smaller bias, more of them are 0."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 24, "vocab_size": 40, "num_mel_bins": 8, "encoder_layers": 1}
    sizes |= {"decoder_layers": 1, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2}
    sizes |= {"encoder_linear_units": 24, "decoder_linear_units": 24, "speech_decoder_postnet_layers": 2}
    sizes |= {"speech_decoder_postnet_units": 16, "duration_predictor_channels": 16, "energy_predictor_channels": 16}
    sizes |= {"pitch_predictor_channels": 16, "pitch_predictor_layers": 2}
    config = transformers.FastSpeech2ConformerConfig(**{**sizes, **changes})
    model: Any = transformers.FastSpeech2ConformerModel(config)
    with torch.no_grad():
        model.duration_predictor.linear.weight.mul_(3)
        model.duration_predictor.linear.bias.fill_(bias)
    model.eval()
    return model


def _case(batch: int, tokens: int) -> dict[str, Tensor]:
    """Texts, the last of which is the longest."""
    lengths = torch.linspace(max(tokens // 2, 1), tokens, batch).long()
    lengths[-1] = tokens
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 40, (batch, tokens)) * mask, "attention_mask": mask}


@pytest.mark.xfail(
    torch.__version__.startswith("2.9."),
    strict=True,
    reason="torch 2.9 asks for the memory format of a convolution of data-dependent length",
)
@pytest.mark.parametrize(("bias", "speed"), [(1.0, 1.0), (0.3, 1.6), (-9.0, 1.0)])
def test_frames_of_any_duration(bias: float, speed: float) -> None:
    """Durations that differ, some of them 0, and all 0, which become 1."""
    torch.manual_seed(0)
    model = _model(bias, speaking_speed=speed)
    dynamic = {name: {0: "batch", 1: "tokens"} for name in _case(2, 7)}
    program = onnxplug.to_onnx(model, kwargs=_case(2, 7), dynamic_shapes=dynamic)
    numbers = set()
    for batch, tokens in ((2, 7), (1, 1), (3, 12), (5, 4)):
        case = _case(batch, tokens)
        program.verify(kwargs=case, seeds=(), **LOOSER["frames"][0])
        with torch.no_grad():
            durations = model(**case).duration_outputs
        numbers |= set(durations.flatten().tolist())
    assert (len(numbers) > 3) == (bias > -9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("speed", [1.0, 0.4, 2.5])
def test_regulator_is_that_of_transformers(dtype: torch.dtype, speed: float) -> None:
    from onnxplug_transformers.durations import length_regulator
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as modeling

    torch.manual_seed(0)
    for batch, tokens, largest in ((1, 1, 1), (1, 1, 5), (3, 6, 1), (4, 9, 2), (4, 9, 7), (5, 3, 40)):
        states = torch.randn(batch, tokens, 3).to(dtype)
        given = torch.randint(0, largest, (batch, tokens))
        one_is_empty = given * (torch.arange(batch) > 0)[:, None]
        for durations in (given, one_is_empty, given.int()):
            first, second = durations.clone(), durations.clone()
            expected = modeling.length_regulator(states, first, speed)
            result = length_regulator(states, second, speed)
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
            assert torch.equal(first, second)


def test_refused_by_transformers() -> None:
    from onnxplug_transformers.durations import frames_of_any_duration
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as modeling

    with frames_of_any_duration():
        with pytest.raises(ValueError, match="speaking_speed"):
            modeling.length_regulator(torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.int64), 0.0)
        with pytest.raises((TypeError, RuntimeError)):
            modeling.length_regulator(torch.zeros(1, 2, 3), torch.ones(1, 2))


def test_positions_are_those_of_transformers() -> None:
    """Also of sequences longer than 5000, whose positions transformers does not keep."""
    from onnxplug_transformers.durations import frames_of_any_duration

    encoding = _model().encoder.pos_enc  # type: ignore[union-attr]
    for time in (1, 2, 9, 5000, 5003):
        states = torch.randn(2, time, 24)
        with frames_of_any_duration():
            results = encoding(states)  # type: ignore[operator]
        for result, expected in zip(results, encoding(states), strict=True):  # type: ignore[operator]
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
