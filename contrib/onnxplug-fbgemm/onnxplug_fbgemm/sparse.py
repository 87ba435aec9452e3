"""fbgemm's operators on sparse features by ATen operators: running sums, ranges, permutations, buckets.

Values and lengths of features lie one after the other: ``lengths`` is [features, samples] or [features * samples].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onnxplug_fbgemm.segments import copied, last_of, lengths_of, offsets_of, one_more, owners, starts_of

Permuted = tuple[Tensor, Tensor, Tensor | None]


# -- running sums and ranges -------------------------------------------------------------------------------------------


def asynchronous_inclusive_cumsum(t_in: Tensor) -> Tensor:
    """The running sums of all elements."""
    return t_in.reshape(-1).cumsum(0, dtype=t_in.dtype).reshape(t_in.shape)


def asynchronous_exclusive_cumsum(t_in: Tensor) -> Tensor:
    """The sum of the elements before each element."""
    return asynchronous_inclusive_cumsum(t_in) - t_in


def asynchronous_complete_cumsum(t_in: Tensor) -> Tensor:
    """0 and the running sums, of a vector or of each row of a matrix."""
    if t_in.dim() == 1:
        return offsets_of(t_in)
    return torch.cat([t_in.new_zeros((t_in.shape[0], 1)), t_in.cumsum(1, dtype=t_in.dtype)], 1)


asynchronous_batched_complete_cumsum = asynchronous_complete_cumsum


def offsets_range(offsets: Tensor, range_size: Any) -> Tensor:
    """0, 1, … in each segment; the offsets lack the end of the last segment."""
    return _positions(torch.cat([offsets, offsets.new_full((1,), range_size)]), range_size).to(offsets.dtype)


def _positions(offsets: Tensor, count: Any) -> Tensor:
    """The number of each row within its segment."""
    place = torch.arange(count, device=offsets.device)
    return place - one_more(starts_of(offsets.long())).index_select(0, owners(offsets, count))


def lengths_range(t_in: Tensor, shape: list[Any] | None = None) -> Tensor:
    """0, 1, … for each length; ``shape`` gives the number of elements where it is known."""
    offsets = offsets_of(t_in)
    count = last_of(offsets) if shape is None else math.prod(shape)
    return _positions(offsets, count).to(t_in.dtype)


def repeat_arange(lengths: Tensor) -> Tensor:
    """0, 1, … for each length."""
    return lengths_range(lengths)


def get_source_mask(num_sources: Tensor, num_targets: Tensor, output_size: Any) -> Tensor:
    """For each sample True for its sources, then False for its targets."""
    offsets = offsets_of(num_sources + num_targets)
    return _positions(offsets, output_size) < one_more(num_sources).index_select(0, owners(offsets, output_size))


def segment_sum_csr(batch_size: Any, csr_seg: Tensor, values: Tensor) -> Tensor:
    """The sum of each segment; segments are counted in batches of values."""
    count = values.shape[0]
    total = values.new_zeros((csr_seg.shape[0],))
    return total.index_add(0, owners(csr_seg.long() * batch_size, count), values)[:-1]


def invert_permute(permute: Tensor) -> Tensor:
    """The inverse of a permutation."""
    places = torch.arange(permute.shape[0], device=permute.device, dtype=permute.dtype)
    return torch.empty_like(permute).scatter(0, permute.long(), places)


def expand_into_jagged_permute(
    permute: Tensor, input_offset: Tensor, output_offset: Tensor, output_size: Any
) -> Tensor:
    """The permutation of elements that a permutation of segments gives."""
    return copied(permute, input_offset, output_offset, output_size).to(permute.dtype)


# -- permutations ------------------------------------------------------------------------------------------------------


def _permuted(permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None, count: Any) -> Permuted:
    """Features in another order, each any number of times; ``lengths`` is [features, samples]."""
    rows, own, stride = lengths.index_select(0, permute.long()), lengths.reshape(-1), lengths.shape[1]
    sample = torch.arange(stride, device=permute.device)
    segments = (permute.long().unsqueeze(1) * stride + sample).reshape(-1)
    offsets = offsets_of(rows.reshape(-1).long())
    place = copied(segments, starts_of(offsets_of(own.long())), offsets, last_of(offsets) if count is None else count)
    return rows, values.index_select(0, place), None if weights is None else weights.index_select(0, place)


def permute_1D_sparse_data(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None, permuted_lengths_sum: Any = None
) -> Permuted:
    """Segments in another order; ``permute`` is a permutation of segments."""
    rows, moved, weighted = _permuted(permute, lengths.unsqueeze(1), values, weights, permuted_lengths_sum)
    return rows.reshape(-1), moved, weighted


def permute_2D_sparse_data(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None = None, permuted_lengths_sum: Any = None
) -> Permuted:
    """Features in another order; ``lengths`` is [features, samples]."""
    return _permuted(permute, lengths, values, weights, permuted_lengths_sum)


def permute_2D_sparse_data_input1D(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    stride: Any,
    weights: Tensor | None = None,
    permuted_lengths_sum: Any = None,
) -> Permuted:
    """Features in another order; ``lengths`` is [features * stride]."""
    lengths = lengths.reshape((-1, stride))
    rows, moved, weighted = _permuted(permute, lengths, values, weights, permuted_lengths_sum)
    return rows.reshape(-1), moved, weighted


permute_sparse_data = permute_2D_sparse_data


def permute_sparse_features(
    permute: Tensor, lengths: Tensor, indices: Tensor, weights: Tensor | None = None
) -> Permuted:
    """Features in another order; ``lengths`` is [features, samples]."""
    return permute_2D_sparse_data(permute, lengths, indices, weights)


def permute_sequence_embeddings(permute: Tensor, lengths: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences of numbers in another order of features; fbgemm's kernel for the CPU takes no rows of embeddings."""
    return permute_2D_sparse_data(permute, lengths, embeddings)[:2]


