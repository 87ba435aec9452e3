"""Patches of several images in one row, whose sizes are an input (``grid_thw``), while a model is captured.

transformers' encoders of such images (Qwen2-VL and later models) loop over the images, whose numbers of patches they
read from the tensor, and compute attention image by image. Here the image, row and column of each patch are computed
from its place in the row, and attention has a mask. Models split the encoder's states by images, of which there may be
any number, and join them again: while a model is captured they stay together.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel

from onnxplug.capture.patching import patched
from onnxplug.torch_private import pytree
from onnxplug_transformers.exchanged import exchanged, never, parameters

#: Inkling 2 has the pixels of each image token together, and counts such tokens.
_BY_TOKENS = ["self", "pixel_values", "image_grid_thw"]
_MINICPM = ("V4_6", "V4_7", "Ocr")
#: MiniCPM-V has all patches beside one another in one image, [1, channels, side, patches * side].
_IN_A_STRIP = ["self", "pixel_values", "target_sizes", "use_vit_merger"]
_FORWARDS = [
    *(["self", patches, "grid_thw"] for patches in ("hidden_states", "pixel_values")),
    ["self", "pixel_values", "grid_thw", "merge_sizes"],
    _BY_TOKENS,
    _IN_A_STRIP,
]
#: Modules with one of these functions of transformers have encoders of such images.
_NAMES = ("position_ids", "nearest_position_ids", "attention_seqlens")
_FLASH = "is_flash_attention_requested"
#: How many axes of an encoder's input count patches, by its rank: [patches, width], [patches, channels, height, width], and the
#: latter after a batch of 1 (PaddleOCR-VL). With another rank the model stays as it is.
_AXES_OF_PATCHES = {2: 1, 4: 1, 5: 2}
#: The number of patches of the encoder that is being called, and masks by the id of the tensor of bounds that they are
#: made of. The number is ``None`` for an encoder whose bounds may not cover all states; the exported model then has an
#: error.
PACKED: ContextVar[tuple[Any, dict[int, tuple[Tensor, Tensor]]] | None] = ContextVar("called", default=None)


@contextlib.contextmanager
def images_of_any_size() -> Iterator[None]:
    """Holds while a model is captured."""
    with contextlib.ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            if not path.startswith("transformers.models."):
                continue
            is_packed = any(hasattr(module, f"get_vision_{name}") for name in _NAMES)
            if is_packed and (before := getattr(module, _FLASH, None)):
                stack.enter_context(patched(module, _FLASH, is_packed_or(before)))
            for owner in list(vars(module).values()):
                if not isinstance(owner, type) or owner.__module__ != path or not issubclass(owner, nn.Module):
                    continue
                own = vars(owner).get("forward")
                if is_packed and _is_encoder(owner) and own is not None and parameters(own) in _FORWARDS:
                    stack.enter_context(patched(owner, "forward", _counted(own)))
                for name in ("get_image_features", "get_video_features"):
                    if before := vars(owner).get(name):
                        stack.enter_context(patched(owner, name, _together(before)))
        of_strips: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
            "ViTWindowAttentionMerger.get_window_index": (whole_windows, _are_no_squares),
            "Merger.forward": (merged, never),
        }
        interface = AttentionInterface.get_interface
        stack.enter_context(patched(AttentionInterface, "get_interface", _masked(interface)))
        stack.enter_context(
            exchanged(
                {
                    "get_vision_position_ids": (get_vision_position_ids, _are_given("position_ids")),
                    "get_vision_window_index": (get_vision_window_index, _are_given("window_index")),
                    "get_vision_frame_index": (get_vision_frame_index, _are_given("frame_index")),
                    "get_vision_temporal_merge_index": (_merge_of_frames(), _are_given("temporal_merge_index")),
                    "get_vision_pixel_shuffle_index": (
                        get_vision_pixel_shuffle_index,
                        _are_given("pixel_shuffle_index"),
                    ),
                    "Ernie4_5_VLMoeVariableResolutionResamplerModel._temporal_slicing": (frames_in_pairs, never),
                    "Lfm3VlVisionShortConv.forward": (convolved, _is_other_convolution),
                    "VideoLlama3VisionModel.pixel_unshuffle": (squares_averaged, never),
                    "get_vision_nearest_position_ids": (get_vision_nearest_position_ids, _are_given("position_ids")),
                    **{f"MiniCPM{name}{part}": exchange for name in _MINICPM for part, exchange in of_strips.items()},
                }
            )
        )
        yield


def _is_encoder(owner: type[nn.Module]) -> bool:
    """Whether a class is a whole model: its parts may take patches and sizes too, but have no setting of attention."""
    return issubclass(owner, PreTrainedModel)


def _counted(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        patches = args[0] if args else kwargs[parameters(forward)[1]]
        axes = _AXES_OF_PATCHES.get(patches.dim())
        if axes is None or self.config._attn_implementation not in ("eager", "sdpa"):
            return forward(self, *args, **kwargs)
        count = math.prod(patches.shape[:axes])
        if parameters(forward) == _BY_TOKENS:
            count *= self.config.spatial_merge_size**2
        elif parameters(forward) == _IN_A_STRIP:
            count = patches.shape[3] // self.config.patch_size
        token = PACKED.set((count, {}))
        stack = contextlib.ExitStack()
        try:
            for kind in _kinds_with_lists(patches, *args, *kwargs.values()):
                stack.enter_context(patched(kind, "tolist", _with_tensor(kind.tolist)))
            return forward(self, *args, **kwargs)
        finally:
            stack.close()
            PACKED.reset(token)

    return called


class _Grid(list[Any]):
    """Lists of the frames, rows and columns of each image, with the tensor that they are made of."""

    def __init__(self, sizes: Any, tensor: Tensor) -> None:
        super().__init__(sizes)
        self.tensor = tensor


class _Sizes(_Grid):
    """Stands for the sizes of any number of images, which only a split, or code that reads the tensor, may use."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__((), tensor)

    def __iter__(self) -> Iterator[int]:
        raise TypeError("the model asks for the size of each image, of which there may be any number")

    __getitem__ = __len__ = __iter__  # type: ignore[assignment]


