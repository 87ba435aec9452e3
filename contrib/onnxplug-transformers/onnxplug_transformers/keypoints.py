"""Keypoints, whose number depends on an image's values, while a model is captured: SuperPoint, SuperGlue, LightGlue.

transformers detects the keypoints image by image, and pads them to the largest number of the batch; here one
``nonzero`` finds the keypoints of all images. Where no image of a batch has a keypoint, matching gets a keypoint that
its mask hides, and the results lose it again. LightGlue drops pairs of images that are done from its tensors; here they
and their results stay.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.capture.patching import patched
from onnxplug_transformers.chosen_patches import in_front
from onnxplug_transformers.exchanged import exchanged, modeling_of


@contextlib.contextmanager
def any_number_of_keypoints() -> Iterator[None]:
    """Holds while a model is captured."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(exchanged({"SuperPointForKeypointDetection.forward": (detected, _is_labelled)}))
        for name, place in _MATCHERS.items():
            matcher = getattr(sys.modules.get(f"transformers.models.{place}.modeling_{place}"), name, None)
            if matcher is not None:
                stack.enter_context(patched(matcher, "_match_image_pair", _of_one_or_more(matcher._match_image_pair)))
        yield


_MATCHERS = {"SuperGlueForKeypointMatching": "superglue", "LightGlueForKeypointMatching": "lightglue"}


def _is_labelled(*args: Any, labels: Any = None, **_: Any) -> bool:
    return labels is not None or len(args) > 2


def detected(
    self: Any,
    pixel_values: Tensor,
    labels: None = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = None,
    **_: Any,
) -> Any:
    """SuperPoint's results of images [batch, 3, height, width]; behind the keypoints of an image are zeros."""
    module = modeling_of(self)
    with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
    height, width = pixel_values.shape[2:]
    encoded = self.encoder(
        self.extract_one_channel_pixel_values(pixel_values), output_hidden_states=with_states, return_dict=return_dict
    )
    scores = self.keypoint_decoder._get_pixel_scores(encoded[0])
    slots = _slots(self.keypoint_decoder, scores)
    image, row, column = torch.nonzero(slots >= 0, as_tuple=True)
    place = image, slots[image, row, column]
    shape: Any = scores.shape[0], (slots.amax((1, 2)).max() + 1).item()
    points = scores.new_zeros((*shape, 2)).index_put(place, torch.stack([column, row], 1).to(scores.dtype))
    mask = torch.zeros(shape, dtype=torch.int, device=scores.device).index_put(place, place[0].new_ones(()).int())
    decoder = self.descriptor_decoder
    maps = decoder.conv_descriptor_b(decoder.relu(decoder.conv_descriptor_a(encoded[0])))
    sampled = decoder._sample_descriptors(points, functional.normalize(maps, p=2, dim=1), 8).transpose(1, 2)
    dtype = torch.get_default_dtype()
    results = module.SuperPointKeypointDescriptionOutput(
        loss=None,
        keypoints=torch.stack([points[:, :, 0].to(dtype) / width, points[:, :, 1].to(dtype) / height], 2),
        scores=torch.zeros(shape, device=scores.device).index_put(place, scores[image, row, column].to(dtype)),
        descriptors=sampled.to(dtype).where(mask[:, :, None] > 0, 0),
        mask=mask,
        hidden_states=encoded[1] if with_states else None,
    )
    as_class = self.config.return_dict if return_dict is None else return_dict
    return results if as_class else tuple(value for value in results.values() if value is not None)


