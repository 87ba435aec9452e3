"""Nodes of a graph that become a function, where modules are entangled in ways that captured programs lack."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxplug_tools.outline.calls import ModuleCalls
from onnxplug_tools.outline.outline import outline

from onnxplug import Functions
from onnxplug.build.provenance import MODULE_CALL
from onnxplug.build.scope import detach
from tests.support.structure import same_inlined


def made_by_hand(text: str, owners: dict[str, list[str]]) -> tuple[ir.Model, ModuleCalls]:
    """A model of text; ``owners`` has the paths of the modules around the node that makes a value, outermost first."""
    model = ir.from_proto(onnx.parser.parse_model(text))
    result = ModuleCalls()
    for node in model.graph:
        paths = owners.get(str(node.outputs[0].name), [])
        number = result.of(
            {path: (path, f"acme.{path.rpartition('.')[2].rstrip('0123456789').title()}") for path in paths}
        )
        if number is not None:
            node.metadata_props[MODULE_CALL] = number
    return model, result


HEADER = '<ir_version: 10, opset_import: ["": 21]> agraph (float[N] x) => (float[N] out) '
ENTANGLED = {
    # b reads the result a1 of a, and a2 of a reads the result of b: neither can be taken out before the other.
    "between two": (
        "{ a1 = Sin(x) m = Cos(a1) b1 = Tan(a1) b2 = Abs(b1) a2 = Add(m, b2) b3 = Neg(b2) out = Mul(a2, b3) }",
        {"a1": ["a"], "a2": ["a"], "b1": ["b"], "b2": ["b"], "b3": ["b"]},
        ["A", "B"],
        {},
    ),
    "through a node of nobody": (
        "{ a1 = Sin(x) m = Cos(a1) a2 = Add(m, a1) out = Abs(a2) }",
        {"a1": ["a", "a.c1"], "a2": ["a", "a.c2"], "out": ["d"]},
        ["A", "C", "D"],
        {"C": 1, "C_1": 1, "D": 1},
    ),
    "each needs the other": (
        "{ a1 = Sin(x) b1 = Cos(x) a2 = Tan(b1) b2 = Abs(a1) out = Add(a2, b2) }",
        {"a1": ["a"], "a2": ["a"], "b1": ["b"], "b2": ["b"]},
        ["A", "B"],
        {},
    ),
    "out of order": (
        "{ a1 = Sin(x) b1 = Cos(x) b2 = Tan(b1) a2 = Add(b2, a1) out = Abs(a2) }",
        {"a1": ["a"], "a2": ["a"], "b1": ["b"], "b2": ["b"], "out": ["a"]},
        ["A", "B"],
        {"B": 1, "A": 1},
    ),
}


@pytest.mark.filterwarnings("ignore:no function was made")
@pytest.mark.parametrize("name", ENTANGLED)
def test_entangled_modules(name: str) -> None:
    nodes, owners, classes, expected = ENTANGLED[name]
    model, operators = made_by_hand(HEADER + nodes, owners)
    before = ir.from_proto(ir.to_proto(model))
    assert outline(model, operators, Functions(classes)) == expected
    same_inlined(model, before)


def random_model(seed: int) -> tuple[ir.Model, ModuleCalls]:
    """Modules of two classes, nested, some of whose nodes read or stand where they shouldn't."""
    draw = random.Random(seed)
    outcome = ModuleCalls()
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N"]))
    weights = [
        ir.Value(
            name=f"w{i}",
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape([size]),
            const_value=ir.tensor(np.full(size, i // 2, np.float32)),
        )
        for i, size in enumerate([1, 1, 1, 1, 100])
    ]
    values, nodes = [x], []

    def add(op: str, read: list[ir.Value], stack: dict[str, tuple[str, str]]) -> None:
        # Now and then a node is of no module, or of another module.
        if draw.random() < 0.04:
            stack = draw.choice([{}, {"m0": ("m0", "acme.Outer")}, {"m1": ("m1", "acme.Outer")}])
        node = ir.Node("", op, read[:1] if op in ("Sin", "Abs") else read, name=f"n{len(nodes)}")
        (result,) = node.outputs
        result.name, result.type, result.shape = f"v{len(nodes)}", x.type, ir.Shape([None])
        number = outcome.of(stack)
        if number is not None:
            node.metadata_props[MODULE_CALL] = number
        nodes.append(node)
        values.append(result)

    templates = {
        name: [
            (draw.choice(["Sin", "Abs", "Add", "Mul"]), draw.randrange(1, 4), draw.randrange(1, 4))
            for _ in range(draw.randrange(1, 5))
        ]
        for name in ("Outer", "Inner")
    }
    for number in range(6):
        outer = {f"m{number}": (f"m{number}", "acme.Outer")}
        for position, (op, back, other) in enumerate(templates["Outer"] * 2):
            far = draw.random() < 0.1
            inputs = [
                values[-min(back, len(values))],
                draw.choice(values) if far else weights[other] if other > 1 else values[-1],
            ]
            add(op, inputs, outer)
            if position % 3 == 1:
                inner = {**outer, f"m{number}.i{position}": (f"m{number}.i{position}", "acme.Inner")}
                for op_, back_, other_ in templates["Inner"]:
                    add(
                        op_,
                        [values[-min(back_, len(values))], weights[other_] if draw.random() < 0.9 else weights[0]],
                        inner,
                    )
    ends = [v for v in values[1:] if not v.uses()][-3:]
    needed = {v.producer() for v in ends}
    for node in reversed(nodes):
        if node in needed:
            needed.update(v.producer() for v in node.inputs if v is not None)
    kept = [node for node in nodes if node in needed]
    for node in nodes:
        if node not in needed:
            detach(node)
    read = [w for w in weights if w.uses()]
    graph = ir.Graph([x], ends, nodes=kept, initializers=read, opset_imports={"": 21}, name="random")
    return ir.Model(graph, ir_version=10), outcome


@pytest.mark.filterwarnings("ignore:no function was made")
def test_random_models() -> None:
    made = 0
    for seed in range(40):
        for functions in (Functions(), Functions(["Inner", "Outer"])):
            model, result = random_model(seed)
            before = ir.from_proto(ir.to_proto(model))
            counts = outline(model, result, functions)
            same_inlined(model, before)
            made += sum(counts.values())
    assert made > 200
