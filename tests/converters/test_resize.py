"""Interpolation of dynamic sizes in every mode, and of static sizes by factors whose rounding matters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxplug.run.session import Runner
from tests.support.check import check
from tests.support.tolerances import looser

SIZES = [{2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}]
SMOOTH = ("bilinear", "bicubic")
MODES = ("nearest", "nearest-exact", *SMOOTH, "area")


def image(height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * 100 + width)
    return torch.randn(2, 3, height, width, generator=generator).to(dtype)


OTHERS = [(image(12, 5),), (image(2, 31),), (image(7, 1),), (image(3, 4),)]


def options() -> list[dict[str, Any]]:
    combinations: list[dict[str, Any]] = []
    for mode, factor in itertools.product(MODES, (2, 4.0, 0.5, 1.7, (1.5, 3.0))):
        combinations.append({"mode": mode, "scale_factor": factor})
    for mode, factor in itertools.product(SMOOTH, (2, 0.6, 1.3)):
        combinations.append({"mode": mode, "scale_factor": factor, "align_corners": True})
        combinations.append({"mode": mode, "scale_factor": factor, "antialias": True})
        combinations.append({"mode": mode, "scale_factor": factor, "antialias": True, "align_corners": True})
        combinations.append({"mode": mode, "scale_factor": factor, "recompute_scale_factor": True})
    for mode in MODES:
        # Sizes up to 3 do not change.
        combinations.append({"mode": mode, "scale_factor": 1.25})
        combinations.append({"mode": mode, "scale_factor": 1.3, "recompute_scale_factor": True})
        combinations.append({"mode": mode, "size": (6, 8)})
        combinations.append({"mode": mode, "size": 1})
    return combinations


def close(mode: str) -> dict[str, float]:
    # Weights are rounded to float32 at other steps than torch's.
    return looser("resize") if mode not in ("nearest", "nearest-exact") else {}


@pytest.mark.parametrize("named", options(), ids=lambda named: " ".join(str(v) for v in named.items()))
def test_dynamic_sizes(named: dict[str, Any]) -> None:
    others = OTHERS
    if named.get("scale_factor") in (0.5, 0.6) or "antialias" in named:
        # Half of 1 is not a size; torch 2.13's antialiasing spreads the first element of an axis of size 1.
        others = [(image(12, 5),), (image(2, 31),), (image(3, 4),)]
    check(lambda x: F.interpolate(x, **named), image(9, 8), others=others, dynamic=SIZES, **close(named["mode"]))


@pytest.mark.parametrize("mode", MODES)
def test_to_the_size_of_another_image(mode: str) -> None:
    def merge(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=y.shape[2:], mode=mode) + y

    others = [(image(3, 5), image(10, 7)), (image(1, 4), image(4, 1)), (image(2, 2), image(82, 4))]
    check(merge, image(4, 5), image(8, 9), others=others, dynamic=SIZES * 2, **close(mode))


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("mode", SMOOTH)
@pytest.mark.parametrize("corners", [False, True])
def test_opsets(mode: str, corners: bool, opset: int) -> None:
    for extra in ({}, {"antialias": True}):
        check(
            lambda x, extra=extra: F.interpolate(x, scale_factor=2, mode=mode, align_corners=corners, **extra),
            image(5, 4),
            others=OTHERS,
            dynamic=SIZES,
            opset=opset,
            **close(mode),
        )


@pytest.mark.parametrize(
    ("mode", "shape"), [("linear", (2, 3, 5)), ("trilinear", (1, 2, 3, 4, 5)), ("nearest", (2, 3, 5))]
)
@pytest.mark.parametrize("named", [{"scale_factor": 2}, {"scale_factor": 1.7}], ids=str)
def test_one_and_three_axes(mode: str, shape: tuple[int, ...], named: dict[str, Any]) -> None:
    x = torch.randn(*shape)
    dynamic = [dict.fromkeys(range(2, len(shape)), torch.export.Dim.DYNAMIC)]
    check(
        lambda x: F.interpolate(x, mode=mode, **named),
        x,
        others=[(x[..., :1],), (x[..., 1:],)],
        dynamic=dynamic,
        **close(mode),
    )
    if mode != "nearest":
        check(
            lambda x: F.interpolate(x, mode=mode, align_corners=True, **named),
            x,
            others=[(x[..., :1],)],
            dynamic=dynamic,
            **close(mode),
        )


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    ("size", "named"),
    [
        (2, {"size": (1, 82)}),
        (2, {"size": (1, 41)}),
        (34, {"scale_factor": (1.0, 0.3)}),
        (100, {"scale_factor": (1.0, 0.29)}),
        (60, {"scale_factor": (1.0, 1.05)}),
        (12, {"scale_factor": (1.0, 1.05)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "dynamic"])
def test_neighbours_are_rounded_in_float(size: int, named: dict[str, Any], mode: str, dynamic: Any) -> None:
    check(lambda x: F.interpolate(x, mode=mode, **named), image(2, size), others=[(-image(2, size),)], dynamic=dynamic)


@pytest.mark.parametrize("mode", SMOOTH)
@pytest.mark.parametrize(("size", "factor"), [(100, 0.29), (60, 1.05)])
def test_the_size_by_a_factor_is_worked_out_in_double(size: int, factor: float, mode: str) -> None:
    check(
        lambda x: F.interpolate(x, mode=mode, scale_factor=(1.0, factor)),
        image(2, size),
        others=[(-image(2, size),)],
        **close(mode),
    )


LOW_LEVEL = {
    "bilinear": lambda x: torch.ops.aten.upsample_bilinear2d.default(x, [3, 3], False, 1.7, 0.9),
    "bilinear corners": lambda x: torch.ops.aten.upsample_bilinear2d.default(x, [3, 3], True, 1.7, 0.9),
    "bicubic": lambda x: torch.ops.aten.upsample_bicubic2d.default(x, [5, 3], False, 1.7, 0.9),
    "bilinear antialiased": lambda x: torch.ops.aten._upsample_bilinear2d_aa.default(x, [3, 3], False, 1.7, 0.9),
    "bicubic antialiased": lambda x: torch.ops.aten._upsample_bicubic2d_aa.default(x, [3, 4], False, 0.7, 0.9),
    "lanczos antialiased": lambda x: torch.ops.aten._upsample_lanczos2d_aa.default(x, [3, 4], False, 0.7, 0.9),
    "lanczos antialiased corners": lambda x: torch.ops.aten._upsample_lanczos2d_aa.default(x, [9, 3], True, None, None),
    "nearest": lambda x: torch.ops.aten.upsample_nearest2d.default(x, [3, 3], 1.7, 0.9),
    "nearest of sizes": lambda x: torch.ops.aten.upsample_nearest2d.default(x, [x.shape[3], x.shape[2] * 2], 1.7, 2.0),
    "nearest exact": lambda x: torch.ops.aten._upsample_nearest_exact2d.default(x, [3, 3], 1.7, 0.9),
    "doubled": lambda x: torch.ops.aten.upsample_bilinear2d.default(
        x, [x.shape[2] * 2, x.shape[3] * 2], False, 2.0, 2.0
    ),
    "one factor": lambda x: torch.ops.aten.upsample_bilinear2d.default(x, [4, x.shape[3] * 2], False, None, 1.5),
}


@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", LOW_LEVEL)
def test_the_size_is_the_result_s_and_factors_steer_coordinates(name: str, dynamic: Any) -> None:
    others = [(-image(6, 5),)] if dynamic is None else [(image(4, 9),), (image(7, 3),), (image(12, 5),)]
    check(LOW_LEVEL[name], image(6, 5), others=others, dynamic=dynamic, **looser("resize"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lanczos(dtype: torch.dtype) -> None:
    x = image(8, 9).to(dtype)
    for options in ({"size": (5, 7)}, {"size": (20, 11)}, {"scale_factor": 0.6}):

        def resized(x: torch.Tensor, named: dict[str, Any] = options) -> torch.Tensor:
            return torch.nn.functional.interpolate(x, mode="lanczos", antialias=True, **named)

        others = [(image(4, 19).to(dtype),), (image(12, 5).to(dtype),)]
        check(resized, x, others=[(-x,)], **looser("resize"))
        check(resized, x, others=others, dynamic=SIZES, opset=13 if "size" in options else None, **looser("resize"))


def test_native_channel_shuffle() -> None:
    for dtype in (torch.float32, torch.int64):
        x = torch.arange(2 * 6 * 3 * 2).reshape(2, 6, 3, 2).to(dtype)
        check(lambda x: torch.native_channel_shuffle(x, 3), x, others=[(-x,)])


@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "dynamic"])
@pytest.mark.parametrize("size", [(2, 3), (3, 2), (2, 2), (4, 9)])
@pytest.mark.parametrize(("name", "factor"), [("_upsample_bilinear2d_aa", 0.4), ("_upsample_bicubic2d_aa", 0.35)])
def test_places_beyond_the_tensor_are_zero(name: str, factor: float, size: tuple[int, int], dynamic: Any) -> None:
    """A factor that does not match the output size gives coordinates beyond the end, where all weights are 0.

    For such a place torch reads a number behind the channel and multiplies it by 0, which is NaN where foreign memory
    holds NaN. Channels of zeros follow the compared channels, so that torch reads zeros.
    """
    function = getattr(torch.ops.aten, name).default

    def resized(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 16))
        return function(padded, [5, 4], False, factor, 0.9)[:, : x.shape[1]]

    x = image(*size)[:1]
    check(resized, x, others=[(-x,)], dynamic=dynamic, **looser("resize"))


#: Sizes and factors at which all weights of a point are tiny, or none is left: (operator, size, output size, factor).
_EDGES = [
    ("_upsample_bicubic2d_aa", 2, 3, 0.4),
    ("_upsample_bicubic2d_aa", 16, 8, 0.3),
    ("_upsample_bilinear2d_aa", 8, 6, 0.6),
    ("_upsample_bilinear2d_aa", 8, 12, 0.6),
    ("_upsample_bilinear2d_aa", 17, 11, 0.6),
]


@pytest.mark.parametrize("dynamic", [None, [{3: torch.export.Dim.DYNAMIC}]], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "size", "out", "factor"), _EDGES)
def test_antialiasing_weights_have_the_precision_of_the_tensor(
    name: str, size: int, out: int, factor: float, dtype: torch.dtype, dynamic: Any
) -> None:
    """Elements at the edge of the filter, which rounding includes or excludes."""
    function = getattr(torch.ops.aten, name).default
    x = image(4, size, dtype)[:1]
    x = torch.cat([x, torch.zeros(1, 16, 4, size, dtype=dtype)], 1)
    check(
        lambda x: function(x, [4, out], False, 1.0, factor)[:, :3],
        x,
        others=[(-x,)],
        dynamic=dynamic,
        **looser("resize") if dtype == torch.float32 else {},
    )


def test_bytes_of_dynamic_sizes() -> None:
    x = (image(5, 4).abs() * 80).clamp(0, 255).to(torch.uint8)
    for mode in ("nearest", "nearest-exact"):
        check(
            lambda x, mode=mode: F.interpolate(x, scale_factor=1.7, mode=mode), x, others=[(x[..., 1:],)], dynamic=SIZES
        )


BYTES = [
    {"mode": mode, "antialias": antialias, "align_corners": corners}
    for mode, antialias, corners in itertools.product(SMOOTH, (False, True), (False, True))
]


@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "named", [*BYTES, {"mode": "lanczos", "antialias": True}], ids=lambda named: " ".join(map(str, named.values()))
)
def test_bytes_are_those_of_pytorch(named: dict[str, Any], dynamic: Any) -> None:
    """To larger and smaller sizes, to one twenty times smaller, with small weights alone, by factors that disagree."""

    def bytes_of(*shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randint(0, 256, (2, 3, *shape), generator=generator, dtype=torch.uint8)

    others = [(bytes_of(19, 17).flip(3),), (bytes_of(19, 17) // 255 * 255,)]
    if dynamic is not None:
        others += [(bytes_of(60, 5),), (bytes_of(7, 100),)]
    for extra in ({"size": (6, 40)}, {"size": (2, 3)}, {"scale_factor": 1.7}, {"scale_factor": (0.3, 1.2)}):
        check(lambda x, e=extra: F.interpolate(x, **named, **e), bytes_of(19, 17), others=others, dynamic=dynamic)


@pytest.mark.parametrize("opset", [13, 26])
def test_bytes_of_every_opset(opset: int) -> None:
    x = image(9, 8).abs().mul(90).clamp(0, 255).to(torch.uint8)
    for dynamic in (None, SIZES):
        check(lambda x: F.interpolate(x, size=(5, 11), mode="bicubic", antialias=True), x, dynamic=dynamic, opset=opset)


class Pyramid(torch.nn.Module):
    """Levels added from the top down, as feature pyramids do."""

    def __init__(self, **named: Any) -> None:
        super().__init__()
        self.named = named
        self.lateral = torch.nn.ModuleList(torch.nn.Conv2d(c, 4, 1) for c in (3, 8, 8))
        self.down = torch.nn.ModuleList(torch.nn.Conv2d(c, 8, 3, 2, 1) for c in (3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [x]
        for layer in self.down:
            levels.append(layer(levels[-1]).relu())
        sides = [layer(level) for layer, level in zip(self.lateral, levels, strict=True)]
        top = sides.pop()
        while sides:
            side = sides.pop()
            top = F.interpolate(top, size=side.shape[-2:], **self.named) + side
        return F.interpolate(top, scale_factor=4, mode="bilinear", align_corners=True)


@pytest.mark.parametrize("named", [{"mode": "nearest"}, {"mode": "bilinear", "align_corners": True}], ids=str)
def test_a_pyramid_of_dynamic_sizes(named: dict[str, Any]) -> None:
    others = [(image(17, 33),), (image(8, 12),), (image(31, 9),)]
    check(Pyramid(**named).eval(), image(24, 16), others=others, dynamic=(SIZES[0],), **looser("resize, pyramid"))


DOUBLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest_exact": lambda x: F.interpolate(x, scale_factor=0.5, mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(5, 6), mode="bicubic"),
    "antialiased": lambda x: F.interpolate(x, size=(5, 6), mode="bilinear", antialias=True),
}


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", DOUBLES)
def test_doubles_of_dynamic_sizes(name: str, opset: int) -> None:
    """ONNX Runtime has no kernel of Resize for doubles: other nodes compute its result."""
    x, other = torch.randn(1, 2, 7, 9, dtype=torch.float64), torch.randn(1, 2, 6, 11, dtype=torch.float64)
    sizes = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    program = check(DOUBLES[name], x, dynamic=(sizes,), others=[(other,)], opset=opset)
    assert Runner(program.model).runtime == "onnxruntime"


_WAVE = torch.arange(64.0).reshape(1, 1, 4, 4, 4)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("factor", [1.1, 2.1, 2.4])
def test_nearest_of_one_and_three_axes_follows_the_factor(factor: float, dtype: torch.dtype, dynamic: bool) -> None:
    """Only PyTorch's kernel of two axes ignores the factor where the size stays or doubles."""
    for axes in (1, 2, 3):
        x = _WAVE[:, 0, 0] if axes == 1 else _WAVE[:, 0] if axes == 2 else _WAVE
        x = x.to(dtype)
        smaller = F.interpolate(x.double(), size=[2] * axes).to(dtype)
        check(
            nn.Upsample(scale_factor=(factor, 1.1, 2.1)[:axes]),
            x,
            others=[(smaller,)] if dynamic else [],
            dynamic=[dict.fromkeys(range(2, 2 + axes), torch.export.Dim.DYNAMIC)] if dynamic else None,
        )


@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "dynamic"])
@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("factor", [1.1, (1.1, 1.7), (1.7, 1.1), (1.1, 2.0)], ids=str)
def test_bicubic_interpolation_of_bytes_copies_an_axis_whose_size_stays(
    factor: Any, channels: int, dynamic: Any
) -> None:
    x = (torch.arange(25 * channels) * 10).to(torch.uint8).reshape(1, channels, 5, 5)
    others = [(x.repeat(1, 1, 3, 2),)] if dynamic else []
    check(lambda x: F.interpolate(x, scale_factor=factor, mode="bicubic"), x, others=others, dynamic=dynamic)
