"""A plugin that ships code for torch.onnx: symbolic functions, autograd functions, a translation table."""

from __future__ import annotations

from pathlib import Path

from tests.support.distributions import Dist, place, run_python

LIBRARY = """
import torch

@torch.library.custom_op("shop::softcap", mutates_args=())
def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)
softcap.register_fake(lambda x, cap: torch.empty_like(x))

@torch.library.custom_op("shop::shift", mutates_args=())
def shift(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x + by
shift.register_fake(lambda x, by=1.0: torch.empty_like(x))

class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        return x.clamp(-limit, limit)
    @staticmethod
    def backward(ctx, grad):
        return grad, None
    @staticmethod
    def symbolic(g, x, limit):
        value = g.op("Constant", value_t=torch.tensor(limit, dtype=x.type().dtype()))
        return g.op("com.shop::Clamp", x, g.op("Neg", value), value, note_s="symbolic")

clamp = Clamp.apply  # bound before any plugin is loaded
"""

PLUGIN = """
import onnx
import onnxscript
import shop
from onnx.reference.op_run import OpRun
from onnxplug import Domain, OpSample, PluginInfo, ReferenceOp, Rule, compat, hookimpl
from onnxscript import opset18 as op
from torch.onnx import symbolic_helper

@symbolic_helper.parse_args("v", "f")
def softcap(g, x, cap):
    limit = g.op("CastLike", g.op("Constant", value_t=shop.torch.tensor(cap)), x)
    return g.op("Mul", limit, g.op("Tanh", g.op("Div", x, limit)))

def shift(x, by: float = 1.0):
    return op.Add(x, op.CastLike(op.Constant(value_float=by), x))

class Clamp(OpRun):
    op_domain = "com.shop"
    def _run(self, x, low, high, note=None):
        assert note == "symbolic"
        return (x.clip(low, high),)

@hookimpl
def onnxplug_rules():
    return [
        Rule("shop::softcap", compat.symbolic(softcap)),
        compat.autograd_function(shop.Clamp, domains={"com.shop": 3}),
        *compat.table_rules({shop.torch.ops.shop.shift.default: shift}),
    ]

@hookimpl
def onnxplug_domains():
    return [Domain("com.shop", 3)]

@hookimpl
def onnxplug_runtime():
    return [ReferenceOp(Clamp)]

@hookimpl
def onnxplug_samples():
    x = shop.torch.linspace(-9, 9, 12).reshape(3, 4)
    return [
        OpSample("shop::softcap", (x, 2.0), opsets=(18, 21), dynamic_shapes=({0: "rows"}, None)),
        OpSample("shop::shift", (x, 0.5), opsets=(18, 21)),
    ]

@hookimpl
def onnxplug_info():
    return PluginInfo(namespaces=("shop",))
"""

USE = """
import warnings; warnings.simplefilter("ignore")
import torch, onnxplug, shop

def model(x):
    return shop.shift(shop.clamp(shop.softcap(x, 4.0) * 2, 1.5), 0.25) + 1

program = onnxplug.to_onnx(model, (torch.randn(3, 4) * 9,), dynamic_shapes=({0: "rows"},), verify=True)
print(sorted(program.statistics.operators.items()), program.model.opset_imports)
special = torch.tensor([[float("inf"), float("-inf"), float("nan"), -0.0]])
for x in (special, torch.zeros(0, 4), torch.randn(7, 4)):
    torch.testing.assert_close(program(x)[0], model(x), equal_nan=True)
double = onnxplug.to_onnx(model, (torch.randn(3, 4, dtype=torch.float64),), opset_version=18, verify=True)
print(double(special[:, 3:].double().expand(3, 4))[0].dtype, double.model.opset_imports)

alone = onnxplug.to_onnx(lambda x: shop.clamp(x, 1.5), (torch.randn(3, 4),), plugins=[], verify=True)
print("inlined", [n.op_type for n in alone.model.graph])
try:
    onnxplug.to_onnx(model, (torch.randn(3, 4),), plugins=[])
except onnxplug.MissingRuleError as error:
    print("missing", sorted(error.missing))
print("kept after", shop.Clamp.apply(torch.tensor([5.0]), 1.5).item(), shop.clamp(torch.tensor([5.0]), 1.5).item())
"""


def test_a_plugin_of_functions_written_for_torch_onnx(tmp_path: Path) -> None:
    place(tmp_path, Dist("onnxplug-shop", PLUGIN, module="onnxplug_shop"))
    (tmp_path / "shop.py").write_text(LIBRARY, encoding="utf-8")
    printed = run_python(tmp_path, "-c", USE)
    assert "('Clamp', 1)" in printed
    assert "'com.shop': 3" in printed
    assert "torch.float64 {'': 18" in printed
    assert "inlined ['Clip']" in printed
    assert "missing ['shop::shift.default', 'shop::softcap.default']" in printed
    assert "kept after 1.5 1.5" in printed
    listed = run_python(tmp_path, "-m", "onnxplug", "plugins", "check", "shop")
    assert "shop::softcap agrees with PyTorch at opsets 18, 21" in listed
    assert "shop::shift agrees with PyTorch at opsets 18, 21" in listed
