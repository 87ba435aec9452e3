"""Pools, interpolation, grids and windows in every mode, at sizes that they were not exported with; attention at opset 23."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.check import check
from tests.support.sampling import rotated
from tests.support.tolerances import looser

AUTO = torch.export.Dim.AUTO
D = torch.export.Dim.DYNAMIC
X = torch.randn(2, 3, 9, 12, generator=torch.Generator().manual_seed(0))
SIZES = ({0: D, 2: D, 3: D},)
OTHERS = [(torch.randn(1, 3, 10, 7),), (torch.randn(3, 3, 12, 13),)]

POOLS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        f"avg_{k}_{s}_{p}_ceil{c}_include{i}": (
            lambda x, k=k, s=s, p=p, c=c, i=i: F.avg_pool2d(x, k, s, p, ceil_mode=c, count_include_pad=i)
        )
        for (k, s, p), c, i in itertools.product(
            [(2, 2, 0), (3, 2, 1), ((3, 2), (2, 3), (1, 1))], (False, True), (False, True)
        )
    },
    "avg_divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=4),
    **{
        f"max_{k}_{s}_{p}_{d}_ceil{c}": (lambda x, k=k, s=s, p=p, d=d, c=c: F.max_pool2d(x, k, s, p, d, ceil_mode=c))
        for (k, s, p, d), c in itertools.product([(2, 2, 0, 1), (3, 2, 1, 1), (2, 1, 1, 2)], (False, True))
    },
    "max_indices": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max_indices_ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
    "adaptive_avg": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
    "adaptive_avg_one": lambda x: F.adaptive_avg_pool2d(x, (1, None)),
    "adaptive_max": lambda x: F.adaptive_max_pool2d(x, (4, 5), return_indices=True),
    "lp": lambda x: F.lp_pool2d(x.abs(), 2.0, 2),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str, dynamic: bool) -> None:
    if dynamic:
        check(POOLS[name], X, others=OTHERS, dynamic=SIZES)
    else:
        check(POOLS[name], X, others=[(X.flip(0) * 3,)])


HALVES = {
    "avg_2d": lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, x.shape[3] // 2)),
    "avg_2d_one": lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, 1)),
    "avg_2d_unbatched": lambda x: F.adaptive_avg_pool2d(x[0], (x.shape[2] // 3, x.shape[3] // 2)),
    "avg_3d": lambda x: F.adaptive_avg_pool3d(x[None], (3, x.shape[2] // 2, x.shape[3] // 2)),
    "avg_3d_depth": lambda x: F.adaptive_avg_pool3d(x[None], (x.shape[2] // 2, x.shape[2] // 2, x.shape[3] // 2)),
}


@pytest.mark.parametrize("name", HALVES)
def test_adaptive_pools_to_half_the_size(name: str) -> None:
    """An output size of 0 gives an empty result."""
    others = [(torch.randn(2, 3, *size),) for size in ((1, 1), (1, 6), (6, 1), (2, 2), (7, 5))]
    check(HALVES[name], X, others=others, dynamic=SIZES)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_adaptive_pools_to_size_0(spatial: int, mode: str, dynamic: bool) -> None:
    pool = getattr(F, f"adaptive_{mode}_pool{spatial}d")
    sizes = dict.fromkeys(range(2, 2 + spatial), D)
    others = [(torch.randn(2, 3, *[size] * spatial),) for size in ([1, 4] if dynamic else [6])]
    x = torch.randn(2, 3, *[6] * spatial)
    for size in ([0] * spatial, [0, *[2] * (spatial - 1)]):
        check(lambda x, size=size: pool(x, size), x, others=others, dynamic=(sizes,) if dynamic else None)


def interpolations() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Every mode, by size and by factor, corners aligned or not, antialiased or not."""
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        for how, named in (
            ("up", {"scale_factor": 2.0}),
            ("down", {"scale_factor": 0.6}),
            ("size", {"size": (5, 17)}),
            ("one", {"size": 1}),
        ):
            functions[f"{mode}_{how}"] = lambda x, mode=mode, named=named: F.interpolate(x, mode=mode, **named)
    for mode in ("bilinear", "bicubic"):
        for named in ({"size": (5, 17)}, {"size": 1}, {"scale_factor": 1.7}):
            functions[f"{mode}_corners_{named}"] = lambda x, mode=mode, named=named: F.interpolate(
                x, mode=mode, align_corners=True, **named
            )
            functions[f"{mode}_antialias_{named}"] = lambda x, mode=mode, named=named: F.interpolate(
                x, mode=mode, antialias=True, **named
            )
        functions[f"{mode}_recomputed"] = lambda x, mode=mode: F.interpolate(
            x, mode=mode, scale_factor=1.3, recompute_scale_factor=True
        )
    return functions


