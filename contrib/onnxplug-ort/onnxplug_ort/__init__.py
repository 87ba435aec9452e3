"""ONNX Runtime's fused operators: rules and rewrites for exports with the domain com.microsoft."""

from __future__ import annotations

from typing import Any

from onnxplug import Domain, OpSample, PluginInfo, Rewrite, Rule, hookimpl

__all__ = ["set_experts"]

DOMAIN = "com.microsoft"
_DOMAINS = {DOMAIN: 1}
#: Measured with ONNX Runtime 1.31 on [2, 64, 256], one thread: 140 us for 35, and 43 us for 23.
_SLOW_SKIP = "on the CPU, one node for a sum and a normalization takes two to four times as long as two nodes"


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """Translations of whole operators; each declines calls that ONNX Runtime's operator computes otherwise."""
    attention = "aten::scaled_dot_product_attention.default"
    return [
        Rule("aten::gelu.default", "onnxplug_ort.rules:gelu", domains=_DOMAINS, override=True),
        Rule(attention, "onnxplug_ort.rules:multi_head_attention", domains=_DOMAINS, override=True),
        Rule(attention, "onnxplug_ort.rules:group_query_attention", domains=_DOMAINS, override=True, priority=1),
        Rule("aten::linear.default", "onnxplug_ort.nibbles:linear", domains=_DOMAINS, when=_of_nibbles, override=True),
        Rule(
            "aten::_weight_int4pack_mm_for_cpu.default",
            "onnxplug_ort.nibbles:packed",
            domains=_DOMAINS,
            override=True,
        ),
        Rule("onnxplug_ort::experts.default", "onnxplug_ort.experts:moe", domains=_DOMAINS),
    ]


def set_experts(model: Any) -> Any:
    """Lets a model of transformers compute its mixtures of experts by an operator that becomes ONNX Runtime's ``MoE``.

    Args:
        model: The model, which is changed: ``set_experts_implementation("onnxruntime")``.

    Returns:
        The model.
    """
    from onnxplug_ort.experts import set_experts as use

    return use(model)


def _of_nibbles(node: Any) -> bool:
    from onnxplug_ort.nibbles import of_restored_nibbles

    return of_restored_nibbles(node)


@hookimpl
def onnxplug_decompositions() -> dict[str, Any]:
    """The decomposition of the package's own operator for exports without the domain."""
    return {"onnxplug_ort::experts.default": _plain_experts}


def _plain_experts(*args: Any, **kwargs: Any) -> Any:
    from onnxplug_ort.experts import plain

    return plain(*args, **kwargs)


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the package's own operator with."""
    tokens = ({0: "tokens"},) * 3
    return [OpSample("onnxplug_ort::experts", _routed, dynamic_shapes=(*tokens, None, None))]


def _routed() -> tuple[Any, ...]:
    import torch

    import onnxplug_ort.experts  # noqa: F401  # declares the operator

    index = torch.tensor([[0, 2], [3, 1], [1, 0], [2, 3], [0, 3]])
    weights = torch.rand(5, 2) + 0.1
    return torch.randn(5, 8), index, weights, torch.randn(4, 12, 8), torch.randn(4, 8, 6)


def _written_out_attention(g: Any, node: Any) -> Any:
    from onnxplug_ort.attention import written_out_attention  # imports onnx_ir, which an export needs anyway

    return written_out_attention(g, node)


def _self_attention(g: Any, node: Any) -> Any:
    from onnxplug_ort.attention import self_attention

    return self_attention(g, node)


@hookimpl
def onnxplug_rewrites() -> list[Rewrite]:
    """Rewrites of patterns in the finished graph, which models make of several operators."""
    from onnxplug_ort import rewrites

    patterns = [
        ("fused_matmul", "MatMul", rewrites.fused_matmul),
        ("scaled_fused_matmul", "Mul", rewrites.scaled_matmul),
        ("divided_fused_matmul", "Div", rewrites.scaled_matmul),
        ("bias_gelu", "Gelu", rewrites.bias_gelu),
        ("bias_gelu_before_20", f"{DOMAIN}::Gelu", rewrites.bias_gelu),
        ("bias_fast_gelu", f"{DOMAIN}::FastGelu", rewrites.bias_fast_gelu),
        ("rotary_embedding", "Add", rewrites.rotary_embedding),
        (
            "skip_simplified_layer_normalization_of_decoders",
            "Add",
            rewrites.skip_simplified_layer_normalization_of_decoders,
        ),
        ("written_out_attention", "Reshape", _written_out_attention),
        ("self_attention", f"{DOMAIN}::MultiHeadAttention", _self_attention),
    ]
    return [
        *(Rewrite(f"ort_{name}", op, apply, domains=_DOMAINS) for name, op, apply in patterns),
        *(
            Rewrite(f"ort_{name}", "Add", apply, domains=_DOMAINS, target="onnxruntime:cuda", reason=_SLOW_SKIP)
            for name, apply in (
                ("skip_layer_normalization", rewrites.skip_layer_normalization),
                ("skip_simplified_layer_normalization", rewrites.skip_simplified_layer_normalization),
            )
        ),
    ]


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """ONNX Runtime's domain. Its schemas live in ONNX Runtime, not in onnx."""
    return [Domain(DOMAIN, 1)]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The version of ONNX Runtime that the package requires."""
    return PluginInfo(api=1, requires=["onnxruntime>=1.28"])
