"""fbgemm's operators on pooled embeddings, on tables of other kinds and on inputs of tables, by ATen operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onnxplug_fbgemm.segments import (
    copied,
    lengths_of,
    offsets_of,
    one_more,
    owners,
    size_of,
    starts_of,
)

# -- columns in another order ------------------------------------------------------------------------------------------


def permute_pooled_embs(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """The columns of each feature in another order of features."""
    return _columns_permuted(pooled_embs, offset_dim_list, permute_list, pooled_embs.shape[1])


def _columns_permuted(pooled: Tensor, offsets: Tensor, permute: Tensor, width: Any) -> Tensor:
    lengths = lengths_of(offsets.long()).index_select(0, permute.long())
    return pooled.index_select(1, copied(permute, starts_of(offsets), offsets_of(lengths), width))


permute_pooled_embs_auto_grad = permute_pooled_embs
permute_pooled_embs_split = permute_pooled_embs
permute_pooled_embs_auto_grad_split = permute_pooled_embs


def permute_duplicate_pooled_embs(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """:func:`permute_pooled_embs` where a feature may occur more than once."""
    lengths = lengths_of(offset_dim_list.long()).index_select(0, permute_list.long())
    return _columns_permuted(pooled_embs, offset_dim_list, permute_list, size_of(lengths.sum()))


permute_duplicate_pooled_embs_auto_grad = permute_duplicate_pooled_embs
permute_duplicate_pooled_embs_split = permute_duplicate_pooled_embs
permute_duplicate_pooled_embs_auto_grad_split = permute_duplicate_pooled_embs


def permute_multi_embedding(
    pooled_embs: list[Tensor], permutes: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: list[Any]
) -> list[Tensor]:
    """New tensors from the columns of several tensors.

    A row of ``permutes`` is a run of columns: its source tensor, its target tensor, its first column in both, and its
    length.
    """
    source, target, first, place, length = (column.long() for column in permutes.unbind(1)[:5])
    widths = [pooled.shape[1] for pooled in pooled_embs]
    befores = [torch.tensor([sum(sizes[:i]) for i in range(len(sizes))]) for sizes in (widths, out_lengths)]
    first, place = first + befores[0].index_select(0, source), place + befores[1].index_select(0, target)
    column = torch.arange(sum(out_lengths)).unsqueeze(1)
    covered = ((column >= place) & (column < place + length)).long()
    taken = (covered * (first - place)).sum(1) + column.squeeze(1)
    return list(torch.cat(pooled_embs, 1).index_select(1, taken).split(list(out_lengths), 1))


def regroup_keyed_tensor(
    pooled_embs: list[Tensor], keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]]
) -> list[Tensor]:
    """A tensor for each group of keys."""
    parts: dict[str, Tensor] = {}
    for pooled, names, sizes in zip(pooled_embs, keys, lengths, strict=True):
        for name, part in zip(names, pooled.split(list(sizes), 1), strict=True):
            parts.setdefault(name, part)
    return [torch.cat([parts[name] for name in group], 1) for group in groups]


def merge_pooled_embeddings(
    pooled_embeddings: list[Tensor], uncat_dim_size: Any, target_device: Any, cat_dim: Any = 1
) -> Tensor:
    """The tensors joined along an axis."""
    return torch.cat(pooled_embeddings, cat_dim)


def all_to_one_device(input_tensors: list[Tensor], target_device: Any) -> list[Tensor]:
    """Copies of the tensors: a model has one device."""
    return [tensor.clone() for tensor in input_tensors]


def sum_reduce_to_one(input_tensors: list[Tensor], target_device: Any) -> Tensor:
    """The sum of the tensors."""
    total = input_tensors[0].clone()
    for tensor in input_tensors[1:]:
        total = total + tensor
    return total


def permute102_baddbmm_permute102(bias: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """[rows, batch, out]: A [rows, batch, in] times the matrices B [batch, in, out], plus the bias [batch, out]."""
    return (bias.unsqueeze(1) + torch.bmm(A.transpose(0, 1), B)).transpose(0, 1)


# -- rows taken --------------------------------------------------------------------------------------------------------


def index_select_dim0(
    input: Tensor,
    indices: Tensor,
    consecutive_range_start: Any = 0,
    consecutive_range_length: Any = 0,
    skip_indices_sorting_fwd: bool | None = None,
) -> Tensor:
    """Rows of a tensor."""
    return input.index_select(0, indices)


def group_index_select_dim0(input_group: list[Tensor], indices_group: list[Tensor]) -> list[Tensor]:
    """Rows of several tensors."""
    return [rows.index_select(0, index) for rows, index in zip(input_group, indices_group, strict=True)]


def batch_index_select_dim0(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: list[Any],
    input_rows: list[Any],
    input_columns: list[Any],
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """Rows of several matrices that lie one after the other in one axis."""
    sizes = [rows * columns for rows, columns in zip(input_rows, input_columns, strict=True)]
    taken = [
        part.reshape((rows, columns)).index_select(0, index)
        for part, rows, columns, index in zip(
            inputs.split(sizes), input_rows, input_columns, indices.split(list(input_num_indices)), strict=True
        )
    ]
    if permute_output_dim_0_1:
        return torch.cat(taken, 1).reshape(-1)
    return torch.cat([rows.reshape(-1) for rows in taken])


# -- inputs of tables --------------------------------------------------------------------------------------------------


def _combined(indices_list: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All indices, and all weights where some feature has weights: features without weights get 1."""
    indices = torch.cat([index.int() for index in indices_list])
    if all(weight.shape[0] == 0 for weight in weights):
        return indices, torch.empty(0)
    rows = [
        weight if weight.shape[0] else torch.ones(index.shape, dtype=torch.float32)
        for index, weight in zip(indices_list, weights, strict=True)
    ]
    return indices, torch.cat([row.float() for row in rows])


