"""The hook ``onnxplug_operators``: a plugin's knowledge of the ONNX operators of its domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference.op_run import OpRun

import onnxplug
from onnxplug import Domain, OnnxOperator, ReferenceOp, Rule
from onnxplug.build.inference.dims import dims_of
from onnxplug.testing import IsolatedRegistry

LIB = torch.library.Library("halves", "DEF")
LIB.define("halve(Tensor x) -> Tensor")
LIB.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")
DOMAIN = "com.halves"


def schema(name: str) -> onnx.defs.OpSchema:
    return onnx.defs.OpSchema(
        name,
        DOMAIN,
        1,
        inputs=[onnx.defs.OpSchema.FormalParameter("x", "T")],
        outputs=[onnx.defs.OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", ["tensor(float)"], "")],
    )


class Halve(OpRun):
    op_domain = DOMAIN

    def _run(self, x: Any) -> Any:
        return (x / 2,)


class Double(OpRun):
    op_domain = DOMAIN

    def _run(self, x: Any) -> Any:
        return (x * 2,)


def same(inputs: Sequence[Any], attributes: Mapping[str, Any], spec: Any) -> Any:
    return [(None, dims_of(inputs[0]))]


def undone(g: Any, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    before = inputs[0].producer()
    return before.inputs[0] if before is not None and (before.domain, before.op_type) == (DOMAIN, "Halve") else None


def halved(arrays: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    return arrays[0] / np.float32(2)


def registry(*operators: Any, rule: Any) -> IsolatedRegistry:
    plugin = ModuleType("onnxplug_halves")
    supplied = {
        "rules": [Rule("halves::halve", rule)],
        "domains": [Domain(DOMAIN, 1, [schema("Halve"), schema("Double")])],
        "runtime": [ReferenceOp(Halve), ReferenceOp(Double)],
        "operators": operators,
    }
    for name, items in supplied.items():
        setattr(plugin, f"onnxplug_{name}", onnxplug.hookimpl(lambda items=items: list(items)))
    isolated = IsolatedRegistry()
    isolated.add_plugin(plugin, name="halves", distribution="onnxplug-halves", version="1")
    return isolated


def exported(operators: Sequence[Any], rule: Any) -> tuple[list[str], onnxplug.OnnxProgram]:
    """The operators of an exported model, which is verified at several sizes, and the program."""
    with registry(*operators, rule=rule).active():
        model = onnxplug.to_onnx(
            lambda x: torch.ops.halves.halve(x) + 1, (torch.randn(2, 3),), dynamic_shapes=({0: "rows"},), verify=True
        )
    return [node.op_type for node in model.model.graph], model


def test_shapes_are_the_plugins() -> None:
    seen: list[Any] = []

    def rule(g: Any, node: Any) -> Any:
        half = g.domain(DOMAIN).Halve(node.args[0])
        seen.append(half.shape)
        return half

    exported([OnnxOperator("Halve", DOMAIN, infer=same)], rule)
    exported([], rule)
    assert [shape if shape is None else shape.rank() for shape in seen] == [2, None]


def test_nodes_simplify_and_constants_fold_as_the_plugin_says() -> None:
    def rule(g: Any, node: Any) -> Any:
        ops = g.domain(DOMAIN)
        again = ops.Double(ops.Halve(node.args[0]))
        return g.op.Mul(again, ops.Halve(g.const(np.ones(1, np.float32))))

    known = [OnnxOperator("Double", DOMAIN, simplify=undone), OnnxOperator("Halve", DOMAIN, fold=halved)]
    assert exported([], rule)[0] == ["Halve", "Double", "Halve", "Mul", "Add"]
    names, program = exported(known, rule)
    assert names == ["Mul", "Add"]
    x = torch.tensor([[-0.0, torch.inf, 3.0]])
    torch.testing.assert_close(program(x)[0], x / 2 + 1)


def test_a_record_of_ai_onnx_replaces_onnxplugs() -> None:
    shapes: list[Any] = []

    def unknown(inputs: Sequence[Any], attributes: Mapping[str, Any], spec: Any) -> Any:
        shapes.append(dims_of(inputs[0]))
        return [(ir.DataType.FLOAT, dims_of(inputs[0]))]

    names, _ = exported(
        [OnnxOperator("Neg", infer=unknown)], lambda g, node: g.op.Mul(g.op.Neg(g.op.Neg(node.args[0])), 0.5)
    )
    assert len(shapes) == 2, "onnxplug's record, by which two Neg are none, is not used"
    assert names == ["Neg", "Neg", "Mul", "Add"]


def test_an_object_that_is_no_record_refuses_the_plugin() -> None:
    with (
        registry("Halve", rule=lambda g, node: None).active(),
        pytest.warns(UserWarning, match="onnxplug_operators returned 'Halve', which is not an OnnxOperator"),
    ):
        onnxplug.to_onnx(torch.nn.Tanh(), (torch.randn(2),))
