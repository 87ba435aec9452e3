"""ONNX Runtime's fused operators: rules and rewrites that hold where the export asks for the domain com.microsoft."""

from __future__ import annotations

from onnxplug import Domain, PluginInfo, Rewrite, Rule, hookimpl

DOMAIN = "com.microsoft"
_DOMAINS = {DOMAIN: 1}


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """Translations of whole operators; each declines what ONNX Runtime's operator doesn't compute alike."""
    attention = "aten::scaled_dot_product_attention.default"
    return [
        Rule("aten::gelu.default", "onnxplug_ort.rules:gelu", domains=_DOMAINS, override=True),
        Rule(attention, "onnxplug_ort.rules:multi_head_attention", domains=_DOMAINS, override=True),
        Rule(attention, "onnxplug_ort.rules:group_query_attention", domains=_DOMAINS, override=True, priority=1),
    ]


@hookimpl
def onnxplug_rewrites() -> list[Rewrite]:
    """What is found in the finished graph, put together by models themselves."""
    from onnxplug_ort import rewrites

    found = [
        ("fused_matmul", "MatMul", rewrites.fused_matmul),
        ("scaled_fused_matmul", "Mul", rewrites.scaled_matmul),
        ("divided_fused_matmul", "Div", rewrites.scaled_matmul),
        ("bias_gelu", "Gelu", rewrites.bias_gelu),
        ("bias_gelu_before_20", f"{DOMAIN}::Gelu", rewrites.bias_gelu),
        ("bias_fast_gelu", f"{DOMAIN}::FastGelu", rewrites.bias_fast_gelu),
        ("skip_layer_normalization", "Add", rewrites.skip_layer_normalization),
        ("skip_simplified_layer_normalization", "Add", rewrites.skip_simplified_layer_normalization),
        ("rotary_embedding", "Add", rewrites.rotary_embedding),
    ]
    return [Rewrite(f"ort_{name}", op, apply, domains=_DOMAINS) for name, op, apply in found]


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """ONNX Runtime's domain. Its schemas live in ONNX Runtime, not in onnx."""
    return [Domain(DOMAIN, 1)]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, requires=["onnxruntime>=1.20"])
