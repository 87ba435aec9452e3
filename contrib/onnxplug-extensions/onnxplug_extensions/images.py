"""Bytes of an image file to pixels, and pixels to the input of an image model."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from onnxplug import UsageError
from onnxplug_extensions import IMAGES
from onnxplug_extensions.library import check_library
from onnxplug_extensions.parts import refuse, typed

#: How a JPEG file and a PNG file begin.
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
#: The summand before pixels are cut to integers: halves, which sums in float32 may miss, are rounded up.
_HALF = 0.5 + 2**-12
#: The largest difference from a processor's pixels, in steps of 255, that counts as rounding.
_STEPS = 2.01


@torch.library.custom_op("onnxplug_extensions::decode_image", mutates_args=())
def decode_image(data: torch.Tensor) -> torch.Tensor:
    """The pixels, uint8 [height, width, 3], of the bytes of a JPEG or PNG file, by Pillow."""
    from PIL import Image as Pillow

    content = data.numpy().tobytes()
    if not content.startswith(_BEGINNINGS):
        raise UsageError("the bytes are neither a JPEG nor a PNG file")
    return torch.from_numpy(np.array(Pillow.open(io.BytesIO(content)).convert("RGB")))


@decode_image.register_fake
def _(data: torch.Tensor) -> torch.Tensor:
    torch._check(data.dim() == 1, lambda: f"decode_image: the bytes of one file, not a tensor of {data.dim()} axes")
    height, width = (torch.library.get_ctx().new_dynamic_size(min=1) for _ in range(2))
    return data.new_empty((height, width, 3))


def convert_decode_image(g: Any, node: Any) -> Any:
    """decode_image(Tensor data) -> Tensor

    DecodeImage ends the process on bytes of other files, and raises an error on no bytes: it gets no bytes of other
    files.
    """
    (data,) = node.args
    check_library()
    known = None
    for beginning in _BEGINNINGS:
        first = g.op.Slice(g.op.Concat(data, g.const(torch.zeros(8, dtype=torch.uint8)), axis=0), [0], [len(beginning)])
        same = g.op.Equal(first, g.const(torch.tensor(list(beginning), dtype=torch.uint8)))
        same = g.op.ReduceMin(g.cast(same, torch.int64), g.const([0]), keepdims=1)
        known = same if known is None else g.op.Max(known, same)
    data = g.op.Slice(data, [0], g.op.Mul(known, g.op.Shape(data)))
    pixels = typed(g.domain(IMAGES, 1).DecodeImage(data, color_space="rgb"), ir.DataType.UINT8, 3)
    return g.op.Expand(pixels, g.const([1, 1, 3]))  # a file without colours has one channel


class Image(nn.Module):
    """The bytes of a JPEG or PNG file to its pixels."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """uint8, [height, width, 3]: red, green and blue.

        Args:
            data: The bytes, uint8.
        """
        return torch.ops.onnxplug_extensions.decode_image(data)


class Pixels(nn.Module):
    """Images to the input of a model, as an image processor of transformers makes it: resized, cropped, rescaled and normalised.

    It is plain PyTorch and becomes plain ONNX: images are resized as torchvision and Pillow resize them, to integers after each
    of the two axes. torchvision's weights have fewer bits, and Pillow 13 may take the axes in the other order, as README says.

    Args:
        processor: An image processor of transformers.

    Raises:
        UsageError: Its settings aren't of this kind, or its results of three images are other results.
    """

    def __init__(self, processor: Any) -> None:
        super().__init__()
        about = processor.to_dict()
        self._size = _sizes(about, "do_resize", "size")
        self._crop = _sizes(about, "do_center_crop", "crop_size")
        resample = about.get("resample", 2)
        refuse(self._size is not None and resample not in _FILTERS, f"its filter is Pillow's {resample}")
        self._filter = _FILTERS.get(resample, _linear)
        refuse(self._crop is not None and len(self._crop) != 2, "it crops to no height and width")
        if self._crop is not None and self._size is not None:
            least = self._size if len(self._size) == 2 else self._size * 2
            refuse(any(c > n for c, n in zip(self._crop, least, strict=True)), "it crops to more than it resizes to")
        refuse(self._crop is not None and self._size is None, "it crops what it has not resized")
        factor = about["rescale_factor"] if about.get("do_rescale") else 1.0
        mean, deviation = [0.0] * 3, [1.0] * 3
        if about.get("do_normalize"):
            mean, deviation = list(about["image_mean"]), list(about["image_std"])
        refuse(len(mean) != 3 or len(deviation) != 3, "it isn't for three channels")
        self.shift = nn.Buffer((torch.tensor(mean) / factor)[:, None, None])
        self.divisor = nn.Buffer((torch.tensor(deviation) / factor)[:, None, None])
        self._compare(processor)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float32, [batch, 3, height, width].

        Args:
            images: uint8, [batch, height, width, 3], all of one size: red, green and blue.
        """
        x = images.permute(0, 3, 1, 2).float()
        if self._size is not None:
            height, width = self._resized(x)
            x = _rounded(x @ self._weights(x.shape[3], width).T)
            x = _rounded(self._weights(x.shape[2], height) @ x)
        if self._crop is not None:
            for axis, size in zip((2, 3), self._crop, strict=True):
                x = x.narrow(axis, (x.shape[axis] - size) // 2, size)
        return (x - self.shift) / self.divisor

    def _resized(self, x: torch.Tensor) -> list[Any]:
        assert self._size is not None
        if len(self._size) == 2:
            return list(self._size)
        shorter = torch.sym_min(x.shape[2], x.shape[3])
        return [self._size[0] * n // shorter for n in x.shape[2:]]

    def _weights(self, size: Any, count: Any) -> torch.Tensor:
        """The weights of ``size`` pixels in ``count`` new pixels: float32 [count, size], by float64 as in Pillow."""
        old, new = (torch.arange(n, dtype=torch.float64) + 0.5 for n in (size, count))
        distance = ((old - (new * size / count)[:, None]) * count / torch.sym_max(size, count)).abs()
        weights = self._filter(distance)
        return (weights / weights.sum(1, keepdim=True)).float()

    def _compare(self, processor: Any) -> None:
        """Raises :class:`UsageError` where a processor's results differ by more than rounding to other integers."""
        for height, width in ((31, 40), (500, 367), (640, 2000)):
            places = np.arange(height)[:, None, None] / height + np.arange(width)[None, :, None] / width * [
                [[1, 2, -1]]
            ]
            image = (127.5 + 127.5 * np.sin(20 * places)).astype(np.uint8)
            results = processor(image, return_tensors="np", input_data_format="channels_last")
            refuse(set(results) != {"pixel_values"}, f"it gives {', '.join(results)}")
            wanted, got = results["pixel_values"], self(torch.from_numpy(image)[None]).numpy()
            refuse(wanted.shape != got.shape, f"of {height}×{width} it makes {wanted.shape}, and not {got.shape}")
            steps = float((np.abs(wanted - got) * self.divisor.numpy()).max())
            refuse(steps > _STEPS, f"its pixels are up to {steps:.0f} steps of 255 away")


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return (x + _HALF).floor().clamp(0, 255)


def _linear(distance: torch.Tensor) -> torch.Tensor:
    return (1 - distance).clamp(min=0)


def _cubic(distance: torch.Tensor) -> torch.Tensor:
    near = (1.5 * distance - 2.5) * distance.square() + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


#: The filters, by Pillow's numbers.
_FILTERS = {2: _linear, 3: _cubic}


def _sizes(about: dict[str, Any], flag: str, name: str) -> tuple[int, ...] | None:
    """Height and width, or the shorter side alone; ``None`` where the processor leaves the step out."""
    if not about.get(flag):
        return None
    size = {key: value for key, value in dict(about[name]).items() if value is not None}
    if size.keys() == {"height", "width"}:
        return size["height"], size["width"]
    refuse(size.keys() != {"shortest_edge"}, f"its {name} has {', '.join(size)}")
    return (size["shortest_edge"],)
