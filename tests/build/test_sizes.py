"""Dynamic sizes in every place that takes one, and expressions of sizes: compared with eager PyTorch at several sizes.

Size 1 is always among them. Tests of a family's own formulas are in tests/converters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.check import check

Function = Callable[..., Any]

#: x [a, b, 4], y [a, c, 6]: the sizes that each function is exported with and run at.
SIZES = ((3, 5, 4), (1, 2, 7), (6, 1, 1), (2, 9, 5))


def _inputs(a: int, b: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(a + 10 * b + 100 * c)
    return torch.randn(a, b, 4, generator=generator), torch.randn(a, c, 6, generator=generator)


def _hold(function: Function, **options: Any) -> None:
    first, *others = (_inputs(*sizes) for sizes in SIZES)
    # A function that mixes the inputs must not make torch tie their other sizes.
    dynamic = [{0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}] * 2
    check(function, *first, others=others, dynamic=dynamic, **options)


RESHAPES: dict[str, Function] = {
    "reshape first and rest": lambda x, y: y.reshape(x.shape[0], -1),
    "reshape rest and last": lambda x, y: y.reshape(-1, y.shape[1]),
    "reshape between": lambda x, y: y.reshape(y.shape[1], -1, y.shape[0]),
    "view rest first": lambda x, y: y.view(-1, y.shape[1], 3),
    "view rest last": lambda x, y: y.view(x.shape[0], y.shape[1], -1),
    "view of a product": lambda x, y: y.view(y.shape[0] * y.shape[1], -1),
    "view of two products": lambda x, y: y.view(y.shape[1] * 2, y.shape[0] * 3),
    "view as the rest of a product": lambda x, y: y.view(-1, y.shape[0] * 3),
    "heads": lambda x, y: y.view(y.size(0), y.size(1), 2, -1).permute(0, 2, 1, 3).contiguous().view(-1, y.size(1), 3),
    "heads and back": lambda x, y: (
        y.view(*y.shape[:2], 3, 2).transpose(1, 2).reshape(-1, y.size(1), 2).view(-1, 3, y.size(1), 2)
    ),
    "DeBERTa": lambda x, y: x[:, None].permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), x.size(-1)),
    "flatten all": lambda x, y: x.flatten(),
    "flatten first": lambda x, y: x.flatten(0, 1),
    "flatten last": lambda x, y: x.flatten(1),
    "flatten four": lambda x, y: y.view(*y.shape[:2], 2, 3).flatten(1, 2),
    "flatten twice": lambda x, y: y.flatten(0, 1).flatten(),
    "ravel": lambda x, y: x.ravel() * 2,
    "unflatten": lambda x, y: x.flatten(0, 1).unflatten(0, (x.shape[0], -1)),
    "unflatten rest first": lambda x, y: x.flatten(0, 1).unflatten(0, (-1, x.shape[1])),
    "unflatten last": lambda x, y: y.unflatten(-1, (2, -1)),
    "reshape to a shape": lambda x, y: x.flatten().reshape(x.shape),
    "reshape_as": lambda x, y: x.flatten().reshape_as(x) + 1,
    "view_as": lambda x, y: x.transpose(0, 1).contiguous().view_as(x),
    "view of half": lambda x, y: x.reshape(x.shape[0], -1, 2),
    "view of a concatenation": lambda x, y: torch.cat([x, x]).view(2, x.shape[0], -1),
    "reshape of more": lambda x, y: torch.cat([x, y[:, :, :4]], 1).reshape(-1, x.shape[1] + y.shape[1]),
    "window": lambda x, y: x.view(x.shape[0], x.shape[1], 2, 2).permute(0, 2, 1, 3).reshape(x.shape[0] * 2, -1, 2),
}

BROADCASTS: dict[str, Function] = {
    "expand": lambda x, y: x[:, :, None].expand(-1, -1, y.shape[1], -1),
    "expand with sizes": lambda x, y: x[:1].expand(x.shape[0], x.shape[1], 4),
    "expand by a sum": lambda x, y: x[:, :1].expand(-1, x.shape[1] + y.shape[1], -1),
    "expand in front": lambda x, y: x.expand(y.shape[1], *x.shape),
    "expand in front by a product": lambda x, y: x.expand(y.shape[1] * 2, -1, -1, -1),
    "expand_as": lambda x, y: x[:, :1, :1].expand_as(y),
    "broadcast_to": lambda x, y: x[0].broadcast_to(y.shape[1], x.shape[1], 4),
    "broadcast_tensors": lambda x, y: torch.broadcast_tensors(x[:, :, None, :1], y[:, None, :, :1])[0],
    "repeat": lambda x, y: x.repeat(1, y.shape[1], 2),
    "repeat in front": lambda x, y: x.repeat(x.shape[1], 1, 1, 1),
    "repeat by a quotient": lambda x, y: x.repeat((y.shape[1] + 1) // 2, 1, 1),
    "tile": lambda x, y: x.tile(y.shape[1]),
    "tile two": lambda x, y: x.tile((x.shape[0], 2, 1)),
    "repeat_interleave": lambda x, y: x.repeat_interleave(y.shape[1], dim=1),
    "repeat_interleave by 2": lambda x, y: x.repeat_interleave(2, dim=0),
    "repeat_interleave flat": lambda x, y: x.repeat_interleave(3),
    "repeat_kv": lambda x, y: x[:, :, None].expand(x.shape[0], x.shape[1], 3, 4).reshape(x.shape[0], x.shape[1] * 3, 4),
    "meshgrid": lambda x, y: torch.meshgrid(torch.arange(x.shape[1]), torch.arange(y.shape[1]), indexing="ij"),
    "meshgrid xy": lambda x, y: torch.meshgrid(torch.arange(x.shape[1]), torch.arange(y.shape[1]), indexing="xy"),
    "cartesian_prod": lambda x, y: torch.cartesian_prod(torch.arange(x.shape[1]), torch.arange(y.shape[1])),
}

SLICES: dict[str, Function] = {
    "slice to half": lambda x, y: x[:, : x.shape[1] // 2 + 1],
    "slice from half": lambda x, y: x[:, x.shape[1] // 2 :],
    "slice by another's size": lambda x, y: y[:, : x.shape[1]],
    "slice by the smaller": lambda x, y: y[:, : min(x.shape[1], y.shape[1])],
    "slice from the end": lambda x, y: x[:, -(x.shape[1] // 2) - 1 :],
    "slice between": lambda x, y: x[:, x.shape[1] // 3 : x.shape[1] - x.shape[1] // 4],
    "slice by two": lambda x, y: x[:, ::2],
    "narrow": lambda x, y: x.narrow(1, 0, (x.shape[1] + 1) // 2),
    "narrow from": lambda x, y: x.narrow(1, x.shape[1] // 2, x.shape[1] - x.shape[1] // 2),
    "select the last": lambda x, y: x.select(1, x.shape[1] - 1),
    "select the middle": lambda x, y: x[:, x.shape[1] // 2],
    "chunk": lambda x, y: torch.cat([x, x, x], 1).chunk(3, 1),
    "chunk the last": lambda x, y: y.chunk(2, -1),
    "split in halves": lambda x, y: torch.cat([x, x], 1).split(x.shape[1], 1),
    "split sizes": lambda x, y: torch.cat([x, y[:, :, :4]], 1).split([x.shape[1], y.shape[1]], 1),
    "tensor_split": lambda x, y: x.tensor_split(2, 1),
    "tensor_split in four": lambda x, y: x.tensor_split(4, 1),
    "tensor_split at": lambda x, y: x.tensor_split((1, x.shape[1] // 2 + 1), 1),
    "hsplit": lambda x, y: torch.cat([x, x], 1).hsplit(2),
    "roll by a size": lambda x, y: x.roll(x.shape[1] // 2, 1),
    "roll back by a size": lambda x, y: x.roll(-(y.shape[1] // 2), 1),
    "roll two": lambda x, y: x.roll((y.shape[1], 1), (0, 1)),
    "window partition": lambda x, y: F.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(x.shape[0], -1, 4, 4),
    "unfold": lambda x, y: F.pad(x, (0, 0, 0, 3)).unfold(1, 3, 2),
    "flip": lambda x, y: x.flip(1)[:, : y.shape[1]],
    "slice_scatter": lambda x, y: x.slice_scatter(x[:, : x.shape[1] // 2] * 2, 1, 0, x.shape[1] // 2),
    "index by arange": lambda x, y: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "gather by arange": lambda x, y: x[torch.arange(x.shape[0]), torch.arange(x.shape[0]) % x.shape[1]],
    "write a slice": lambda x, y: torch.zeros(x.shape[0], x.shape[1] + y.shape[1], 4).index_put_(
        (torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]), x
    ),
}

FACTORIES: dict[str, Function] = {
    "arange": lambda x, y: torch.arange(x.shape[1]) + x[:, :, 0],
    "arange of a product": lambda x, y: torch.arange(x.shape[0] * x.shape[1]),
    "arange from": lambda x, y: torch.arange(x.shape[1], x.shape[1] + y.shape[1]),
    "arange back": lambda x, y: torch.arange(x.shape[1], -1, -1),
    "arange of negative numbers as an index": lambda x, y: x[:, torch.arange(-x.shape[1], 0)],
    "arange back as an index by two": lambda x, y: x[:, torch.arange(x.shape[1] - 1, -1, -2)],
    "arange by": lambda x, y: torch.arange(0, x.shape[1] * 2, 3),
    "arange by a size": lambda x, y: torch.arange(0, 20, x.shape[1]),
    "arange of floats": lambda x, y: torch.arange(0.0, x.shape[1], 0.5),
    "linspace to a size": lambda x, y: torch.linspace(-1, x.shape[1], 5),
    "full": lambda x, y: torch.full((x.shape[0], y.shape[1] * 2), 3.0),
    "full of a size": lambda x, y: torch.full((2,), x.shape[1]),
    "zeros": lambda x, y: torch.zeros(x.shape[1] + y.shape[1], 2),
    "ones": lambda x, y: torch.ones((x.shape[0] * 2 + 1) // 3),
    "new_zeros": lambda x, y: x.new_zeros(x.shape[0], x.shape[1] - 1 + 1),
    "new_ones": lambda x, y: x.new_ones(max(x.shape[1], y.shape[1])),
    "new_full": lambda x, y: x.new_full((y.shape[1], x.shape[1]), 2.0),
    "eye": lambda x, y: torch.eye(x.shape[1]),
    "eye of two": lambda x, y: torch.eye(x.shape[1], y.shape[1]),
    "causal mask": lambda x, y: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(),
    "causal mask of floats": lambda x, y: torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1),
    "length mask": lambda x, y: torch.arange(x.shape[1])[None] < x.sum((1, 2)).abs().long()[:, None],
    "relative positions": lambda x, y: torch.arange(x.shape[1])[:, None] - torch.arange(y.shape[1])[None],
    "diag": lambda x, y: torch.diag(torch.arange(x.shape[1])),
    "one_hot": lambda x, y: F.one_hot(torch.arange(x.shape[1]), 12),
    "hann": lambda x, y: torch.hann_window(8) * x.shape[1],
    "zeros_like": lambda x, y: torch.zeros_like(torch.cat([x, y[:, :, :4]], 1)),
    "normalized grid": lambda x, y: (torch.arange(x.shape[1]) + 0.5) / x.shape[1] * 2 - 1,
    "empty filled": lambda x, y: torch.empty(x.shape[1], y.shape[1]).fill_(2.0),
    "scalar tensor": lambda x, y: torch.tensor(x.shape[1] * 3 - y.shape[1]),
    "tensor of sizes": lambda x, y: torch.tensor([x.shape[1], y.shape[1] // 2]),
}

PADS: dict[str, Function] = {
    "pad to a multiple": lambda x, y: F.pad(x, (0, 0, 0, -x.shape[1] % 4)),
    "pad to a multiple by ceil": lambda x, y: F.pad(x, (0, 0, 0, math.ceil(x.shape[1] / 4) * 4 - x.shape[1])),
    "pad to the larger": lambda x, y: F.pad(x, (0, 0, 0, torch.sym_max(x.shape[1], y.shape[1]) - x.shape[1])),
    "pad to 12": lambda x, y: F.pad(x, (0, 0, 0, 12 - x.shape[1])),
    "pad both": lambda x, y: F.pad(x, (1, 1, x.shape[1] // 2, x.shape[1] - x.shape[1] // 2), value=2.0),
    "replicate": lambda x, y: F.pad(x, (y.shape[1], 1), mode="replicate"),
    "circular": lambda x, y: F.pad(torch.cat([x, x], -1), (2, 3), mode="circular"),
    "circular of a dynamic axis": lambda x, y: F.pad(x.transpose(1, 2), (1, 1), mode="circular"),
    "circular by a size": lambda x, y: F.pad(x.transpose(1, 2), (x.shape[1] // 2, x.shape[1]), mode="circular"),
    "replicate cropped": lambda x, y: F.pad(torch.cat([x, x], 1).transpose(1, 2), (-1, 2), mode="replicate"),
    "reflect": lambda x, y: F.pad(
        torch.cat([x, x, x], 1).transpose(1, 2), (x.shape[1] // 2, x.shape[1]), mode="reflect"
    ),
    "reflect or crop": lambda x, y: F.pad(
        torch.cat([x, x, x, x], 1).transpose(1, 2), (2 - x.shape[1], x.shape[1] - 4), mode="reflect"
    ),
    "replicate or crop": lambda x, y: F.pad(
        torch.cat([x, x, x, x], 1).transpose(1, 2), (2 - x.shape[1], x.shape[1] - 4), mode="replicate"
    ),
    "crop": lambda x, y: F.pad(torch.cat([x, x], 1), (0, 0, -x.shape[1], 0)),
}

WINDOWS: dict[str, Function] = {
    "adaptive average": lambda x, y: F.adaptive_avg_pool1d(x.transpose(1, 2), 3),
    "adaptive average to 1": lambda x, y: F.adaptive_avg_pool1d(x.transpose(1, 2), 1),
    "adaptive max": lambda x, y: F.adaptive_max_pool1d(x.transpose(1, 2), 2),
    "pixel_shuffle": lambda x, y: F.pixel_shuffle(x.transpose(1, 2)[..., None], 2),
    "pixel_unshuffle": lambda x, y: F.pixel_unshuffle(torch.cat([y, y], 1)[:, None], 2),
    "channel_shuffle": lambda x, y: F.channel_shuffle(torch.cat([x, x], 1), 2),
    "F.unfold": lambda x, y: F.unfold(F.pad(x, (0, 0, 0, 2))[:, None], (2, 2)),
    "F.fold": lambda x, y: F.fold(x.repeat(1, 1, y.shape[1])[:, :1].expand(-1, 4, -1), (y.shape[1] * 4 + 1, 2), (2, 2)),
    "unfold and fold": lambda x, y: F.fold(
        F.unfold(F.pad(x, (0, 0, 0, 2))[:, None], (2, 2)), (x.shape[1] + 2, 4), (2, 2)
    ),
    "convolution": lambda x, y: F.conv1d(F.pad(x.transpose(1, 2), (1, 1)), torch.ones(2, 4, 3)),
    "convolution by an input": lambda x, y: F.conv1d(y.transpose(1, 2), y[:1].transpose(1, 2)),
    "as_strided": lambda x, y: x.contiguous().as_strided((x.shape[0], x.shape[1]), (x.shape[1] * 4, 4)),
    "as_strided windows": lambda x, y: F.pad(x, (0, 0, 0, 2)).as_strided(
        (x.shape[0], x.shape[1], 3, 4), ((x.shape[1] + 2) * 4, 4, 4, 1)
    ),
    "cumsum to a size": lambda x, y: x.cumsum(1)[:, -1] / x.shape[1],
    "mean by hand": lambda x, y: x.sum(1) / x.shape[1] ** 0.5,
    "attention scale": lambda x, y: (x @ x.transpose(1, 2) / math.sqrt(x.shape[1])).softmax(-1),
    "topk of all": lambda x, y: x.topk(x.shape[1], dim=1).values,
    "topk of half": lambda x, y: x.topk((x.shape[1] + 1) // 2, dim=1).values,
    "baddbmm": lambda x, y: torch.baddbmm(torch.zeros(x.shape[0], x.shape[1], y.shape[1]), x, y[:, :, :4].mT),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,)).reshape(x.shape[0] * x.shape[1], -1),
    "logical stack": lambda x, y: torch.stack([x[:, 0, :1]] * 3, 1).reshape(-1, 3),
}

EXPRESSIONS: dict[str, Function] = {
    "sum": lambda x, y: torch.zeros(x.shape[0] + 2 * y.shape[1]),
    "product": lambda x, y: torch.zeros(x.shape[0] * y.shape[1] * 3),
    "floor": lambda x, y: torch.zeros((x.shape[0] * 2 + 1) // 3),
    "floor of negative": lambda x, y: torch.zeros(20 + (-x.shape[1] // 2)),
    "floor by negative": lambda x, y: torch.zeros(20 + x.shape[1] // -2),
    "ceil by negation": lambda x, y: torch.zeros(-(-x.shape[1] // 2)),
    "modulo": lambda x, y: torch.zeros(x.shape[1] % 3 + 1),
    "modulo of negative": lambda x, y: torch.zeros(-x.shape[1] % 4 + 1),
    "modulo by a size": lambda x, y: torch.zeros(17 % x.shape[1] + 1),
    "largest": lambda x, y: torch.zeros(max(x.shape[1], y.shape[1])),
    "smallest": lambda x, y: torch.zeros(torch.sym_min(x.shape[1], y.shape[1])),
    "sym_max of three": lambda x, y: torch.zeros(torch.sym_max(x.shape[1], torch.sym_max(y.shape[1], x.shape[0]))),
    "ceil": lambda x, y: torch.zeros(math.ceil(x.shape[1] / 2)),
    "floor of a fraction": lambda x, y: torch.zeros(math.floor(x.shape[1] * 0.75) + 1),
    "int of a fraction": lambda x, y: torch.zeros(torch.sym_int(x.shape[1] * 1.5)),
    "root": lambda x, y: torch.zeros(torch.sym_int(torch.sym_sqrt(x.shape[1] * x.shape[1])) + 1),
    "power": lambda x, y: torch.zeros(x.shape[1] ** 2),
    "cube": lambda x, y: torch.zeros(x.shape[1] ** 3 // 2 + 1),
    "sizes of a result": lambda x, y: torch.cat([x, y[:, :, :4]], 1).flatten(0, 1).new_zeros(2).sum() + y.numel(),
    "numel": lambda x, y: torch.zeros(x.numel() // 4),
    "stride": lambda x, y: torch.zeros(x.contiguous().stride(0)),
    "shift": lambda x, y: torch.zeros(x.shape[1] * 4 // 4),
    "shift left": lambda x, y: torch.zeros(x.shape[1] << 2),
    "shift right": lambda x, y: torch.zeros((x.shape[1] >> 1) + 1),
    "round": lambda x, y: torch.zeros(round(x.shape[1] * 0.5) + 1),
    "absolute": lambda x, y: torch.zeros(abs(x.shape[1] - y.shape[1]) + 1),
    "size from the data": lambda x, y: torch.nonzero(x > -9).reshape(-1).repeat(2),
    "product of a size from the data": lambda x, y: x[x > 0].repeat(2).new_zeros(3) + torch.nonzero(x > 0).numel(),
    "sum with a size from the data": lambda x, y: torch.cat([torch.nonzero(x[0, 0] > 0)[:, 0], torch.arange(5)]).flip(
        0
    ),
    "arange of a size from the data": lambda x, y: torch.arange(torch.nonzero(x > 0).shape[0] * 2 + 1),
}

GROUPS = {
    "reshape": RESHAPES,
    "broadcast": BROADCASTS,
    "slice": SLICES,
    "factory": FACTORIES,
    "pad": PADS,
    "window": WINDOWS,
    "expression": EXPRESSIONS,
}
CASES = [pytest.param(f, id=f"{group}: {name}") for group, table in GROUPS.items() for name, f in table.items()]


@pytest.mark.parametrize("function", CASES)
def test_a_dynamic_size_is_computed_where_it_is_requested(function: Function) -> None:
    _hold(function)


def _unpooled(rank: int, given: bool) -> Function:
    pool, unpool = getattr(F, f"max_pool{rank}d"), getattr(F, f"max_unpool{rank}d")

    def model(x: torch.Tensor) -> torch.Tensor:
        values, places = pool(x, 2, return_indices=True)
        return unpool(values * 2, places, 2, output_size=x.shape[-rank:] if given else None)

    return model


@pytest.mark.parametrize("has_size", [True, False], ids=["size given", "size doubled"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_unpool(rank: int, has_size: bool) -> None:
    # Where the output's sizes are not given, eager takes indices of even sizes alone.
    spatial = [(7, 8, 9), (2, 3, 5), (4, 11, 6)] if has_size else [(6, 8, 10), (2, 4, 2), (4, 12, 6)]
    first, *others = (torch.randn(b, 3, *sizes[:rank]) for b, sizes in zip((2, 1, 3), spatial, strict=True))
    dynamic = [{axis: torch.export.Dim.DYNAMIC for axis in range(rank + 2) if axis != 1}]
    check(_unpooled(rank, has_size), first, others=[(x,) for x in others], dynamic=dynamic)


@pytest.mark.parametrize("out", [(3, 4), (1, 1), (2, 1)], ids=str)
def test_fractional_max_pool(out: tuple[int, int]) -> None:
    def model(x: torch.Tensor, u: torch.Tensor) -> Any:
        return F.fractional_max_pool2d(x, 2, output_size=out, return_indices=True, _random_samples=u)

    first, *others = ((torch.randn(b, 3, h, w), torch.rand(b, 3, 2)) for b, h, w in ((2, 9, 10), (1, 4, 5), (3, 16, 7)))
    named = [{0: "b", 2: "h", 3: "w"}, {0: "b"}]
    check(model, *first, others=others, dynamic=named)


@pytest.mark.parametrize("out", [(3, 4, 2), (1, 2, 1)], ids=str)
def test_fractional_max_pool_of_volumes(out: tuple[int, int, int]) -> None:
    """The samples are in the order of the axes, unlike those of planes."""

    def model(x: torch.Tensor, u: torch.Tensor) -> Any:
        return F.fractional_max_pool3d(x, (2, 1, 2), output_size=out, return_indices=True, _random_samples=u)

    # torch itself fixes the sizes.
    for b, d, h, w in ((2, 9, 10, 5), (1, 6, 5, 4)):
        check(model, torch.randn(b, 3, d, h, w), torch.rand(b, 3, 3))


def test_a_size_that_is_data_to_torch_and_constant_in_the_graph() -> None:
    def model(x: torch.Tensor) -> Any:
        y = x.repeat_interleave(torch.tensor([2, 1]), 0)
        return y.unsqueeze(-1).expand(*y.shape, 2).flatten(-2), y * y.shape[0]

    check(model, torch.randn(2, 2, 3), others=[(torch.randn(2, 5, 3),)], dynamic=[{1: "n"}])