def _slots(decoder: Any, scores: Tensor) -> Tensor:
    """The place of each pixel among its image's keypoints, [batch, height, width]; -1 for other pixels.

    Keypoints are in the order of the pixels, and where there are more than ``max_keypoints``, in the order of their
    scores.
    """
    _, height, width = scores.shape
    border, limit = decoder.border_removal_distance, decoder.max_keypoints
    rows, columns = (torch.arange(size, device=scores.device) for size in (height, width))
    # transformers multiplies height and width by 8 here, as if they were in the encoder's cells.
    inside = (
        ((rows >= border) & (rows < height * 8 - border))[:, None]
        & (columns >= border)
        & (columns < width * 8 - border)
    )
    chosen = ((scores > decoder.keypoint_threshold) & inside).flatten(1)
    slots = chosen.cumsum(1) - 1
    if limit >= 0:
        falling = scores.flatten(1).where(chosen, -torch.inf).argsort(stable=True, dim=1, descending=True)
        slots = slots.where(chosen.sum(1, keepdim=True) <= limit, falling.argsort(1))
        chosen = chosen & (slots < limit)
    return slots.where(chosen, -1).reshape(scores.shape)


def _of_one_or_more(match: Callable[..., Any]) -> Callable[..., Any]:
    """A matching that adds a keypoint, hidden by the mask, where there is none, and takes it out of the results.

    Args:
        match: The matching of pairs of images. Its tensors are [batch, 2, keypoints, ...]; the last axis of its results has
            the keypoints.
    """

    @functools.wraps(match)
    def matched(self: Any, keypoints: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = keypoints.shape[2]
        if isinstance(count, int) or kwargs.get("mask") is None or _wants_states(kwargs):
            return match(self, keypoints, *args, **kwargs)
        # transformers' attention asks whether there are several queries; without dropping there always are.
        size = _size(keypoints.new_full((), count, dtype=torch.long), 1 if _drops(self) else 2)
        torch._check(size >= count)

        def widened(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.cat([value, value.new_zeros((*value.shape[:2], size - count, *value.shape[3:]))], 2)

        kwargs = {name: widened(value) for name, value in kwargs.items()}
        chosen = lightly_matched if _drops(self) else match
        results = chosen(self, widened(keypoints), *map(widened, args), **kwargs)
        return tuple(x.narrow(-1, 0, count) if isinstance(x, Tensor) else x for x in results)

    return matched


def _size(count: Tensor, least: int = 1) -> Any:
    """A count as a size of at least ``least``."""
    size = count.clamp(min=least).item()
    torch._check(size >= least)
    return size


def _wants_states(kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("output_attentions") or kwargs.get("output_hidden_states"))


def _drops(model: Any) -> bool:
    """Whether a matcher drops pairs of images and keypoints, as LightGlue does by default."""
    return getattr(model, "depth_confidence", 0) > 0 and getattr(model, "width_confidence", 0) > 0


def lightly_matched(
    self: Any, keypoints: Tensor, descriptors: Tensor, height: Any, width: Any, mask: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    """LightGlue's matching with early stops and pruning.

    Args:
        keypoints: [pairs, 2, keypoints, 2], with at least one keypoint.
        descriptors: [pairs, 2, keypoints, width].
        height: The height of the images.
        width: The width of the images.
        mask: Not 0 where there is a keypoint, [pairs, 2, keypoints].

    Returns:
        Matches, -1 for none, their scores, and after how many layers each keypoint was dropped, all [pairs, 2, keypoints].
    """
    module = modeling_of(self)
    pairs, count = keypoints.shape[0], keypoints.shape[2]
    images, device = 2 * pairs, keypoints.device
    points_of_pair = mask.reshape(pairs, -1).sum(1)
    mask = mask.reshape(images, count)
    positions = module.normalize_keypoints(keypoints.reshape(images, count, 2), height, width)
    states, (angles, *_) = self._keypoint_processing(
        descriptors.reshape(images, count, self.keypoint_detector_descriptor_dim), positions, output_hidden_states=False
    )
    # The numbers of the keypoints that are left, and -1 for padding.
    numbers = torch.arange(count, device=device).expand(images, count)
    layers = torch.ones_like(numbers)
    going = torch.ones(pairs, dtype=torch.bool, device=device)
    stopped_at = torch.zeros(pairs, dtype=torch.long, device=device)
    size_at_stop, longest = stopped_at, stopped_at.new_zeros(())
    matches = torch.full_like(numbers, -1)
    scores = torch.zeros(images, count, dtype=states.dtype, device=device)
    size: Any = count
    for index in range(self.num_layers):
        states = _through_layer(self, index, states, angles, mask, size)
        is_last = index == self.num_layers - 1
        confidences = None if is_last else self.token_confidence[index](states)
        stops = going
        if not is_last:
            stops = stops & self._get_early_stopped_image_pairs(confidences, index, mask, num_points=points_of_pair)
        found, found_scores = self._get_keypoint_matching(states, mask, index)
        others = numbers.reshape(pairs, 2, -1).flip(1).reshape(images, -1)
        found = others.gather(1, found.clamp(min=0)).where(found != -1, -1)
        of_images = _of_images(stops)[:, None]
        matches = _placed(found, numbers, count, -1).where(of_images, matches)
        scores = _placed(found_scores, numbers, count, 0).where(of_images, scores)
        stopped_at = torch.where(stops, index, stopped_at)
        size_at_stop = torch.where(stops, size, size_at_stop)
        longest = torch.maximum(longest, size_at_stop.max())
        going = going & ~stops
        if is_last:
            break
        matchability = self.match_assignment_layers[index].get_matchability(states)
        kept = self._get_pruning_mask(confidences, matchability, index) & (mask != 0) & _of_images(going)[:, None]
        layers = layers + _placed(kept.long(), numbers.where(kept, -1), count, 0, at_end=False)
        counts = kept.sum(1, keepdim=True)
        size = _size(counts.max())
        slots = torch.arange(size, device=device).expand(images, size)
        place, mask = in_front(kept).gather(1, slots), slots < counts
        states, *angles = (_taken(x, place).where(mask[:, :, None], 0) for x in (states, *angles))
        numbers = numbers.gather(1, place).where(mask, -1)
    # Where the rows of pairs that stopped are padded, transformers writes the padding to the last keypoint.
    is_cut = _of_images(size_at_stop < longest)[:, None] & (torch.arange(count, device=device) == count - 1)
    results = matches.where(~is_cut, -1), scores.where(~is_cut, 0), layers
    # transformers' order of pairs that stop at different layers: the order of their stops, applied three times.
    order = (_of_images(stopped_at) * images + torch.arange(images, device=device)).argsort()
    order = order[order[order]]
    matches, scores, layers = (x[order].reshape(pairs, 2, count) for x in results)
    return matches, scores, layers, None, None


def _through_layer(model: Any, index: int, states: Tensor, angles: Any, mask: Tensor, size: Any) -> Tensor:
    """The states [images, size, width] after a layer of LightGlue's transformer."""
    if (
        model.config._attn_implementation == "sdpa"
    ):  # it computes a single query in another way; a hidden key changes no result
        states, mask, *angles = (torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in (states, mask, *angles))
    attention_mask = modeling_of(model).create_bidirectional_mask(
        config=model.config, inputs_embeds=states[:, 0:1, :], attention_mask=mask, allow_is_bidirectional_skip=False
    )
    layer = model.transformer_layers[index]
    states = layer(states, angles, attention_mask=attention_mask, output_hidden_states=False, output_attentions=False)[
        0
    ]
    return states.narrow(1, 0, size)


def _of_images(values: Tensor) -> Tensor:
    """Values of pairs, repeated for the two images of each pair."""
    return values[:, None].expand(-1, 2).reshape(-1)


def _taken(x: Tensor, place: Tensor) -> Tensor:
    return x.gather(1, place[:, :, None].expand(*place.shape, x.shape[2]))


def _placed(values: Tensor, numbers: Tensor, count: Any, otherwise: int, at_end: bool = True) -> Tensor:
    """Values of the keypoints that are left, [images, left], in the places of all keypoints, [images, count].

    Args:
        at_end: Whether a number of -1 in the last column means the last keypoint, as where transformers indexes by it.
    """
    row = values.new_full((values.shape[0], count + 1), otherwise)
    row = row.scatter(1, numbers.where(numbers >= 0, count), values).narrow(1, 0, count)
    if not at_end:
        return row
    is_end = (numbers[:, -1:] < 0) & (torch.arange(count, device=values.device) == count - 1)
    return values[:, -1:].where(is_end, row)