# -- buckets -----------------------------------------------------------------------------------------------------------


def _in_buckets(bucket: Tensor, row: Tensor, buckets: Any, rows: Any) -> tuple[Tensor, Tensor]:
    """The number of elements of each row in each bucket, [buckets * rows], and the new place of each element.

    Elements are ordered by bucket; the elements of a bucket keep their order.
    """
    ones = (bucket.unsqueeze(1) == torch.arange(buckets, device=bucket.device)).long()
    before = (ones.cumsum(0) * ones).sum(1) - 1
    place = before + starts_of(offsets_of(ones.sum(0))).index_select(0, bucket)
    counts = bucket.new_zeros((buckets * rows,)).scatter_add(0, bucket * rows + row, torch.ones_like(bucket))
    return counts, place


def _moved_to(place: Tensor, values: Tensor) -> Tensor:
    """The rows moved to their places."""
    return torch.zeros_like(values).index_copy(0, place, values)


def _unsigned(indices: Tensor) -> Tensor:
    """The indices as int64: fbgemm takes them for unsigned numbers, as raw ones may be negative; those of int64 stay negative."""
    return indices.long() if indices.dtype == torch.int64 else indices.long() % 2**32


def _divided(index: Tensor, size: Any) -> tuple[Tensor, Tensor]:
    """Quotients and remainders of unsigned numbers of 64 bits by positive numbers."""
    quotient, rest = torch.div(index, size, rounding_mode="floor"), index % size
    # A negative number stands for 2**64 more, which is 2 * (2**63 - 1) + 2; the quotients wrap.
    largest = torch.full_like(index, 2**63 - 1)
    more = largest % size * 2 + 2 + rest
    further = torch.div(largest, size, rounding_mode="floor") * 2 + torch.div(more, size, rounding_mode="floor")
    return torch.where(index < 0, quotient + further, quotient), torch.where(index < 0, more % size, rest)


