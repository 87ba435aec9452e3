"""TimesFM: any number of time series in one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug


def _timesfm(family: str = "TimesFm", **changes: Any) -> nn.Module:
    import transformers

    sizes = {"patch_length": 4, "context_length": 16, "horizon_length": 8, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    if family == "TimesFm2_5":
        sizes |= {"output_quantile_len": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, **changes)
    model: nn.Module = getattr(transformers, f"{family}ModelForPrediction")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _series(count: int, length: int, least: float | None = None) -> torch.Tensor:
    """Series of several means and deviations, none of them below ``least``."""
    values = torch.randn(count, length) * (1 + torch.arange(count)[:, None]) + torch.randn(count, 1)
    return values if least is None else values.clamp(min=least)


@pytest.mark.parametrize("family", ["TimesFm", "TimesFm2_5"])
@pytest.mark.parametrize("length", [16, 11, 23])
def test_any_number_of_series(family: str, length: int) -> None:
    """As long as the context, shorter and longer."""
    torch.manual_seed(0)
    inputs = {"past_values": _series(2, length)}
    program = onnxplug.to_onnx(_timesfm(family), kwargs=inputs, dynamic_shapes={"past_values": {0: "batch"}})
    for count in (1, 2, 5):
        program.verify(kwargs={"past_values": _series(count, length)}, seeds=())


@pytest.mark.parametrize("family", ["TimesFm", "TimesFm2_5"])
def test_trends(family: str) -> None:
    """Two rows for each series, the trend and the rest; forecasts are cut at zero only if no series is negative."""
    torch.manual_seed(0)
    options = {"window_size": 3, "truncate_negative": True, "forecast_context_len": 12}
    inputs = {"past_values": _series(2, 14), **options}
    dynamic = {"past_values": {0: "batch"}, **dict.fromkeys(options)}
    program = onnxplug.to_onnx(_timesfm(family), kwargs=inputs, dynamic_shapes=dynamic)
    for case in (_series(3, 14), _series(1, 14, 0.0), _series(4, 14, 0.0)):
        program.verify(kwargs={"past_values": case, **options}, seeds=())


@pytest.mark.filterwarnings("error:the exported model is right only where")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("family", ["TimesFm", "TimesFm2_5"])
def test_series_of_any_length(family: str, window: int | None) -> None:
    """One model for series shorter than the context, as long as it and longer."""
    torch.manual_seed(0)
    dynamic = {"past_values": {0: "batch", 1: "time"}, "window_size": None}
    inputs = {"past_values": _series(2, 11), "window_size": window}
    program = onnxplug.to_onnx(_timesfm(family), kwargs=inputs, dynamic_shapes=dynamic)
    for count, length in ((1, 16), (3, 4), (2, 1), (2, 17), (1, 40)):
        program.verify(kwargs={"past_values": _series(count, length), "window_size": window}, seeds=())


@pytest.mark.parametrize("window", [None, 4])
def test_frequencies(window: int | None) -> None:
    torch.manual_seed(0)

    def case(count: int) -> dict[str, Any]:
        freq = torch.arange(count).flip(0) % 3
        return {"past_values": _series(count, 13), "freq": freq, "window_size": window}

    dynamic = {"past_values": {0: "batch"}, "freq": {0: "batch"}, "window_size": None}
    program = onnxplug.to_onnx(_timesfm(), kwargs=case(2), dynamic_shapes=dynamic)
    for count in (1, 3, 7):
        program.verify(kwargs=case(count), seeds=())


def test_series_of_unequal_lengths() -> None:
    """A list of tensors is left to transformers: it has the example's number of series."""
    torch.manual_seed(0)
    series = [torch.randn(9), torch.randn(16), torch.randn(20)]
    onnxplug.to_onnx(_timesfm(), kwargs={"past_values": series}).verify(seeds=())
