"""Metadata as seen from a module."""

from __future__ import annotations

import pytest
from onnxplug_tools.outline.terms import in_terms_of

from onnxplug.build.provenance import CLASSES, NAMES, NAMESPACE, REPLACED

#: The metadata of a node in the model, a module's path, and the metadata as seen from the module.
CASES: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "a layer": (
        {
            NAMESPACE: ": M/blocks.0: Block/blocks.0.lin: Linear/linear_3: aten.linear.default",
            NAMES: "['', 'blocks.0', 'blocks.0.lin', 'linear_3']",
            CLASSES: "['M', 'Block', 'Linear', 'aten.linear.default']",
        },
        "blocks.0",
        {
            NAMESPACE: "lin: Linear/linear: aten.linear.default",
            NAMES: "['lin', 'linear']",
            CLASSES: "['Linear', 'aten.linear.default']",
        },
    ),
    "the module's own operator": (
        {
            NAMESPACE: ": M/b: Block/add_1_2: aten.add.Tensor",
            NAMES: "['', 'b', 'add_1_2']",
            CLASSES: "['M', 'Block', 'aten.add.Tensor']",
        },
        "b",
        {NAMESPACE: "add: aten.add.Tensor", NAMES: "['add']", CLASSES: "['aten.add.Tensor']"},
    ),
    "a path that begins alike": (
        {
            NAMESPACE: ": M/b.1: Block/b.1.b.10: Linear/x: t",
            NAMES: "['', 'b.1', 'b.1.b.10', 'x']",
            CLASSES: "['M', 'B', 'L', 't']",
        },
        "b.1",
        {NAMESPACE: "b.10: Linear/x: t", NAMES: "['b.10', 'x']", CLASSES: "['L', 't']"},
    ),
    "another module's": (
        {
            NAMESPACE: ": M/c: Other/mul_1: aten.mul.Tensor",
            NAMES: "['', 'c', 'mul_1']",
            CLASSES: "['M', 'Other', 'aten.mul.Tensor']",
        },
        "b",
        {
            NAMESPACE: ": M/c: Other/mul: aten.mul.Tensor",
            NAMES: "['', 'c', 'mul']",
            CLASSES: "['M', 'Other', 'aten.mul.Tensor']",
        },
    ),
    "the model itself": (
        {NAMESPACE: ": M/lin: Linear/linear_1: t", NAMES: "['', 'lin', 'linear_1']", CLASSES: "['M', 'Linear', 't']"},
        "",
        {NAMESPACE: "lin: Linear/linear: t", NAMES: "['lin', 'linear']", CLASSES: "['Linear', 't']"},
    ),
    "no module": (
        {NAMESPACE: "sym_size_int_2: aten.sym_size.int"},
        "b",
        {NAMESPACE: "sym_size_int: aten.sym_size.int"},
    ),
    "what was rewritten": (
        {REPLACED: "['b.lin/matmul_4: MatMul', 'b/add_1: Add', 'c/mul: Mul', 'matmul_1: MatMul']"},
        "b",
        {REPLACED: "['lin/matmul: MatMul', 'add: Add', 'c/mul: Mul', 'matmul: MatMul']"},
    ),
    "anything else": ({"key": ": M/b: Block"}, "b", {"key": ": M/b: Block"}),
}


@pytest.mark.parametrize("name", CASES)
def test_in_terms_of(name: str) -> None:
    text, path, expected = CASES[name]
    assert in_terms_of(path, text) == expected