class States(tuple[Tensor]):
    """The states of all images, which can be joined and nothing else."""

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("the model asks for the states of each image, of which there may be any number")

    __getitem__ = __len__ = __iter__  # type: ignore[assignment]


def _refused(_: States) -> Any:
    raise TypeError(
        "the model's results have the states of each image, of which there may be any number; export a module that returns "
        "the model's other results"
    )


pytree.register_pytree_node(States, _refused, lambda states, _: States(states))


class _Together(TorchFunctionMode):
    """Leaves tensors together that are split by unknown sizes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.split, Tensor.split) and isinstance(args[1], _Sizes) and kwargs in (None, {}, {"dim": 0}):
            return States(args[:1])
        return function(*args, **(kwargs or {}))


def _together(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def called(*args: Any, **kwargs: Any) -> Any:
        stack = contextlib.ExitStack()
        try:  # a `with` would be taken for code that handles the model's errors
            stack.enter_context(_Together())
            for kind in _kinds_with_lists(*args, *kwargs.values()):
                stack.enter_context(patched(kind, "tolist", _of_any_length(kind.tolist)))
            return before(*args, **kwargs)
        finally:
            stack.close()

    return called


def _kinds_with_lists(*args: Any) -> set[type[Tensor]]:
    """The classes of tensors that stand for others while a model is captured, and make lists in a way of their own."""
    return {type(x) for x in args if isinstance(x, Tensor) and "tolist" in vars(type(x))} - {Tensor}


def _of_any_length(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def tolist(self: Tensor) -> Any:
        return _Sizes(self) if self.dim() == 1 and isinstance(self.shape[0], torch.SymInt) else before(self)

    return tolist


def _with_tensor(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def tolist(self: Tensor) -> Any:
        if self.dim() != 2:
            return before(self)
        return _Sizes(self) if isinstance(self.shape[0], torch.SymInt) else _Grid(before(self), self)

    return tolist


def is_packed_or(before: Callable[..., bool]) -> Callable[..., bool]:
    """A function that says whether flash attention is asked for: as before, or True while packed images are encoded.

    transformers then gives attention whole rows, and the bounds of images in them.
    """

    @functools.wraps(before)
    def asked(*args: Any, **kwargs: Any) -> bool:
        return not is_not_packed() or before(*args, **kwargs)

    return asked


def _are_given(key: str) -> Callable[..., bool]:
    def given(*args: Any, kwargs: Mapping[str, Any] | None = None, **_: Any) -> bool:
        return is_not_packed() or (kwargs or {}).get(key) is not None

    return given


def is_not_packed(*_: Any, **__: Any) -> bool:
    """Whether no encoder of packed images is being called."""
    return PACKED.get() is None


def number_of_patches() -> Any:
    """The number of patches of the encoder that is being called."""
    called = PACKED.get()
    assert called is not None
    return called[0]


def _masked(before: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    @functools.wraps(before)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        interface = before(self, *args, **kwargs)
        return interface if is_not_packed() else functools.partial(_within_images, interface)

    return get_interface


def _within_images(
    interface: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **settings: Any,
) -> Any:
    """Attention of [1, heads, patches, width], in which a patch sees the patches of its own image or window."""
    called = PACKED.get()
    if cu_seq_lens_q is not None and called is not None:
        known = called[1].get(id(cu_seq_lens_q))
        if known is None:
            places = torch.arange(query.shape[2], device=query.device)  # an image may have states of no patch
            number = (places[:, None] >= cu_seq_lens_q[1:]).sum(-1)
            if called[0] is None:
                is_whole = cu_seq_lens_q[-1] == query.shape[2]
                number = cu_seq_lens_q[1:][number.where(is_whole, cu_seq_lens_q.shape[0])]
            mask = torch.zeros((), dtype=query.dtype, device=query.device).where(
                number[:, None] == number, torch.finfo(query.dtype).min
            )
            known = called[1][id(cu_seq_lens_q)] = (cu_seq_lens_q, mask[None, None])
        attention_mask = known[1]
        # transformers' function of sdpa branches on whether there is a single state.
        if called[0] is None and module.config._attn_implementation == "sdpa":
            scale, dropout = settings.get("scaling"), settings.get("dropout", 0.0)
            states = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scale)
            return states.transpose(1, 2).contiguous(), None
    return interface(module, query, key, value, attention_mask=attention_mask, **settings)


def images_of(grid_thw: Tensor, count: Any, unit: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The image of each of ``count`` cells of ``unit`` patches, its size [cells, 3], and the cell's place in it.

    Where the images have another number of cells, the image is out of range.

    Args:
        unit: One number, or one for each image.
    """
    cells = torch.arange(count, device=grid_thw.device)
    counts = grid_thw.prod(-1) // unit
    ends = counts.cumsum(0)
    image = (cells[:, None] >= ends).sum(-1).where((ends[-1:] == count).all(), counts.shape[0])
    return image, grid_thw[image], cells - (ends - counts)[image]