INTERPOLATIONS = interpolations()


@pytest.mark.parametrize(("name", "dtype"), rotated(INTERPOLATIONS, [torch.float32, torch.float64], every=2))
def test_interpolation(name: str, dtype: torch.dtype) -> None:
    # Cubic weights are rounded to float32 at other steps than torch's.
    tolerance = looser("images, filters") if dtype == torch.float32 else {}
    check(INTERPOLATIONS[name], X.to(dtype), others=[(X.flip(0).to(dtype) * 3,)], **tolerance)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_of_dynamic_sizes(mode: str) -> None:
    check(lambda x: F.interpolate(x, size=(6, 8), mode=mode), X, others=OTHERS, dynamic=SIZES, **looser("images"))
    check(lambda x: F.interpolate(x, scale_factor=2, mode=mode), X, others=OTHERS, dynamic=SIZES, **looser("images"))


GRIDS = (("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True))


@pytest.mark.parametrize(("mode", "padding", "corners", "opset"), rotated(*GRIDS, [13, 17, 21], every=3))
def test_grid_sample(mode: str, padding: str, corners: bool, opset: int) -> None:
    grid = torch.rand(2, 4, 5, 2, generator=torch.Generator().manual_seed(1)) * 2.6 - 1.3
    other = torch.rand(2, 4, 5, 2, generator=torch.Generator().manual_seed(2)) * 1.8 - 0.9
    check(
        lambda x, g: F.grid_sample(x, g, mode=mode, padding_mode=padding, align_corners=corners),
        X,
        grid,
        others=[(X.flip(0), other)],
        opset=opset,
        **looser("images, grids"),
    )


@pytest.mark.parametrize("opset", [16, 21])
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_far_outside(mode: str, padding: str, opset: int) -> None:
    """As points near a camera's plane are projected."""

    def model(x: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {"mode": mode, "padding_mode": padding}
        corners = [F.grid_sample(x, grid, align_corners=corners, **options) for corners in (False, True)]
        if mode == "bicubic" or opset < 20:
            return tuple(corners)
        volume = F.pad(grid[:, None], (0, 1))
        return *corners, F.grid_sample(x[:, :, None], volume, align_corners=False, **options)

    def inputs(height: int, width: int, *places: float) -> tuple[torch.Tensor, ...]:
        near = torch.linspace(-0.9, 0.8, len(places))
        grid = torch.stack([torch.stack([torch.tensor(places), near], 1), torch.stack([near, torch.tensor(places)], 1)])
        return torch.randn(1, 2, height, width, generator=torch.Generator().manual_seed(height)), grid[None]

    dynamic = [{2: AUTO, 3: AUTO}, {2: AUTO}]
    others = [inputs(1, 7, 1e10, 1e19, -1e20, 1e30), inputs(6, 2, 3.0, -5e9)]
    check(model, *inputs(5, 4, 1e7, -3e7, 1e9), others=others, dynamic=dynamic, opset=opset, **looser("images, grids"))


SHUFFLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :8, :6], 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x.repeat(1, 2, 1, 1), 3),
    "unfold": lambda x: F.unfold(x, (2, 3), padding=1, stride=2),
    "fold": lambda x: F.fold(F.unfold(x, 3, padding=1), (9, 12), 3, padding=1),
    "circular": lambda x: F.pad(x, (2, 1, 3, 0), "circular"),
    "reflect": lambda x: F.pad(x, (2, 1, 3, 0), "reflect"),
    "replicate_negative": lambda x: F.pad(x, (-2, 1, 3, -1), "replicate"),
}


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", SHUFFLES)
def test_rearrangements(name: str, opset: int) -> None:
    check(SHUFFLES[name], X, others=[(X.flip(0),)], opset=opset)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("shape", [(2, 3, 9, 7), (0, 3, 9, 7), (3, 9, 7)])
