"""TorchScript symbolic functions as converters."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch.onnx import symbolic_helper, symbolic_opset9

import onnxplug
from onnxplug import Rule, compat
from tests.support.check import check

LIB = torch.library.Library("cs", "DEF")
LIB.define("scale(Tensor x, int[] dims, float factor=1.0, bool twice=False, str mode='a', Tensor? bias=None) -> Tensor")
LIB.define("cat(Tensor[] xs, int dim=0) -> Tensor")
LIB.define("pair(Tensor x) -> (Tensor, Tensor)")
LIB.define("grid(Tensor x, SymInt[] sizes) -> Tensor")
LIB.define("as_type(Tensor x, ScalarType dtype) -> Tensor")


def _scale(x: Any, dims: Any, factor: float = 1.0, twice: bool = False, mode: str = "a", bias: Any = None) -> Any:
    y = x.sum(dims, keepdim=True) * factor * (2 if twice else 1)
    return y + bias if bias is not None else y * 1


LIB.impl("scale", _scale, "CompositeExplicitAutograd")
LIB.impl("cat", lambda xs, dim=0: torch.cat(xs, dim), "CompositeExplicitAutograd")
LIB.impl("pair", lambda x: (x + 1, x - 1), "CompositeExplicitAutograd")
LIB.impl("grid", lambda x, sizes: x.new_ones(sizes) * x.sum(), "CompositeExplicitAutograd")
LIB.impl("as_type", lambda x, dtype: x.to(dtype, copy=True), "CompositeExplicitAutograd")


@symbolic_helper.parse_args("v", "is", "f", "b", "s", "v")
def scale(g: Any, x: Any, dims: Any, factor: float, twice: bool, mode: str, bias: Any) -> Any:
    assert mode == "b"
    y = g.op("ReduceSum", x, g.op("Constant", value_t=torch.tensor(dims)), keepdims_i=1)
    y = g.op("Mul", y, torch.tensor(factor * (2 if twice else 1)))
    return y if symbolic_helper._is_none(bias) else g.op("Add", y, bias)


@pytest.mark.parametrize("opset", [21, *(pytest.param(n, marks=pytest.mark.long) for n in (18, 23))])
def test_parsed_arguments(opset: int) -> None:
    bias = torch.tensor([3.0])
    rules = [Rule("cs::scale", compat.symbolic(scale))]
    x, other = torch.randn(2, 3, 4), torch.randn(5, 3, 4)
    for model in (
        lambda x: torch.ops.cs.scale(x, [0, 2], 2, True, "b"),
        lambda x: torch.ops.cs.scale(x, [1], 0.5, mode="b", bias=bias),
    ):
        program = check(model, x, others=[(other,)], dynamic=[{0: "n"}], opset=opset, rules=rules)
        assert "ReduceSum" in {n.op_type for n in program.model.graph}


def test_plain_arguments_are_values_of_the_graph() -> None:
    def plain(g: Any, x: Any, dims: Any, factor: Any, twice: Any, mode: Any, bias: Any) -> Any:
        assert symbolic_helper._get_tensor_sizes(x) == [2, 3]
        assert x.type().scalarType() == "Float"
        assert symbolic_helper._get_const(twice, "b", "twice") is True
        axes = symbolic_helper._maybe_get_const(dims, "is")
        y = symbolic_opset9.neg(g, symbolic_opset9.neg(g, x))
        y = symbolic_helper._reducesum_helper(g, y, axes_i=axes, keepdims_i=1)
        return g.op("Mul", y, g.op("Cast", g.op("Mul", factor, torch.tensor(2.0, dtype=torch.float64)), to_i=1))

    check(
        lambda x: torch.ops.cs.scale(x, [1], 3.0, True),
        torch.randn(2, 3),
        others=[(torch.randn(2, 3),)],
        rules=[Rule("cs::scale", compat.symbolic(plain))],
    )


def test_tensor_lists_and_several_outputs() -> None:
    def cat(g: Any, xs: Any, dim: Any) -> Any:
        assert symbolic_helper._is_packed_list(xs)
        return g.op("Concat", *symbolic_helper._unpack_list(xs), axis_i=symbolic_helper._get_const(dim, "i", "dim"))

    def pair(g: Any, x: Any) -> Any:
        return g.op("Add", x, torch.tensor(1.0)), g.op("Sub", x, torch.tensor(1.0))

    def model(x: Any, y: Any) -> Any:
        up, down = torch.ops.cs.pair(x)
        return torch.ops.cs.cat([up, y, down], 1)

    rules = [Rule("cs::cat", compat.symbolic(cat)), Rule("cs::pair", compat.symbolic(pair))]
    check(
        model,
        torch.randn(2, 3),
        torch.randn(2, 1),
        others=[(torch.randn(2, 3), torch.randn(2, 4))],
        dynamic=[None, {1: "k"}],
        rules=rules,
    )


def test_dynamic_sizes_and_dtypes() -> None:
    def grid(g: Any, x: Any, sizes: Any) -> Any:
        parts = [symbolic_helper._unsqueeze_helper(g, part, [0]) for part in symbolic_helper._unpack_list(sizes)]
        total = symbolic_helper._reducesum_helper(g, x, keepdims_i=0)
        return g.op("Expand", total, g.op("Concat", *parts, axis_i=0))

    def as_type(g: Any, x: Any, dtype: Any) -> Any:
        from torch.onnx._internal.torchscript_exporter._type_utils import JitScalarType

        return g.op("Cast", x, to_i=JitScalarType(symbolic_helper._get_const(dtype, "i", "dtype")).onnx_type())

    rules = [Rule("cs::grid", compat.symbolic(grid)), Rule("cs::as_type", compat.symbolic(as_type))]
    check(
        lambda x: torch.ops.cs.as_type(torch.ops.cs.grid(x, [2, x.shape[0], 3]), torch.int32),
        torch.randn(3, 3),
        others=[(torch.randn(5, 3) * 10,), (torch.randn(1, 3),)],
        dynamic=[{0: "n"}],
        rules=rules,
    )


def test_attributes_and_outputs_of_a_custom_domain() -> None:
    def pair(g: Any, x: Any) -> Any:
        return g.op(
            "com.acme::Pair",
            x,
            outputs=2,
            count_i=3,
            dims_i=[1, 2],
            none_i=[],
            alpha_f=1,
            alphas_f=[1, 2.5],
            mode_s="fast",
            names_s=["a", "b"],
            table_t=torch.arange(3),
        )

    program = onnxplug.to_onnx(
        lambda x: torch.ops.cs.pair(x),
        (torch.randn(2, 3),),
        rules=[Rule("cs::pair", compat.symbolic(pair, domains={"com.acme": 4}))],
    )
    (node,) = program.model_proto.graph.node
    assert (node.domain, node.op_type, len(node.output)) == ("com.acme", "Pair", 2)
    assert {o.domain: o.version for o in program.model_proto.opset_import}["com.acme"] == 4
    got = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert onnx.numpy_helper.to_array(got.pop("table")).tolist() == [0, 1, 2]
    assert got == {
        "count": 3,
        "dims": [1, 2],
        "none": [],
        "alpha": 1.0,
        "alphas": [1.0, 2.5],
        "mode": b"fast",
        "names": [b"a", b"b"],
    }
    kinds = {a.name: a.type for a in node.attribute}
    assert kinds["none"] == onnx.AttributeProto.INTS
    assert kinds["alpha"] == onnx.AttributeProto.FLOAT


def test_errors_of_a_symbolic_function() -> None:
    def refuses(g: Any, x: Any) -> Any:
        raise torch.onnx.errors.SymbolicValueError("only on Tuesdays", x)

    def foreign(g: Any, x: Any) -> Any:
        return g.at("pair", x), x

    for function, text in ((refuses, "only on Tuesdays"), (foreign, "aten::ATen, which is not an operator of ONNX")):
        with pytest.raises(onnxplug.Unsupported, match=text) as caught:
            onnxplug.to_onnx(
                lambda x: torch.ops.cs.pair(x)[0],
                (torch.randn(2),),
                rules=[Rule("cs::pair", compat.symbolic(function))],
            )
        assert "cs::pair" in str(caught.value)
        assert f"{function.__name__}" in str(caught.value)
    with pytest.raises(onnxplug.UsageError, match=r"compat\.symbolic takes a function"):
        compat.symbolic(3)  # type: ignore[arg-type]


def test_subgraphs_of_a_symbolic_function() -> None:
    from torch.onnx._internal.torchscript_exporter import jit_utils

    def pair(g: Any, x: Any) -> Any:
        total = g.op("ReduceSum", x, keepdims_i=0)
        positive = g.op("Greater", total, torch.tensor(0.0))
        chosen, (yes, no), _ = jit_utils.add_op_with_blocks(g, "If", positive, n_blocks=2)
        yes.block.registerOutput(yes.op("Add", x, torch.tensor(1.0)))
        no.block.registerOutput(no.op("Add", x, torch.tensor(1.0)))
        return chosen, g.op("Sub", x, torch.tensor(1.0))

    program = check(
        lambda x: torch.ops.cs.pair(x),
        torch.ones(3),
        others=[(-torch.ones(3),)],
        rules=[Rule("cs::pair", compat.symbolic(pair))],
    )
    assert "If" in {n.op_type for n in program.model.graph}


def test_functions_registered_with_torch() -> None:
    def old(g: Any, x: Any) -> Any:
        raise AssertionError("not for this opset")

    def new(g: Any, x: Any) -> Any:
        return g.op("Add", x, torch.tensor(1.0)), g.op("Sub", x, torch.tensor(1.0))

    from torch.onnx._internal.torchscript_exporter import registration

    registration.registry.register("cs::pair", 9, old, custom=True)
    registration.registry.register("cs::pair", 17, new, custom=True)
    try:
        rules = compat.registered_symbolics("cs")
    finally:
        registration.registry.unregister("cs::pair", 9)
        registration.registry.unregister("cs::pair", 17)
    assert [rule.opset for rule in rules] == [(9, 16), (17, None)]
    check(lambda x: torch.ops.cs.pair(x), torch.randn(3), rules=rules)
