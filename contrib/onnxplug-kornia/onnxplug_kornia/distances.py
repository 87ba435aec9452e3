"""kornia's distance transform: a loop over the rounds of the cascade, as many as the image needs."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug import UsageError
from onnxplug.torch_private import while_loop_op
from onnxplug_kornia.loops import goes_on


def distance_transform(image: Tensor, kernel_size: int = 3, h: float = 0.35) -> Tensor:
    """``kornia.contrib.distance_transform``, whose number of rounds is made of the sizes.

    Each round reaches the pixels up to ``kernel_size // 2`` away from those that earlier rounds reached. The loop ends where a
    round reaches none, after which kornia's further rounds change nothing.

    Args:
        image: [batch, channels, (depth,) height, width]
        kernel_size: Width of the kernel, odd.
        h: Sharpness of the soft minimum.
    """
    from kornia.contrib.distance_transform import _check_h_range

    if image.ndim not in (4, 5) or not image.is_floating_point():
        raise UsageError(
            f"distance_transform takes floating-point images of 4 or 5 axes, not {image.ndim} of {image.dtype}"
        )
    if kernel_size < 3 or kernel_size % 2 == 0 or h <= 0:
        raise UsageError(
            f"distance_transform takes an odd kernel_size from 3 on and h above 0, not {kernel_size} and {h}"
        )
    dtype = torch.float32 if image.dtype in (torch.float16, torch.bfloat16) else image.dtype
    _check_h_range(kernel_size, h, dtype, image.ndim - 2)
    sizes, half = image.shape[2:], kernel_size // 2
    offsets = itertools.product(range(-half, half + 1), repeat=len(sizes))
    taps = [math.exp(-math.hypot(*offset) / h) for offset in offsets]
    kernel = torch.tensor(taps, dtype=dtype, device=image.device).reshape(1, 1, *[kernel_size] * len(sizes))
    convolve = functional.conv2d if len(sizes) == 2 else functional.conv3d
    longest = sizes[0]
    for size in sizes[1:]:
        longest = torch.sym_max(longest, size)
    rounds = torch.full((), (longest + half - 1) // half, dtype=torch.int64, device=image.device)

    def once(
        number: Tensor, going: Tensor, result: Tensor, sources: Tensor, kernel: Tensor, rounds: Tensor
    ) -> tuple[Tensor, ...]:
        padded = functional.pad(sources, (half,) * (2 * len(sizes)), mode="replicate")
        sums = convolve(padded, kernel)
        distances = torch.where(sums > 0, -h * torch.log(torch.where(sums > 0, sums, 1.0)), 0.0)
        reached = distances > 0
        result = result + torch.where(reached, number * half + distances, 0.0)
        number = number + 1
        return number, reached.any() & (number < rounds), result, torch.where(reached, 1.0, sources)

    sources = image.to(dtype).flatten(0, 1).unsqueeze(1)
    sources = torch.where(sources > 1, 1.0, torch.where(sources < 0, 0.0, sources))
    first = (torch.zeros_like(rounds), rounds > 0, torch.zeros_like(sources), sources)
    result: Tensor = while_loop_op(goes_on, once, first, (kernel, rounds))[2]
    return result.reshape(image.shape).to(image.dtype)
