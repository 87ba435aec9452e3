"""Patches of images that UDOP and ViLT choose by values, while a model is captured.

UDOP keeps the patches that no token covers, ViLT the patches that a mask shows.

transformers loops over the batch, takes each image's patches by a mask of its own, and pads them. Here the chosen patches of all
images are brought to the front by one sort of their places.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import exchanged, never


@contextlib.contextmanager
def patches_chosen_by_values() -> Iterator[None]:
    """Holds while a model is captured."""
    udop, compiling = sys.modules.get("transformers.models.udop.modeling_udop"), "is_torchdynamo_compiling"
    with contextlib.ExitStack() as stack:
        if hasattr(udop, compiling):
            # While a model is compiled, UDOP makes no mask where none is given, and its encoder asks for the mask's size.
            stack.enter_context(patched(udop, compiling, lambda: False))
        stack.enter_context(
            exchanged(
                {
                    "combine_image_text_embeddings": (combine_image_text_embeddings, _is_cut),
                    "ViltEmbeddings.visual_embed": (visual_embed, never),
                }
            )
        )
        yield


def in_front(chosen: Tensor) -> Tensor:
    """The places of all patches, [images, patches]: first the chosen patches, then the others, each in their order."""
    count = chosen.shape[1]
    places = torch.arange(count, device=chosen.device)
    # No two keys are equal, so that any sort gives this order.
    return places.where(chosen, places + count).argsort(1)


def _is_cut(*args: Any, max_len: int = 0, **_: Any) -> bool:
    """Whether another number of patches is asked for than the image has, which no model of transformers does."""
    return (args[6] if len(args) > 6 else max_len) != 0


def combine_image_text_embeddings(
    image_embeddings: Tensor,
    inputs_embeds: Tensor,
    bbox: Tensor,
    visual_bbox: Tensor | None,
    attention_mask: Tensor | None = None,
    num_patches: int = 14,
    max_len: int = 0,
    image_size: int = 224,
    patch_size: int = 16,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """UDOP's embeddings: each token gets the patch in the middle of its box; the patches left over are behind the text.

    The remaining places, one for each patch that a token got, are zeros in all three results.

    Args:
        image_embeddings: [batch, patches, width].
        inputs_embeds: [batch, tokens, width]; written in place, as in transformers.
        bbox: Left, top, right and bottom of each token, 0 to 1, [batch, tokens, 4].
        visual_bbox: The same for each patch, [batch, patches, 4].
        attention_mask: [batch, tokens].

    Returns:
        Embeddings [batch, tokens + patches, width], boxes in float64, and their mask, if ``attention_mask`` is given.
    """
    middle_x, middle_y = (
        torch.floor((bbox[:, :, side] + bbox[:, :, side + 2]) / 2.0 * num_patches).long().clip(0, num_patches - 1)
        for side in (0, 1)
    )
    covered = middle_x + middle_y * num_patches
    bbox = bbox.to(torch.float32 if bbox.device.type == "mps" else torch.float64)
    mean = bbox.mean(-1)
    of_tokens = image_embeddings.gather(1, covered[:, :, None].expand(-1, -1, image_embeddings.shape[2]))
    inputs_embeds += of_tokens.masked_fill(((mean == 0.0) | (mean == 1.0))[:, :, None], 0.0)

    is_free = torch.ones_like(image_embeddings[:, :, 0], dtype=torch.bool).scatter(1, covered, False)
    if visual_bbox is None:
        from transformers.models.udop.modeling_udop import get_visual_bbox

        visual_bbox = get_visual_bbox(image_size=image_size, patch_size=patch_size).to(image_embeddings.device)
    order = in_front(is_free)

    def free(values: Tensor) -> Tensor:
        values = values.where(is_free[:, :, None], 0)  # before they are moved: ``is_free`` has one row for each patch
        return values.gather(1, order[:, :, None].expand(-1, -1, values.shape[2]))

    embeddings = torch.cat([inputs_embeds, free(image_embeddings)], 1)
    boxes = torch.cat([bbox, free(visual_bbox)], 1)
    if attention_mask is None:
        return embeddings, boxes, None
    return embeddings, boxes, torch.cat([attention_mask, is_free.gather(1, order).to(attention_mask.dtype)], 1)


def _weights(size: Tensor, count: Any, cells: int, dtype: torch.dtype) -> Tensor:
    """The weights of a table's ``cells`` for each of ``count`` places, [images, count, cells]; 0 behind an image's size.

    Bilinear between corners, as ``torch.nn.functional.interpolate`` with ``align_corners=True``.

    Args:
        size: The number of places of each image, 1 to ``count``, [images].
    """
    places = torch.arange(count, device=size.device)
    scale = (cells - 1) / (size - 1).clamp(min=1).to(dtype)
    distance = places[:, None] * scale[:, None, None] - torch.arange(cells, device=size.device)
    return (1 - distance.abs()).clamp(min=0).where((places < size[:, None])[:, :, None], 0)


def _positions(table: Tensor, sizes: Tensor, height: Any, width: Any) -> Tensor:
    """A table [rows, columns, channels] resized to each image's size, with zeros behind it, [images, height, width, channels].

    Args:
        sizes: Rows and columns of each image, [images, 2].
    """
    rows, columns, channels = table.shape
    dtype = torch.promote_types(table.dtype, torch.float32)
    down, across = _weights(sizes[:, 0], height, rows, dtype), _weights(sizes[:, 1], width, columns, dtype)
    lines = (down @ table.to(dtype).flatten(1)).unflatten(2, (columns, channels))
    return (across[:, None] @ lines).to(table.dtype)


def visual_embed(
    self: Any, pixel_values: Tensor, pixel_mask: Tensor, max_image_length: Any = 200
) -> tuple[Tensor, Tensor, tuple[Tensor, tuple[Any, Any]]]:
    """ViLT's patches that the mask shows, in their order, and behind them patches that the new mask hides.

    Their number is that of the largest image's patches, ``max_image_length`` at most. An image with more patches gets a
    random choice of them in random order, as in transformers, which also shuffles the patches of the largest images,
    and pads with any patches that the mask hides.

    Without ``max_image_length`` no random numbers are drawn. An image that transformers refuses (no patch in its first
    row or column), a mask of other numbers than 0 and 1, and, without random numbers, a mask that is no rectangle and
    shows more patches than the largest image has, are an index out of range in the exported model.

    Args:
        pixel_values: [images, channels, height, width].
        pixel_mask: [images, height, width], or of another size; 1 where an image is.

    Returns:
        Embeddings [images, 1 + patches, width] and their mask; rows and columns of the patches, [images, patches, 2].
    """
    x = self.patch_embeddings(pixel_values)
    images, _, height, width = x.shape
    count = height * width
    mask = functional.interpolate(pixel_mask[:, None, :, :].float(), size=(height, width)).long()[:, 0]
    sizes = torch.stack([mask[:, :, :1].sum((1, 2)), mask[:, :1].sum((1, 2))], 1)
    mask = mask.flatten(1)
    most = sizes.prod(1).max()
    is_limited = isinstance(max_image_length, int) and max_image_length >= 0
    if is_limited:
        most = most.clamp(max=max_image_length)
    has_more = mask.sum(1) > most
    fits = (sizes > 0).all(1) & ((mask == 0) | (mask == 1)).all(1)
    places = torch.arange(count, device=x.device)
    if not is_limited or (isinstance(count, int) and count <= max_image_length):
        fits = fits & ~has_more
        order = in_front(mask != 0)
    else:
        scores = torch.rand(images, count, device=x.device)
        key = places.to(scores.dtype).where(~has_more[:, None], scores)
        order = key.where(mask != 0, places + count).argsort(1)
    image = torch.arange(images, device=x.device).where(fits, images)
    order = order[:, torch.arange(most.item(), device=x.device)]

    def chosen(values: Tensor) -> Tensor:
        return values[image[:, None], order]

    side = self.config.image_size // self.config.patch_size
    table = self.position_embeddings[0, 1:].unflatten(0, (side, side))
    # The sizes are looked up: where all images are refused, there are no patches whose index could be out of range.
    positions = _positions(table, sizes[image], height, width)
    patches = torch.cat([self.cls_token.expand(images, -1, -1), chosen(x.flatten(2).transpose(1, 2))], 1)
    first = self.position_embeddings[:, :1].expand(images, -1, -1)
    embedded = self.dropout(patches + torch.cat([first, chosen(positions.flatten(1, 2))], 1))
    shown = torch.cat([torch.ones_like(mask[:, :1]), chosen(mask)], 1)
    return embedded, shown, (torch.stack([order // width, order % width], -1), (height, width))
