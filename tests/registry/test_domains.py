"""Custom domains: the nodes that a converter can emit, and the times of the checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx_ir as ir
import pytest
import torch

import onnxplug
from onnxplug import Domain, GraphBuilder, Rule
from tests.support.check import check

LIB = torch.library.Library("cd", "DEF")
LIB.define("one(Tensor x) -> Tensor")
LIB.define("two(Tensor x) -> Tensor")
LIB.define("several(Tensor x, Tensor? y=None, Tensor? z=None) -> (Tensor, Tensor, Tensor)")
LIB.define("listed(Tensor[] xs) -> Tensor[]")
for name in ("one", "two"):
    LIB.impl(name, lambda x: x * 1, "CompositeExplicitAutograd")
LIB.impl("several", lambda x, y=None, z=None: (x * 1, x * 2, x * 3), "CompositeExplicitAutograd")
LIB.impl("listed", lambda xs: [x * 2 for x in xs], "CompositeExplicitAutograd")

X = torch.randn(2, 3)


def _export(convert: Any, op: str = "cd::one", model: Any = None, **options: Any) -> Any:
    return onnxplug.to_onnx(model or (lambda x: torch.ops.cd.one(x)), (X,), rules=[Rule(op, convert)], **options)


def test_imports_are_those_of_the_nodes() -> None:
    program = _export(lambda g, node: g.domain("com.acme", 3).Foo(node.args[0]))
    assert program.model.opset_imports == {"": 21, "com.acme": 3}
    # The user's version is emitted, and a domain that nothing uses isn't imported.
    program = _export(
        lambda g, node: g.domain("com.acme").Foo(node.args[0]),
        opset_version={"": 20, "com.acme": 7, "com.microsoft": 1},
    )
    assert program.model.opset_imports == {"": 20, "com.acme": 7}


def test_versions_that_disagree() -> None:
    rules = [
        Rule("cd::one", lambda g, node: g.domain("com.acme", 1).Foo(node.args[0])),
        Rule("cd::two", lambda g, node: g.domain("com.acme", 2).Foo(node.args[0])),
    ]

    def model(x: Any) -> Any:
        y = torch.ops.cd.one(x)
        return torch.ops.cd.two(y)

    with pytest.raises(onnxplug.OpsetError, match=r"two versions of domain 'com\.acme': 1") as caught:
        onnxplug.to_onnx(model, (X,), rules=rules)
    text = str(caught.value)
    assert "cd::one" in text
    assert "cd::two" in text
    assert text.count("test_domains.py:") >= 2
    with pytest.raises(onnxplug.OpsetError, match="opset_version"):
        onnxplug.to_onnx(model, (X,), rules=rules, opset_version={"": 21, "com.acme": 5})


def test_a_declined_rule_leaves_no_version_behind(expect_graph: Any) -> None:
    def declines(g: Any, node: Any) -> Any:
        g.domain("com.acme", 1).Foo(node.args[0])
        g.function("com.acme", "Gone", lambda x: g.op.Neg(x), [node.args[0]], version=1)
        raise onnxplug.Decline("not me")

    rules = [
        Rule("cd::one", declines, priority=1),
        Rule("cd::one", lambda g, node: g.domain("com.acme", 2).Foo(node.args[0])),
    ]
    program = onnxplug.to_onnx(lambda x: torch.ops.cd.one(x), (X,), rules=rules)
    assert program.model.opset_imports["com.acme"] == 2
    expect_graph(program, "com.acme::Foo")
    assert not program.model.functions


def test_attributes_of_every_type() -> None:
    def convert(g: Any, node: Any) -> Any:
        body = g.subgraph(lambda x: g.op.Neg(x), [(torch.float32, (2,))])
        other = g.subgraph(lambda: g.op.Abs(node.args[0]))
        return g.domain("com.acme", 1).Foo(
            node.args[0],
            i=3,
            flag=True,
            dtype=torch.float16,
            f=2.5,
            s="text",
            b=b"\xff\x00",
            t=torch.arange(3),
            n=np.float64([1.5]),
            g=body,
            ints=[1, 2],
            size=torch.Size([4, 5]),
            floats=[1, 2.5],
            strings=["a", "ü"],
            blobs=[b"a", b"b"],
            tensors=[torch.ones(1), torch.zeros(2)],
            graphs=[other, g.subgraph(lambda: g.op.Neg(node.args[0]))],
            no_ints=ir.AttrInt64s("no_ints", []),
            no_floats=ir.AttrFloat32s("x", []),
            no_strings=ir.AttrStrings("x", []),
            no_tensors=ir.Attr("x", ir.AttributeType.TENSORS, []),
            type=ir.TypeAndShape(ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])),
            absent=None,
        )

    (node,) = _export(convert).model_proto.graph.node
    kinds = onnx.AttributeProto
    got = {a.name: a for a in node.attribute}
    assert {name: a.type for name, a in got.items()} == {
        **dict.fromkeys(["i", "flag", "dtype"], kinds.INT),
        "f": kinds.FLOAT,
        "s": kinds.STRING,
        "b": kinds.STRING,
        "t": kinds.TENSOR,
        "n": kinds.TENSOR,
        "g": kinds.GRAPH,
        **dict.fromkeys(["ints", "size", "no_ints"], kinds.INTS),
        **dict.fromkeys(["floats", "no_floats"], kinds.FLOATS),
        **dict.fromkeys(["strings", "blobs", "no_strings"], kinds.STRINGS),
        **dict.fromkeys(["tensors", "no_tensors"], kinds.TENSORS),
        "graphs": kinds.GRAPHS,
        "type": kinds.TYPE_PROTO,
    }
    value = onnx.helper.get_attribute_value
    assert (got["i"].i, got["flag"].i, got["dtype"].i) == (3, 1, onnx.TensorProto.FLOAT16)
    assert (got["s"].s, got["b"].s) == (b"text", b"\xff\x00")
    assert (value(got["ints"]), value(got["size"]), value(got["floats"])) == ([1, 2], [4, 5], [1.0, 2.5])
    assert (value(got["strings"]), value(got["blobs"])) == ([b"a", "ü".encode()], [b"a", b"b"])
    assert onnx.numpy_helper.to_array(got["n"].t).tolist() == [1.5]
    assert [len(onnx.numpy_helper.to_array(t)) for t in got["tensors"].tensors] == [1, 2]
    assert [g.node[0].op_type for g in (got["g"].g, *got["graphs"].graphs)] == ["Neg", "Abs", "Neg"]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"empty": []}, "attribute 'empty' is an empty list, whose element type is unknown"),
        ({"mixed": [1, "a"]}, "attribute 'mixed' has a value that ONNX can't hold"),
        ({"blobs": [b"\xfe"]}, "in a list each string must be UTF-8"),
        ({"what": object()}, "attribute 'what' has a value that ONNX can't hold"),
    ],
)
def test_attributes_that_onnx_cannot_hold(attributes: Any, text: str) -> None:
    with pytest.raises(onnxplug.ConversionError, match=text):
        _export(lambda g, node: g.domain("com.acme", 1).Foo(node.args[0], **attributes))


def test_a_dynamic_size_is_no_attribute() -> None:
    LIB_SIZE.define("sized(Tensor x, SymInt n) -> Tensor")
    LIB_SIZE.impl("sized", lambda x, n: x * n, "CompositeExplicitAutograd")
    model = lambda x: torch.ops.cd_size.sized(x, x.shape[0])  # noqa: E731
    rule = Rule("cd_size::sized", lambda g, node: g.domain("com.acme", 1).Foo(node.args[0], n=node.args[1]))
    with pytest.raises(onnxplug.ConversionError, match="must be a constant, but it is the dynamic size"):
        onnxplug.to_onnx(model, (X,), dynamic_shapes=({0: "n"},), rules=[rule])
    rule = Rule("cd_size::sized", lambda g, node: g.domain("com.acme", 1).Foo(*node.args))
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=({0: "n"},), rules=[rule])
    foo = next(n for n in program.model.graph if n.op_type == "Foo")
    assert [v.dtype for v in foo.inputs] == [ir.DataType.FLOAT, ir.DataType.INT64]


LIB_SIZE = torch.library.Library("cd_size", "DEF")


def test_optional_and_variadic_inputs_and_several_outputs() -> None:
    def several(g: Any, node: Any) -> Any:
        x, y, z = node.args
        return g.domain("com.acme", 1).Several(x, y, z, None, 2.0, [1, 2], None, None, _outputs=3)

    def listed(g: Any, node: Any) -> Any:
        return list(g.domain("com.acme", 1).Listed(*node.args[0], _outputs=len(node.args[0])))

    def model(x: Any) -> Any:
        a, _, c = torch.ops.cd.several(x, None, x)
        p, q = torch.ops.cd.listed([a, c])
        return p + q, torch.ops.cd.several(None if False else x)[1]

    program = onnxplug.to_onnx(model, (X,), rules=[Rule("cd::several", several), Rule("cd::listed", listed)])
    nodes = {n.op_type: [] for n in program.model_proto.graph.node}
    for node in program.model_proto.graph.node:
        nodes[node.op_type].append(node)
    first, second = nodes["Several"]
    assert [bool(name) for name in first.input] == [True, False, True, False, True, True]
    assert [bool(name) for name in second.input] == [True, False, False, False, True, True]
    assert (len(first.output), len(second.output), len(nodes["Listed"][0].output)) == (3, 3, 2)


def test_functions_are_callable_from_subgraphs_and_from_functions() -> None:
    """Functions are built for the target opset; their own domains and the domains in their branches are imported."""

    def convert(g: Any, node: Any) -> Any:
        x = node.args[0]

        def inner(value: Any) -> Any:
            return g.op.Mul(value, 2.0)

        def outer(value: Any, absent: Any, limit: Any) -> Any:
            assert absent is None
            positive = g.op.Greater(g.op.ReduceSum(value, keepdims=0), 0.0)
            yes = g.subgraph(lambda: g.function("com.inner", "Double", inner, [value], version=5))
            no = g.subgraph(lambda: g.op.Div(g.op.Add(value, limit), 1.0))
            return g.op.If(positive, then_branch=yes, else_branch=no)

        always = g.op.Greater(g.op.ReduceSum(g.op.Abs(x), keepdims=0), -1.0)
        yes = g.subgraph(lambda: g.function("com.outer", "Choose", outer, [x, None, 1.0], version=2))
        no = g.subgraph(lambda: g.function("com.outer", "Choose", outer, [x, None, 1.0], version=2))
        return g.op.If(always, then_branch=yes, else_branch=no)

    LIB_IF.define("choose(Tensor x) -> Tensor")
    LIB_IF.impl("choose", lambda x: x * 2 if x.sum() > 0 else x + 1, "CPU")
    LIB_IF.impl("choose", torch.empty_like, "Meta")
    for opset in (18, 21):
        program = check(
            lambda x: torch.ops.cd_if.choose(x),
            torch.ones(2, 3),
            others=[(-torch.ones(2, 3),), (torch.ones(5, 3),)],
            dynamic=[{0: "n"}],
            rules=[Rule("cd_if::choose", convert)],
            opset=opset,
        )
        functions = {(f.domain, f.name): f for f in program.model.functions.values()}
        assert set(functions) == {("com.outer", "Choose"), ("com.inner", "Double")}
        assert functions["com.outer", "Choose"].opset_imports == {"": opset, "com.inner": 5}
        assert program.model.opset_imports == {"": opset, "com.outer": 2, "com.inner": 5}
        onnx.checker.check_model(program.model_proto)


LIB_IF = torch.library.Library("cd_if", "DEF")


def test_function_attributes_are_the_calls() -> None:
    def convert(g: Any, node: Any) -> Any:
        def body(x: Any, alpha: Any) -> Any:
            return g.op.LeakyRelu(x, alpha=alpha)

        x = node.args[0]
        y = g.function("com.acme", "Leaky", body, [x], attributes={"alpha": 0.5})
        return g.op.Sub(g.function("com.acme", "Leaky", body, [y], attributes={"alpha": 0.25}), 0.0)

    LIB_LEAKY.define("leaky(Tensor x) -> Tensor")
    LIB_LEAKY.impl("leaky", lambda x: torch.where(x > 0, x, x * 0.125), "CompositeExplicitAutograd")
    program = check(lambda x: torch.ops.cd_leaky.leaky(x), X, others=[(-X,)], rules=[Rule("cd_leaky::leaky", convert)])
    calls = [n for n in program.model.graph if n.domain]
    assert [(n.op_type, n.attributes["alpha"].value) for n in calls] == [("Leaky", 0.5), ("Leaky", 0.25)]
    assert len(program.model.functions) == 1


LIB_LEAKY = torch.library.Library("cd_leaky", "DEF")


def test_functions_that_cannot_be() -> None:
    def captures(g: Any, node: Any) -> Any:
        x = node.args[0]
        return g.function("com.acme", "Bad", lambda y: g.op.Add(x, y), [g.op.Neg(x)])

    with pytest.raises(onnxplug.ConversionError, match=r"the body of the function com\.acme::Bad reads x of the graph"):
        _export(captures)
    with pytest.raises(onnxplug.ConversionError, match="needs a domain of its own"):
        _export(lambda g, node: g.function("", "Bad", lambda y: g.op.Neg(y), [node.args[0]]))
    with pytest.raises(onnxplug.ConversionError, match="returns 1 value, but 2 were requested"):
        _export(lambda g, node: g.function("com.acme", "Bad", lambda y: g.op.Neg(y), [node.args[0]], outputs=2)[0])


def _schema() -> onnx.defs.OpSchema:
    schema = onnx.defs.OpSchema
    option = schema.FormalParameterOption
    return schema(
        "Foo",
        "com.checked",
        2,
        inputs=[
            schema.FormalParameter("x", "T"),
            schema.FormalParameter("y", "T", param_option=option.Optional),
            schema.FormalParameter("n", "tensor(int64)", param_option=option.Optional),
        ],
        outputs=[schema.FormalParameter("a", "T"), schema.FormalParameter("b", "T", param_option=option.Optional)],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)"], "")],
        attributes=[
            schema.Attribute("k", onnx.defs.OpSchema.AttrType.INT, required=True),
            schema.Attribute("ks", onnx.defs.OpSchema.AttrType.INTS, required=False),
            schema.Attribute("f", onnx.defs.OpSchema.AttrType.FLOAT, required=False),
        ],
    )


def _checked(build: Any) -> Any:
    domain = Domain("com.checked", 2, [_schema()])
    g = GraphBuilder({"": 21}, domains={domain.name: domain.version}, schemas={domain.name: domain.schemas})
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    return build(g.domain("com.checked"), x, g)


def test_a_registered_schema_types_emitted_nodes() -> None:
    value = _checked(lambda d, x, g: d.Foo(x, None, 3, k=1, ks=[], f=2))
    node = value.producer()
    assert value.dtype == ir.DataType.FLOAT
    assert node.inputs[2].dtype == ir.DataType.INT64
    assert node.attributes["ks"].type == ir.AttributeType.INTS
    assert node.attributes["f"].value == 2.0
    first, second = _checked(lambda d, x, g: d.Foo(x, 1, k=1, _outputs=2))
    assert first.producer().inputs[1].dtype == ir.DataType.FLOAT
    assert second.dtype == ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda d, x, g: d.Foo(x), "Foo needs the attribute 'k'"),
        (lambda d, x, g: d.Foo(x, k=1, other=2), "Foo has no attribute 'other' at version 2; it has f, k, ks"),
        (lambda d, x, g: d.Foo(x, k=ir.AttrFloat32("k", 1.0)), "attribute 'k' of Foo is INT, got FLOAT"),
        (lambda d, x, g: d.Foo(x, k="a"), "attribute 'k' of Foo is INT, which can't hold 'a'"),
        (lambda d, x, g: d.Foo(x, k=1.5), r"attribute 'k' of Foo is INT, which can't hold 1\.5"),
        (lambda d, x, g: d.Foo(x, k=[1]), "attribute 'k' of Foo is INT, which can't hold"),
        (lambda d, x, g: d.Foo(x, k=1, ks=3), "attribute 'ks' of Foo is INTS, which can't hold 3"),
        (lambda d, x, g: d.Foo(None, x, k=1), "com.checked::Foo needs its input 0, which is None"),
        (lambda d, x, g: d.Foo(k=1), "com.checked::Foo takes 1 to 3 inputs, got 0"),
        (lambda d, x, g: d.Foo(x, x, 1, x, k=1), "com.checked::Foo takes 1 to 3 inputs, got 4"),
        (lambda d, x, g: d.Foo(x, k=1, _outputs=3), "com.checked::Foo has 1 to 2 outputs, but 3 were requested"),
        (lambda d, x, g: d.Foo(g.const(1), k=1), "takes float, float16 as input 0, got int64: its schema says so"),
        (lambda d, x, g: d.Foo(x, x, x, k=1), "takes int64 as input 2, got float"),
        (lambda d, x, g: d.Foo(x, g.cast(x, torch.float16), k=1), r"one dtype as inputs 0 and 1 \(T\), got float and"),
    ],
)
def test_a_registered_schema_is_held_to(build: Any, text: str) -> None:
    with pytest.raises(onnxplug.ConversionError, match=text):
        _checked(build)


def test_without_a_schema_anything_goes() -> None:
    g = GraphBuilder({"": 21})
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    made = g.domain("com.free", 9).Foo(None, x, None, 1, anything="goes", _outputs=4)
    assert len(made) == 4
    assert [v is None for v in made[0].producer().inputs] == [True, False, True, False]
    # Nothing declares the operator pure: two calls are two nodes.
    assert g.domain("com.free").Bar(x) is not g.domain("com.free").Bar(x)
