"""Models quantised by bitsandbytes, in ONNX: the plugin. Importing it imports neither torch nor bitsandbytes."""

from __future__ import annotations

import sys
from typing import Any

from onnxplug import Domain, LibraryPatch, Observer, OpSample, PluginInfo, Rule, hookimpl

REQUIRED = "bitsandbytes>=0.50,<0.51"
_FUSED = "ONNX Runtime multiplies by the packed weights as they are"


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The translations: plain ones, and ONNX Runtime's own."""
    here = "onnxplug_bitsandbytes"
    fused: dict[str, Any] = {"target": "onnxruntime", "reason": _FUSED}
    return [
        *(Rule(f"bitsandbytes::{name}.default", f"{here}.four_bits:{name}") for name in _FOUR_BITS),
        *(Rule(f"bitsandbytes::{name}.default", f"{here}.eight_bits:{name}") for name in _EIGHT_BITS),
        Rule("bitsandbytes::gemm_4bit.default", f"{here}.four_bits:gemm_4bit_packed", **fused),
        Rule("bitsandbytes::gemv_4bit.default", f"{here}.four_bits:gemv_4bit_packed", **fused),
    ]


_FOUR_BITS = ("gemm_4bit", "gemv_4bit", "dequantize_4bit", "dequantize_blockwise")
_EIGHT_BITS = (
    "int8_vectorwise_quant",
    "int8_vectorwise_dequant",
    "int8_linear_matmul",
    "int8_mm_dequant",
    "int8_scaled_mm",
    "int8_mixed_scaled_mm",
)


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """ONNX Runtime's domain, for products with packed weights."""
    return [Domain("com.microsoft", 1)]


@hookimpl
def onnxplug_patches() -> list[LibraryPatch]:
    """The patch that gives bitsandbytes' layers plain weights while torch.export captures a model."""
    return [LibraryPatch(("bitsandbytes.nn",), "onnxplug_bitsandbytes.layers:plain_layers")]


@hookimpl
def onnxplug_observers() -> list[Any]:
    """An observer for processors with AVX512-BF16: in a verification, layers compute in the dtype of their input."""
    return [_float32]


def _float32(_: Any) -> Observer | None:
    if "bitsandbytes.nn" not in sys.modules:
        return None
    from onnxplug_bitsandbytes.layers import VerifiedInFloat32

    return VerifiedInFloat32()


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_bitsandbytes.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespace, and the version of bitsandbytes that the package requires."""
    return PluginInfo(api=1, namespaces=("bitsandbytes",), requires=[REQUIRED])
