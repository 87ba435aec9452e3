"""The operators on a machine without a GPU: defined where torch doesn't know them, and with a kernel for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onnxplug.torch_private import DispatchKey, has_kernel_for_dispatch_key
from onnxplug_vllm import OPERATORS, operators

_NORM, _NORM_OF_SUM = (
    "(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "Tensor! input, Tensor! residual",
)
_ACTIVATION, _PDL = "(Tensor! out, Tensor input) -> ()", "Tensor weight, float eps, bool enable_pdl) -> ()"
#: The schemas of vLLM 0.33.0 and sgl_kernel 0.3.
SCHEMAS = {
    **dict.fromkeys(OPERATORS, _ACTIVATION),
    "_C::rms_norm": _NORM,
    "_C::fused_add_rms_norm": f"({_NORM_OF_SUM}, Tensor? weight, float epsilon) -> ()",
    "_C::rotary_embedding": "(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, bool is_neox, "
    "int rope_dim_offset=0, bool inverse=False) -> ()",
    "_C::silu_and_mul": "(Tensor! result, Tensor input) -> ()",
    "_C::fatrelu_and_mul": "(Tensor! out, Tensor input, float threshold) -> ()",
    "_C::swigluoai_and_mul": "(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0) -> ()",
    "sgl_kernel::rmsnorm": f"(Tensor! output, Tensor input, {_PDL}",
    "sgl_kernel::gemma_rmsnorm": f"(Tensor! output, Tensor input, {_PDL}",
    "sgl_kernel::fused_add_rmsnorm": f"({_NORM_OF_SUM}, {_PDL}",
    "sgl_kernel::gemma_fused_add_rmsnorm": f"({_NORM_OF_SUM}, {_PDL}",
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": "(Tensor q, Tensor k, Tensor! q_rope, Tensor! k_rope, Tensor cos_sin_cache, "
    "Tensor pos_ids, bool interleave, bool enable_pdl, int cuda_stream, Tensor? v, Tensor!? k_buffer, Tensor!? v_buffer, "
    "Tensor? kv_cache_loc) -> ()",
}


def define() -> None:
    """Defines the operators where torch doesn't know them, and kernels for the CPU where they have none; repeatable."""
    for op, schema in SCHEMAS.items():
        namespace, _, name = op.partition("::")
        if not hasattr(getattr(torch.ops, namespace), name):
            torch.library.define(op, schema)
            torch.library.register_fake(op, _nothing)
        if not has_kernel_for_dispatch_key(op, DispatchKey.CPU):
            torch.library.impl(op, "cpu", _kernel(getattr(operators, OPERATORS[op]), schema))


def _nothing(*_: Any, **__: Any) -> None:
    """The shapes of an operator without results, which writes to its arguments."""


def _kernel(function: Callable[..., Any], schema: str) -> Callable[..., None]:
    """A kernel that writes the results of a function into the arguments that the schema marks as written."""
    written = [n for n, parameter in enumerate(schema.split(", ")) if "!" in parameter]

    def kernel(*args: Any) -> None:
        results = function(*args)
        places = [n for n in written if n < len(args) and args[n] is not None]
        for place, result in zip(places, results, strict=False):
            args[place].copy_(result)

    return kernel
