"""fbgemm's operators between jagged and padded tensors, and its arithmetic on jagged tensors, by ATen operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxplug_fbgemm.segments import (
    HALVES,
    copied,
    last_of,
    lengths_of,
    offsets_of,
    one_more,
    places,
    places_in_dense,
    size_of,
    starts_of,
)

Sizes = list[Any]


def jagged_to_padded_dense(
    values: Tensor, offsets: list[Tensor], max_lengths: Sizes, padding_value: float = 0
) -> Tensor:
    """Jagged to [segments, *max_lengths, ...]: missing rows are the padding value, surplus rows are left out."""
    return _padded(values, offsets, max_lengths, padding_value)


jagged_to_padded_dense_forward = jagged_to_padded_dense


def _padded(values: Tensor, offsets: list[Tensor], sizes: Sizes, padding: float = 0, segments: Any = None) -> Tensor:
    return one_more(values, padding)[places(offsets, sizes, values.shape[0], segments)]


def jagged_1d_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: Any, padding_value: int) -> Tensor:
    """The padded tensor, with an integer as the padding value."""
    return jagged_to_padded_dense(values, [offsets], [max_sequence_length], padding_value)


def jagged_2d_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: Any) -> Tensor:
    """The padded tensor, with 0 as the padding value."""
    return jagged_to_padded_dense(values, [offsets], [max_sequence_length])


def stacked_jagged_1d_to_dense(
    values: Tensor, lengths: Tensor, offset_per_key: list[int], max_lengths_per_key: list[int], padding_value: int = 0
) -> list[Tensor]:
    """A padded tensor of each key, whose values begin at ``offset_per_key``; ``lengths`` is [keys, segments]."""
    return [
        jagged_to_padded_dense(values[first:last], [offsets_of(own)], [size], padding_value)
        for own, first, last, size in zip(
            lengths.unbind(0), offset_per_key[:-1], offset_per_key[1:], max_lengths_per_key, strict=True
        )
    ]


stacked_jagged_2d_to_dense = stacked_jagged_1d_to_dense


def dense_to_jagged_forward(dense: Tensor, x_offsets: list[Tensor], total_L: Any = None) -> Tensor:
    """The rows of the segments; rows that the padded tensor has no room for are 0."""
    count = last_of(x_offsets[-1]) if total_L is None else total_L
    sizes = list(dense.shape[1:-1])
    rows = dense.reshape((-1, dense.shape[-1]))
    return one_more(rows).index_select(0, places_in_dense(x_offsets, sizes, count))


def dense_to_jagged(dense: Tensor, x_offsets: list[Tensor], total_L: Any = None) -> tuple[Tensor, list[Tensor]]:
    """The rows of :func:`dense_to_jagged_forward`, and the offsets."""
    return dense_to_jagged_forward(dense, x_offsets, total_L), x_offsets


# -- arithmetic --------------------------------------------------------------------------------------------------------


def jagged_dense_elementwise_add(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> Tensor:
    """The sum of the jagged tensor, padded by 0, and the padded tensor."""
    return _padded(x_values, x_offsets, list(y.shape[1:-1]), segments=y.shape[0]) + y


def jagged_dense_elementwise_mul_forward(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> Tensor:
    """The rows times the corresponding rows of the padded tensor."""
    return x_values * dense_to_jagged_forward(y, x_offsets, x_values.shape[0])


def jagged_dense_elementwise_mul(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The product of :func:`jagged_dense_elementwise_mul_forward`, and the offsets."""
    return jagged_dense_elementwise_mul_forward(x_values, x_offsets, y), x_offsets


