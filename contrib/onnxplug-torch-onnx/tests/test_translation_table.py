"""custom_translation_table, as people have written it for torch.onnx.export."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import onnxscript
import pytest
import torch
from onnxscript import DOUBLE, FLOAT, FLOAT16, INT64, opset12 as op12, opset13 as op13, opset18 as op, script

import onnxplug
from onnxplug import compat
from tests.support.check import check

LIB = torch.library.Library("ct", "DEF")
LIB.define("mix(Tensor a, Tensor b, float alpha=1.0) -> Tensor")
LIB.define(
    "stats(Tensor x, int[] dims, *, bool keepdim=False, ScalarType? dtype=None, Device? device=None) -> (Tensor, Tensor)"
)
LIB.define("parts(Tensor x, int n) -> Tensor[]")
LIB.define("join(Tensor[] xs, SymInt[] shape) -> Tensor")


def _stats(x: Any, dims: Any, *, keepdim: bool = False, dtype: Any = None, device: Any = None) -> Any:
    y = x.to(dtype) if dtype is not None else x
    return y.sum(dims, keepdim=keepdim), y.mean(dims, keepdim=keepdim)


LIB.impl("mix", lambda a, b, alpha=1.0: a * 1 + b * alpha, "CompositeExplicitAutograd")
LIB.impl("stats", _stats, "CompositeExplicitAutograd")
LIB.impl("parts", lambda x, n: [p.clone() for p in torch.chunk(x, n)], "CompositeExplicitAutograd")
LIB.impl("join", lambda xs, shape: torch.cat(xs).reshape(shape).clone(), "CompositeExplicitAutograd")

TFloat = TypeVar("TFloat", FLOAT, FLOAT16)


def mix(a: TFloat, b: TFloat, alpha: float = 1.0) -> TFloat:
    return op.Add(a, op.Mul(b, alpha))


def mix_any(a, b, alpha: float = 1.0):
    return a + b * op.CastLike(op.Constant(value_float=alpha), a)


def _mixed(x: Any, y: Any) -> Any:
    return torch.ops.ct.mix(x, y), torch.ops.ct.mix(x, y, 2), torch.ops.ct.mix(x, y, alpha=0.5)


PAIR = (torch.randn(2, 3), torch.randn(3))
OTHERS = [(torch.randn(5, 3), torch.tensor([0.0, float("nan"), float("inf")])), (torch.randn(1, 3), torch.randn(3))]


@pytest.mark.parametrize("opset", [18, 21, 23])
@pytest.mark.parametrize("function", [mix, mix_any, script()(mix_any), [mix_any], (mix, mix_any)])
def test_plain_scripted_and_several(function: Any, opset: int) -> None:
    table = {torch.ops.ct.mix.default: function}
    check(_mixed, *PAIR, others=OTHERS, dynamic=[{0: "n"}, None], opset=opset, custom_translation_table=table)


def test_annotations_choose() -> None:
    def doubles(a: DOUBLE, b: DOUBLE, alpha: float = 1.0) -> DOUBLE:
        return op.Sub(a, op.Mul(op.Neg(b), op.CastLike(alpha, b)))

    table = {torch.ops.ct.mix.default: [mix, doubles]}
    program = check(
        lambda x, y: (torch.ops.ct.mix(x, y, 3.0), torch.ops.ct.mix(x.double(), y.double(), 3.0)),
        *PAIR,
        others=[(-PAIR[0], PAIR[1])],
        custom_translation_table=table,
    )
    assert "Sub" in {n.op_type for n in program.model.graph}
    with pytest.raises(onnxplug.MissingRuleError, match="a does not take int64"):
        onnxplug.to_onnx(lambda x: torch.ops.ct.mix(x, x), (torch.arange(3),), custom_translation_table=table)


def test_keyword_arguments_dtypes_and_dropped_ones() -> None:
    def stats(x, dims: Sequence[int], keepdim: bool = False, dtype: int = -1):
        if dtype != -1:
            x = op.Cast(x, to=dtype)
        axes = op.Constant(value_ints=dims)
        return op.ReduceSum(x, axes, keepdims=keepdim), op.ReduceMean(x, axes, keepdims=keepdim)

    def model(x: Any) -> Any:
        a = torch.ops.ct.stats(x, [0, 2])
        b = torch.ops.ct.stats(x, [1], keepdim=True, dtype=torch.float64, device=torch.device("cpu"))
        return (*a, *b)

    check(
        model,
        torch.randn(2, 3, 4),
        others=[(torch.randn(5, 3, 4),)],
        dynamic=[{0: "n"}],
        custom_translation_table={torch.ops.ct.stats.default: stats},
    )


def test_tensor_lists_and_dynamic_sizes() -> None:
    def parts(x, n: int):
        return op.Split(x, num_outputs=n)

    def join(xs: Sequence[FLOAT], shape: INT64):
        return op.Reshape(op.Concat(*xs, axis=0), shape)

    def model(x: Any) -> Any:
        a, b = torch.ops.ct.parts(x, 2)
        return torch.ops.ct.join([b, a, a], [3, x.shape[1], -1])

    check(
        model,
        torch.randn(4, 3),
        others=[(torch.randn(4, 6),), (torch.randn(4, 1),)],
        dynamic=[{1: "n"}],
        custom_translation_table={torch.ops.ct.parts.default: parts, torch.ops.ct.join.default: join},
    )


def test_operators_of_a_custom_domain_and_inner_functions(expect_graph: Any) -> None:
    acme = onnxscript.values.Opset("com.acme", 3)
    blend = onnxscript.values.Op(acme, "Blend")

    @script(acme, default_opset=op)
    def Twice(x):
        return op.Add(x, x)

    def mixed(a, b, alpha: float = 1.0):
        return op.Add(Twice(a), blend(b, alpha=alpha, mode="linear"))

    program = onnxplug.to_onnx(
        lambda x, y: torch.ops.ct.mix(x, y), PAIR, custom_translation_table={torch.ops.ct.mix.default: mixed}
    )
    expect_graph(program, "com.acme::Twice com.acme::Blend Add")
    assert program.model.opset_imports["com.acme"] == 3
    assert [f.name for f in program.model.functions.values()] == ["Twice"]


def test_our_converters_are_distinguished() -> None:
    def ours(g, node):
        a, b, alpha = node.args
        return g.op.Add(a, g.op.Mul(b, alpha))

    def ambiguous(first, second):
        return first

    def legacy(g, a, b, alpha):
        return g.op("Add", a, b)

    overload = torch.ops.ct.mix.default
    check(_mixed, *PAIR, others=OTHERS, dynamic=[{0: "n"}, None], custom_translation_table={overload: ours})
    check(_mixed, *PAIR, custom_translation_table={"ct::mix": lambda g, node: ours(g, node)})
    check(
        lambda x, y: torch.ops.ct.mix(x, y),
        *PAIR,
        custom_translation_table={overload: compat.symbolic(legacy)},
    )
    for function, text in (
        (ambiguous, "takes two arguments, and may be a converter"),
        (legacy, "looks like a TorchScript symbolic function"),
        (3, "must be a function"),
        ([], "is an empty list"),
    ):
        with pytest.raises(onnxplug.UsageError, match=text):
            onnxplug.to_onnx(_mixed, PAIR, custom_translation_table={overload: function})


def test_torchlib_itself() -> None:
    """The functions of onnxscript's own torchlib, unchanged."""
    from onnxscript.function_libs.torch_lib.ops import core

    table = {
        torch.ops.aten.addmm.default: core.aten_addmm,
        torch.ops.aten.clamp.default: core.aten_clamp,
        torch.ops.aten.gelu.default: __import__("onnxscript.function_libs.torch_lib.ops.nn", fromlist=["nn"]).aten_gelu,
    }
    layer = torch.nn.Linear(3, 4)
    check(
        lambda x: torch.nn.functional.gelu(torch.addmm(layer.bias, x, layer.weight.t())).clamp(-1, 0.5),
        torch.randn(2, 3),
        others=[(torch.randn(5, 3) * 3,)],
        dynamic=[{0: "n"}],
        custom_translation_table=table,
    )


