"""Views, slices, joins, indexing, scatter and padding: each with dynamic dimensions, at other sizes, 1 among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from tests.support.check import check


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


A = tensor(3, 4, 6)
#: (function of a [batch, sequence, 6] tensor); exported at (3, 4), run at (5, 7) and (1, 1) too unless it can't be.
DYNAMIC: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x.view(x.shape[0], x.shape[1], 2, 3),
    "view_merge": lambda x: x.view(-1, 6),
    "view_split_and_merge": lambda x: x.view(x.shape[0] * x.shape[1], 3, 2),
    "reshape_last": lambda x: x.reshape(x.shape[0], -1),
    "flatten": lambda x: x.flatten(1),
    "flatten_all": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(2, (2, -1)),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(-1, 0),
    "movedim": lambda x: x.movedim(0, 2),
    "mT": lambda x: x.mT,
    "expand": lambda x: x.unsqueeze(1).expand(x.shape[0], 2, x.shape[1], 6),
    "expand_minus_one": lambda x: x[:, :, :1].expand(-1, -1, 5),
    "expand_as": lambda x: x[:, :, :1].expand_as(x),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze_dims": lambda x: x[None, ..., None].squeeze((0, -1)),
    "slice_to": lambda x: x[:, :, 1:-1],
    "slice_step": lambda x: x[..., ::2],
    "slice_beyond": lambda x: x[:, :, 3:100],
    "slice_before": lambda x: x[:, :, -100:3],
    "slice_empty": lambda x: x[:, :, 5:2],
    "slice_dynamic": lambda x: x[:, : x.shape[0]],
    "slice_last": lambda x: x[:, -1:],
    "select": lambda x: x[:, -1],
    "select_first": lambda x: x[0, 0],
    "narrow": lambda x: x.narrow(2, 1, 3),
    "split": lambda x: x.split(4, 2),
    "split_sizes": lambda x: x.split([1, 2, 3], -1),
    "chunk": lambda x: x.chunk(3, 2),
    "chunk_uneven": lambda x: x.chunk(4, 2),
    "unbind": lambda x: x.unbind(2)[1:4],
    "flip": lambda x: x.flip(1, 2),
    "roll": lambda x: x.roll((1, -2), (1, 2)),
    "roll_flat": lambda x: x.roll(2),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "cat_promotes": lambda x: torch.cat([x, torch.ones(1, 1, 6, dtype=torch.int64).expand(x.shape[0], 1, 6)], 1),
    "stack": lambda x: torch.stack([x, x + 1], -1),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_more_axes": lambda x: x.repeat(2, 1, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "tile": lambda x: x.tile((2,)),
    "meshgrid": lambda x: torch.meshgrid(x[0, :, 0], x[:, 0, 0], indexing="ij"),
    "meshgrid_xy": lambda x: torch.meshgrid(x[0, :, 0], x[:, 0, 0], indexing="xy"),
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "index_one": lambda x: x[:, :, torch.tensor([0, 2, -1])],
    "index_first": lambda x: x[torch.tensor([0, 0])],
    "index_two": lambda x: x[torch.tensor([0, -1]), :, torch.tensor([1, 2])],
    "index_two_beside": lambda x: x[:, torch.tensor([[0], [-1]]), torch.tensor([1, 2, 3])],
    "index_mask": lambda x: torch.where(x > 0, x, 0.0)[:, :, torch.tensor([True, False, True, False, True, False])],
    "index_select": lambda x: x.index_select(2, torch.tensor([5, 0])),
    "gather": lambda x: x.gather(2, torch.zeros_like(x, dtype=torch.int64) + 3),
    "topk": lambda x: x.topk(2, -1),
    "topk_smallest": lambda x: x.topk(3, 2, largest=False),
    "sort": lambda x: x.sort(2, descending=True),
    "argsort": lambda x: x.argsort(-1),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "arange": lambda x: torch.arange(x.shape[1]) + torch.arange(2, x.shape[1] + 2, dtype=torch.float32),
    "arange_step": lambda x: torch.arange(0, x.shape[1] * 3, 3),
    "zeros": lambda x: torch.zeros(x.shape[0], 2) + torch.ones(x.shape[0], 1),
    "full": lambda x: torch.full((x.shape[1], 3), 2.5),
    "full_like": lambda x: torch.full_like(x, 7, dtype=torch.int64),
    "new_zeros": lambda x: x.new_zeros(x.shape[1], 2),
    "eye": lambda x: torch.eye(x.shape[1]),
    "linspace": lambda x: x + torch.linspace(0, 1, 6),
    "pad": lambda x: F.pad(x, (1, 2)),
    "pad_value": lambda x: F.pad(x, (0, 0, 2, 1), value=1.5),
    "pad_negative": lambda x: F.pad(x, (-1, -2)),
    "pad_circular": lambda x: F.pad(x, (1, 2), mode="circular"),
    "pad_replicate": lambda x: F.pad(x, (1, 2), mode="replicate"),
    "pad_reflect": lambda x: F.pad(x, (1, 2), mode="reflect"),
    "select_scatter": lambda x: x.select_scatter(x[:, 0] * 0, 1, -1),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :, :2] * 0, 2, 1, 3),
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "numel": lambda x: x + x.numel(),
    "size_arithmetic": lambda x: x[: (x.shape[0] + 1) // 2] * (x.shape[1] % 3) - x.shape[0] ** 2,
    "size_float": lambda x: x * (x.shape[1] ** -0.5) / (x.shape[0] / 3),
    "max_of_sizes": lambda x: torch.zeros(max(x.shape[0], x.shape[1])),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic(name: str) -> None:
    auto = torch.export.Dim.AUTO
    check(
        DYNAMIC[name], A, others=[(tensor(5, 7, 6, seed=1),), (tensor(1, 2, 6, seed=2),)], dynamic=[{0: auto, 1: auto}]
    )


STATIC: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "embedding": (F.embedding, (ints(5, 2, 3), tensor(5, 4)), (ints(5, 2, 3, seed=1), tensor(5, 4, seed=1))),
    "take": (torch.take, (A, torch.tensor([0, 5, -1])), (A * 2, torch.tensor([3, -3, 1]))),
    "one_hot": (lambda x: F.one_hot(x, 5), (ints(5, 2, 3),), (ints(5, 2, 3, seed=1),)),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s),
        (tensor(3, 5), ints(5, 3, 2), tensor(3, 4)),
        (tensor(3, 5, seed=1), ints(5, 3, 2, seed=3), tensor(3, 4, seed=2)),
    ),
    "scatter_value": (lambda x, i: x.scatter(0, i, 2.5), (tensor(3, 5), ints(3, 2, 5)), (tensor(3, 5), ints(3, 2, 5, seed=4))),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(1, i, s),
        (tensor(3, 5), ints(5, 3, 4), tensor(3, 4)),
        (tensor(3, 5), torch.zeros(3, 4, dtype=torch.int64), tensor(3, 4, seed=5)),
    ),
    **{
        f"scatter_reduce_{mode}_{include}": (
            lambda x, i, s, mode=mode, include=include: x.scatter_reduce(1, i, s, mode, include_self=include),
            (tensor(3, 5), ints(5, 3, 4), tensor(3, 4)),
            (tensor(3, 5, seed=7), ints(3, 3, 4, seed=8), tensor(3, 4, seed=9)),
        )
        for mode in ("sum", "prod", "amax", "amin")
        for include in (True, False)
    },
    "index_put": (
        lambda x, i, v: x.index_put((i,), v),
        (tensor(4, 3), torch.tensor([0, -1]), tensor(2, 3)),
        (tensor(4, 3, seed=1), torch.tensor([2, 1]), tensor(2, 3, seed=2)),
    ),
    "index_put_accumulate": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (tensor(4, 3), torch.tensor([0, 0]), tensor(2, 3)),
        (tensor(4, 3, seed=1), torch.tensor([2, -2]), tensor(2, 3, seed=2)),
    ),
    "index_put_two": (
        lambda x, i, j, v: x.index_put((i, j), v),
        (tensor(4, 3), torch.tensor([0, -1]), torch.tensor([1, 2]), tensor(2)),
        (tensor(4, 3), torch.tensor([3, 1]), torch.tensor([0, -1]), tensor(2, seed=1)),
    ),
    "index_put_second_axis": (
        lambda x, i, v: torch.ops.aten.index_put(x, [None, i], v),
        (tensor(4, 3), torch.tensor([0, -1]), tensor(4, 2)),
        (tensor(4, 3), torch.tensor([1, 2]), tensor(4, 2, seed=1)),
    ),
    "index_put_mask": (
        lambda x: x.index_put((x > 0,), torch.tensor(0.5)),
        (tensor(4, 3),),
        (tensor(4, 3, seed=1),),
    ),
    "index_mask": (lambda x: x[x > 0], (tensor(4, 3),), (tensor(4, 3, seed=1),)),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s, alpha=2),
        (tensor(4, 3), torch.tensor([0, 0, 2]), tensor(3, 3)),
        (tensor(4, 3), torch.tensor([3, 1, 3]), tensor(3, 3, seed=1)),
    ),
    "index_put_impl": (
        lambda x, i, v: (
            torch._index_put_impl_(x.clone(), (i,), v, True, False),
            torch.ops.aten._index_put_impl(x, [None, i[:2]], v[:, :2], False, True),
        ),
        (tensor(4, 3), torch.tensor([0, 2, 0, 1]), tensor(4, 3)),
        (tensor(4, 3), torch.tensor([-1, 2, 1, 1]), tensor(4, 3, seed=1)),
    ),
    "index_copy": (
        lambda x, i, s: x.index_copy(1, i, s),
        (tensor(4, 3), torch.tensor([0, 2]), tensor(4, 2)),
        (tensor(4, 3), torch.tensor([1, 0]), tensor(4, 2, seed=1)),
    ),
    "index_fill": (lambda x, i: x.index_fill(1, i, 9.0), (tensor(4, 3), torch.tensor([0, 2])), (tensor(4, 3), torch.tensor([1, 1]))),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (tensor(2, 8, 3, 4),), (tensor(2, 8, 3, 4, seed=1),)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (tensor(2, 2, 4, 6),), (tensor(2, 2, 4, 6, seed=1),)),
    "pixel_shuffle_3": (lambda x: F.pixel_shuffle(x, 3), (tensor(9, 3, 4),), (tensor(9, 3, 4, seed=1),)),
    "pixel_unshuffle_3": (lambda x: F.pixel_unshuffle(x, 3), (tensor(2, 3, 6),), (tensor(2, 3, 6, seed=1),)),
    "empty_cat": (lambda x: torch.cat([torch.zeros(0), x.flatten(), torch.zeros(0)]), (tensor(2, 3),), (tensor(2, 3, seed=1),)),
    "empty_reshape": (lambda x: x[:0].reshape(0, 2, 2), (tensor(3, 4),), (tensor(3, 4, seed=1),)),
    "zero_dim": (lambda x: (x.reshape(1), x.unsqueeze(0), x.expand(3), x.flatten()), (torch.tensor(2.0),), (torch.tensor(-1.0),)),
}  # fmt: skip


_PIXELS = [torch.float32, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.filterwarnings("error:ONNX Runtime can't run")
@pytest.mark.parametrize("dtype", _PIXELS, ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (2, 1, 3)], ids=str)
def test_pixels_of_every_rank_and_dtype(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    auto = torch.export.Dim.AUTO
    others = tuple(b + 1 for b in batch)

    def of(*shape: int, seed: int = 0) -> torch.Tensor:
        return (tensor(*shape, seed=seed) * 3).to(dtype)

    lead = dict.fromkeys(range(len(batch)), auto)
    sizes = dict.fromkeys((len(batch) + 1, len(batch) + 2), auto)
    shuffled = [(of(*others, 8, 5, 3, seed=1),), (of(*others, 8, 1, 2),)]
    check(lambda x: F.pixel_shuffle(x, 2), of(*batch, 8, 3, 4), others=shuffled, dynamic=[lead | sizes])
    check(
        lambda x: F.pixel_unshuffle(x, 2), of(*batch, 3, 4, 6), others=[(of(*others, 3, 4, 6, seed=1),)], dynamic=[lead]
    )
    check(
        lambda x: F.pixel_unshuffle(x.repeat_interleave(2, -1).repeat_interleave(2, -2), 2),
        of(*batch, 3, 4, 6),
        others=[(of(*others, 3, 5, 2, seed=1),)],
        dynamic=[lead | sizes],
    )


@pytest.mark.parametrize("name", STATIC)
def test_static(name: str) -> None:
    function, first, second = STATIC[name]
    check(function, *first, others=[second])


@pytest.mark.parametrize("opset", [13, 15, 18, 23])
@pytest.mark.parametrize("name", ["view", "slice_dynamic", "split", "chunk_uneven", "roll", "pad", "tril", "unbind"])
def test_opsets(name: str, opset: int) -> None:
    auto = torch.export.Dim.AUTO
    check(DYNAMIC[name], A, others=[(tensor(5, 7, 6, seed=1),)], dynamic=[{0: auto, 1: auto}], opset=opset)


def test_a_dynamic_view_is_one_node(expect_graph: Any) -> None:
    auto = torch.export.Dim.AUTO
    program = check(DYNAMIC["view"], A, others=[(tensor(5, 7, 6),)], dynamic=[{0: auto, 1: auto}])
    expect_graph(program, "Reshape")


@pytest.mark.parametrize("form", ["flatten", "reshape", "unflattened", "transposed"])
def test_reshaping_tensors_that_may_be_empty(form: str) -> None:
    """Reshape infers no size (-1) beside one of 0, and ONNX Runtime's ReshapeFusion writes a -1 of its own."""

    def reshaped(x: torch.Tensor) -> Any:
        y = x[x[:, 0, 0] > 0]
        if form == "flatten":
            return y.flatten(1), y.flatten(0, 1)
        if form == "reshape":
            return y.reshape(y.shape[0], y.shape[1] * 6), y.reshape(-1, 6)
        if form == "unflattened":
            return y.reshape(y.shape[0], y.shape[1], 3, 2), y.reshape(y.shape[0] * y.shape[1], 6)
        return y.transpose(0, 2).flatten(1), y.permute(2, 1, 0).reshape(6, y.shape[0] * y.shape[1])

    program = onnxplug.to_onnx(reshaped, (A,), dynamic_shapes=({0: "batch", 1: "sequence"},))
    for x in (A, tensor(5, 7, 6), -A.abs(), tensor(1, 1, 6).abs()):
        for got, expected in zip(program(x), reshaped(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_sizes_of_the_call_beside_long_expressions() -> None:
    """For the size 8, torch computes an expression of the length; the given size is used."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded = F.pad(x, (0, 0, 0, (8 - x.shape[1] % 8) % 8))
        batch, _, width = padded.shape
        return padded.reshape(batch, -1, 8, width).sum(2), padded.view(batch, 8, -1, width).sum(1)

    dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    check(model, torch.randn(2, 13, 4), others=[(torch.randn(3, 8, 4),), (torch.randn(5, 21, 4),)], dynamic=dynamic)


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.filterwarnings("ignore:the exported model is right only where")
def test_chunks_of_a_dynamic_axis(chunks: int) -> None:
    """Every piece but the last has the size divided by the number of chunks, rounded up, at sizes with as many pieces."""
    others = [(torch.randn(3, size),) for size in (7, 10, 11, 13)]
    check(lambda x: x.chunk(chunks, 1), torch.randn(3, 8), others=others, dynamic=({1: torch.export.Dim.DYNAMIC},))


#: Strict: the test fails once a release of torch 2.9 has it.
LEFT = pytest.mark.xfail(
    torch.__version__.startswith("2.9."),
    strict=True,
    reason="torch 2.9's kernel for tracing pad_sequence has no padding_side",
)


@pytest.mark.parametrize("side", [pytest.param("left", marks=LEFT), "right"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_any_sequence_may_be_the_longest(batch_first: bool, side: str) -> None:
    def padded(*sequences: torch.Tensor) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first, -1.5, side)

    def drawn(*lengths: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor(length, 3, seed=length) for length in lengths)

    dynamic = ({0: "a"}, {0: "b"}, {0: "c"})
    others = [drawn(2, 4, 7), drawn(3, 6, 1), drawn(1, 1, 1), drawn(2, 2, 2)]
    check(padded, *drawn(5, 4, 2), others=others, dynamic=dynamic)
    check(padded, *drawn(5, 4, 2), others=[drawn(5, 1, 2), drawn(5, 9, 2)], dynamic=({}, {0: "b"}, {}))
    check(padded, *drawn(2, 4, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.float16])
def test_pad_sequence_of_other_dtypes(dtype: torch.dtype) -> None:
    def padded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([x, y], padding_value=1.5)

    first, second, third = (tensor(n).to(dtype) for n in (2, 5, 3))
    check(padded, first, second, others=[(second, third)], dynamic=({0: "a"}, {0: "b"}))


NARROWED: dict[str, Callable[..., Any]] = {
    "dynamic start and length": lambda x, k: x.narrow(0, -k.shape[0], k.shape[0]),
    "dynamic length": lambda x, k: x.narrow(0, -5, k.shape[0]),
    "dynamic start": lambda x, k: x.narrow(0, k.shape[0] - x.shape[0], 2),
    "copy": lambda x, k: torch.narrow_copy(x, 0, -k.shape[0], k.shape[0]),
    "from the start": lambda x, k: x.narrow(0, k.shape[0], k.shape[0] - 1),
}


@pytest.mark.parametrize("rows", [None, torch.export.Dim.DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NARROWED)
def test_narrow_from_the_end(name: str, rows: Any) -> None:
    """A negative start counts from the end, also where the start or the length is known only when the model runs."""
    x, dim = torch.arange(10.0), torch.export.Dim("b", min=2, max=5)
    others = [(x, torch.zeros(5)), (-x, torch.zeros(2)), *([(torch.arange(15.0), torch.zeros(4))] if rows else [])]
    check(NARROWED[name], x, torch.zeros(3), others=others, dynamic=({0: rows} if rows else None, {0: dim}))


def test_index_copy_of_one_number() -> None:
    """By ONNX Runtime alone, which refuses updates without axes; the evaluator takes them."""
    x, place, number = torch.arange(4.0), torch.tensor(1), torch.tensor(5.0)
    for index in (place, place[None]):
        program = onnxplug.to_onnx(lambda x, i, s: x.index_copy(0, i, s), (x, index, number))
        torch.testing.assert_close(program(x, index, number)[0], x.index_copy(0, index, number))
