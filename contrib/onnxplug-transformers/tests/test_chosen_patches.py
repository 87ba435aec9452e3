"""Patches that a model chooses by values: UDOP's, which stand at tokens or behind the text, and ViLT's, which a mask shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

_UDOP = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "use_cache": False,
}
_VILT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
_DYNAMIC = {
    "input_ids": {0: "batch", 1: "sequence"},
    "pixel_values": {0: "batch", 2: "height", 3: "width"},
    "pixel_mask": {0: "batch", 1: "height", 2: "width"},
}
_OUT_OF_RANGE = r"out of data bounds|out of bounds|invalid index"


def _drawn(model: nn.Module) -> nn.Module:
    """The model with all weights at random: in a new model many are 0 or 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.eval()


def _document(boxes: torch.Tensor, padding: int = 0, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """A page for each row of boxes [batch, tokens, 4], the last of which has padding."""
    batch, tokens, _ = boxes.shape
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    mask[-1, tokens - padding :] = 0
    return {
        "input_ids": torch.randint(1, 99, (batch, tokens)),
        "attention_mask": mask,
        "bbox": boxes,
        "pixel_values": torch.randn(batch, 3, 16, 16),
        "decoder_input_ids": torch.randint(1, 99, (batch, 3)),
        **more,
    }


def _each_patch(first: int, last: int) -> torch.Tensor:
    """Boxes within the patches from ``first`` to ``last``, four patches in a row, [1, patches, 4]."""
    places = torch.arange(first, last)
    left, top = places % 4 / 4 + 0.05, places // 4 / 4 + 0.1
    return torch.stack([left, top, left + 0.1, top + 0.05], 1)[None]


def test_documents() -> None:
    """Patches with no, one or several tokens; boxes of 0 and 1 get no patch, and cover a patch all the same."""
    from transformers import UdopConfig, UdopModel

    torch.manual_seed(0)
    model = _drawn(UdopModel(UdopConfig(**_UDOP)))
    tokens = {0: "batch", 1: "tokens"}
    axes = {"input_ids": tokens, "attention_mask": tokens, "bbox": tokens, "pixel_values": {0: "batch"}}
    program = onnxplug.to_onnx(
        model,
        kwargs=_document(torch.rand(2, 7, 4)),
        dynamic_shapes={**axes, "decoder_input_ids": {0: "batch", 1: "target"}},
    )
    ends = torch.tensor([0.0, 1.0, 0.5])[:, None].expand(3, 4)
    for case in (
        _document(torch.rand(3, 30, 4), 11),
        _document(_each_patch(0, 16)),
        _document(torch.cat([_each_patch(0, 16), _each_patch(4, 9).repeat(1, 4, 1)[:, :16]]), 2),
        _document(ends[None, [0, 1, 2, 2, 0]]),
        _document(ends[None, [1]]),
    ):
        program.verify(kwargs=case, seeds=())


@pytest.mark.parametrize("masked", [True, False])
def test_encoder_of_documents(masked: bool) -> None:
    """Boxes of patches may be given; without a mask transformers takes a mask of ones."""
    from transformers import UdopConfig, UdopEncoderModel

    torch.manual_seed(0)
    model = _drawn(UdopEncoderModel(UdopConfig(**_UDOP)))

    def case(batch: int, tokens: int) -> dict[str, torch.Tensor]:
        given = _document(torch.rand(batch, tokens, 4), 1, visual_bbox=torch.rand(batch, 16, 4))
        del given["decoder_input_ids"]
        return given if masked else {name: x for name, x in given.items() if name != "attention_mask"}

    tokens = {0: "batch", 1: "tokens"}
    dynamic = {name: {0: "batch"} if "v" in name else tokens for name in case(1, 1)}
    program = onnxplug.to_onnx(model, kwargs=case(2, 6), dynamic_shapes=dynamic)
    for sizes in ((1, 3), (3, 19)):
        program.verify(kwargs=case(*sizes), seeds=())


def _images(height: int, width: int, *sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Images of some sizes in pixels, with zeros around them, and a question about each."""
    mask = torch.zeros(len(sizes), height, width, dtype=torch.int64)
    for row, (high, wide) in enumerate(sizes):
        mask[row, :high, :wide] = 1
    return {
        "input_ids": torch.randint(1, 99, (len(sizes), 3 + len(sizes))),
        "pixel_values": torch.randn(len(sizes), 3, height, width) * mask[:, None],
        "pixel_mask": mask,
    }


@pytest.mark.parametrize("limit", [-1, 20])
def test_questions_about_images(limit: int) -> None:
    """Positions come from a table of 3 x 3, which is made smaller, larger and both; no image has more patches than the limit."""
    from transformers import ViltConfig, ViltForQuestionAnswering

    torch.manual_seed(0)
    config = ViltConfig(**_VILT, max_image_length=limit)
    model = _drawn(ViltForQuestionAnswering(config))
    program = onnxplug.to_onnx(model, kwargs=_images(12, 20, (12, 8), (8, 20)), dynamic_shapes=_DYNAMIC)
    draws = [node.op_type for node in program.model.graph if "Random" in node.op_type]
    assert bool(draws) == (limit > 0)
    for case in (
        _images(12, 12, (12, 12)),
        _images(20, 16, (4, 4), (20, 16), (12, 8)),
        _images(16, 30, (4, 28), (16, 4)),
        _images(9, 7, (8, 7), (4, 4), (5, 4)),
    ):
        program.verify(kwargs=case, seeds=())


class _Chosen(nn.Module):
    """ViLT's embeddings of the chosen patches, with the mask and the patches' places."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        from transformers import ViltConfig
        from transformers.models.vilt.modeling_vilt import ViltEmbeddings

        self.limit = settings.get("max_image_length", -1)
        self.embeddings = ViltEmbeddings(ViltConfig(**_VILT, **settings))

    def forward(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor) -> Any:
        states, mask, (places, _) = self.embeddings.visual_embed(pixel_values, pixel_mask, self.limit)
        return states, mask, places


def _chosen(model: nn.Module, example: dict[str, torch.Tensor]) -> onnxplug.OnnxProgram:
    kwargs = {name: example[name] for name in ("pixel_values", "pixel_mask")}
    return onnxplug.to_onnx(model, kwargs=kwargs, dynamic_shapes={name: _DYNAMIC[name] for name in kwargs})


def test_more_patches_than_the_limit() -> None:
    """Patches are drawn, all as often, in any order, none twice; a smaller image keeps all of its patches."""
    torch.manual_seed(0)
    model = _drawn(_Chosen(max_image_length=4))
    program = _chosen(model, _images(12, 20, (12, 8), (8, 20)))
    images, mask = list(_images(12, 12, (12, 8), (8, 4), (12, 12)).values())[1:]
    with torch.no_grad():
        whole = _drawn(_Chosen()).embeddings
        whole.load_state_dict(model.embeddings.state_dict())
        states, shown, (places, _) = whole.visual_embed(images, mask, -1)
    counts, orders = torch.zeros(3, 3, 3), set()
    for _ in range(240):  # the bounds below are 7 standard deviations away: no seed decides
        drawn, hidden, where = program(images, mask)
        assert hidden.tolist() == [[1] * 5, [1, 1, 1, 0, 0], [1] * 5]
        assert where[1, :2].tolist() == [[0, 0], [1, 0]]
        orders.add(str(where[0].tolist()))
        for row in range(3):
            known = {tuple(place): state for place, state in zip(places[row].tolist(), states[row, 1:], strict=True)}
            assert len({tuple(place) for place in where[row].tolist()}) == 4
            for number in range(4 if row != 1 else 2):
                place = tuple(where[row, number].tolist())
                torch.testing.assert_close(drawn[row, 1 + number], known[place])
                counts[(row, *place)] += 1
    assert shown.sum(1).tolist() == [7, 3, 10]
    assert len(orders) > 30
    assert ((counts[0, :, :2] > 96) & (counts[0, :, :2] < 224)).all()  # 240 * 4 / 6 each
    assert counts[0, :, 2].eq(0).all()
    assert ((counts[2] > 48) & (counts[2] < 168)).all()  # 240 * 4 / 9 each


def test_images_that_transformers_refuses() -> None:
    torch.manual_seed(0)
    program = _chosen(model := _drawn(_Chosen()), _images(12, 20, (12, 8), (8, 20)))
    for sizes in ([(12, 8), (0, 0)], [(0, 0)], [(2, 0), (2, 2)]):
        images, mask = list(_images(12, 12, *sizes).values())[1:]
        with pytest.raises(Exception, match=r"."), torch.no_grad():
            model(images, mask)
        with pytest.raises(Exception, match=_OUT_OF_RANGE):
            program(images, mask)


def test_masks_that_are_not_taken() -> None:
    """Without random numbers: more patches than the largest image has, or numbers other than 0 and 1."""
    torch.manual_seed(0)
    program = _chosen(_drawn(_Chosen()), _images(12, 20, (12, 8), (8, 20)))
    images, mask = list(_images(12, 12, (8, 8), (8, 4)).values())[1:]
    for other in (mask * 2, torch.where(torch.arange(12) >= 8, 1, mask)):
        with pytest.raises(Exception, match=_OUT_OF_RANGE):
            program(images, other)
