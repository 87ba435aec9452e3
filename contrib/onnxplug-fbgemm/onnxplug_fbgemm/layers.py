"""fbgemm's modules of tables while torch.export captures a model.

Tables that are trained are looked up by an operator for each optimizer, whose schema declares that it writes to the
weights: it does so for gradients alone. The operator without an optimizer, which all of them call, is traced in its
place.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onnxplug import Unsupported
from onnxplug.capture.patching import patched
from onnxplug_fbgemm import LOOKUPS
from onnxplug_fbgemm.segments import owners

#: fbgemm's numbers of modes of the check, and of pooling.
_WARNING, _IGNORE = 1, 2
_WITHOUT_POOLING = 2


class _WithoutCache:
    """Stands for the queue and the counter of rows in a device's cache, which torch.export can't trace."""

    def pop(self) -> Tensor:
        """No places in the cache."""
        return torch.empty(0, dtype=torch.int32)


@contextlib.contextmanager
def traceable(module: Any) -> Iterator[None]:
    """A context for a capture: tables have no cache, and their checks of indices change a copy of the indices."""
    kinds = [_kind(module_name, name) for module_name, name in _MODULES]
    layers = tuple(kind for kind in kinds if kind is not None)
    with contextlib.ExitStack() as stack:
        for layer in module.modules() if isinstance(module, nn.Module) else ():
            if isinstance(layer, layers):
                for name in [name for name, value in vars(layer).items() if isinstance(value, torch.ScriptObject)]:
                    stack.enter_context(patched(layer, name, _WithoutCache()))
        for kind in layers:
            stack.enter_context(patched(kind, "forward", _on_a_copy(kind.forward)))
        for name in LOOKUPS:
            stack.enter_context(patched(torch.ops.fbgemm, name, _lookup(getattr(torch.ops.fbgemm, name).default)))
        stack.enter_context(patched(torch.ops.fbgemm, "bounds_check_indices", bounds_check_indices))
        yield


_PREFIX = "fbgemm_gpu.split_table_batched_embeddings_ops_"
_MODULES = (
    (f"{_PREFIX}inference", "IntNBitTableBatchedEmbeddingBagsCodegen"),
    (f"{_PREFIX}training", "SplitTableBatchedEmbeddingBagsCodegen"),
    (f"{_PREFIX}training", "DenseTableBatchedEmbeddingBagsCodegen"),
)


def _kind(module: str, name: str) -> Any:
    """A class of fbgemm, ``None`` where its module isn't imported."""
    return getattr(sys.modules.get(module), name, None)


def _lookup(op: Any) -> Callable[..., Tensor]:
    """The function that is traced in place of one optimizer's look-up."""
    names = [argument.name for argument in op._schema.arguments]

    def lookup(*args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if arguments.get("max_B", -1) != -1:
            raise Unsupported("features with numbers of samples of their own")
        weights = arguments.get("weights") or [arguments.get("host_weights", arguments.get("dev_weights"))]
        if len(weights) not in (1, 3):
            raise Unsupported("tables in a device's memory")
        where = weights[2] if len(weights) == 3 else arguments["weights_offsets"]
        inputs = [arguments["hash_size_cumsum"], arguments["indices"], arguments["offsets"]]
        if arguments["pooling_mode"] == _WITHOUT_POOLING:
            return torch.ops.fbgemm.split_embedding_nobag_codegen_forward_cpu(
                weights[0], where, arguments["max_D"], *inputs, arguments["output_dtype"]
            )
        factors = arguments.get("indice_weights")
        factors = weights[0].new_empty(0, dtype=torch.float32) if factors is None else factors
        return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            weights[0],
            where,
            arguments["D_offsets"],
            arguments["total_D"],
            *inputs,
            arguments["pooling_mode"],
            factors,
            arguments["output_dtype"],
        )

    lookup.default = op  # type: ignore[attr-defined]
    return lookup


#: A module's counters of training, and the tensor that it keeps at its first call.
_STATE = ("iter", "iter_cpu", "feature_dims")


def _on_a_copy(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that runs on copies of the indices and the state.

    The check writes to the indices, and modules that are trained count their calls: both would be results of the model.
    """

    @functools.wraps(forward)
    def on_a_copy(self: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        state = {name: getattr(self, name) for name in _STATE if isinstance(getattr(self, name, None), Tensor)}
        for name, tensor in state.items():
            setattr(self, name, tensor.clone())
        try:
            return forward(self, indices.clone(), *args, **kwargs)
        finally:
            for name, tensor in state.items():
                setattr(self, name, tensor)

    return on_a_copy


def bounds_check_indices(
    rows_per_table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bounds_check_mode: int,
    warning: Tensor,
    weights: Tensor | None = None,
    B_offsets: Tensor | None = None,
    *more: Any,
    **options: Any,
) -> None:
    """Replaces an index that a table lacks by 0; -1 stands for a pruned row. Offsets are taken as they are."""
    if bounds_check_mode not in (_WARNING, _IGNORE) or B_offsets is not None:
        return
    samples = (offsets.shape[0] - 1) // rows_per_table.shape[0]
    feature = (owners(offsets, indices.shape[0]) // samples).clamp(max=rows_per_table.shape[0] - 1)
    is_row = (indices >= -1) & (indices < rows_per_table.index_select(0, feature))
    indices.copy_(torch.where(is_row, indices, 0))