def _divided(grid_thw: Tensor, by: Any) -> Tensor:
    """The sizes of the images, out of range where rows or columns aren't divided by ``by``, as transformers' reshape asks."""
    images = torch.arange(grid_thw.shape[0], device=grid_thw.device)
    return grid_thw[images.where((grid_thw[:, 1:] % by == 0).all(), grid_thw.shape[0])]


def _in_windows(sizes: Tensor, count: Any, window: tuple[int, int], frames: Any = 1) -> tuple[Tensor, Tensor]:
    """The patches of each window in the first frame, [windows, patches of a window], and the size of its image, [windows, 2].

    Args:
        sizes: Rows and columns of each image, whose patches lie row by row, [images, 2].
        count: The number of windows.
        frames: How many frames each image has.
    """
    high, wide = window
    _, of_each, place = images_of(sizes, count, high * wide)
    width = of_each[:, 1]
    columns = width // wide
    start = (torch.arange(count, device=sizes.device) - place) * (high * wide * frames)
    first = start + place // columns * high * width + place % columns * wide
    rows, across = (torch.arange(n, device=sizes.device) for n in window)
    within = (rows[:, None] * width[:, None, None] + across).flatten(1)
    return first[:, None] + within, of_each


def get_vision_position_ids(
    grid_thw: Tensor, spatial_merge_size: Any, include_temporal: bool = False, kwargs: Any = None
) -> Tensor:
    """Row and column of each patch, [patches, 2], and before them its frame if ``include_temporal``.

    Patches are ordered by squares of ``spatial_merge_size``, one size for all images or one for each image.
    """
    is_one = isinstance(spatial_merge_size, int)
    if not is_one or spatial_merge_size > 1:
        grid_thw = _divided(grid_thw, spatial_merge_size if is_one else spatial_merge_size[:, None])
    image, sizes, place = images_of(grid_thw, number_of_patches(), 1)
    merged = spatial_merge_size if is_one else spatial_merge_size[image]
    _, height, width = sizes.unbind(-1)
    frame, place = place // (height * width), place % (height * width)
    square, place = place // (merged * merged), place % (merged * merged)
    columns = width // merged
    row, column = square // columns * merged + place // merged, square % columns * merged + place % merged
    return torch.stack([frame, row, column] if include_temporal else [row, column], -1)


