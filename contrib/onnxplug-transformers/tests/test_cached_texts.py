"""OmDet-Turbo's texts of classes and tasks: any number of them, and of classes of each image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

#: A limit of torch, not of the package.
_NOT_WITH_29 = pytest.mark.xfail(
    torch.__version__.startswith("2.9."), strict=True, reason="torch 2.9 slices by no number that the model computes"
)
_SWIN = {"model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [1, 1, 1, 1]}
_SWIN |= {"num_heads": [1, 2, 2, 4], "window_size": 4, "out_indices": [2, 3, 4]}
_TEXT = {"model_type": "clip_text_model", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 24}
_OMDET = {
    "text_projection_in_dim": 32,
    "text_projection_out_dim": 32,
    "class_embed_dim": 32,
    "task_encoder_hidden_dim": 64,
    "encoder_in_channels": [32, 64, 128],
    "vision_features_channels": [64, 64, 64],
    "apply_layernorm_after_vision_backbone": False,
    "num_queries": 12,
    "decoder_num_layers": 1,
    "encoder_hidden_dim": 64,
    "decoder_hidden_dim": 64,
    "d_model": 64,
    "image_size": 64,
}


def _omdet() -> nn.Module:
    from transformers import OmDetTurboConfig, OmDetTurboForObjectDetection

    config = OmDetTurboConfig(**_OMDET, backbone_config=_SWIN, text_config=_TEXT, use_timm_backbone=False)
    model = OmDetTurboForObjectDetection(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


class Texts(nn.Module):
    """The results of the texts that the detector reads."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _omdet()

    def forward(
        self,
        classes_input_ids: torch.Tensor,
        classes_attention_mask: torch.Tensor,
        tasks_input_ids: torch.Tensor,
        tasks_attention_mask: torch.Tensor,
        classes_structure: torch.Tensor,
    ) -> Any:
        return self.model.get_language_embedding(
            classes_input_ids, classes_attention_mask, tasks_input_ids, tasks_attention_mask, classes_structure
        )


def _texts(*counts: int, classes: int | None = None, task: int = 7) -> dict[str, torch.Tensor]:
    """Classes of each image and a task, each task shorter than the one before; the first and last class are equal."""
    classes = sum(counts) if classes is None else classes
    ids, tasks = torch.randint(1, 99, (classes, 5)), torch.randint(1, 99, (len(counts), task))
    ids[-1] = ids[0]
    lengths = torch.arange(task - 1, task - 1 - len(counts), -1)  # the mask's last column shows nothing
    return {
        "classes_input_ids": ids,
        "classes_attention_mask": (torch.rand(classes, 5) < 0.8).long(),
        "tasks_input_ids": tasks,
        "tasks_attention_mask": (torch.arange(task) < lengths[:, None]).long(),
        "classes_structure": torch.tensor(counts),
    }


_ROWS, _TASK = {0: "classes"}, {0: "batch", 1: "sequence"}
_DYNAMIC = {
    "classes_input_ids": _ROWS,
    "classes_attention_mask": _ROWS,
    "tasks_input_ids": _TASK,
    "tasks_attention_mask": _TASK,
    "classes_structure": {0: "batch"},
}


@_NOT_WITH_29
def test_texts_of_any_number() -> None:
    """Also fewer classes than are counted, which PyTorch accepts for a single image."""
    torch.manual_seed(0)
    model = Texts()
    example = _texts(3, 1)
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=_DYNAMIC)
    for case in (
        example,
        _texts(2, 4, 3, task=9),
        _texts(0, 2),
        _texts(5),
        _texts(1, 2, classes=6),
        _texts(4, classes=2),
    ):
        program.verify(kwargs=case, seeds=())
    for case in (_texts(3, 2, classes=4), _texts(2, 2, classes=2)):
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"), torch.no_grad():
            model(**case)
        with pytest.raises(onnxplug.OnnxplugError, match="out of data bounds"):
            program(**case)


@_NOT_WITH_29
@pytest.mark.long
def test_detector() -> None:
    torch.manual_seed(0)
    model = _omdet()

    def case(*counts: int, task: int = 7) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(len(counts), 3, 64, 64), **_texts(*counts, task=task)}

    dynamic = {"pixel_values": {0: "batch"}, **_DYNAMIC}
    program = onnxplug.to_onnx(model, kwargs=case(3, 1), dynamic_shapes=dynamic)
    for inputs in (case(2, 4, 3, task=9), case(5)):
        program.verify(kwargs=inputs, seeds=())
