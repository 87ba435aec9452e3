"""onnxscript functions and FunctionProtos as bodies of operators."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.parser
import onnxscript
import pytest
import torch
from onnxscript import FLOAT, opset18 as op, script

import onnxplug
from onnxplug import Rule, compat
from tests.support.check import check

LIB = torch.library.Library("cf", "DEF")
LIB.define("cap(Tensor x, float cap=2.0, int times=1) -> Tensor")
LIB.define("norm(Tensor x, Tensor? w=None) -> (Tensor, Tensor)")


def _cap(x: Any, cap: float = 2.0, times: int = 1) -> Any:
    return cap * torch.tanh(x / cap) * times


LIB.impl("cap", _cap, "CompositeExplicitAutograd")
LIB.impl(
    "norm", lambda x, w=None: (x / x.abs().sum() * (1 if w is None else w), x.abs().sum()), "CompositeExplicitAutograd"
)

acme = onnxscript.values.Opset("com.acme", 2)


@script(acme, default_opset=op)
def half(x):
    return op.Mul(x, 0.5)


@script(acme, default_opset=op)
def Softcap(x, cap: float = 2.0, times: int = 1):
    limit = op.CastLike(op.Constant(value_float=cap), x)
    count = op.CastLike(op.Constant(value_int=times), x)
    y = op.Mul(op.Tanh(op.Div(x, limit)), limit)
    return op.Mul(half(op.Add(y, y)), count)


@pytest.mark.parametrize("opset", [18, 21, 23])
@pytest.mark.parametrize("inline", [False, True])
def test_onnxscript_function(opset: int, inline: bool) -> None:
    def model(x: Any) -> Any:
        return torch.ops.cf.cap(x, 3.0, 2) + torch.ops.cf.cap(x.double()).float() + torch.ops.cf.cap(x, 5)

    program = check(
        model,
        torch.randn(2, 3) * 5,
        others=[(torch.randn(4, 3) * 5,), (torch.tensor([[0.0, float("inf"), float("nan")]]),)],
        dynamic=[{0: "n"}],
        opset=opset,
        rules=[Rule("cf::cap", compat.function_body(Softcap, inline=inline))],
    )
    onnx.checker.check_model(program.model_proto)
    functions = {(f.domain, f.name): f for f in program.model.functions.values()}
    calls = [n for n in program.model.graph if n.domain == "com.acme"]
    if inline:
        assert not functions
        assert not calls
        assert set(program.model.opset_imports) == {""}
        return
    assert [n.op_type for n in calls] == ["Softcap", "Softcap_2", "Softcap"]
    assert [n.attributes["cap"].value for n in calls] == [3.0, 2.0, 5.0]
    assert ("com.acme", "half") in functions
    assert functions["com.acme", "Softcap"].opset_imports == {"": opset, "com.acme": 2}
    assert program.model.opset_imports == {"": opset, "com.acme": 2}


FUNCTION = """
<domain: "com.acme", opset_import: ["" : 18]>
Normalize <mode: string = "l1"> (x, w) => (y, n)
{
    a = Abs(x)
    n = ReduceSum <keepdims = 0> (a)
    z = Div(x, n)
    y = Mul(z, w)
}
"""


def test_function_proto_with_two_outputs() -> None:
    proto = onnx.parser.parse_function(FUNCTION)
    w = torch.tensor([1.0, -2.0])
    program = check(
        lambda x: torch.ops.cf.norm(x, w),
        torch.randn(3, 2),
        others=[(torch.randn(1, 2),)],
        dynamic=[{0: "n"}],
        rules=[Rule("cf::norm", compat.function_body(proto, version=4))],
        opset=20,
    )
    (function,) = program.model.functions.values()
    assert function.opset_imports == {"": 20}
    (call,) = [n for n in program.model.graph if n.domain]
    assert call.attributes["mode"].value == "l1"
    assert program.model.opset_imports == {"": 20, "com.acme": 4}
    onnx.checker.check_model(program.model_proto)


def test_annotations_choose_among_several() -> None:
    @script(acme, default_opset=op)
    def only_float(x: FLOAT, cap: float = 2.0, times: int = 1) -> FLOAT:
        return op.Mul(op.Tanh(op.Div(x, op.Constant(value_float=cap))), op.Constant(value_float=cap))

    rules = [
        Rule("cf::cap", compat.function_body(only_float), priority=1),
        Rule("cf::cap", compat.function_body(Softcap)),
    ]
    program = check(lambda x: (torch.ops.cf.cap(x), torch.ops.cf.cap(x.double())), torch.randn(3), rules=rules)
    assert [n.op_type for n in program.model.graph if n.domain] == ["only_float", "Softcap"]


def test_refusals() -> None:
    old = onnx.parser.parse_function('<domain: "com.acme", opset_import: ["" : 12]> Old (x) => (y) { y = Softmax(x) }')
    with pytest.raises(onnxplug.Unsupported, match="Softmax means something else at opset 21"):
        onnxplug.to_onnx(
            lambda x: torch.ops.cf.cap(x), (torch.randn(2),), rules=[Rule("cf::cap", compat.function_body(old))]
        )
    boxes = onnx.parser.parse_function(
        '<domain: "com.acme", opset_import: ["" : 15]> Boxes (x) => (y) { y = RoiAlign(x, x, x) }'
    )
    with pytest.raises(onnxplug.Unsupported, match="opset 15, and RoiAlign means something else at opset 21"):
        onnxplug.to_onnx(
            lambda x: torch.ops.cf.cap(x), (torch.randn(2),), rules=[Rule("cf::cap", compat.function_body(boxes))]
        )
    few = onnx.parser.parse_function('<domain: "com.acme", opset_import: ["" : 18]> Few (x) => (y) { y = Abs(x) }')
    with pytest.raises(
        onnxplug.ConversionError, match=r"com\.acme::Few has no parameter for the argument 1 of cf::cap"
    ):
        onnxplug.to_onnx(
            lambda x: torch.ops.cf.cap(x, 3.0), (torch.randn(2),), rules=[Rule("cf::cap", compat.function_body(few))]
        )
    moved = onnx.parser.parse_function(
        '<domain: "com.acme", opset_import: ["" : 11]> Moved (x) => (y) { y = ReduceSum<axes = [0]>(x) }'
    )
    with pytest.raises(onnxplug.ConversionError, match="ReduceSum has no attribute 'axes'"):
        onnxplug.to_onnx(
            lambda x: torch.ops.cf.cap(x), (torch.randn(2),), rules=[Rule("cf::cap", compat.function_body(moved))]
        )
    with pytest.raises(onnxplug.UsageError, match="takes an onnxscript function"):
        compat.function_body(lambda x: x)


def test_control_flow_in_a_function() -> None:
    @script(acme, default_opset=op)
    def Flip(x, cap: float = 2.0, times: int = 1):
        if op.ReduceSum(x, keepdims=0) > 0.0:
            y = op.Neg(x)
        else:
            y = op.Add(x, 1.0)
        return y

    library = torch.library.Library("cf2", "DEF")
    library.define("flip(Tensor x) -> Tensor")
    library.impl("flip", lambda x: -x if x.sum() > 0 else x + 1, "CPU")
    library.impl("flip", lambda x: torch.empty_like(x), "Meta")
    check(
        lambda x: torch.ops.cf2.flip(x),
        torch.ones(3),
        others=[(-torch.ones(3),)],
        rules=[Rule("cf2::flip", compat.function_body(Flip))],
    )