def bucketize_sparse_features(
    lengths: Tensor, indices: Tensor, bucketize_pos: bool, my_size: Any, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Indices in buckets by their remainder: lengths, quotients, weights, positions."""
    offsets = offsets_of(lengths.long())
    row = owners(offsets, indices.shape[0])
    quotient, bucket = _divided(_unsigned(indices), my_size)
    counts, place = _in_buckets(bucket, row, my_size, lengths.shape[0])
    position = _positions(offsets, indices.shape[0])
    return (
        counts.to(lengths.dtype),
        _moved_to(place, quotient.to(indices.dtype)),
        None if weights is None else _moved_to(place, weights),
        _moved_to(place, position.to(indices.dtype)) if bucketize_pos else None,
    )


def block_bucketize_sparse_features_inference(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: Any,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: Any = -1,
    block_bucketize_pos: list[Tensor] | None = None,
    return_bucket_mapping: bool = False,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Indices in buckets by blocks of ``block_sizes`` rows of their feature's table.

    The results are lengths, indices within the bucket, weights, positions, the new place of each element, and its
    bucket. Indices after the last block are distributed by their remainder.
    """
    offsets = offsets_of(lengths.long())
    row = owners(offsets, indices.shape[0])
    feature = _features(row, lengths.shape[0], block_sizes.shape[0], batch_size_per_feature)
    index, block = _unsigned(indices), block_sizes.long()[feature]
    blocks = torch.full_like(block, my_size) if total_num_blocks is None else total_num_blocks.long()[feature]
    blocks_each = blocks // my_size
    inside = (index >= 0) & (index < block * blocks)
    quotient, rest = _divided(index, blocks)
    bucket = torch.where(inside, index // (block * blocks_each), rest // blocks_each)
    within = torch.where(inside, index % (block * blocks_each), quotient)
    if block_bucketize_pos is not None:
        bounds = torch.stack(list(block_bucketize_pos)).long()[feature]
        passed = (index.unsqueeze(1) >= bounds[:, 1:]).sum(1)
        inside, last = (index >= 0) & (passed < my_size), passed.clamp(max=my_size - 1)
        quotient, rest = _divided(index, my_size)
        bucket = torch.where(inside, passed, rest)
        within = torch.where(inside, index - bounds.gather(1, last.unsqueeze(1)).squeeze(1), quotient)
    if keep_orig_idx:
        within = index
    elif keep_orig_idx_per_feature is not None:
        within = torch.where(keep_orig_idx_per_feature[feature].bool(), index, within)
    counts, place = _in_buckets(bucket, row, my_size, lengths.shape[0])
    position = _positions(offsets, indices.shape[0])
    return (
        counts.to(lengths.dtype),
        _moved_to(place, within.to(indices.dtype)),
        None if weights is None else _moved_to(place, weights),
        _moved_to(place, position.to(indices.dtype)) if bucketize_pos else None,
        place.to(indices.dtype) if sequence else None,
        bucket.to(indices.dtype) if return_bucket_mapping else None,
    )


def _features(row: Tensor, rows: Any, features: int, batch_sizes: Tensor | None) -> Tensor:
    """The feature of each row; features have equal numbers of samples, or the numbers of ``batch_sizes``."""
    if batch_sizes is None:
        return torch.div(row, rows // features, rounding_mode="floor")
    return owners(offsets_of(batch_sizes.long()), rows).index_select(0, row)


def block_bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: Any,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: Any = -1,
    block_bucketize_pos: list[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """:func:`block_bucketize_sparse_features_inference` without the bucket of each element."""
    most = (weights, batch_size_per_feature, max_B, block_bucketize_pos, False, keep_orig_idx, total_num_blocks)
    results = block_bucketize_sparse_features_inference(
        lengths, indices, bucketize_pos, sequence, block_sizes, my_size, *most, keep_orig_idx_per_feature
    )
    return results[:5]


def block_bucketize_sparse_features_2d_weights(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: Any,
    weights: Tensor,
    weights_dim: Any = 1,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """:func:`block_bucketize_sparse_features` with a row of weights for each element."""
    return block_bucketize_sparse_features(
        lengths, indices, bucketize_pos, sequence, block_sizes, my_size, weights.reshape((-1, weights_dim)), *more
    )


def populate_bucketized_permute(lengths: Tensor, bucketized_lengths: Tensor, bucket_mapping: Tensor) -> Tensor:
    """The new place of each element, from its bucket."""
    rows = lengths.shape[0]
    row = owners(offsets_of(lengths.long()), bucket_mapping.shape[0])
    _, place = _in_buckets(bucket_mapping.long(), row, bucketized_lengths.shape[0] // rows, rows)
    return place.to(bucket_mapping.dtype)


# -- advertisements ----------------------------------------------------------------------------------------------------


def _samples(batch_offsets: Tensor, count: Any) -> tuple[Tensor, Tensor]:
    """The batch of each sample, and its number there."""
    return owners(batch_offsets, count), _positions(batch_offsets, count)


def _segments_reordered(batch_offsets: Tensor, count: Any, segments: Any, is_shared: bool) -> Tensor:
    """The source segment of each place [features, samples]; segments lie by batch, then feature, then sample.

    With ``is_shared`` the samples of a batch share the batch's one segment of each feature.
    """
    batch, number = _samples(batch_offsets, count)
    batches = batch_offsets.shape[0] - 1
    features = segments // (batches if is_shared else count)
    feature = torch.arange(features, device=batch_offsets.device).unsqueeze(1)
    if is_shared:
        return batch * features + feature
    first = starts_of(batch_offsets.long()).index_select(0, batch) * features
    own = lengths_of(batch_offsets.long()).index_select(0, batch)
    return first + feature * own + number


def reorder_batched_ad_lengths(
    cat_ad_lengths: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: Any,
    broadcast_lengths: bool = False,
    max_batch_size: Any = 0,
) -> Tensor:
    """Lengths by feature, then sample, from lengths by batch, then feature, then sample."""
    segments = _segments_reordered(batch_offsets, num_ads_in_batch, cat_ad_lengths.shape[0], broadcast_lengths)
    return cat_ad_lengths.index_select(0, segments.reshape(-1))


def reorder_batched_ad_indices(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Tensor,
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: Any,
    broadcast_indices: bool = False,
    num_indices_after_broadcast: Any = -1,
) -> Tensor:
    """The indices of the segments that :func:`reorder_batched_ad_lengths` reorders."""
    segments = _segments_reordered(batch_offsets, num_ads_in_batch, cat_ad_offsets.shape[0] - 1, broadcast_indices)
    count = num_indices_after_broadcast if broadcast_indices else cat_ad_indices.shape[0]
    place = copied(segments.reshape(-1), starts_of(cat_ad_offsets), reordered_cat_ad_offsets, count)
    return cat_ad_indices.index_select(0, place)


def cat_reorder_batched_ad_indices(
    cat_ad_offsets: Tensor,
    cat_ad_indices: list[Tensor],
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: Any,
    broadcast_indices: bool,
    total_num_indices: Any,
    pinned_memory: bool = False,
    max_batch_size: Any = 0,
) -> Tensor:
    """:func:`reorder_batched_ad_indices` of several tensors of indices, one after the other."""
    return reorder_batched_ad_indices(
        cat_ad_offsets,
        torch.cat(cat_ad_indices),
        reordered_cat_ad_offsets,
        batch_offsets,
        num_ads_in_batch,
        broadcast_indices,
        total_num_indices,
    )


def reorder_batched_sequence_embeddings(
    cat_sequence_embeddings_offsets: Tensor,
    cat_sequence_embeddings: Tensor,
    reordered_cat_sequence_embeddings_offsets: Tensor,
    batch_offsets: Tensor,
    num_items_in_batch: Any,
) -> Tensor:
    """The rows of embeddings of the segments that :func:`reorder_batched_ad_lengths` reorders."""
    return reorder_batched_ad_indices(
        cat_sequence_embeddings_offsets,
        cat_sequence_embeddings,
        reordered_cat_sequence_embeddings_offsets,
        batch_offsets,
        num_items_in_batch,
    )