def test_an_operator_of_another_meaning_at_the_target() -> None:
    """Softmax is over all axes from 1 on below opset 13: emitted at another opset, its numbers were others."""

    def older(a, b, alpha: float = 1.0):
        return op12.Add(op12.Softmax(a), b)

    def newer(a, b, alpha: float = 1.0):
        return op13.Add(a, op13.Log(op13.Exp(op13.Softmax(b, axis=-1))))

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.ct.mix(x, y)

    overload = torch.ops.ct.mix.default
    with pytest.raises(onnxplug.Unsupported, match="'older' is written for opset 12, and Softmax means something else"):
        onnxplug.to_onnx(model, PAIR, custom_translation_table={overload: older})
    program = onnxplug.to_onnx(model, PAIR, custom_translation_table={overload: newer})
    for x, y in (PAIR, tuple(2 * value for value in PAIR)):
        torch.testing.assert_close(program(x, y)[0], x + y.softmax(-1))


def test_powers_of_a_number() -> None:
    def powers(a, b, alpha: float = 1.0):
        return op.Cast(2**a, to=1) + 3.0**b

    table = {torch.ops.ct.mix.default: powers}
    program = onnxplug.to_onnx(lambda x, y: torch.ops.ct.mix(x, y), PAIR, custom_translation_table=table)
    for x, y in (PAIR, tuple(2 * value for value in PAIR)):
        torch.testing.assert_close(program(x, y)[0], 2**x + 3**y)


def test_eager_onnxscript_goes_on_beside_an_export() -> None:
    import numpy as np

    results: list[Any] = []

    def mixed(a, b, alpha: float = 1.0):
        thread = threading.Thread(target=lambda: results.append(op.Add(np.float32([1]), np.float32([2]))))
        thread.start()
        thread.join()
        return op.Add(a, b)

    check(lambda x, y: torch.ops.ct.mix(x, y), *PAIR, custom_translation_table={torch.ops.ct.mix.default: mixed})
    assert np.asarray(getattr(results[0], "value", results[0])).tolist() == [3.0]


def test_public_names_resolve() -> None:
    assert all(callable(getattr(compat, name)) for name in compat.__all__)
    assert set(compat.__all__) <= set(dir(compat))
