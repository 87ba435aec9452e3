"""Swin's windows, and the models built on them, with a dynamic batch, height and width."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.torch_private import pytree

#: Tolerances that are looser than torch.testing's, with their reasons.
LOOSER = {"deep": ({"rtol": 1e-3, "atol": 2e-4}, "logits of deep networks of random weights, far from 1")}

_SMALL = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "initializer_range": 0.2}
_BACKBONE = {**_SMALL, "image_size": 64, "depths": [2, 2, 1, 1], "num_heads": [2, 2, 2, 2]}
_STAGES = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}


def _classifier(prefix: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**{**_SMALL, "image_size": 32, "num_labels": 5, **settings})
    made: nn.Module = getattr(transformers, f"{prefix}ForImageClassification")(config)
    return made


def _swin2sr() -> nn.Module:
    from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution

    return Swin2SRForImageSuperResolution(
        Swin2SRConfig(**{**_SMALL, "embed_dim": 12, "image_size": 16, "patch_size": 1})
    )


def _maskformer_swin() -> nn.Module:
    from transformers import MaskFormerSwinConfig
    from transformers.models.maskformer.modeling_maskformer_swin import MaskFormerSwinBackbone

    return MaskFormerSwinBackbone(MaskFormerSwinConfig(**_SMALL, image_size=32, out_features=["stage1", "stage2"]))


def _mask2former() -> nn.Module:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    sizes = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim"), 32)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32}
    backbone = SwinConfig(**_BACKBONE, **_STAGES)
    config = Mask2FormerConfig(backbone_config=backbone, **sizes, **layers, num_queries=5, num_labels=3)
    return Mask2FormerForUniversalSegmentation(config)


def _maskformer() -> nn.Module:
    from transformers import DetrConfig, MaskFormerConfig, MaskFormerForInstanceSegmentation, SwinConfig

    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    decoder = DetrConfig(d_model=16, encoder_layers=1, decoder_layers=1, num_queries=5, **heads)
    backbone = SwinConfig(**_BACKBONE, **_STAGES)
    config = MaskFormerConfig(
        backbone_config=backbone, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, num_labels=3
    )
    return MaskFormerForInstanceSegmentation(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swin": lambda: _classifier("Swin"),
    "swinv2": lambda: _classifier("Swinv2", patch_size=2),
    "donut": lambda: _classifier("DonutSwin"),
    "maskformer_swin": _maskformer_swin,
    "swin2sr": _swin2sr,
    "focalnet": lambda: _classifier("FocalNet", hidden_sizes=[32, 64], focal_levels=[2, 2], focal_windows=[3, 3]),
    "mask2former": _mask2former,
    "maskformer": _maskformer,
}


def _built(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # position biases are zero as initialised
                nn.init.normal_(parameter, std=0.2)
    return model.eval()


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def check_sizes(name: str, example: Sequence[int], others: Sequence[Sequence[int]]) -> None:
    """Exports with one size of images, and compares with eager at this size and at others."""
    model = _built(name)
    program = onnxplug.to_onnx(model, (torch.randn(*example),), dynamic_shapes=({0: "batch", 2: "height", 3: "width"},))
    for size in (example, *others):
        x = torch.randn(*size)
        with torch.no_grad():
            expected = _tensors(copy.deepcopy(model)(x))  # Swin keeps the shift of the smallest image that it has seen
        for got, value in zip(_tensors(program(x)), expected, strict=True):
            torch.testing.assert_close(got, value, **LOOSER["deep"][0])


#: Heights and widths that windows divide, and that they do not divide; maps of one window, which have no shift.
FITTING, OTHER = (2, 3, 32, 32), (3, 3, 33, 47)
FURTHER = [(1, 3, 40, 56), (1, 3, 32, 64), (2, 3, 64, 44)]


LATER = [pytest.param(name, marks=pytest.mark.long) for name in ("swinv2", "donut", "maskformer_swin", "focalnet")]


@pytest.mark.long
@pytest.mark.filterwarnings("error:the exported model is right only where")
@pytest.mark.parametrize("name", ["swin", *LATER])
def test_example_that_windows_divide(name: str) -> None:
    check_sizes(name, FITTING, [OTHER, *FURTHER])


@pytest.mark.long
@pytest.mark.filterwarnings("error:the exported model is right only where")
@pytest.mark.parametrize("name", ["swin", pytest.param("donut", marks=pytest.mark.long)])
def test_example_that_windows_do_not_divide(name: str) -> None:
    check_sizes(name, OTHER, [FITTING, *FURTHER])


@pytest.mark.long
@pytest.mark.parametrize("name", ["swinv2", "maskformer_swin"])
def test_example_that_windows_do_not_divide_of_every_model(name: str) -> None:
    check_sizes(name, OTHER, [FITTING, *FURTHER])


@pytest.mark.long
def test_superresolution() -> None:
    """transformers' own takes whole windows alone."""
    check_sizes("swin2sr", (2, 3, 16, 16), [(1, 3, 20, 24), (3, 3, 12, 32), (1, 3, 8, 8)])


@pytest.mark.long
@pytest.mark.parametrize("name", ["maskformer", "mask2former"])
def test_segmentation(name: str) -> None:
    check_sizes(name, (2, 3, 64, 64), [(1, 3, 64, 96), (2, 3, 75, 131), (1, 3, 128, 160)])


@pytest.mark.long
def test_plain_sizes_have_no_padding_and_no_computed_shift() -> None:
    program = onnxplug.to_onnx(_built("swin"), (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: "batch"},))
    assert not {"Pad", "Min", "Mod"} & {node.op_type for node in program.model.graph}


@pytest.mark.long
def test_the_model_is_as_before() -> None:
    from transformers.models.swin import modeling_swin

    model = _built("swin")
    before = {name: vars(module).get("shift_size") for name, module in model.named_modules()}
    functions = (modeling_swin.window_partition, modeling_swin.SwinLayer.maybe_pad)
    onnxplug.to_onnx(model, (torch.randn(*FITTING),), dynamic_shapes=({2: "height", 3: "width"},))
    assert before == {name: vars(module).get("shift_size") for name, module in model.named_modules()}
    assert functions == (modeling_swin.window_partition, modeling_swin.SwinLayer.maybe_pad)
