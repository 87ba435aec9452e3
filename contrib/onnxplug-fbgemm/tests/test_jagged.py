"""fbgemm's operators in models, beside the samples: dtypes, empty inputs, offsets and sizes of all kinds, against the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fbgemm_gpu", reason="`make packages` tests with it, in an environment of its own")

import torch

import onnxplug

FBGEMM = torch.ops.fbgemm
ROWS, OFFSETS, SEGMENTS = {0: "rows"}, {0: "offsets"}, {0: "segments"}
LENGTHS = ([2, 0, 3], [4, 1, 0, 0], [0], [0, 0], [1])


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64, first: int = 0) -> torch.Tensor:
    return torch.tensor([first + sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype)


def check(
    onnx_check: Callable[..., Any], model: Any, inputs: list[tuple[Any, ...]], shapes: Any, **options: Any
) -> Any:
    return onnx_check(model, inputs[0], dynamic_shapes=shapes, inputs=inputs[1:], seeds=(), **options)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_padded_and_back(onnx_check: Callable[..., Any], dtype: torch.dtype, index: torch.dtype) -> None:
    """Segments longer than the padded size, empty ones, no rows at all."""

    def model(values: torch.Tensor, offsets: torch.Tensor) -> Any:
        padded = FBGEMM.jagged_to_padded_dense(values, [offsets], [3], 7.0)
        return padded, FBGEMM.dense_to_jagged(padded, [offsets], values.shape[0])[0]

    inputs = [
        ((torch.randn(sum(n), 2) * 5).to(dtype), offsets_of(n, index)) for n in ([2, 0, 3], [1, 3, 0, 0], [0], [0, 0])
    ]
    check(onnx_check, model, inputs, (ROWS, OFFSETS))
    longer = ((torch.randn(9, 2) * 5).to(dtype), offsets_of([1, 8], index))
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=(ROWS, OFFSETS))
    padded, rows = program(*longer)
    torch.testing.assert_close(padded, model(*longer)[0])
    torch.testing.assert_close(rows[:4], longer[0][:4])
    assert not rows[4:].any()


@pytest.mark.parametrize("name", ["add", "mul", "add_jagged_output"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_arithmetic(onnx_check: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    def model(values: torch.Tensor, offsets: torch.Tensor, dense: torch.Tensor) -> Any:
        result = getattr(FBGEMM, f"jagged_dense_elementwise_{name}")(values, [offsets], dense)
        return result if isinstance(result, torch.Tensor) else result[0]

    inputs = [
        (torch.randn(sum(n), 2).to(dtype), offsets_of(n), torch.randn(len(n), 4, 2).to(dtype))
        for n in ([2, 0, 3], [4, 1, 0, 0], [0], [1])
    ]
    check(onnx_check, model, inputs, (ROWS, OFFSETS, {0: "segments", 1: "size"}))


def test_rows_before_the_first_segment(onnx_check: Callable[..., Any]) -> None:
    def model(values: torch.Tensor, offsets: torch.Tensor) -> Any:
        column = values[:, 0].contiguous()  # fbgemm misreads other strides
        return FBGEMM.jagged_to_padded_dense(values, [offsets], [3], 0.5), FBGEMM.segment_sum_csr(1, offsets, column)

    inputs = [(torch.randn(sum(n) + 2, 2), offsets_of(n, first=2)) for n in ([2, 0, 3], [1])]
    check(onnx_check, model, inputs, (ROWS, OFFSETS))


def test_sizes_that_depend_on_values(onnx_check: Callable[..., Any]) -> None:
    """A jagged tensor of unknown length goes through further operators."""

    def model(dense: torch.Tensor, lengths: torch.Tensor) -> Any:
        offsets = FBGEMM.asynchronous_complete_cumsum(lengths)
        values, _ = FBGEMM.dense_to_jagged(dense, [offsets])
        summed = FBGEMM.segment_sum_csr(1, offsets, values.relu()[:, 0].contiguous())
        return values * 2, FBGEMM.jagged_2d_to_dense(values + 1, offsets, 4), summed

    inputs = [(torch.randn(len(n), 4, 3), torch.tensor(n)) for n in LENGTHS]
    check(onnx_check, model, inputs, (SEGMENTS, SEGMENTS))


def test_stacked(onnx_check: Callable[..., Any]) -> None:
    def model(values: torch.Tensor, lengths: torch.Tensor) -> Any:
        return FBGEMM.stacked_jagged_2d_to_dense(values, lengths, [0, 3, 5], [2, 4], 1)

    inputs = [(torch.randn(5, 2), torch.tensor(n)) for n in ([[1, 2], [2, 0]], [[3, 0, 0], [0, 1, 1]])]
    check(onnx_check, model, inputs, (None, {1: "segments"}))


def test_vectors_of_heads(onnx_check: Callable[..., Any]) -> None:
    """The number of heads is static, as the sizes of both operands give the number of segments."""
    segments = torch.export.Dim("segments")

    def model(v: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor) -> Any:
        return FBGEMM.batched_dense_vec_jagged_2d_mul(v.flatten(0, 1), values, offsets)

    inputs = [(torch.randn(len(n), 2, 3), torch.randn(sum(n), 8), offsets_of(n)) for n in ([2, 0, 3], [3, 1], [1])]
    check(onnx_check, model, inputs, ({0: segments}, ROWS, {0: segments + 1}))


def test_features(onnx_check: Callable[..., Any]) -> None:
    """Lengths and values of features, one of them twice; the sum of lengths given."""

    def model(lengths: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> Any:
        permute = torch.tensor([2, 0, 1], dtype=torch.int32)
        more = FBGEMM.permute_2D_sparse_data(permute.flip(0)[:2], lengths, values, weights, None)
        return *more, *FBGEMM.permute_2D_sparse_data(permute, lengths, values, weights, values.numel())

    def drawn(samples: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        lengths = torch.randint(0, 4, (3, samples))
        count = int(lengths.sum())
        return lengths, torch.randint(0, 99, (count,)).to(dtype), torch.rand(count)

    for dtype in (torch.int32, torch.int64):
        inputs = [drawn(samples, dtype) for samples in (3, 1, 5)]
        inputs.append((torch.zeros(3, 2, dtype=torch.int64), torch.empty(0, dtype=dtype), torch.empty(0)))
        check(onnx_check, model, inputs, ({1: "samples"}, ROWS, ROWS))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_indices_that_are_negative(onnx_check: Callable[..., Any], dtype: torch.dtype) -> None:
    """Raw indices are unsigned in fbgemm: negative ones are in the bucket of their remainder."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max

    def model(lengths: torch.Tensor, indices: torch.Tensor) -> Any:
        blocks, bounds = torch.tensor([3, 10], dtype=dtype), [torch.tensor([0, 5, 9, 40], dtype=dtype)] * 2
        arguments = lengths, indices, True, True, blocks, 3
        blocked = FBGEMM.block_bucketize_sparse_features(*arguments)
        between = FBGEMM.block_bucketize_sparse_features(*arguments, block_bucketize_pos=bounds)
        kept = FBGEMM.block_bucketize_sparse_features(*arguments, keep_orig_idx=True)
        remainders = FBGEMM.bucketize_sparse_features(lengths, indices, True, 3)
        return [[x for x in results if x is not None] for results in (blocked, between, kept, remainders)]

    inputs = [
        (torch.tensor([2, 0, 1, 3], dtype=dtype), torch.tensor([-1, 4, -7, 29, least, 8], dtype=dtype)),
        (torch.tensor([1, 3], dtype=dtype), torch.tensor([most, least + 1, 0, -2], dtype=dtype)),
        (torch.tensor([0, 0], dtype=dtype), torch.zeros(0, dtype=dtype)),
    ]
    check(onnx_check, model, inputs, ({0: "lengths"}, {0: "indices"}))


def test_devices(onnx_check: Callable[..., Any]) -> None:
    device = torch.device("cpu")

    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        both = FBGEMM.merge_pooled_embeddings([x, y], x.shape[0], device)
        return both, *FBGEMM.all_to_one_device([x + 1, y], device), FBGEMM.sum_reduce_to_one([x, x * 2], device)

    inputs = [(torch.randn(n, 3), torch.randn(n, 2)) for n in (3, 1, 5)]
    check(onnx_check, model, inputs, ({0: "samples"}, {0: "samples"}))