def jagged_dense_elementwise_add_jagged_output(
    x_values: Tensor, x_offsets: list[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The sum as a jagged tensor, and the offsets."""
    return x_values + dense_to_jagged_forward(y, x_offsets, x_values.shape[0]), x_offsets


def jagged_dense_dense_elementwise_add_jagged_output_forward(
    x_values: Tensor, x_offsets: list[Tensor], y_0: Tensor, y_1: Tensor
) -> Tensor:
    """The sum with two padded tensors, as a jagged tensor."""
    return (
        x_values
        + dense_to_jagged_forward(y_0, x_offsets, x_values.shape[0])
        + dense_to_jagged_forward(y_1, x_offsets, x_values.shape[0])
    )


def jagged_dense_dense_elementwise_add_jagged_output(
    x_values: Tensor, x_offsets: list[Tensor], y_0: Tensor, y_1: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The sum with two padded tensors, and the offsets."""
    return jagged_dense_dense_elementwise_add_jagged_output_forward(x_values, x_offsets, y_0, y_1), x_offsets


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of batches of matrices; halves are summed in float."""
    if left.dtype in HALVES:
        return torch.bmm(left.float(), right.float()).to(left.dtype)
    return torch.bmm(left, right)


def batched_dense_vec_jagged_2d_mul(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> Tensor:
    """[segments * heads, width]: a vector [segments * heads, size] times the matrix of its segment and head."""
    heads = v.shape[0] // (a_offsets.shape[0] - 1)
    width = a_values.shape[1] // heads
    number = torch.arange(v.shape[0], device=v.device)
    row = places([a_offsets], [v.shape[1]], a_values.shape[0])[number // heads]
    column = (number % heads).reshape((-1, 1, 1)) * width + torch.arange(width, device=v.device)
    matrices = one_more(a_values).reshape(-1)[row.unsqueeze(2) * a_values.shape[1] + column]
    return _product(v.unsqueeze(1), matrices).squeeze(1)


batched_dense_vec_jagged_2d_mul_forward = batched_dense_vec_jagged_2d_mul


def jagged_dense_bmm_forward(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> Tensor:
    """The rows of each segment times the segment's matrix [segments, in, out]."""
    padded = _padded(x_values, [x_offsets], [max_L], segments=y.shape[0])
    return dense_to_jagged_forward(_product(padded, y), [x_offsets], x_values.shape[0])


def jagged_dense_bmm(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    """The product of :func:`jagged_dense_bmm_forward`, and the offsets."""
    return jagged_dense_bmm_forward(x_values, x_offsets, y, max_L), x_offsets


def jagged_jagged_bmm(x_values: Tensor, y_values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """[segments, width of x, width of y]: each segment of x, transposed, times the same segment of y."""
    left, right = (jagged_to_padded_dense(values, [x_offsets], [max_L]) for values in (x_values, y_values))
    return _product(left.transpose(1, 2), right)


jagged_jagged_bmm_forward = jagged_jagged_bmm


def jagged_softmax_forward(values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """The softmax over the rows of each segment, column by column."""
    padded = jagged_to_padded_dense(values, [x_offsets], [max_L], float("-inf"))
    # An empty segment, whose softmax is NaN, has no rows that are read.
    return dense_to_jagged_forward(padded.softmax(1), [x_offsets], values.shape[0])


def jagged_softmax(values: Tensor, x_offsets: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    """The softmax over the rows of each segment, and the offsets."""
    return jagged_softmax_forward(values, x_offsets, max_L), x_offsets


# -- parts of segments -------------------------------------------------------------------------------------------------


def jagged_1d_to_truncated_values(values: Tensor, lengths: Tensor, max_truncated_length: int) -> Tensor:
    """The first values of each segment."""
    kept = lengths.clamp(max=max_truncated_length)
    offsets = offsets_of(kept)
    starts, every = starts_of(offsets_of(lengths)), torch.arange(lengths.shape[0], device=lengths.device)
    return values.index_select(0, copied(every, starts, offsets, last_of(offsets)))


def masked_select_jagged_1d(
    values: Tensor, lengths: Tensor, mask: Tensor, check_length: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The values that a mask keeps, and their number in each segment."""
    offsets = offsets_of(lengths)
    before = offsets_of(mask.to(lengths.dtype)).index_select(0, offsets)
    return values[mask], lengths_of(before)


def jagged_slice(x_values: Tensor, x_lengths: Tensor, start: Tensor, slice_length: int) -> tuple[Tensor, Tensor]:
    """At most ``slice_length`` values of each segment from ``start`` on, and their numbers."""
    kept = (x_lengths - start).clamp(max=slice_length)
    offsets = offsets_of(kept)
    every = torch.arange(kept.shape[0], device=kept.device)
    place = copied(every, starts_of(offsets_of(x_lengths)) + start, offsets, last_of(offsets))
    return x_values.index_select(0, place), kept


def jagged_index_select_2d_forward(
    values: Tensor, indices: Tensor, input_offsets: Tensor, output_offsets: Tensor, num_dense_output_rows: Any
) -> Tensor:
    """The rows of the segments that ``indices`` names; the offsets are the segments' ends."""
    row = _rows_selected(indices, input_offsets, output_offsets, num_dense_output_rows)
    return values.index_select(0, row)


def _rows_selected(indices: Tensor, input_ends: Tensor, output_ends: Tensor, count: Any) -> Tensor:
    starts = one_more(input_ends).roll(1)
    return copied(indices, starts, one_more(output_ends).roll(1), count)


def jagged_index_select_2d_forward_v2(
    values: Tensor, indices: Tensor, input_offsets: Tensor, output_offsets: Tensor, num_dense_output_rows: Any = None
) -> Tensor:
    """:func:`jagged_index_select_2d_forward`; the default number of rows is the last segment's end."""
    count = last_of(output_offsets) if num_dense_output_rows is None else num_dense_output_rows
    return jagged_index_select_2d_forward(values, indices, input_offsets, output_offsets, count)


def jagged_index_add_2d_forward(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_dense_input_rows: Any,
    num_output_rows: Any,
) -> Tensor:
    """The rows of each segment added to the segment that ``indices`` names; the offsets are the segments' ends."""
    row = _rows_selected(indices, output_offsets, input_offsets, num_dense_input_rows)
    wide = values.float() if values.dtype in HALVES else values
    total = wide.new_zeros((num_output_rows, values.shape[1])).index_add(0, row, wide)
    return total.to(values.dtype)


def jagged_index_add_2d_forward_v2(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_output_rows: Any,
    num_dense_input_rows: Any,
) -> Tensor:
    """:func:`jagged_index_add_2d_forward` with the numbers of rows in the other order."""
    return jagged_index_add_2d_forward(
        values, indices, input_offsets, output_offsets, num_dense_input_rows, num_output_rows
    )


def jagged_index_select(
    values: Tensor, lengths: Tensor, indices: Tensor, num_dense_output_rows: Any = None
) -> list[Tensor]:
    """The rows of the segments that ``indices`` names, and their lengths."""
    chosen = lengths.index_select(0, indices)
    ends, new_ends = lengths.cumsum(0), chosen.cumsum(0)
    count = size_of(chosen.sum()) if num_dense_output_rows is None else num_dense_output_rows
    return [jagged_index_select_2d_forward(values, indices, ends, new_ends, count), chosen]


def jagged_acc_weights_and_counts(weights: Tensor, reverse_indices: Tensor, num_unique_indices: int) -> Tensor:
    """[unique, 2]: the sum of the weights of each unique index, and their number."""
    pairs = torch.stack([weights.float(), torch.ones_like(weights, dtype=torch.float32)], 1)
    return pairs.new_zeros((num_unique_indices, 2)).index_add(0, reverse_indices, pairs)


def pack_segments(t_in: Tensor, lengths: Tensor, max_length: Any) -> Tensor:
    """[segments, max_length, ...], padded by 0."""
    return jagged_to_padded_dense(t_in, [offsets_of(lengths)], [max_length])


def pack_segments_v2(
    t_in: Tensor, lengths: Tensor, max_length: Any, pad_minf: bool = False, return_presence_mask: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The padded tensor, by 0 or minus infinity, and the mask of the places that have rows."""
    packed = jagged_to_padded_dense(t_in, [offsets_of(lengths)], [max_length], float("-inf") if pad_minf else 0)
    present = torch.arange(max_length, device=lengths.device) < lengths.unsqueeze(1)
    return packed, present if return_presence_mask else None