def tbe_input_combine(
    indices_list: list[Tensor],
    offsets_list: list[Tensor],
    per_sample_weights: list[Tensor],
    include_last_offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets and weights of several features; a feature's offsets may include the end of its last bag."""
    total, offsets, kept = 0, [], []
    for number, (index, own) in enumerate(zip(indices_list, offsets_list, strict=True)):
        offsets.append(own.int() + total)
        is_last = torch.arange(own.shape[0]) == own.shape[0] - 1
        kept.append(~(is_last & include_last_offsets[number]))
        total = total + index.shape[0]
    indices, weights = _combined(indices_list, per_sample_weights)
    together = torch.cat(offsets)[torch.cat(kept)]
    return indices, torch.cat([together, together.new_full((1,), total)]), weights


def tbe_input_combine_with_length(
    indices_list: list[Tensor], lengths_list: list[Tensor], per_sample_weights: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, lengths and weights of several features."""
    indices, weights = _combined(indices_list, per_sample_weights)
    return indices, torch.cat([lengths.int() for lengths in lengths_list]), weights


def padding_fused_tbe_input_combine(
    indices_list: list[Tensor],
    offsets_list: list[Tensor],
    per_sample_weights: list[Tensor],
    include_last_offsets: Tensor,
    batch_size: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`tbe_input_combine` with empty bags behind each feature's bags, up to ``batch_size``."""
    total, offsets = 0, []
    bag = torch.arange(batch_size)
    for number, (index, own) in enumerate(zip(indices_list, offsets_list, strict=True)):
        begun = bag < own.shape[0] - include_last_offsets[number].int()
        start = one_more(own.int()).index_select(0, bag.clamp(max=own.shape[0]))
        offsets.append(torch.where(begun, start, index.shape[0]) + total)
        total = total + index.shape[0]
    indices, weights = _combined(indices_list, per_sample_weights)
    return indices, torch.cat([*offsets, offsets[0].new_full((1,), total)]), weights


def padding_fused_tbe_input_combine_with_length(
    indices_list: list[Tensor], lengths_list: list[Tensor], per_sample_weights: list[Tensor], batch_size: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`tbe_input_combine_with_length` with empty bags behind each feature's bags, up to ``batch_size``."""
    bag = torch.arange(batch_size)
    padded = [one_more(lengths.int()).index_select(0, bag.clamp(max=lengths.shape[0])) for lengths in lengths_list]
    indices, weights = _combined(indices_list, per_sample_weights)
    return indices, torch.cat(padded), weights


# -- tables of other kinds ---------------------------------------------------------------------------------------------


def batched_unary_embeddings(weight: Tensor, table_offsets: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
    """[tasks, samples, tables]: sums of one number a row; weight is [tasks, rows of all tables, 1]."""
    tables, bags = table_offsets.shape[0] - 1, offsets.shape[0] - 1
    samples = bags // tables
    bag = owners(offsets, indices.shape[0])
    row = one_more(starts_of(table_offsets.long())).index_select(0, bag // samples) + indices
    numbers = weight.reshape((weight.shape[0], -1)).index_select(1, row)
    total = numbers.new_zeros((weight.shape[0], bags)).index_add(1, bag, numbers)
    place = torch.arange(tables, device=bag.device) * samples + torch.arange(samples, device=bag.device).unsqueeze(1)
    return total.index_select(1, place.reshape(-1)).reshape((-1, samples, tables))


def pruned_array_lookup(
    indices: Tensor, offsets: Tensor, index_remappings: Tensor, index_remappings_offsets: Tensor
) -> Tensor:
    """Indices remapped to the remaining rows of pruned tables; a table without remappings is whole."""
    tables = index_remappings_offsets.shape[0] - 1
    samples = (offsets.shape[0] - 1) // tables
    table = owners(offsets, indices.shape[0]) // samples
    sizes = one_more(lengths_of(index_remappings_offsets.long())).index_select(0, table)
    first = one_more(starts_of(index_remappings_offsets.long())).index_select(0, table)
    place = torch.where(sizes > 0, first + indices, index_remappings.shape[0])
    return torch.where(sizes > 0, one_more(index_remappings).index_select(0, place), indices).to(indices.dtype)


# -- calibration -------------------------------------------------------------------------------------------------------


def histogram_binning_calibration(
    logit: Tensor,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    positive_weight: float,
    lower_bound: float,
    upper_bound: float,
    bin_ctr_in_use_after: Any,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """The probability of each logit, mixed with the share of positives in its bin, and the bin."""
    chance = torch.sigmoid(logit + math.log(positive_weight))
    step = (upper_bound - lower_bound) / bin_num_examples.shape[0]
    number = (torch.ceil((chance.double() - lower_bound) / step) - 1).long()
    return _calibrated(chance, number, bin_num_examples, bin_num_positives, bin_ctr_in_use_after, bin_ctr_weight_value)


def _calibrated(
    chance: Tensor, number: Tensor, examples: Tensor, positives: Tensor, after: Any, share: float
) -> tuple[Tensor, Tensor]:
    seen, hits = examples.index_select(0, number), positives.index_select(0, number)
    mixed = (hits / seen * share + chance.double() * (1 - share)).to(chance.dtype)
    return torch.where(seen > after, mixed, chance), number


def histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: Any,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    num_bins: Any,
    positive_weight: float,
    lower_bound: float,
    upper_bound: float,
    bin_ctr_in_use_after: Any,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """:func:`histogram_binning_calibration` with separate bins for each value of a feature."""
    chance = torch.sigmoid(logit + math.log(positive_weight))
    step = (upper_bound - lower_bound) / num_bins
    number = (torch.ceil((chance.double() - lower_bound) / step) - 1).long()
    number = number + _feature_of(segment_value, segment_lengths, num_segments) * num_bins
    return _calibrated(chance, number, bin_num_examples, bin_num_positives, bin_ctr_in_use_after, bin_ctr_weight_value)


def _feature_of(values: Tensor, lengths: Tensor, count: Any) -> Tensor:
    """The feature's value of each sample, from 1 on; 0 where it has no value, several, or an unknown value."""
    first = starts_of(offsets_of(lengths.long())).clamp(max=values.shape[0])
    value = torch.where(lengths == 1, one_more(values.long(), -1).index_select(0, first) + 1, 0)
    return torch.where(value > count, 0, value.clamp(min=0))


def generic_histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: Any,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    bin_boundaries: Tensor,
    positive_weight: float,
    bin_ctr_in_use_after: Any,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """:func:`histogram_binning_calibration_by_feature` with bins between given boundaries."""
    chance = torch.sigmoid(logit + math.log(positive_weight))
    number = (chance.double().unsqueeze(1) > bin_boundaries).sum(1)
    number = number + _feature_of(segment_value, segment_lengths, num_segments) * (bin_boundaries.shape[0] + 1)
    return _calibrated(chance, number, bin_num_examples, bin_num_positives, bin_ctr_in_use_after, bin_ctr_weight_value)
