"""The plugin: one domain, one rule, one sample."""

from __future__ import annotations

from typing import Any

from onnxplug import Domain, OpSample, PluginInfo, Rule, hookimpl

DOMAIN = "onnxplug.softcap"


def softcap(g: Any, node: Any) -> Any:
    """softcap(Tensor x, float cap) -> Tensor"""
    x, cap = node.args
    return g.function(DOMAIN, "Softcap", lambda x, cap: _body(g, x, cap), [x, g.const(cap, x.dtype)])


def _body(g: Any, x: Any, cap: Any) -> Any:
    return g.op.Mul(g.op.Tanh(g.op.Div(x, cap)), cap)


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The translation."""
    return [Rule("softcap::softcap", softcap)]


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """The operator's domain."""
    return [Domain(DOMAIN, 1)]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operator with."""

    def inputs() -> tuple[Any, float]:
        import torch

        return torch.linspace(-100, 100, 12).reshape(3, 4), 30.0

    return [OpSample("softcap::softcap", inputs)]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operator's namespace."""
    return PluginInfo(api=1, namespaces=("softcap",))
