"""torch.onnx.ops: operators of ONNX in a torch program."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
import torch.onnx.ops

import onnxplug
from tests.support.check import check
from tests.support.tolerances import looser


def _attributes(node: Any) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def test_symbolic_in_a_custom_domain() -> None:
    def model(x: torch.Tensor) -> Any:
        y = torch.onnx.ops.symbolic(
            "com.acme::Blend",
            (x, None, x),
            {"alpha": 1.0, "alphas": [1.0, 2.5], "n": 3, "ns": [1, 2], "mode": "a", "modes": ["a", "b"], "on": True},
            dtype=torch.int32,
            shape=(x.shape[0], 7),
            version=4,
            metadata_props={"key": "value"},
        )
        a, b = torch.onnx.ops.symbolic_multi_out(
            "com.acme::Pair", (y,), dtypes=(torch.int32, torch.bool), shapes=((x.shape[0], 7), ()), version=4
        )
        return a, b

    program = onnxplug.to_onnx(model, (torch.randn(2, 3),), dynamic_shapes=({0: "n"},))
    proto = program.model_proto
    blend, pair = proto.graph.node
    assert [(n.domain, n.op_type, len(n.output)) for n in (blend, pair)] == [
        ("com.acme", "Blend", 1),
        ("com.acme", "Pair", 2),
    ]
    assert [bool(name) for name in blend.input] == [True, False, True]
    assert _attributes(blend) == {
        "alpha": 1.0,
        "alphas": [1.0, 2.5],
        "n": 3,
        "ns": [1, 2],
        "mode": b"a",
        "modes": [b"a", b"b"],
        "on": 1,
    }
    assert {a.name: a.type for a in blend.attribute}["alpha"] == onnx.AttributeProto.FLOAT
    assert {p.key: p.value for p in blend.metadata_props}["key"] == "value"
    assert {o.domain: o.version for o in proto.opset_import}["com.acme"] == 4
    types = [
        (v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in proto.graph.output
    ]
    assert types == [(onnx.TensorProto.INT32, ["n", 7]), (onnx.TensorProto.BOOL, [])]


def test_symbolic_of_ai_onnx_runs() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.onnx.ops.symbolic("Celu", (x,), {"alpha": 2.0}, dtype=x.dtype, shape=x.shape, version=18) * 2

    x = torch.randn(2, 3)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "n"},))
    for value in (x, torch.randn(5, 3)):
        torch.testing.assert_close(program(value)[0], torch.nn.functional.celu(value, 2.0) * 2)


def test_symbolic_refuses_another_version_of_the_operator() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.onnx.ops.symbolic("ReduceSum", (x,), {"axes": [0]}, dtype=x.dtype, shape=(3,), version=11)

    with pytest.raises(onnxplug.Unsupported, match="ReduceSum is requested as of opset 11"):
        onnxplug.to_onnx(model, (torch.randn(2, 3),))


@pytest.mark.parametrize("opset", [18, 21, 23, 24])
def test_rotary_embedding(opset: int) -> None:
    cos, sin = torch.randn(8, 4), torch.randn(8, 4)
    positions = torch.arange(3).expand(2, 3)

    def model(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.onnx.ops.rotary_embedding(x, cos, sin, positions)

    args = (torch.randn(2, 4, 3, 8), positions)
    others = [(torch.randn(5, 4, 3, 8), positions[:1].expand(5, 3) + 2), (torch.randn(1, 4, 3, 8), positions[:1])]
    program = check(model, *args, others=others, dynamic=[{0: "n"}, {0: "n"}], opset=opset)
    assert ("RotaryEmbedding" in {n.op_type for n in program.model.graph}) is (opset >= 23)


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("wide", [True, False], ids=["four axes", "three axes"])
def test_attention(opset: int, wide: bool) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        heads = {} if wide else {"q_num_heads": 4, "kv_num_heads": 4}
        return torch.onnx.ops.attention(q, k, v, is_causal=True, **heads)[0]

    def draw(n: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(*((n, 4, 3, 8) if wide else (n, 3, 32))) for _ in range(3))

    program = check(
        model, *draw(2), others=[draw(5), draw(1)], dynamic=[{0: "n"}] * 3, opset=opset, **looser("onnx operators")
    )
    nodes = [n for n in program.model.graph if n.op_type == "Attention"]
    assert bool(nodes) is (opset >= 23)
    assert all(len(n.outputs) == 1 for n in nodes)


def test_attention_with_caches() -> None:
    def model(q: Any, k: Any, v: Any, past_k: Any, past_v: Any) -> Any:
        return torch.onnx.ops.attention(q, k, v, None, past_k, past_v, scale=0.25)[:3]

    args = [torch.randn(2, 4, n, 8) for n in (3, 3, 3, 5, 5)]
    check(model, *args, others=[tuple(torch.randn_like(a) for a in args)], opset=23, **looser("onnx operators"))


def test_a_users_own_operator_of_onnx(expect_graph: Any) -> None:
    library = torch.library.Library("onnx", "FRAGMENT")
    library.define("HardSwish.opset14(Tensor x) -> Tensor")
    library.define("ThresholdedRelu.opset10(Tensor x, *, float alpha=1.0) -> Tensor")
    library.impl("HardSwish.opset14", lambda x: torch.nn.functional.hardswish(x), "CompositeExplicitAutograd")
    library.impl(
        "ThresholdedRelu.opset10", lambda x, *, alpha=1.0: torch.where(x > alpha, x, 0), "CompositeExplicitAutograd"
    )
    program = check(
        lambda x: torch.ops.onnx.ThresholdedRelu.opset10(torch.ops.onnx.HardSwish.opset14(x), alpha=0.5),
        torch.randn(3, 4),
        others=[(torch.randn(3, 4) * 5,)],
        opset=21,
    )
    expect_graph(program, "HardSwish ThresholdedRelu")
