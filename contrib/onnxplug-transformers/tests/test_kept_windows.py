"""Hiera's masking: it keeps the same number of windows of each image, whichever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug


def _hiera(model_class: str, **changes: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"embed_dim": 8, "depths": [1, 1, 2, 1], "image_size": [96, 96], "mask_ratio": 0.5}
    sizes |= {"decoder_hidden_size": 16, "decoder_depth": 1, "decoder_num_heads": 2, "initializer_range": 0.15}
    model_type = getattr(transformers, model_class)
    extra = {"is_mae": True} if model_class == "HieraModel" else {}
    model: nn.Module = model_type(transformers.HieraConfig(**{**sizes, **changes}), **extra).eval()
    return model


def _case(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 96, 96), "noise": torch.rand(batch, 9)}


def test_any_number_of_images() -> None:
    torch.manual_seed(0)
    dynamic = {name: {0: "batch"} for name in _case(2)}
    program = onnxplug.to_onnx(_hiera("HieraForPreTraining"), kwargs=_case(2), dynamic_shapes=dynamic)
    for batch in (1, 2, 5):
        program.verify(kwargs=_case(batch), seeds=())


@pytest.mark.parametrize("ratio", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("as_dict", [True, False])
def test_states_are_those_of_transformers(ratio: float, as_dict: bool) -> None:
    """All windows are kept, some, or none."""
    from onnxplug_transformers.kept_windows import windows_that_are_kept

    torch.manual_seed(0)
    model = _hiera("HieraModel", mask_ratio=ratio)
    for noise in (torch.rand(3, 9), torch.zeros(3, 9), torch.full((3, 9), torch.nan)):
        case = {
            **_case(3),
            "noise": noise,
            "output_attentions": True,
            "output_hidden_states": True,
            "return_dict": as_dict,
        }
        results = []
        for patch in (False, True):
            with torch.no_grad():
                if patch:
                    with windows_that_are_kept():
                        results.append(_of(model, case))
                else:
                    results.append(_of(model, case))
        if isinstance(results[0], RuntimeError):
            assert isinstance(results[1], RuntimeError)
            continue
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)
        assert type(results[1]) is type(results[0])


def _of(model: nn.Module, case: dict[str, Any]) -> Any:
    try:
        return model(**case)
    except RuntimeError as error:
        return error


def test_without_masking() -> None:
    """A model that masks nothing has transformers' own forward."""
    torch.manual_seed(0)
    images = {"pixel_values": torch.randn(2, 3, 96, 96)}
    model = _hiera("HieraForImageClassification")
    program = onnxplug.to_onnx(model, kwargs=images, dynamic_shapes={"pixel_values": {0: "batch"}})
    program.verify(kwargs={"pixel_values": torch.randn(3, 3, 96, 96)}, seeds=())
