"""TimesFM's time series, of which there may be any number, while a model is captured.

transformers loops over the series, which may differ in length. Series in one tensor have the same length: here the
model sees them as one series, whose items are rows of numbers, until they are padded to the context.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import parameters

_FAMILIES = {
    "timesfm": ("TimesFmModelForPrediction", "_timesfm_moving_average"),
    "timesfm2_5": ("TimesFm2_5ModelForPrediction", "_timesfm2_5_moving_average"),
}


@contextlib.contextmanager
def any_number_of_series() -> Iterator[None]:
    """Holds while a model is captured; a class of another version, with other parameters, is left as it is."""
    with contextlib.ExitStack() as stack:
        for family, (name, average) in _FAMILIES.items():
            owner = getattr(sys.modules.get(f"transformers.models.{family}.modeling_{family}"), name, None)
            before = {one: vars(owner).get(one) for one in ("forward", "_preprocess", average)} if owner else {}
            if not before or None in before.values():
                continue
            prepare, smooth = before["_preprocess"], getattr(before[average], "__func__", before[average])
            if parameters(prepare) != parameters(_preprocess) or parameters(smooth) != parameters(_moving_average):
                continue
            stack.enter_context(patched(owner, "forward", _of_one_tensor(before["forward"])))
            stack.enter_context(patched(owner, "_preprocess", _for_rows(_preprocess, prepare)))
            stack.enter_context(patched(owner, average, staticmethod(_for_rows(_moving_average, smooth))))
        yield


def _of_one_tensor(before: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward: series in a tensor [series, time], and their frequencies, become one series of rows."""

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(before).bind(self, *args, **kwargs)
        series, freq = call.arguments.get("past_values"), call.arguments.get("freq")
        is_known = freq is None or (isinstance(freq, Tensor) and freq.ndim == 1)
        if isinstance(series, Tensor) and series.ndim == 2 and is_known:
            call.arguments["past_values"] = [series.T]
            if freq is not None:
                call.arguments["freq"] = [freq]
        return before(*call.args, **call.kwargs)

    return forward


def _for_rows(function: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ``function`` for series of rows, and transformers' own for series of numbers."""

    @functools.wraps(before)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if isinstance(args[0], Tensor) else args[1][0]
        return (function if first.ndim == 2 else before)(*args, **kwargs)

    return chosen


def _preprocess(self: Any, inputs: Sequence[Tensor], freq: Any = None, context_len: int | None = None) -> Any:
    """Series of the context's length, zeros in front of shorter ones, and their padding; frequencies, if there are any.

    Args:
        inputs: One series of rows [time, series], or two, the trend and the rest, which alternate in the results.
        freq: As many frequencies, each 0 for all series or [series].

    Returns:
        [rows, context], where the padding is 1, [rows, context + horizon], and frequencies [rows, 1].
    """
    context = self.context_len if context_len is None else context_len
    time, count = inputs[0].shape
    series = torch.stack([one.T for one in inputs], 1).flatten(0, 1)
    rows = count * len(inputs)
    # As many zeros as the context is long, and then the last numbers: a size that doesn't depend on the time.
    series = functional.pad(series, (context, 0)).narrow(1, time, context)
    padding = torch.arange(context + self.horizon_len, device=series.device) < context - time
    result = series, padding.to(series.dtype).expand(rows, -1)
    if freq is None:
        return result
    if not isinstance(freq[0], Tensor):
        return *result, torch.full((rows, 1), freq[0], dtype=torch.int32)
    return *result, torch.stack([one[:count] for one in freq], 1).to(torch.int32).reshape(-1, 1)


def _moving_average(arr: Tensor, window_size: int) -> list[Tensor]:
    """Means of each item of [time, series] and the items before it, and the series minus these means."""
    smooth = functional.pad(arr, (0, 0, window_size - 1, 0)).unfold(0, window_size, 1).mean(-1)
    return [smooth, arr - smooth]