@pytest.mark.parametrize(
    "options", [{}, {"padding": (2, 1), "stride": (3, 2), "dilation": (2, 3)}], ids=["plain", "all"]
)
def test_windows(options: dict[str, Any], shape: tuple[int, ...], opset: int) -> None:
    x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)

    def model(x: torch.Tensor) -> torch.Tensor:
        return F.unfold(x, (2, 3), **options)

    check(model, x, others=[(x.flip(-1) - 3,)], opset=opset)
    check(model, x.double(), opset=opset)
    dynamic = {len(shape) - 2: AUTO, len(shape) - 1: AUTO} | ({0: AUTO} if len(shape) == 4 else {})
    lead = [(3,), (1,), (0,)] if len(shape) == 4 else [()]
    others = [(torch.randn(*batch, 3, *plane),) for batch in lead for plane in ((7, 9), (10, 8))]
    check(model, x, others=others, dynamic=[dynamic], opset=opset)


@pytest.mark.parametrize("opset", [21, 23, 26])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "broadcast"])
def test_attention_at_every_opset(mask: str, opset: int) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {
            "none": {},
            "causal": {"is_causal": True},
            "bool": {"attn_mask": seen},
            "float": {"attn_mask": torch.where(seen, 0.0, float("-inf"))},
            "broadcast": {"attn_mask": seen[:, :, :1]},
        }[mask]
        return F.scaled_dot_product_attention(q, k, v, scale=0.3, **options) + seen.sum()

    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        seen = torch.rand(batch, 1, length, length) > 0.4
        seen[0, 0, 0] = False  # a row that sees no key
        return (*(torch.randn(batch, 4, length, 8) for _ in range(3)), seen)

    check(
        call,
        *inputs(2, 5),
        others=[inputs(1, 7), inputs(3, 1)],
        dynamic=[{0: "batch", 2: "length"}] * 3 + [{0: "batch", 2: "length", 3: "length"}],
        opset=opset,
        **looser("images, sizes"),
    )


@pytest.mark.filterwarnings("error:ONNX Runtime can't run")
@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("divisor", [None, 3, -2])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ceil", [True, False])
def test_average_pools_of_integers(ceil: bool, include: bool, divisor: int | None, opset: int) -> None:
    """Quotients are cut off; sums beyond a double's precision are exact."""
    noise = torch.Generator().manual_seed(0)

    def pools(x: torch.Tensor) -> Any:
        return (
            F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil, include, divisor),
            F.avg_pool3d(x, 2, 2, 1, ceil, include, divisor),
            F.avg_pool2d(x[0], 2, None, 1, ceil, include, divisor) + 2**61 // 4,
            F.avg_pool1d(x.flatten(1, 2), 3, 2, 1, ceil, include),
        )

    def integers(*shape: int, top: int = 100) -> torch.Tensor:
        return torch.randint(-top, top, shape, generator=noise)

    if opset == 21:
        dynamic = [dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)]
        check(
            lambda x: pools(x)[::2],
            integers(2, 3, 8, 9),
            others=[(integers(1, 3, 6, 4),)],
            dynamic=dynamic,
            opset=opset,
        )
    check(pools, integers(2, 3, 8, 9), others=[(integers(2, 3, 8, 9, top=2**58),)], opset=opset)


def test_local_response_norm_of_integers() -> None:
    x = torch.arange(-30, 30).reshape(1, 5, 3, 4)
    check(lambda x: F.local_response_norm(x, 2, alpha=1.0, k=3.0), x, others=[(x * 7,)])
