"""fbgemm's operators in ONNX, and torchrec's models: the plugin. Importing it imports neither torch nor fbgemm_gpu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onnxplug import LibraryPatch, OpSample, PluginInfo, Rule, hookimpl

__all__ = ["features_shapes"]

#: The versions of fbgemm-gpu and fbgemm-gpu-cpu whose operators the package knows.
REQUIRED = ">=1.8,<1.9"

#: Module to the operators that its functions compute by ATen operators.
_FUNCTIONS = {
    "jagged": (
        "batched_dense_vec_jagged_2d_mul",
        "batched_dense_vec_jagged_2d_mul_forward",
        "dense_to_jagged",
        "dense_to_jagged_forward",
        "jagged_1d_to_dense",
        "jagged_1d_to_truncated_values",
        "jagged_2d_to_dense",
        "jagged_acc_weights_and_counts",
        "jagged_dense_bmm",
        "jagged_dense_bmm_forward",
        "jagged_dense_dense_elementwise_add_jagged_output",
        "jagged_dense_dense_elementwise_add_jagged_output_forward",
        "jagged_dense_elementwise_add",
        "jagged_dense_elementwise_add_jagged_output",
        "jagged_dense_elementwise_mul",
        "jagged_dense_elementwise_mul_forward",
        "jagged_index_add_2d_forward",
        "jagged_index_add_2d_forward_v2",
        "jagged_index_select",
        "jagged_index_select_2d_forward",
        "jagged_index_select_2d_forward_v2",
        "jagged_jagged_bmm",
        "jagged_jagged_bmm_forward",
        "jagged_slice",
        "jagged_softmax",
        "jagged_softmax_forward",
        "jagged_to_padded_dense",
        "jagged_to_padded_dense_forward",
        "masked_select_jagged_1d",
        "pack_segments",
        "pack_segments_v2",
        "stacked_jagged_1d_to_dense",
        "stacked_jagged_2d_to_dense",
    ),
    "pooled": (
        "all_to_one_device",
        "batch_index_select_dim0",
        "batched_unary_embeddings",
        "generic_histogram_binning_calibration_by_feature",
        "group_index_select_dim0",
        "histogram_binning_calibration",
        "histogram_binning_calibration_by_feature",
        "index_select_dim0",
        "merge_pooled_embeddings",
        "padding_fused_tbe_input_combine",
        "padding_fused_tbe_input_combine_with_length",
        "permute102_baddbmm_permute102",
        "permute_duplicate_pooled_embs",
        "permute_duplicate_pooled_embs_auto_grad",
        "permute_duplicate_pooled_embs_auto_grad_split",
        "permute_duplicate_pooled_embs_split",
        "permute_multi_embedding",
        "permute_pooled_embs",
        "permute_pooled_embs_auto_grad",
        "permute_pooled_embs_auto_grad_split",
        "permute_pooled_embs_split",
        "pruned_array_lookup",
        "regroup_keyed_tensor",
        "sum_reduce_to_one",
        "tbe_input_combine",
        "tbe_input_combine_with_length",
    ),
    "sparse": (
        "asynchronous_batched_complete_cumsum",
        "asynchronous_complete_cumsum",
        "asynchronous_exclusive_cumsum",
        "asynchronous_inclusive_cumsum",
        "block_bucketize_sparse_features",
        "block_bucketize_sparse_features_2d_weights",
        "block_bucketize_sparse_features_inference",
        "bucketize_sparse_features",
        "cat_reorder_batched_ad_indices",
        "expand_into_jagged_permute",
        "get_source_mask",
        "invert_permute",
        "lengths_range",
        "offsets_range",
        "permute_1D_sparse_data",
        "permute_2D_sparse_data",
        "permute_2D_sparse_data_input1D",
        "permute_sequence_embeddings",
        "permute_sparse_data",
        "permute_sparse_features",
        "populate_bucketized_permute",
        "reorder_batched_ad_indices",
        "reorder_batched_ad_lengths",
        "reorder_batched_sequence_embeddings",
        "repeat_arange",
        "segment_sum_csr",
    ),
}
#: Operator to the module of the function that computes it by ATen operators.
FUNCTIONS: Mapping[str, str] = {name: module for module, names in _FUNCTIONS.items() for name in names}

CONVERTERS: Mapping[str, str] = {
    "int_nbit_split_embedding_codegen_lookup_function": "tables",
    "split_embedding_codegen_forward_cpu": "tables",
    "split_embedding_nobag_codegen_forward_cpu": "tables",
}
_OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "cpu": (
        "adagrad",
        "adam",
        "approx_rowwise_adagrad",
        "approx_rowwise_adagrad_with_counter",
        "approx_rowwise_adagrad_with_weight_decay",
        "approx_sgd",
        "lamb",
        "lars_sgd",
        "none",
        "partial_rowwise_adam",
        "partial_rowwise_lamb",
        "rowwise_adagrad",
        "rowwise_adagrad_with_counter",
        "rowwise_adagrad_with_weight_decay",
        "rowwise_weighted_adagrad",
        "sgd",
    ),
    "pt2": (
        "adagrad",
        "adam",
        "lamb",
        "lars_sgd",
        "none",
        "partial_rowwise_adam",
        "partial_rowwise_lamb",
        "rowwise_adagrad",
        "rowwise_adagrad_with_counter",
        "rowwise_rmsprop_ar",
        "sgd",
    ),
}
#: The look-ups of tables that are trained, one for each optimizer.
LOOKUPS = (
    "dense_embedding_codegen_lookup_function",
    *(f"split_embedding_codegen_lookup_{name}_function_{end}" for end, names in _OPTIMIZERS.items() for name in names),
)
TRACED: Mapping[str, str] = dict.fromkeys(("bounds_check_indices", *LOOKUPS), "tables")


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The translations that need the values of tables."""
    return [Rule(f"fbgemm::{name}.default", f"onnxplug_fbgemm.{module}:{name}") for name, module in CONVERTERS.items()]


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The operators that ATen operators compute."""
    return {f"fbgemm::{name}.default": _later(name) for name in FUNCTIONS}


def _later(name: str) -> Callable[..., Any]:
    """The function that computes an operator, imported when it is called."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from onnxplug_fbgemm.capture import check_version, function_of

        check_version()
        return function_of(name)(*args, **kwargs)

    decomposed.__qualname__, decomposed.__module__ = name, f"{__name__}.{FUNCTIONS[name]}"
    return decomposed


@hookimpl
def onnxplug_patches() -> list[LibraryPatch]:
    """The patch that makes fbgemm's operators and modules traceable while torch.export captures a model."""
    return [LibraryPatch(("fbgemm_gpu",), "onnxplug_fbgemm.capture:patches")]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_fbgemm.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespace and libraries; either of two packages has the operators, so neither is required."""
    libraries, replaced = ("fbgemm_gpu", "torchrec"), [f"fbgemm::{name}" for name in TRACED]
    return PluginInfo(api=1, namespaces=("fbgemm",), libraries=libraries, replaced=replaced)


def features_shapes(features: Any, values: str = "values", lengths: str = "lengths") -> Any:
    """The part of ``dynamic_shapes`` that belongs to a torchrec ``KeyedJaggedTensor``.

    Args:
        features: The object.
        values, lengths: Names of the dimensions of its values and weights, and of its lengths.

    Returns:
        An entry for each of its parts.
    """
    from onnxplug_fbgemm.keyed import shapes

    return shapes(features, values, lengths)