def _is_other_convolution(self: Any, hidden_states: Tensor, grid_thw: Any, **_: Any) -> bool:
    found, side = self.spatial_conv, self.spatial_conv.kernel_size[0]
    settings = found.kernel_size, found.padding, found.stride, found.dilation, found.padding_mode, found.bias
    known = (side, side), (side // 2, side // 2), (1, 1), (1, 1), "zeros", None
    is_known = settings == known and side % 2 == 1 and found.groups == found.in_channels == found.out_channels
    return is_not_packed() or not isinstance(grid_thw, _Grid) or not is_known


def convolved(self: Any, hidden_states: Tensor, grid_thw: Any, **_: Any) -> Tensor:
    """Each channel is convolved by itself over the rows and columns of each frame, [patches, width], with zeros around."""
    input_gate, output_gate, values = self.in_proj(hidden_states).chunk(3, dim=-1)
    gated = input_gate * values
    neighbours = _neighbours(grid_thw.tensor, self.spatial_merge_size, self.spatial_conv.kernel_size[0])
    gated = torch.cat([gated, torch.zeros_like(gated[:1])])
    weights = self.spatial_conv.weight.flatten(1)
    summed = sum(gated[place] * weights[:, number] for number, place in enumerate(neighbours))
    result: Tensor = self.out_proj(output_gate * summed)
    return result


def _neighbours(grid_thw: Tensor, merged: int, side: int) -> list[Tensor]:
    """For each cell of a square window with a patch in its middle, the place of the patch in this cell, [patches].

    The patch is in the same frame; a cell outside of the frame has the place behind all patches.
    """
    frame, row, column = get_vision_position_ids(grid_thw, merged, include_temporal=True).unbind(-1)
    _, sizes, place = images_of(grid_thw, number_of_patches(), 1)
    _, height, width = sizes.unbind(-1)
    start = torch.arange(number_of_patches(), device=grid_thw.device) - place + frame * height * width
    found = []
    for down in range(-(side // 2), side // 2 + 1):
        for right in range(-(side // 2), side // 2 + 1):
            y, x = row + down, column + right
            square = y // merged * (width // merged) + x // merged
            there = start + square * merged * merged + y % merged * merged + x % merged
            found.append(there.where((y >= 0) & (y < height) & (x >= 0) & (x < width), number_of_patches()))
    return found


def get_vision_window_index(
    grid_thw: Tensor, spatial_merge_size: int, window_size: int, patch_size: int, kwargs: Any = None
) -> tuple[Tensor, Tensor]:
    """The order of cells by windows, [cells], and the windows' bounds in patches, [cells + 1], some of them empty."""
    unit, side = spatial_merge_size**2, window_size // spatial_merge_size // patch_size
    count = number_of_patches() // unit
    _, sizes, place = images_of(grid_thw, count, unit)
    rows, columns = (sizes[:, axis] // spatial_merge_size for axis in (1, 2))
    cells = torch.arange(count, device=grid_thw.device)
    frame, within = place // (rows * columns), place % (rows * columns)
    row, column = within // columns, within % columns
    top, left = row // side * side, column // side * side
    high, wide = (rows - top).clamp(max=side), (columns - left).clamp(max=side)
    first = cells - place + frame * rows * columns + top * columns + high * left
    order = torch.zeros_like(cells).scatter(0, first + (row - top) * wide + column - left, cells)
    bounds = torch.cat([first[order] * unit, cells.new_full((1,), number_of_patches())])
    return order, bounds.to(torch.int32)


def get_vision_frame_index(grid_thw: Tensor, kwargs: Any = None) -> Tensor:
    """The row of each patch in a table of frames, [patches]: 0 where the image has one frame, otherwise 1 for the first."""
    _, sizes, place = images_of(grid_thw, number_of_patches(), 1)
    frames, height, width = sizes.unbind(-1)
    return place // (height * width) + (frames > 1)


def _merge_of_frames() -> Callable[..., Any]:
    """The function for the installed transformers: before 5.24 patches were gathered, since then they are added up."""
    models = (m for name, m in list(sys.modules.items()) if name.startswith("transformers.models.kimi_k25"))
    adds = any(hasattr(getattr(module, "Kimi_K25VisionModel", None), "temporal_merge") for module in models)
    return token_of_each_patch if adds else get_vision_temporal_merge_index


def token_of_each_patch(
    grid_thw: Tensor, kernel_height: int, kernel_width: int, kwargs: Any = None
) -> tuple[Tensor, Tensor, Any]:
    """The place of each patch in its token, [patches], its share in the mean over frames, [patches], and the number of tokens."""
    image, sizes, place = images_of(grid_thw, number_of_patches(), 1)
    frames, height, width = sizes.unbind(-1)
    tokens = grid_thw[:, 1] // kernel_height * (grid_thw[:, 2] // kernel_width)
    first = tokens.cumsum(0) - tokens
    within = place % (height * width)
    row, column = within // width, within % width
    token = first[image] + row // kernel_height * (width // kernel_width) + column // kernel_width
    index = token * (kernel_height * kernel_width) + row % kernel_height * kernel_width + column % kernel_width
    count = tokens.sum().item()
    torch._check(count >= 0)
    return index, 1.0 / frames.float(), count


def get_vision_temporal_merge_index(
    grid_thw: Tensor, kernel_height: int, kernel_width: int, kwargs: Any = None
) -> Tensor:
    """The patches that become one token, [tokens, frames, kernel_height * kernel_width], from patches row by row.

    transformers joins the images' places, which fails for different numbers of frames; here the places are then out of
    range.
    """
    frames, window = grid_thw[0, 0].item(), (kernel_height, kernel_width)
    grid_thw = _divided(grid_thw, torch.tensor(window, device=grid_thw.device))
    places, sizes = _in_windows(grid_thw[:, 1:], number_of_patches() // math.prod(window) // frames, window, frames)
    frame = torch.arange(frames, device=grid_thw.device) * sizes.prod(-1)[:, None]
    index = places[:, None] + frame[:, :, None]
    return index.where((grid_thw[:, 0] == frames).all(), number_of_patches())


def get_vision_pixel_shuffle_index(grid_thw: Tensor, merge_size: int, kwargs: Any = None) -> Tensor:
    """The former place of each patch, [patches], when patches in rows are reordered by squares of ``merge_size``."""
    frame, row, column = get_vision_position_ids(grid_thw, merge_size, include_temporal=True).unbind(-1)
    _, sizes, place = images_of(grid_thw, number_of_patches(), 1)
    _, height, width = sizes.unbind(-1)
    start = torch.arange(number_of_patches(), device=grid_thw.device) - place
    return start + (frame * height + row) * width + column


def frames_in_pairs(self: Any, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
    """The states of two frames beside each other, [tokens, 2 * width].

    An image has its frame twice; a video loses an odd last frame.

    Args:
        hidden_states: A token for each square of ``spatial_merge_size``, [squares, width].
    """
    frames = grid_thw[:, 0]
    squares = grid_thw[:, 1:].prod(-1) // self.spatial_merge_size**2
    counts = frames * squares
    starts = counts.cumsum(0) - counts
    tokens = frames.where(frames == 1, frames // 2) * squares
    ends = tokens.cumsum(0)
    number = torch.arange(tokens.sum().item(), device=grid_thw.device)
    image = (number[:, None] >= ends).sum(-1)
    place, size = number - (ends - tokens)[image], squares[image]
    first = starts[image] + place // size * 2 * size + place % size
    second = first + size * (frames > 1)[image]
    return torch.cat([hidden_states[first], hidden_states[second]], -1)


def squares_averaged(self: Any, hidden_states: Tensor, grid_thw: Tensor, merge_sizes: Tensor) -> Tensor:
    """A token for each square of an image's ``merge_sizes``, [tokens, width]: the mean of the four patches around its middle.

    This is bilinear interpolation to a size that divides an image's; an odd size has one patch in the middle. Where
    squares don't divide an image, for which transformers has an error, the places are out of range.

    Args:
        hidden_states: Patches by squares, [patches, width].
    """
    patches, units = grid_thw.prod(-1), merge_sizes**2
    image, _, place = images_of(grid_thw, (patches // units).sum().item(), units)
    side = merge_sizes[image]
    first = (patches.cumsum(0) - patches)[image] + place * units[image]
    first = first.where((grid_thw[:, 1:] % merge_sizes[:, None] == 0).all(), hidden_states.shape[0])
    places = (side - 1) // 2, side // 2
    left, right = ([hidden_states[first + row * side + column] for row in places] for column in places)
    upper, lower = ((x + y) * 0.5 for x, y in zip(left, right, strict=True))
    return (upper + lower) * 0.5


def get_vision_nearest_position_ids(target_sizes: Tensor, num_patches_per_side: int, kwargs: Any = None) -> Tensor:
    """The cell of a square table that each patch is nearest to, [patches], by its row's and its column's part of the image."""
    _, sizes, place = images_of(target_sizes, number_of_patches(), 1)
    height, width = sizes.unbind(-1)
    bounds = torch.arange(1 / num_patches_per_side, 1.0, 1 / num_patches_per_side, device=target_sizes.device)
    row, column = ((part[:, None] >= bounds).sum(-1) for part in (place // width / height, place % width / width))
    return row * num_patches_per_side + column


def in_whole_windows(target_sizes: Tensor, patches: Any, window: tuple[int, int]) -> Tensor:
    """The patches of each window, [windows, patches of a window], of images that windows divide.

    Where windows don't divide an image, for which transformers has an error, the places are out of range.
    """
    places, _ = _in_windows(target_sizes, patches // math.prod(window), window)
    divided = target_sizes % torch.tensor(window, device=target_sizes.device) == 0
    return places.where(divided.all(), patches)


def _are_no_squares(self: Any, *_: Any, **__: Any) -> bool:
    return is_not_packed() or len(set(self.window_kernel_size)) > 1


def whole_windows(self: Any, target_sizes: Tensor, kwargs: Any = None) -> tuple[Tensor, Tensor, int]:
    """The order of patches by windows, [patches], the windows' bounds, [windows + 1], and the patches of a window."""
    order = in_whole_windows(target_sizes, number_of_patches(), tuple(self.window_kernel_size))
    count, size = order.shape
    return order.flatten(), torch.arange(0, count * size + 1, size, dtype=torch.int32, device=order.device), size


def merged(self: Any, hidden_states: Tensor, target_sizes: Tensor) -> tuple[Tensor]:
    """The tokens of all images: each of the model's layers makes one token of each window."""
    states, window = hidden_states[0], self.merge_kernel_size
    for layer in self.mlp:
        states = layer(states[in_whole_windows(target_sizes, states.shape[0], window)].flatten(1))
        target_sizes = target_sizes // torch.tensor(window, device=target_sizes.device)
    return States((states,))
