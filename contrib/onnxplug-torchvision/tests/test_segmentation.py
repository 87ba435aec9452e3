"""Functions and models of segment_anything and kornia, which need no plugin; skipped without segment_anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

pytest.importorskip("segment_anything", reason="`make test-torchvision` tests with it")
from kornia.geometry import bbox
from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer
from segment_anything.utils import amg
from segment_anything.utils.onnx import SamOnnxModel

#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {"models": ({"rtol": 1e-4, "atol": 1e-4}, "transformers of two layers, and sums in another order")}
AUTO = torch.export.Dim.AUTO
MASKS = ({0: AUTO, 1: AUTO, 2: AUTO},)
BOXES = ({0: "boxes"},)


def check(model: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], shapes: Any) -> None:
    """Exports with the first inputs; the file gives the library's results for all inputs."""
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes)
    for args in inputs:
        with torch.no_grad():
            wanted = model(*args)
        for result, value in zip(program(*args), [wanted] if isinstance(wanted, torch.Tensor) else wanted, strict=True):
            torch.testing.assert_close(result, value, **LOOSER["models"][0])


def masks(count: int, *size: int) -> tuple[torch.Tensor]:
    return (torch.rand(count, *size) > 0.8,)


def corners(count: int) -> torch.Tensor:
    """Boxes of (x1, y1, x2, y2)."""
    return torch.cat([torch.rand(count, 2) * 20, torch.rand(count, 2) * 20 + 20], 1).floor()


def test_masks_of_segment_anything() -> None:
    check(amg.batched_mask_to_box, [masks(3, 7, 9), (torch.zeros(1, 5, 5) > 0,), masks(4, 20, 1)], MASKS)
    scores = partial(amg.calculate_stability_score, mask_threshold=0.0, threshold_offset=1.0)
    check(scores, [(torch.randn(3, 7, 9) * 2,), (torch.randn(1, 5, 5),)], MASKS)
    check(lambda m: amg.uncrop_masks(m, [2, 3, 11, 10], 20, 20), [(torch.rand(n, 7, 9),) for n in (5, 1)], BOXES)


def test_boxes_of_segment_anything() -> None:
    inputs = [(corners(5),), (corners(1),)]
    check(lambda b: amg.is_box_near_crop_edge(b, [0, 0, 30, 30], [0, 0, 60, 60]), inputs, BOXES)
    check(amg.box_xyxy_to_xywh, [(corners(1)[0],) for _ in range(2)], None)  # of a single box


def sam() -> Sam:
    """A small Sam, for images of 64 × 64 pixels."""
    encoder = ImageEncoderViT(
        depth=2,
        embed_dim=32,
        img_size=64,
        mlp_ratio=2,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        num_heads=2,
        patch_size=8,
        qkv_bias=True,
        use_rel_pos=True,
        global_attn_indexes=[1],
        window_size=5,
        out_chans=16,
    )
    prompts = PromptEncoder(embed_dim=16, image_embedding_size=(8, 8), input_image_size=(64, 64), mask_in_chans=4)
    transformer = TwoWayTransformer(depth=2, embedding_dim=16, mlp_dim=32, num_heads=2)
    decoder = MaskDecoder(
        num_multimask_outputs=3,
        transformer=transformer,
        transformer_dim=16,
        iou_head_depth=2,
        iou_head_hidden_dim=16,
    )
    return Sam(encoder, prompts, decoder).eval()


class Prompted(nn.Module):
    """An image and points to masks and their boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.sam = sam()

    def forward(self, image: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> Any:
        embedding = self.sam.image_encoder(self.sam.preprocess(image)[None])
        sparse, dense = self.sam.prompt_encoder((points, labels), None, None)
        low, quality = self.sam.mask_decoder(
            image_embeddings=embedding,
            image_pe=self.sam.prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=True,
        )
        result = self.sam.postprocess_masks(low, (60, 64), (120, 128))
        return result, quality, amg.batched_mask_to_box(result > 0)


def test_segment_anything() -> None:
    def drawn(images: int, points: int) -> tuple[torch.Tensor, ...]:
        return (torch.rand(3, 60, 64) * 255, torch.rand(images, points, 2) * 64, torch.randint(0, 2, (images, points)))

    many = {0: "prompts", 1: "points"}
    check(Prompted(), [drawn(2, 3), drawn(1, 1), drawn(4, 2)], (None, many, many))


@pytest.mark.parametrize("single", [True, False])
def test_its_own_module_for_exports(single: bool) -> None:
    def drawn(points: int, height: int, width: int) -> tuple[torch.Tensor, ...]:
        places, labels = torch.rand(1, points, 2) * 64, torch.randint(0, 4, (1, points)).float()
        size = torch.tensor([height, width], dtype=torch.float32)
        return (torch.randn(1, 16, 8, 8), places, labels, torch.randn(1, 1, 32, 32), torch.ones(1), size)

    model = SamOnnxModel(sam(), return_single_mask=single, use_stability_score=True).eval()
    shapes = (None, {1: "points"}, {1: "points"}, None, None, None)
    check(model, [drawn(3, 50, 64), drawn(1, 64, 40), drawn(6, 100, 90)], shapes)


def test_boxes_of_kornia() -> None:
    def quadrangles(count: int) -> tuple[torch.Tensor]:
        x1, y1, x2, y2 = corners(count).unbind(1)
        return (torch.stack([torch.stack(p, 1) for p in ((x1, y1), (x2, y1), (x2, y2), (x1, y2))], 1),)

    inputs = [quadrangles(n) for n in (3, 1, 6)]
    check(lambda boxes: bbox.bbox_to_mask(boxes, 45, 42), inputs, BOXES)
    check(bbox.infer_bbox_shape, inputs, BOXES)
    move = torch.tensor([[[0.9, 0.1, 2.0], [-0.1, 1.1, 1.0], [0.0, 0.0, 1.0]]])
    check(lambda boxes: bbox.transform_bbox(move.expand(1, 3, 3), boxes.unsqueeze(0)), inputs, ({0: "boxes"},))
