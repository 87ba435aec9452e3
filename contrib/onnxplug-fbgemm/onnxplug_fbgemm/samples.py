"""Inputs to test the operators with, of two sizes: lengths and offsets fit the values beside them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from onnxplug import OpSample

#: Lengths of segments, of both sizes: the second has empty segments at both ends, and a longer segment.
_LENGTHS = ([2, 0, 3], [0, 1, 4, 1, 0])
#: Lengths of two features' samples, of both sizes.
_FEATURES = ([[2, 0, 1], [1, 3, 0]], [[0, 1, 4, 0], [2, 0, 0, 5]])
_OPSETS = (13, 18, 21)
#: Dynamic dimensions of values, of segments, of offsets.
_N, _B, _O = {0: "values"}, {0: "segments"}, {0: "offsets"}

Make = Callable[[int], tuple[Any, ...]]


def samples() -> list[OpSample]:
    """The samples of all operators."""
    return [*_jagged(), *_selected(), *_ranges(), *_permuted(), *_buckets(), *_reordered(), *_pooled(), *_tables()]


def _sample(op: str, make: Make, shapes: Sequence[Any] | None = None, results: Any = None) -> OpSample:
    """A sample whose inputs ``make`` makes, of size 0 and, with ``shapes``, of size 1."""
    first, second = (functools.partial(_made, make, size) for size in (0, 1))
    others = () if shapes is None else (second,)
    return OpSample(f"fbgemm::{op}", first, opsets=_OPSETS, dynamic_shapes=shapes, others=others, results=results)


def _made(make: Make, size: int) -> tuple[Any, ...]:
    importlib.import_module("fbgemm_gpu")  # registers the operators
    return make(size)


# -- tensors -----------------------------------------------------------------------------------------------------------


def _wave(*shape: int) -> Any:
    import torch

    return torch.arange(float(torch.Size(shape).numel())).mul(1.3).sin().mul(3).reshape(shape)


def _whole(values: Any, dtype: str = "int64") -> Any:
    import torch

    return torch.tensor(values, dtype=getattr(torch, dtype))


def _indices(count: int, most: int, dtype: str = "int64") -> Any:
    return _whole([7 * i % most for i in range(count)], dtype)


def _bounds(lengths: Sequence[int], dtype: str = "int64") -> Any:
    return _whole([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype)


def _lengths(size: int, dtype: str = "int64") -> Any:
    return _whole(_LENGTHS[size], dtype)


def _offsets(size: int, dtype: str = "int64") -> Any:
    return _bounds(_LENGTHS[size], dtype)


def _values(size: int, *width: int) -> Any:
    return _wave(sum(_LENGTHS[size]), *width)


def _dense(size: int, *width: int) -> Any:
    return _wave(len(_LENGTHS[size]), 3, *width)


def _inner(size: int) -> Any:
    """Offsets of a second level: as many segments as the first one has values."""
    return _bounds([i % 3 for i in range(sum(_LENGTHS[size]))])


# -- samples -----------------------------------------------------------------------------------------------------------


def _jagged() -> list[OpSample]:
    def pair(size: int) -> tuple[Any, ...]:
        return _values(size, 3), [_offsets(size)], _dense(size, 3)

    def nested(size: int) -> tuple[Any, ...]:
        return _wave(int(_inner(size)[-1]), 2), [_offsets(size), _inner(size)]

    def segments(size: int) -> tuple[Any, ...]:
        return _values(size, 3), _offsets(size, "int32")

    levels, two = [_O, {0: "inner"}], [_N, [_O], _B]
    padded, one = [_N, [_O], [None], None], [_N, _O, None]
    return [
        _sample("jagged_to_padded_dense", lambda size: (_values(size, 3), [_offsets(size)], [3], 1.5), padded),
        _sample("jagged_to_padded_dense", lambda size: (_values(size), [_offsets(size)], [1], 0.0), padded),
        _sample("jagged_to_padded_dense", lambda size: (*nested(size), [2, 2], -1.0), [_N, levels, [None] * 2, None]),
        _sample(
            "jagged_to_padded_dense_forward", lambda size: (_values(size, 3).half(), [_offsets(size)], [5], 0.5), padded
        ),
        _sample("dense_to_jagged", lambda size: (_dense(size, 3), [_offsets(size)], None), [_B, [_O], None]),
        _sample("dense_to_jagged_forward", lambda size: (_dense(size, 3), [_offsets(size)], None), [_B, [_O], None]),
        _sample("jagged_1d_to_dense", lambda size: (_values(size).long(), _offsets(size), 3, 7), [_N, _O, None, None]),
        _sample("jagged_2d_to_dense", lambda size: (*segments(size), 3), one),
        _sample("stacked_jagged_1d_to_dense", lambda _: (_wave(5), _whole([[2, 0], [1, 2]]), [0, 2, 5], [1, 3], 5)),
        _sample("stacked_jagged_2d_to_dense", lambda _: (_wave(5, 2), _whole([[2, 0], [1, 2]]), [0, 2, 5], [1, 3], 0)),
        *(_sample(f"jagged_dense_elementwise_{name}", pair, two) for name in ("add", "mul", "mul_forward")),
        _sample("jagged_dense_elementwise_add", lambda size: (*nested(size), _dense(size, 2, 2)), [_N, levels, _B]),
        _sample("jagged_dense_elementwise_add_jagged_output", pair, two),
        *(
            _sample(
                f"jagged_dense_dense_elementwise_add_jagged_output{end}",
                lambda size: (*pair(size), _dense(size, 3)),
                [*two, _B],
            )
            for end in ("", "_forward")
        ),
        *(
            _sample(
                f"batched_dense_vec_jagged_2d_mul{end}",
                lambda size: (_wave(6, 3), _wave((5, 7)[size], 4), _bounds(([2, 0, 3], [0, 4, 3])[size])),
                [None, _N, None],
            )
            for end in ("", "_forward")
        ),
        *(
            _sample(f"jagged_dense_bmm{end}", lambda size: (*segments(size), _dense(size, 2), 4), [_N, _O, _B, None])
            for end in ("", "_forward")
        ),
        *(
            _sample(
                f"jagged_jagged_bmm{end}",
                lambda size: (_values(size, 3), _values(size, 2), _offsets(size), 4),
                [_N, _N, _O, None],
            )
            for end in ("", "_forward")
        ),
        *(_sample(f"jagged_softmax{end}", lambda size: (*segments(size), 4), one) for end in ("", "_forward")),
    ]


def _selected() -> list[OpSample]:
    def selection(size: int) -> tuple[Any, ...]:
        """Values, the indices of the taken segments, and the ends of the segments before and after."""
        taken = ([2, 2, 0], [2, 4, 1, 2])[size]
        chosen = [_LENGTHS[size][i] for i in taken]
        return _values(size, 2), _whole(taken), _offsets(size)[1:], _bounds(chosen)[1:]

    def added(size: int) -> tuple[Any, ...]:
        _, taken, inside, outside = selection(size)
        return _wave(int(outside[-1]), 2), taken, outside, inside

    sliced = [_N, _B, _B, None]
    return [
        _sample(
            "jagged_index_select",
            lambda size: (_values(size, 2), _lengths(size), selection(size)[1], None),
            [_N, _B, {0: "taken"}, None],
        ),
        _sample("jagged_index_select_2d_forward", lambda size: (*selection(size), 8)),
        _sample(
            "jagged_index_select_2d_forward_v2",
            lambda size: (*selection(size), None),
            [_N, {0: "taken"}, _B, {0: "taken"}, None],
        ),
        _sample("jagged_index_add_2d_forward", lambda size: (*added(size), 8, 5)),
        _sample("jagged_index_add_2d_forward_v2", lambda size: (*added(size), 5, 8)),
        _sample(
            "jagged_1d_to_truncated_values", lambda size: (_values(size), _lengths(size, "int32"), 2), [_N, _B, None]
        ),
        _sample(
            "masked_select_jagged_1d",
            lambda size: (_values(size).long(), _lengths(size), _values(size) > 0),
            [_N, _B, _N],
        ),
        _sample("jagged_slice", lambda size: (_values(size), _lengths(size), _lengths(size) // 2, 2), sliced),
        _sample(
            "jagged_acc_weights_and_counts",
            lambda size: (_values(size), _indices(sum(_LENGTHS[size]), 4), 4),
            [_N, _N, None],
        ),
        _sample("pack_segments", lambda size: (_values(size, 2), _lengths(size), 4), [_N, _B, None]),
        _sample(
            "pack_segments_v2", lambda size: (_values(size, 2), _lengths(size), 4, True, True), [_N, _B, *[None] * 3]
        ),
    ]


def _ranges() -> list[OpSample]:
    sums = [
        _sample(f"asynchronous_{name}_cumsum", lambda size: (_lengths(size),), [_B])
        for name in ("inclusive", "exclusive", "complete")
    ]
    rows = [
        _sample(f"asynchronous_{name}cumsum", lambda size: (_whole(_FEATURES[size], "int32"),), [{1: "samples"}])
        for name in ("complete_", "batched_complete_")
    ]
    return [
        *sums,
        *rows,
        _sample("offsets_range", lambda size: (_offsets(size)[:-1], 5)),
        _sample("lengths_range", lambda size: (_lengths(size), None), [_B, None]),
        _sample("lengths_range", lambda size: (_lengths(size), [5, 1])),
        _sample("repeat_arange", lambda size: (_lengths(size, "int32"),), [_B]),
        _sample("get_source_mask", lambda size: (_lengths(size), _lengths(size) + 1, 13)),
        _sample("segment_sum_csr", lambda size: (2, _offsets(size), _wave(2 * sum(_LENGTHS[size]))), [None, _O, _N]),
        _sample("invert_permute", lambda size: (_whole(([2, 0, 1], [3, 1, 4, 2, 0])[size]),), [_N]),
        _sample("expand_into_jagged_permute", lambda _: (_whole([2, 0, 1]), _bounds([2, 0, 3]), _bounds([3, 2, 0]), 5)),
    ]


def _features(size: int, dtype: str = "int64") -> tuple[Any, ...]:
    """A permutation, lengths, values and weights of two features."""
    count = sum(map(sum, _FEATURES[size]))
    permute = ([1, 0], [1, 0, 1])[size]
    return _whole(permute, "int32"), _whole(_FEATURES[size], dtype), _indices(count, 40, dtype), _wave(count)


def _permuted() -> list[OpSample]:
    taken, samples_ = {0: "taken"}, {1: "samples"}
    shapes = [taken, samples_, _N, _N]

    def flat(size: int) -> tuple[Any, ...]:
        permute, lengths, values, weights = _features(size)
        return permute, lengths.reshape(-1), values, 3, weights, None

    def rows(size: int) -> tuple[Any, ...]:
        permute = _whole(([2, 0], [4, 2, 2])[size], "int32")
        return permute, _lengths(size), _values(size).long(), _values(size), None

    return [
        *(
            _sample(f"permute_{name}", lambda size: (*_features(size, "int32"), None), [*shapes, None])
            for name in ("2D_sparse_data", "sparse_data")
        ),
        _sample("permute_2D_sparse_data", lambda size: (*_features(size)[:3], None, 7)),
        _sample("permute_2D_sparse_data_input1D", flat),
        _sample("permute_1D_sparse_data", rows, [taken, _B, _N, _N, None]),
        _sample("permute_sparse_features", lambda size: _features(size), shapes),
        _sample("permute_sequence_embeddings", lambda size: (*_features(size)[:2], _features(size)[3]), shapes[:3]),
    ]


def _bucketed(size: int, dtype: str = "int64") -> tuple[Any, ...]:
    """Lengths, indices and weights of two features, the samples of both in one axis."""
    _, lengths, values, weights = _features(size, dtype)
    return lengths.reshape(-1), values, weights


def _buckets() -> list[OpSample]:
    def blocks(size: int, *more: Any) -> tuple[Any, ...]:
        lengths, values, weights = _bucketed(size)
        return lengths, values, True, True, _whole([3, 10]), 2, weights, *more

    def mapped(size: int) -> tuple[Any, ...]:
        import torch

        results = torch.ops.fbgemm.block_bucketize_sparse_features_inference(*blocks(size, None, -1, None, True))
        return blocks(size)[0], results[0], results[5]

    def uneven(size: int) -> tuple[Any, ...]:
        return blocks(size, None, -1, [_whole([0, 5, 9]), _whole([0, 1, 30])])

    def remainders(size: int) -> tuple[Any, ...]:
        lengths, values, weights = _bucketed(size, "int32")
        return lengths, values, True, 3, weights

    def matrix(size: int) -> tuple[Any, ...]:
        return (*blocks(size)[:6], _wave(blocks(size)[1].shape[0], 2), 2)

    block, plain = "block_bucketize_sparse_features", [{0: "lengths"}, _N, None, None, None, None, _N]
    return [
        _sample("bucketize_sparse_features", remainders, [{0: "lengths"}, _N, None, None, _N]),
        _sample(block, blocks, plain),
        _sample(block, lambda size: blocks(size, None, -1, None, True), [*plain, *[None] * 4]),
        _sample(block, lambda size: blocks(size, None, -1, None, False, _whole([4, 6])), [*plain, *[None] * 5]),
        _sample(block, uneven, [*plain, None, None, [None, None]]),
        _sample(f"{block}_inference", lambda size: blocks(size, None, -1, None, True), [*plain, *[None] * 4]),
        _sample(f"{block}_2d_weights", matrix, [*plain, None]),
        _sample("populate_bucketized_permute", mapped, [{0: "lengths"}, {0: "buckets"}, _N]),
    ]


def _reordered() -> list[OpSample]:
    """Samples of the reordering operators: two features of the samples of two batches."""

    def reordered(size: int) -> tuple[Any, ...]:
        import torch

        batches = _bounds([2, 1], "int32")
        lengths = _whole(([2, 0, 1, 3, 1, 0], [0, 4, 0, 0, 2, 1])[size])
        new = torch.ops.fbgemm.reorder_batched_ad_lengths(lengths, batches, 3)
        return _bounds(lengths.tolist(), "int32"), int(lengths.sum()), _bounds(new.tolist(), "int32"), batches, lengths

    def indices(size: int) -> tuple[Any, ...]:
        offsets, count, new, batches, _ = reordered(size)
        return offsets, _indices(count, 30), new, batches, 3

    def rows(size: int) -> tuple[Any, ...]:
        offsets, count, new, batches, _ = reordered(size)
        return offsets, _wave(count, 2), new, batches, 3

    def several(size: int) -> tuple[Any, ...]:
        offsets, values, new, batches, _ = indices(size)
        first = int(offsets[4])
        return offsets, [values[:first], values[first:]], new, batches, 3, False, values.shape[0]

    def shared(_: int) -> tuple[Any, ...]:
        offsets, new, batches = (_bounds(lengths, "int32") for lengths in ([2, 0, 1, 3], [2, 2, 1, 0, 0, 3], [2, 1]))
        return offsets, _indices(6, 30), new, batches, 3, True, 8

    return [
        _sample("reorder_batched_ad_lengths", lambda size: (reordered(size)[4], _bounds([2, 1]), 3)),
        _sample("reorder_batched_ad_lengths", lambda _: (_whole([2, 0, 1, 3]), _bounds([2, 1]), 3, True)),
        _sample("reorder_batched_ad_indices", indices, [None, _N, None, None, None]),
        _sample("reorder_batched_ad_indices", shared),
        _sample("cat_reorder_batched_ad_indices", several),
        _sample("reorder_batched_sequence_embeddings", rows, [None, _N, None, None, None]),
    ]


def _pooled() -> list[OpSample]:
    batch = {0: "samples"}

    def permuted(size: int) -> tuple[Any, ...]:
        return _wave(2 + size, 9), _bounds([4, 2, 3]), _whole([2, 0, 1]), _bounds([3, 4, 2]), _whole([1, 2, 0])

    def repeated(size: int) -> tuple[Any, ...]:
        return _wave(2 + size, 9), _bounds([4, 2, 3]), _whole([2, 0, 2]), _bounds([3, 4, 3]), _whole([1, 2, 0])

    def regrouped(size: int) -> tuple[Any, ...]:
        return [_wave(2 + size, 6), _wave(2 + size, 5)], *_KEYED

    def moved(size: int) -> tuple[Any, ...]:
        import torch

        both = regrouped(size)[0]
        return both, *torch.ops.fbgemm.kt_regroup_arguments(both[0], *_KEYED)

    def tables(size: int) -> tuple[Any, ...]:
        return _wave(32), _whole([2, 0, 4, 1]), [2, 2], [3, 5], [4, 4], bool(size)

    one = [batch, *[None] * 4]
    both = [batch, batch]
    return [
        *(_sample(f"permute_pooled_embs{end}", permuted, one) for end in _ENDS),
        *(_sample(f"permute_duplicate_pooled_embs{end}", repeated, one) for end in _ENDS),
        _sample("permute_multi_embedding", moved, [both, None, None, None, [None, None]]),
        _sample("regroup_keyed_tensor", regrouped, [both, [[None] * 2] * 2, [[None] * 2] * 2, [[None] * 3, [None]]]),
        _sample(
            "permute102_baddbmm_permute102",
            lambda size: (_wave(2, 4), _wave(3 + size, 2, 3), _wave(2, 3, 4)),
            [None, batch, None],
        ),
        _sample("index_select_dim0", lambda size: (_wave(4, 3), _indices(3 + size, 4)), [None, {0: "taken"}]),
        _sample(
            "group_index_select_dim0",
            lambda size: ([_wave(4, 3), _wave(2, 3)], [_indices(3 + size, 4), _indices(2, 2)]),
            [[None, None], [{0: "taken"}, None]],
        ),
        _sample("batch_index_select_dim0", lambda _: tables(0)),
        _sample("batch_index_select_dim0", lambda _: tables(1)),
    ]


_ENDS = ("", "_auto_grad", "_split", "_auto_grad_split")
#: The keys and widths of two tensors, and the groups of keys.
_KEYED: tuple[Any, ...] = ([["a", "b"], ["c", "d"]], [[2, 4], [3, 2]], [["c", "a", "b"], ["d"]])


def _tables() -> list[OpSample]:
    def combined(size: int, last: bool) -> tuple[Any, ...]:
        import torch

        indices = [_indices(3, 9, "int32"), _indices(2 + size, 9)]
        offsets = [_bounds([1, 2]), _bounds([2 + size], "int32")]
        return indices, offsets, [_wave(3), torch.empty(0)], torch.tensor([last, not last])

    def bags(size: int, dtype: str = "int64") -> tuple[Any, ...]:
        """Offsets of two features' bags, and indices below 3."""
        lengths = [length for row in _FEATURES[size] for length in row]
        return _bounds(lengths, dtype), _indices(sum(lengths), 3, dtype)

    def seen() -> tuple[Any, ...]:
        """The numbers of examples and of positives of 10 bins for 3 values."""
        examples = (_indices(30, 4).double() + 1) * 20
        return examples, examples * 0.3

    def calibrated(size: int, *bins: Any) -> tuple[Any, ...]:
        return (
            _wave(5 if size else 3),
            _whole([0, 4, 1, 1, 1][: sum(_LENGTHS[size])] + [2] * size),
            _lengths(size),
            2,
            *seen(),
            *bins,
        )

    def pruned(size: int) -> tuple[Any, ...]:
        offsets, indices = bags(size, "int32")
        return indices, offsets, _whole([2, -1, 0], "int32"), _whole([0, 3, 3])

    features = [[None, _N], [None, None], [None, None]]
    some = [_B, {0: "known"}, _B, *[None] * 3]
    padded, more = "padding_fused_tbe_input_combine", (0.4, 50, 0.9)
    return [
        _sample("tbe_input_combine", lambda size: combined(size, True), [*features, None]),
        _sample("tbe_input_combine_with_length", lambda size: combined(size, True)[:3], features),
        _sample(padded, lambda size: (*combined(size, True), 4), [*features, None, None]),
        _sample(f"{padded}_with_length", lambda size: (*combined(size, True)[:3], 4), [*features, None]),
        _sample(
            "batched_unary_embeddings",
            lambda size: (_wave(2, 7, 1), _bounds([3, 4]), *bags(size)),
            [None, None, _O, _N],
        ),
        _sample("pruned_array_lookup", pruned, [_N, _O, None, None]),
        _sample(
            "histogram_binning_calibration",
            lambda size: (_wave(3 + size), *(x[:10] for x in seen()), 0.4, 0.0, 1.0, 50, 0.9),
            [_N, *[None] * 7],
        ),
        _sample(
            "histogram_binning_calibration_by_feature",
            lambda size: calibrated(size, 10, 0.4, 0.0, 1.0, 50, 0.9),
            [*some, *[None] * 6],
        ),
        _sample(
            "generic_histogram_binning_calibration_by_feature",
            lambda size: calibrated(size, _wave(9).sigmoid().sort()[0].double(), *more),
            [*some, *[None] * 4],
        ),
    ]
